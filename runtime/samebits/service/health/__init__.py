"""Health of a worker's host and devices, and announcements that the host will be taken away."""
