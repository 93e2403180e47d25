"""The package's earlier import name, for scripts of jobs that an earlier release has stored.

Only the workers of such a job have this folder on their PYTHONPATH (``launcher.job_spec``).
"""
