"""Connectors by which inference engines use tierkv: clients of the worker API, and nothing more."""
