"""The worker of the crash tests: that of ``tierkv torture``."""

from tierkv.torture.worker import Held, Worker, WrongBytes, main

__all__ = ["Held", "Worker", "WrongBytes"]

if __name__ == "__main__":
    main()
