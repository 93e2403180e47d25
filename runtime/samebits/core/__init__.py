"""Decide on the job's members, its generations and their restore points.

Every module is a function of (state, event, now), without I/O, clock, random numbers, threads, logging or torch.
Therefore tests, the simulator and a replayed journal reach the same decisions from the same events. The caller supplies
``now``, in seconds of a monotonic clock, and all ids.
"""
