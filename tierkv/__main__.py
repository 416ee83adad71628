"""``python -m tierkv`` is the command ``tierkv``."""

import sys

from tierkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
