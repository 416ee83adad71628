"""Is this machine fit for the daemon: facts are gathered, then judged."""
