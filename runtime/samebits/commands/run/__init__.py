"""``samebits run``: its options, the checks before a start, the start itself, and ``--check``."""
