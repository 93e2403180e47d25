"""The scheduler's process: its loop, inbound messages, followers and key file."""
