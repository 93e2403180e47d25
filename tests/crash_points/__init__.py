"""Every call that changes a disk is failed, and killed before and after; the old or the new state must be read back.

The package has the scenarios (what SameBits writes, and what must be read back), the child processes that are failed
and killed, a model of a power failure, real full and read-only disks, and the campaign under strace. A first run counts
the calls and one run per call follows, so that new calls are covered automatically. Tests of single known sequences of
calls are in ``tests/store``.
"""
