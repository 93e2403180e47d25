"""Form a generation's process group, install it as torch's default group, break it, and drop it.

A group exists only as long as its generation. It is built directly on the backend, without rendezvous or name lookup.
Any thread may break it at any moment, even while it forms. Dropping it is fast, because a separate thread frees what
gloo still holds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.utils.data.distributed import DistributedSampler  # torch has loaded it already

from samebits.errors import CommunicationError, UsageError
from samebits.store.collective_ring import open_ring
from samebits.training import torch_private
from samebits.training.group import device as devices
from samebits.training.group import gloo
from samebits.training.group.accelerator import AcceleratorLink
from samebits.training.group.breakable_group import BreakableGroup
from samebits.training.group.breaker import EXIT_GRACE_S, Breaker, begin_breakable, expect_no_end, run_aside
from samebits.training.group.calling_place import calling_place
from samebits.training.group.failure import is_communication_failure
from samebits.training.group.meeting_store import Exchange, MeetingStore
from samebits.training.group.meshes import Declaring
from samebits.training.group.recorder import Recorder

__all__ = ["Exchange", "Group", "current_breaker", "discard", "form", "form_alone", "is_communication_failure"]

_LOOPBACK = "127.0.0.1"
_STORE_PREFIX = "default_pg"
_DESCRIPTION = "default_pg"  # torch's name for the default group
_LOOK_S = 0.0005  # polling interval for collectives, most of which end within a millisecond
_FORGOTTEN_AFTER = timedelta(seconds=1)  # collectives that gloo wakes end within milliseconds


class _Link(Protocol):
    """Interface for connecting a backend and interrupting it."""

    def begin(self) -> Future[Any]: ...

    def connect(self) -> tuple[dist.ProcessGroup, Store]: ...

    def launched(self) -> int | None: ...

    def cut(self) -> None: ...

    @property
    def is_cut(self) -> bool: ...

    def end(self, *, cuts: bool) -> None: ...


class Group:
    """The processes of one generation, seen from one of them.

    Nothing happens before :meth:`begin` or :meth:`form`. Pass the group to the thread that may have to break it, then
    form it.

    Args:
        device: the device this process trains on; its type decides the backend, unless ``backend`` does.
        rank: this process's rank, 0-based.
        world_size: processes in the generation.
        exchange: carries this rank's message to all; used once.
        name: the group's name in error messages, e.g. ``generation 7``.
        address: a numeric IP address of this host that all peers reach; gloo listens there.
        timeout_s: timeout of one collective. Recovery does not depend on it; it limits how long a cut-off buffer is
            kept.
        connect_timeout_s: how long one connection may take while the group forms.
        alone: as for :class:`BreakableGroup` (gloo only).
        info: sent to all ranks with this rank's message; :meth:`info_of` returns any rank's.
        backend: gloo for a device that has another backend; None: the device's own.
        ahead: subgroups of this rank that will be made, each by its ranks. gloo connects them together with the group,
            so that they need no exchange of their own.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        world_size: int,
        exchange: Exchange,
        *,
        name: str,
        address: str = _LOOPBACK,
        timeout_s: float = 1800.0,
        connect_timeout_s: float = 30.0,
        alone: Callable[[], str] | None = None,
        info: bytes = b"",
        backend: str | None = None,
        ahead: Sequence[tuple[int, ...]] = (),
    ) -> None:
        gloo.check_address(address)
        self.device = device
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._breaker = Breaker(name)
        self._pg: dist.ProcessGroup | None = None
        self._awaited_in_vain: set[dist.Work] = set()
        self.endpoints = endpoints = gloo.Endpoints()
        timeout = timedelta(seconds=timeout_s)
        is_gloo = devices.backend_of(device, backend) == dist.Backend.GLOO
        meshes = 1 + len(ahead) if is_gloo else 0
        store = MeetingStore(exchange, rank, world_size, address, self._breaker, endpoints, timeout, info, meshes)
        self._guards: list[SamplerRefusal | Declaring] = []
        self._all_info = store.all_info  # only the list, since nothing here may keep the store alive
        self._link: _Link | None
        if is_gloo:
            connect_timeout = timedelta(seconds=connect_timeout_s)
            self._link = _GlooLink(self, store, endpoints, address, connect_timeout, timeout, alone, ahead)
        else:
            self._link = AcceleratorLink(
                device, (rank, world_size), self._breaker, store, _STORE_PREFIX, endpoints, timeout
            )

    @property
    def pg(self) -> dist.ProcessGroup:
        """The process group that is ``dist.group.WORLD`` while this group is installed."""
        if self._pg is None:
            raise UsageError(f"the process group of {self.name} was not formed. Fix: call form() first")
        return self._pg

    def holds(self, pg: dist.ProcessGroup | None) -> bool:
        """Return whether ``pg`` is the process group that torch uses for this group."""
        return pg is not None and pg is self._pg

    def info_of(self, rank: int) -> bytes:
        """Return the ``info`` that this rank sent to all; available once the group is formed."""
        return self._all_info[rank]

    @property
    def broken(self) -> bool:
        """Whether :meth:`break_` or :meth:`drop` was called."""
        return self._breaker.broken

    @property
    def collectives(self) -> int:
        """Number of collectives called in the group, without subgroups; 0 if the backend does not count them."""
        return self._pg.count if isinstance(self._pg, BreakableGroup) else 0

    def launched(self) -> int | None:
        """Return a number that increases with every collective, send and receive on an accelerator.

        Return None if it is unknown.
        """
        return None if self._link is None else self._link.launched()

    @property
    def is_quiet(self) -> bool:
        """Whether every collective of this group and its subgroups has ended."""
        return not _unfinished([] if self._pg is None else [*torch_private.subgroups_of(self._pg), self._pg])

    @property
    def breaker(self) -> Breaker:
        """The group's breaker, for calls that must end with the group (:func:`.breaker.run_breakable`)."""
        return self._breaker

    def begin(self) -> Future[Any]:
        """Start connecting in another thread, because the exchange of addresses may take any time.

        The group of a future generation waits in the exchange until its members are known. The future completes when
        the connections are made, or with the error that :meth:`form` would raise.
        """
        assert self._link is not None, "only drop() gives it up, and that breaks the group"
        return self._link.begin()

    def form(self) -> Group:
        """Connect to all ranks and become torch's default group.

        Raises:
            GenerationEndedError: the group was broken meanwhile, by :meth:`break_` or by the exchange.
            CommunicationError: a connection was not made within the connect timeout.
            UsageError: torch has a default group already.
        """
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed already has a default process group, which SameBits must create itself. Fix: remove "
                "init_process_group() from the script (with ENABLE_RECOVERY=1), or destroy the previous group first"
            )
        try:
            self._connect_and_install()
            self._breaker.check()
        except BaseException:
            self.drop()
            raise
        _live.add(self)
        return self

    def _connect_and_install(self) -> None:
        self._breaker.check()
        assert self._link is not None, "only drop() gives it up, and that breaks the group"
        try:
            self._pg, store = self._link.connect()
        except RuntimeError as error:
            self._breaker.check()
            if is_communication_failure(error):
                raise CommunicationError(f"the process group of {self.name} did not connect: {error}") from error
            raise
        if not dist.is_initialized():
            torch_private.install_default_group(self._pg, store, self.world_size)

    def break_(self, reason: str = "a member was lost") -> None:
        """End every wait in this group, its subgroups and its formation; callable from any thread, repeatedly.

        Every waiting thread gets GenerationEndedError, or gloo's own error if gloo is faster. Peers notice the shutdown
        of their connections to this process. This method does not wait: :attr:`is_cut` becomes true when an
        accelerator's abort is over.
        """
        link = self._link
        if self._breaker.throw(reason) and link is not None:
            link.cut()

    @property
    def is_cut(self) -> bool:
        """Whether everything that :meth:`break_` has started in other threads is finished."""
        link = self._link
        return link is None or link.is_cut

    def guard_script(self, alone: Callable[[], str]) -> None:
        """As long as this group is torch's default, keep ``DistributedSampler`` and meshes from using its size."""
        self._guards = [SamplerRefusal(alone), Declaring(alone)]

    def step_aside(self) -> None:
        """Remove the group from torch without freeing it, so that the next one can be formed. Drop it afterwards.

        Use this only for a group without subgroups, because subgroups would lose their names.
        """
        self._end_guards()
        if self._pg is not None:
            torch_private.uninstall_default_group(self._pg)

    def drop(self) -> None:
        """Remove the group from torch, so that the next one can be formed at once. Another thread frees it.

        This also breaks the group, so no thread may be waiting in it.
        """
        self._end_link("it was dropped")
        self._end_guards()
        # Another thread empties the lists. A reference kept here would make this thread free their objects instead.
        groups = [] if self._pg is None else [*torch_private.uninstall_default_group(self._pg), self._pg]
        works = _unfinished(groups)
        backends = [torch_private.backend_of(group, self.device) for group in groups]
        links = [self._link]
        self._pg = self._link = None
        discard([groups, backends, links], works)

    def _end_link(self, reason: str) -> None:
        cuts = self._breaker.throw(reason)
        if self._link is not None:
            self._link.end(cuts=cuts)

    def settle(self, within_s: float) -> None:
        """Wait, for a limited time, until no collective of this group or a subgroup runs.

        A collective that did not end in time is not waited for again. Call this before actions that should not happen
        during a collective but are better done late than never.
        """
        deadline = time.monotonic() + within_s
        groups = [] if self._pg is None else [*torch_private.subgroups_of(self._pg), self._pg]
        while not self.broken and (running := set(_unfinished(groups))) - self._awaited_in_vain:
            if time.monotonic() >= deadline:
                self._awaited_in_vain = running
                return
            time.sleep(_LOOK_S)

    def _end_guards(self) -> None:
        while self._guards:
            self._guards.pop().end()

    def end_with_process(self, deadline: float) -> None:
        """Keep the interpreter's shutdown from freeing the group; call this once, when nothing else runs.

        A collective that ends during shutdown calls back into Python, and the process gets SIGABRT. Freeing a mesh
        whose collective never ends blocks the process until the collective times out. So this waits for broken
        collectives until ``deadline`` on the monotonic clock, and never frees those that do not end.
        """
        self._end_link("the process ends")
        groups = [] if self._pg is None else [*torch_private.subgroups_of(self._pg), self._pg]
        for work in _unfinished(groups):
            with contextlib.suppress(RuntimeError):  # the group is broken, as intended, or it is too late
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        if _unfinished(groups):
            for group in groups:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(torch_private.backend_of(group, self.device)))


