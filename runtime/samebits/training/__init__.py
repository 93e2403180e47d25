"""Everything that imports torch: the process's place in the job, its group, and the state that survives.

Decisions that need no torch are in ``core``; code that only moves bytes to disk is in ``store``.
"""
