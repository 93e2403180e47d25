"""Start, follow, supervise and recover a job on one host."""
