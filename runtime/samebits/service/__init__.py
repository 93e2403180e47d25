"""Loops and the real clock: the shells that carry out the cores' decisions, without torch."""
