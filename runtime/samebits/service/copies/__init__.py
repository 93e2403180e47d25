"""Copies of a rank's newest point on another host: sending, keeping, and the writer process that does both."""
