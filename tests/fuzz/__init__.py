"""Hostile and damaged bytes, against everything that reads bytes it did not just write.

Here live the targets (one module each: what one input is and what must hold for it), their hypothesis tests, which CI
runs within bounds, and the coverage-guided campaigns of ``python -m tests.fuzz``. Never here: tests of one known input;
those are beside the module they belong to. The one idea: a target raises nothing but its defects, so whatever feeds it
(hypothesis, atheris, a crash file) needs no knowledge of it.
"""
