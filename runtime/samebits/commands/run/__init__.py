"""``samebits run``: its options, what is checked before a start, the start itself, and ``--check``."""
