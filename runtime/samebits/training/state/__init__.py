"""What survives: the user's state, how each kind of value is remembered and brought back, and where a step stands.

Never here: when a point is saved and where it lies (``checkpoint``), and when a generation begins (``run``).
"""
