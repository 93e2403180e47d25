"""The package's earlier import name, for the scripts of jobs that an earlier release has stored.

This folder stands on the PYTHONPATH of such a job's workers (``ops.kept_start``), and of no other process.
"""
