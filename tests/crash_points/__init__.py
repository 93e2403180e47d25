"""Every call that changes a disk, failed, and killed before and after: what is read back is the old or the new.

Here live the scenarios (what this package writes, and what must be read back), the child processes that are failed and
killed, the model of a machine that loses its power, the real full and read-only disks, and the campaign under strace.
Never here: tests of one known sequence of calls; those are in ``tests/store``. The one idea: a first run counts the
calls and one run per call follows, so a call that is added tomorrow is failed and killed from tomorrow on.
"""
