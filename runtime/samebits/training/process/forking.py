"""What is done when this process forks, for a DataLoader's worker say: a safe moment, and a child that ends with it.

Here lives what comes before the fork and after it in the child. Never here: which connections a child lets go of
(``gloo.close_copies``). The one idea: a forked child has one thread and the locks of all. A lock that another thread
held at that moment is held in the child for ever, so that the child may sleep before its first line is run; and nothing
that it would do by itself, as looking for its parent now and then, then helps.

- glibc renews most of its own locks in a child, but not the one of atexit(3) (``__exit_funcs_lock``, glibc 2.36). torch
  takes it whenever an operator is used for the first time, so gloo's threads take it in their first collectives; and
  the first thing that a DataLoader's worker does (``torch.set_num_threads``) takes it, too. So a fork waits until no
  collective is running.
- A child that multiprocessing is to end with its parent (``daemon``) is ended by the kernel (prctl(2),
  ``PR_SET_PDEATHSIG``) if the parent cannot: it was killed, or the child no longer hears.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import threading
from collections.abc import Callable

from samebits.store.child_processes import die_with

__all__ = ["Forking"]


class Forking:
    """Of this process, from ``install`` on.

    Args:
        settle: waits until this process's other threads hold no lock that a child would miss; bounded by itself.
        let_go: called in each child.
    """

    def __init__(self, settle: Callable[[], object], let_go: Callable[[], object]) -> None:
        self._settle = settle
        self._let_go = let_go
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident  # the same number in a child that it has forked

    def install(self) -> None:
        """Every fork by Python's own means comes here; ``subprocess`` runs another program at once and does not."""
        os.register_at_fork(before=self._before, after_in_child=self._let_go)
        multiprocessing.util.register_after_fork(self, Forking._begin)

    def _before(self) -> None:
        if os.getpid() == self._pid:  # a child has none of the other threads
            self._settle()

    def _begin(self) -> None:
        """In a child of multiprocessing, before its own work."""
        parent = multiprocessing.parent_process()
        if not multiprocessing.current_process().daemon or threading.get_ident() != self._main_thread:
            return
        if parent is not None and parent.pid is not None:
            die_with(parent.pid)
