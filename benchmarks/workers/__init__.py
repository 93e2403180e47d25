"""The processes that are measured, one module each, run with ``python -m benchmarks.workers.<name>``.

They note moments (:mod:`benchmarks.moments`) and judge nothing; the modules above start them, kill them and do the
sums.
"""
