"""Monitor the health of a worker's host and devices, and detect that the host will be preempted."""
