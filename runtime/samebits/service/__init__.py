"""LOOPS and the real clock: the shells that carry out what the cores decide. Nothing here knows torch."""
