"""Connect a group of accelerators, and end its waits: NCCL, HCCL, or another package's backend.

A rank that waits for a dead peer's kernel returns only if the backend ends the wait. NCCL's ``abort`` does so from any
thread. HCCL's ``abort`` does not reach work that is queued on the device, so the device is stopped (``stop_device``),
the communicators are aborted, and the device is started again (``restart_device``) before the next generation uses it.
This is torch_npu's own order. Its ``reinit_process_group`` is the middle step for a group that is kept; here each group
is new.

An abort may hang (nccl#1013, pytorch#119215). torch also makes it wait, for up to TORCH_NCCL_NONBLOCKING_TIMEOUT
seconds, for the lock of a communicator that is still connecting (``NCCLComm::waitReady``). So each group is aborted in
its own thread, all at once, and the process exits if the aborts miss a deadline. In-process recovery requires the
backend's own error handling to be off (``config.leave_failures_to_us``). This code has not run on NCCL or HCCL yet:
``tests.device`` runs it on a simulated device, once per way of ending a wait.
"""

from __future__ import annotations

import functools
import os
import re
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from samebits import config
from samebits.errors import AbortHungError, StuckError, UsageError
from samebits.service import log
from samebits.store.checkpoint import SHARED_MEMORY
from samebits.training import torch_private
from samebits.training.group import device as devices
from samebits.training.group import gloo
from samebits.training.group.breaker import Breaker, begin_breakable, end_process, run_aside, run_breakable
from samebits.training.group.calling_place import calling_place
from samebits.training.group.meeting_store import MeetingStore

__all__ = ["ABORT_WITHIN_S", "AcceleratorLink", "remove_left_over"]

ABORT_WITHIN_S = 5.0
"""Seconds after which an abort counts as hung."""
LEFT_OVER_AFTER_S: Final = 600.0
"""Age in seconds before an unmapped segment is removed; a peer in another container may be about to map a newer one."""
_SEGMENT: Final = re.compile(r"nccl-\w{6}")
_LEAVES_PAIRS = (
    "this NCCL backend does not abort sends and receives: after a loss, a rank that waits in one ends with status "
    f"{StuckError.exit_code} instead of continuing. Fix: unset TORCH_DIST_USE_NCCL2, so that torch's first backend is "
    "used"
)


class AcceleratorLink:
    """Connects the accelerators of one process group.

    Args:
        device: this process's device.
        place: rank and world size.
        breaker: the group's breaker.
        store: where the backend finds its peers.
        prefix: prefix of the backend's keys in the store.
        endpoints: endpoints of the connections to and from the store on rank 0.
        timeout: timeout of a collective.
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
        self._aborted: threading.Event | None = None  # created when the abort begins, set when it has returned
        self._has_stopped_device = False

    def begin(self) -> Future[Any]:
        """Start exchanging addresses with the other ranks in another thread."""
        self._met = begin_breakable(self._breaker, self._store.meet, "samebits-connect")
        return self._met

    def connect(self) -> tuple[dist.ProcessGroup, Store]:
        """Install torch's default group, then connect, so that a thread that breaks the group meanwhile can abort it.

        If the device were given to ``init_process_group``, it would connect at once, inside a call that cannot be
        interrupted.
        """
        (self._met or self.begin()).result()
        store = PrefixStore(self._prefix, self._store)
        _prepare(self._device)
        for sentence in config.leave_failures_to_us():
            _warn_once(sentence)
        hook = sys.excepthook  # init_process_group wraps it once more each time
        rank, world_size = self._place
        dist.init_process_group(
            devices.backend_of(self._device), store=store, rank=rank, world_size=world_size, timeout=self._timeout
        )
        sys.excepthook = hook
        pg = distributed_c10d._get_default_group()
        self._pg = weakref.ref(pg)
        if torch_private.leaves_pairs_open(pg, self._device):
            _warn_once(_LEAVES_PAIRS)
        try:
            self._breaker.check()  # a break may have come before there was anything to abort
            if self._device.index is not None:
                run_breakable(self._breaker, functools.partial(self._connect_device, pg), "samebits-connect")
        except BaseException:
            torch_private.uninstall_default_group(pg)  # no other code knows of it yet
            raise
        return pg, store

    def _connect_device(self, pg: dist.ProcessGroup) -> None:
        devices.use(self._device)
        torch_private.connect_device(pg, self._device)

    def launched(self) -> int | None:
        """Return the number of launched calls, as :meth:`.group.Group.launched` does."""
        pg = self._pg()
        groups = [] if pg is None else [*torch_private.subgroups_of(pg), pg]
        found = torch_private.launched(groups, self._device) if groups else None
        return None if found is None else found + _launches.count

    def cut(self) -> None:
        """Start ending every wait of this process in the group and its subgroups.

        May be called from any thread; returns without waiting.
        """
        gloo.cut(self._endpoints)  # the connections to and from rank 0's key server
        self._begin_abort(stops=True)

    @property
    def is_cut(self) -> bool:
        """Whether no abort is under way."""
        return self._aborted is None or self._aborted.is_set()

    def end(self, *, cuts: bool) -> None:
        """Wait until the group is aborted, and prepare the device for the next group.

        Args:
            cuts: abort first, because :meth:`cut` was not called; no thread may be waiting.
        """
        if cuts:
            gloo.cut(self._endpoints)
            self._begin_abort(stops=False)
        with self._lock:
            self._has_ended = True
            aborted = self._aborted
        if aborted is not None:
            aborted.wait()  # an abort that hangs ends the process
        if self._has_stopped_device:
            devices.restart(self._device)

    def _begin_abort(self, *, stops: bool) -> None:
        """Abort in a separate thread without holding ``_lock``, because an abort may hang."""
        with self._lock:
            if self._has_ended or self._aborted is not None:
                return
            self._aborted = aborted = threading.Event()
        for body, name in (
            (functools.partial(self._abort, aborted, stops), "samebits-abort"),
            (functools.partial(self._require_end, aborted), "samebits-abort-deadline"),
        ):
            run_aside(body, name)

    def _abort(self, aborted: threading.Event, stops: bool) -> None:
        try:
            if stops:
                self._has_stopped_device = devices.stop(self._device)
            pg = self._pg()
            if pg is not None:
                _abort_at_once([*torch_private.subgroups_of(pg), pg], self._device)
        except RuntimeError as error:  # ``run.stuck_collective`` ends a thread that stays stuck
            log.warn(f"aborting {self._breaker.name} failed: {error}")
        finally:
            aborted.set()

    def _require_end(self, aborted: threading.Event) -> None:
        if not aborted.wait(ABORT_WITHIN_S):
            log.warn(
                f"aborting the communicators of {self._breaker.name} did not return within {ABORT_WITHIN_S:g} s. An "
                "abort has to wait while a communicator still connects to a lost peer, and may hang in NCCL itself. "
                f"This process gives up its seat (status {AbortHungError.exit_code}). Fix: nothing to do; a spare or a "
                "restart takes over; if it recurs, update NCCL"
            )
            end_process(AbortHungError.exit_code)


def _abort_at_once(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Abort each group in its own thread, because aborting one waits for the kernels of all."""
    outcomes = []
    for group in groups:
        outcome: Future[None] = Future()
        run_aside(functools.partial(_abort_one, group, device, outcome), "samebits-abort-group")
        outcomes.append(outcome)
    failures = [error for outcome in outcomes if (error := outcome.exception()) is not None]
    if failures:
        raise failures[0]


