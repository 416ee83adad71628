"""The ``tierkv`` command."""
