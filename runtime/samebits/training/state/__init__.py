"""The user's state: how each kind of value is remembered at a commit and restored, and how steps are counted.

Points are saved in ``checkpoint``; generations begin in ``run``.
"""
