"""The daemon: builds the object graph, runs it, recovers it."""
