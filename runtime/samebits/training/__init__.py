"""All that imports torch: the process's place in the job, its group, and the state that survives.

What may be decided without torch is decided in ``core``; what only moves bytes to disk is ``store``'s.
"""
