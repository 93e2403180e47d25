"""Sockets and message encoding between processes. ``core`` defines what the messages mean."""
