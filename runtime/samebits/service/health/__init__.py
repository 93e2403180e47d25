"""What a worker sees of its host and devices: their health, and that the host is about to go."""
