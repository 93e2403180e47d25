"""Connect a group of accelerators, and end its waits: NCCL, HCCL, or another package's backend.

A rank that waits for a dead peer's kernel is released only if the backend ends the wait. NCCL's ``abort`` does that
from any thread. HCCL's does not reach work queued on the device, so the device itself is stopped, and restarted before
the next generation uses it: ``stop_device`` → the communicators are aborted → ``restart_device``, as in torch_npu
(whose ``reinit_process_group``, the middle step there, is for programs that keep their group; here the next one is
new).

In-process recovery needs the backend's own error handling off (``config.leave_failures_to_us``). (This has not run with
NCCL or HCCL: ``tests.device`` runs it on a simulated device, once with each way of ending a wait.)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from samebits import config
from samebits.training import torch_private
from samebits.training.group import device as devices
from samebits.training.group import gloo
from samebits.training.group.breaker import Breaker, begin_breakable, run_breakable
from samebits.training.group.meeting_store import MeetingStore

__all__ = ["AcceleratorLink"]


class AcceleratorLink:
    """The connections of one group of accelerators.

    Args:
        device: this process's.
        place: rank and world size.
        breaker: the group's.
        store: where the backend finds its peers.
        prefix: of the backend's keys in the store.
        endpoints: of the connections to and from rank 0's keys.
        timeout: of a collective.
    """

    def __init__(
        self,
        device: torch.device,
        place: tuple[int, int],
        breaker: Breaker,
        store: MeetingStore,
        prefix: str,
        endpoints: gloo.Endpoints,
        timeout: timedelta,
    ) -> None:
        self._device, self._place, self._breaker = device, place, breaker
        self._store, self._prefix = store, prefix
        self._endpoints = endpoints
        self._timeout = timeout
        self._pg: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._met: Future[dict[str, bytes]] | None = None
        self._lock = threading.Lock()
        self._has_ended = False
        self._has_stopped_device = False

    def begin(self) -> Future[Any]:
        """Begin to meet the other ranks, in another thread."""
        self._met = begin_breakable(self._breaker, self._store.meet, "samebits-connect")
        return self._met

    def connect(self) -> tuple[dist.ProcessGroup, Store]:
        """Install torch's default group, then connect, so that a thread that breaks the group meanwhile can abort it.

        If the device were given to ``init_process_group``, it would connect at once, inside a call that cannot be
        interrupted.
        """
        (self._met or self.begin()).result()
        store = PrefixStore(self._prefix, self._store)
        config.leave_failures_to_us()
        hook = sys.excepthook  # init_process_group wraps it once more each time
        rank, world_size = self._place
        dist.init_process_group(
            devices.backend_of(self._device), store=store, rank=rank, world_size=world_size, timeout=self._timeout
        )
        sys.excepthook = hook
        pg = distributed_c10d._get_default_group()
        self._pg = weakref.ref(pg)
        try:
            self._breaker.check()  # a break may have come before there was anything to abort
            if self._device.index is not None:
                run_breakable(self._breaker, lambda: torch_private.connect_device(pg, self._device), "samebits-connect")
        except BaseException:
            torch_private.uninstall_default_group(pg)  # no other code knows of it yet
            raise
        return pg, store

    def cut(self) -> None:
        """End every wait of this process in the group and its subgroups; callable from any thread."""
        with self._lock:
            if not self._has_ended:
                self._has_stopped_device = devices.stop(self._device)
                self._abort()
        gloo.cut(self._endpoints)  # to and from rank 0's keys

    def end(self, *, cuts: bool) -> None:
        """End the group's use, and make the device ready for the next one.

        Args:
            cuts: abort first, because :meth:`cut` was not called; no thread may be waiting.
        """
        with self._lock:
            self._has_ended = True
            if cuts:
                self._abort()
            if self._has_stopped_device:
                devices.restart(self._device)
        if cuts:
            gloo.cut(self._endpoints)

    def _abort(self) -> None:
        pg = self._pg()
        if pg is not None:
            torch_private.abort_groups([*torch_private.subgroups_of(pg), pg], self._device)
