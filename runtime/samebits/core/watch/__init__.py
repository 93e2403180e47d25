"""Judges of what the workers report: stalls, health, pace, equality, audits."""
