"""Restore points as training sees them: when to save, what to compare, and how a rank obtains its state again.

The format of a point on disk is defined in ``store.checkpoint``.
"""
