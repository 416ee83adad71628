"""Configuration: the schema with its defaults, and where each value came from."""
