"""The sockets and bytes between processes; ``core`` defines what the messages mean."""
