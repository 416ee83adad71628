"""Where block bytes lie: RAM arenas, segment files, and the index of what is where."""
