"""Carry out the cores' decisions in loops with a real clock, without torch."""
