"""The socket protocol: frames, messages, the daemon's listener."""
