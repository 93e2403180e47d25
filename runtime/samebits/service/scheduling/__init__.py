"""The scheduler process: its loop, inbound messages, followers and key file."""
