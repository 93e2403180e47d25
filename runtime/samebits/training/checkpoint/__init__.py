"""Restore points as training sees them: when to save, what to compare, and how a rank gets its state back.

The format of a point on disk is defined in ``store.checkpoint``.
"""
