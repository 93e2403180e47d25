"""Restore points of one rank: when they are due, how they are taken from the state, and which of them may be resumed.

What a point is on disk is ``store.checkpoint``'s.
"""