def _abort_one(group: dist.ProcessGroup, device: torch.device, outcome: Future[None]) -> None:
    try:
        devices.use(device)
        torch_private.abort_group(group, device)
    except RuntimeError as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


@functools.cache
def _prepare(device: torch.device) -> None:
    """Prepare the process for its first communicator."""
    torch_private.before_launches(functools.partial(_launches.one_more, device))
    if device.type == "cuda":
        remove_left_over()


class _Launches:
    """Counts the collectives, sends and receives that this process calls on accelerators."""

    def __init__(self) -> None:
        self.count = 0

    def one_more(self, device: torch.device) -> None:
        """Count a call that is about to be made.

        Raises:
            UsageError: the call would be captured into a CUDA graph.
        """
        self.count += 1
        if devices.is_capturing(device):
            raise UsageError(
                f"{calling_place()}: a collective was captured into a CUDA graph: its replay would use the "
                "communicator of a group that ends with the first lost peer. Fix: capture what is before and after it, "
                "and call the collective between the replays"
            )


_launches = _Launches()  # one per process, like torch's class


def remove_left_over(folder: Path = SHARED_MEMORY) -> int:
    """Remove NCCL's shared-memory files of this user's killed processes (nccl#525), and return their number.

    A file that a visible process has mapped, or that is younger than LEFT_OVER_AFTER_S seconds, is left alone.
    """
    old_s, user, left = time.time() - LEFT_OVER_AFTER_S, os.getuid(), []
    for path in folder.glob("nccl-*"):
        try:
            found = path.lstat()
        except OSError:
            continue  # its owner removed it first
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == user
        if is_ours and found.st_mtime < old_s and _SEGMENT.fullmatch(path.name):
            left.append(path)
    mapped = set(_mapped(f"{folder}{os.sep}nccl-")) if left else set()
    unused = [path for path in left if str(path) not in mapped]
    for path in unused:
        path.unlink(missing_ok=True)
    return len(unused)


def _mapped(prefix: str) -> Iterator[str]:
    """Return the files with this prefix that any visible process has mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:
            continue  # the process has ended, or is another user's
        yield from re.findall(rf"{re.escape(prefix)}\w{{6}}(?=$|\s)", text, re.MULTILINE)


@functools.cache
def _warn_once(sentence: str) -> None:
    log.warn(sentence)
