"""The measured processes, one module each, run with ``python -m benchmarks.workers.<name>``.

They record events (:mod:`benchmarks.moments`); the modules above start them, kill them and evaluate the events.
"""
