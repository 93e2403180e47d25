"""DECISIONS: who is a member, who waits, which generation runs and from which restore point.

Nothing here does I/O, reads a clock, draws a random number, starts a thread, logs or knows torch. Every module is a
function of (state, event, now): the same events give the same decisions, in a test, in the simulator and in a replayed
journal. ``now`` is seconds of a monotonic clock, handed in by the caller; ids are made by the caller too.
"""
