"""BYTES and sockets: how messages travel. Who may say what, and what follows from it, is decided in ``core``."""
