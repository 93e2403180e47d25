"""Measurements of SameBits beside its floor and its peers: ``python -m benchmarks.<name> [--quick]``.

One module per benchmark, the processes it measures in ``workers``, and what they share: how a report looks, how
processes are started and ended, how moments travel from a measured process to the one that measures. Never here:
anything the product imports, and no test of correctness. The one idea: floor, peers and ours come interleaved from one
run on one machine, so that their ratios hold where the absolute times do not.
"""