_live: weakref.WeakSet[Group] = weakref.WeakSet()


def current_breaker() -> Breaker:
    """Return the breaker of torch's default group, or one that is never thrown if SameBits did not make the group."""
    pg = dist.group.WORLD
    return next((one.breaker for one in _live if one.holds(pg)), _UNBROKEN)


_UNBROKEN = Breaker("a group that the script has made")


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + EXIT_GRACE_S
    for group in list(_live):
        group.end_with_process(deadline)


class _GlooLink:
    """gloo over TCP. It is interrupted by the breaker, and by shutting down its own connections."""

    def __init__(
        self,
        group: Group,
        store: MeetingStore,
        endpoints: gloo.Endpoints,
        address: str,
        connect_timeout: timedelta,
        timeout: timedelta,
        alone: Callable[[], str] | None,
        ahead: Sequence[tuple[int, ...]],
    ) -> None:
        self._rank, self._world_size, self._breaker = group.rank, group.world_size, group.breaker
        self._meeting = store  # torch keeps only the C++ half of a Python store alive
        self._store = PrefixStore(_STORE_PREFIX, store)
        self._endpoints = endpoints
        self._address = address
        self._connect_timeout = connect_timeout
        self._timeout = timeout
        self._alone = alone
        self._mesh: Future[dist.ProcessGroupGloo] | None = None
        self._ahead = ahead
        self._begun: dict[str, Future[dist.ProcessGroupGloo]] = {}  # subgroups, by prefix in the store
        self._made = Counter[tuple[int, ...]]()

    def begin(self) -> Future[Any]:
        self._mesh = self._begin_mesh(self._store, self._rank, self._world_size, self._timeout)
        begun = Counter[tuple[int, ...]]()
        for ranks in self._ahead:
            prefix = _prefix(ranks, begun)
            store = PrefixStore(prefix, self._store)
            self._begun[prefix] = self._begin_mesh(store, ranks.index(self._rank), len(ranks), self._timeout)
        return self._mesh

    def connect(self) -> tuple[dist.ProcessGroup, Store]:
        mesh = self._mesh or self.begin()
        self._mesh = None
        if (ring := open_ring()) is not None:
            ring.begin(self._rank, self._world_size)
        recorder = Recorder(ring, "0", _DESCRIPTION, range(self._world_size))
        return self._wrap(
            mesh, self._store, self._rank, self._world_size, self._timeout, "0", _DESCRIPTION, recorder
        ), self._store

    def _subgroup(self, ranks: list[int], timeout: timedelta, name: str, description: str) -> dist.ProcessGroup | None:
        if self._rank not in ranks:
            return None
        prefix = _prefix(tuple(ranks), self._made)
        store = PrefixStore(prefix, self._store)
        rank, size = ranks.index(self._rank), len(ranks)
        mesh = self._begun.pop(prefix, None) or self._begin_mesh(store, rank, size, timeout)
        recorder = Recorder(open_ring(), name, description, ranks)
        return self._wrap(mesh, store, rank, size, timeout, name, description, recorder)

    def _begin_mesh(self, store: Store, rank: int, size: int, timeout: timedelta) -> Future[dist.ProcessGroupGloo]:
        # In a helper thread: gloo waits until its timeout for a peer that died between its message and its connection.
        def connect() -> dist.ProcessGroupGloo:
            try:
                return gloo.connect(store, rank, size, self._address, self._connect_timeout, timeout)
            except BaseException:
                self._meeting.await_one_less()
                raise

        return begin_breakable(self._breaker, connect, "samebits-connect")

    def _wrap(
        self,
        mesh: Future[dist.ProcessGroupGloo],
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        description: str,
        recorder: Recorder,
    ) -> dist.ProcessGroup:
        inner = dist.ProcessGroup(store, rank, size)
        group = BreakableGroup(inner, self._breaker, timeout, self._subgroup, self._alone, recorder)
        try:
            connected = mesh.result()
        finally:
            del mesh  # the traceback of its error must not refer to it
        for one in (inner, group):
            torch_private.dress_group(one, connected, name, description)
        return group

    def launched(self) -> int | None:
        return None  # not all launches are visible if gloo gets an accelerator's tensors

    def cut(self) -> None:
        if self._world_size > 1:
            gloo.cut(self._endpoints)

    @property
    def is_cut(self) -> bool:
        return True

    def end(self, *, cuts: bool) -> None:
        if cuts:
            self.cut()


