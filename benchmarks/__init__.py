"""Benchmarks of SameBits beside its floor and its peers: ``python -m benchmarks.<name> [--quick]``.

There is one module per benchmark; ``workers`` has the processes it measures. Shared modules format reports, start and
end processes, and carry timestamps from a measured process to the measuring one. The product imports none of them, and
they test no correctness. Floor, peers and SameBits are measured in alternation in one run on one machine, so that their
ratios hold where absolute times do not.
"""
