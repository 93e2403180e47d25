"""The sockets and bytes between processes; ``core`` decides what the messages mean."""
