"""The scheduler's process: its loop, what comes in at its socket, and its key file."""
