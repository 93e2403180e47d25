"""Hostile and damaged bytes, against everything that reads bytes from outside.

The package has the targets (one module each: what an input is and what must hold for it), their hypothesis tests, which
CI runs within bounds, and the coverage-guided campaigns of ``python -m tests.fuzz``. A target raises only for its
defects, so any driver (hypothesis, atheris, a crash file) can use it. Tests of single known inputs are beside the
module they belong to.
"""
