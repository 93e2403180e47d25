"""Make forks safe, such as those of a DataLoader's workers, and end forked children with this process.

A forked child has one thread but the locks of all threads. A lock that another thread held at the fork stays held in
the child forever, so the child may block before its first line runs. Code in the child, such as a check for its parent,
cannot help then.

- glibc reinitializes most of its own locks in a child, but not the lock of atexit(3) (``__exit_funcs_lock``, glibc
  2.36). torch takes that lock whenever an operator is used for the first time, so gloo's threads take it in their first
  collectives. A DataLoader's worker takes it in its first call (``torch.set_num_threads``). So a fork waits until no
  collective is running.
- The kernel ends a multiprocessing child that should end with its parent (``daemon``, prctl(2), ``PR_SET_PDEATHSIG``)
  if the parent cannot do so because it was killed or the child no longer responds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable

from samebits.store.child_processes import die_with


class Forking:
    """Handles forks of this process after ``install()``.

    Args:
        settle: waits, for a bounded time, until this process's other threads hold no lock that a child would need.
        let_go: called in each child.
    """

    def __init__(self, settle: Callable[[], object], let_go: Callable[[], object]) -> None:
        self._settle = settle
        self._let_go = let_go
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident  # the same number in a forked child

    def install(self) -> None:
        """Handle every fork made through Python, except ``subprocess``, which executes another program at once."""
        os.register_at_fork(before=self._before, after_in_child=self._let_go)
        multiprocessing.util.register_after_fork(self, Forking._begin)

    def _before(self) -> None:
        if os.getpid() == self._pid:  # a child has none of the parent's other threads
            self._settle()

    def _begin(self) -> None:
        """Make the kernel end a multiprocessing child with its parent, before the child does its own work."""
        parent = multiprocessing.parent_process()
        if not multiprocessing.current_process().daemon or threading.get_ident() != self._main_thread:
            return
        if parent is not None and parent.pid is not None:
            die_with(parent.pid)