def _prefix(ranks: tuple[int, ...], made: Counter[tuple[int, ...]]) -> str:
    """Return the store's prefix for the next subgroup of these ranks, the same on each of them."""
    made[ranks] += 1
    return f"{','.join(map(str, ranks))}.{made[ranks]}/"


class _Alone:
    """The exchange in a world of one."""

    def __init__(self) -> None:
        self._blob = b""

    def publish(self, blob: bytes) -> None:
        self._blob = blob

    def wait(self) -> Sequence[bytes]:
        return [self._blob]


def form(
    device: torch.device,
    rank: int,
    world_size: int,
    exchange: Exchange,
    *,
    generation: int,
    on_breakable: Callable[[Callable[[str], None]], object],
    **options: Any,
) -> Group:
    """Create and form a generation's :class:`Group`; takes its arguments and raises what :meth:`Group.form` raises.

    Args:
        on_breakable: receives the group's ``break_`` before anything is waited for, so that another thread can call it.
    """
    group = Group(device, rank, world_size, exchange, name=f"generation {generation}", **options)
    on_breakable(group.break_)
    return group.form()


def form_alone(
    device: torch.device,
    *,
    address: str = _LOOPBACK,
    alone: Callable[[], str] | None = None,
    backend: str | None = None,
) -> Group:
    """Form the group of one rank that ``samebits.init()`` installs until the first generation begins.

    Args:
        device: as for :class:`Group`.
        address: address of this machine; gloo listens there even without peers.
        backend: as for :class:`Group`.
        alone: as for :class:`Group`; a ``DistributedSampler`` that would ask for the group's size is refused as well.
    """
    group = Group(
        *(device, 0, 1, _Alone()), name="this process alone", address=address, alone=alone, backend=backend
    ).form()
    if alone is not None:
        group.guard_script(alone)
    return group


