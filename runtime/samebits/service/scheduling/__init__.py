"""The scheduler process: its loop, inbound messages, followers, and the journal of keys."""
