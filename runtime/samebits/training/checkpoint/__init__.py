"""Restore points during training: when to save, what to compare, and how a rank gets its state back.

The on-disk format of a point is defined in ``store.checkpoint``.
"""
