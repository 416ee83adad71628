"""tierkv's write-ahead log."""