def discard(bags: Sequence[list[Any]], works: list[dist.Work] | None = None) -> None:
    """Empty the lists, in order, in another thread, after ``works`` have ended.

    Destroying a gloo mesh waits for its threads. That takes some milliseconds or, if a thread waits for a message that
    was cut off, until that operation times out.
    """
    run_aside(functools.partial(_empty, bags, works or []), "samebits-discard")


def _unfinished(groups: Sequence[dist.ProcessGroup]) -> list[dist.Work]:
    return [work for group in groups if isinstance(group, BreakableGroup) for work in group.unfinished()]


def _empty(bags: Sequence[list[Any]], works: list[dist.Work]) -> None:
    while works:
        with contextlib.suppress(RuntimeError):  # broken works fail, as expected
            works[0].wait(_FORGOTTEN_AFTER)
        if not works[0].is_completed():
            expect_no_end()
            with contextlib.suppress(RuntimeError):
                works[0].wait()
        del works[0]
    for bag in bags:
        while bag:
            bag.pop(0)


# ---- a ``DistributedSampler`` between ``samebits.init()`` and ``samebits.elastic.run``
#
# It asks the process group once how many ranks share the samples. In this phase the answer is always one. So
# the sampler is refused as long as the group of one is torch's default.

SAMPLER_ALONE = (
    "a DistributedSampler without num_replicas and rank {when} samebits.elastic.run would give every rank all samples: "
    "build it inside the function that elastic.run calls, or use samebits.ElasticSampler"
)


