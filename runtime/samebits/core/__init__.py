"""Decide on the job's members, its generations and their restore points.

Every module is a function of (state, event, now), without I/O, clock, random numbers, threads, logging or torch. So a
test, the simulator and a replayed journal reach the same decisions from the same events. ``now`` is in seconds of a
monotonic clock and is passed in by the caller, which also makes all ids.
"""