class SamplerRefusal:
    """Raises UsageError for a ``DistributedSampler`` without both ``num_replicas`` and ``rank``, until :meth:`end`.

    With gloo the group's own methods could refuse instead, but an accelerator's group is torch's, and its methods
    cannot be replaced. So the constructor, which subclasses call as well, is replaced.

    Args:
        alone: as in :class:`BreakableGroup`.
    """

    def __init__(self, alone: Callable[[], str]) -> None:
        self._alone = alone
        self._lasts = True
        self._constructor: Any = DistributedSampler.__init__
        self._refusing = self._wrapped(self._constructor)
        DistributedSampler.__init__ = self._refusing  # type: ignore[method-assign]

    def end(self) -> None:
        """Restore the class. Further calls do nothing."""
        self._lasts = False
        if DistributedSampler.__init__ is self._refusing:  # unless it was wrapped again meanwhile
            DistributedSampler.__init__ = self._constructor  # type: ignore[method-assign]

    def _wrapped(self, constructor: Any) -> Callable[..., None]:
        @functools.wraps(constructor)
        def construct(
            sampler: DistributedSampler[Any],
            dataset: Any,
            num_replicas: int | None = None,
            rank: int | None = None,
            *more: Any,
            **named: Any,
        ) -> None:
            if self._lasts and (num_replicas is None or rank is None):
                raise UsageError(f"{calling_place()}: {SAMPLER_ALONE.format(when=self._alone())}")
            constructor(sampler, dataset, num_replicas, rank, *more, **named)

        return construct
