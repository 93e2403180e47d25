"""``State``: what a commit is to the user, and what the session asks of any state. Torch has no part in its meaning.

Here lives the order of a commit, a reset and a beginning, and the way a subclass of the user's own takes part in them
with Horovod's ``save``, ``restore``, ``sync`` and ``reset``. Never here: values (``object_state``), models
(``state``), disks. The one idea: the user's methods and the session's meet at three moments only. A commit calls
``save`` and then tells the session; a lost peer calls ``restore``; a generation that begins calls ``sync`` and then
``save``, so that the copy of a newcomer is the leader's from the start.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from samebits.core.point import Point
from samebits.core.reports import PartKind
from samebits.errors import UsageError
from samebits.training.group import transfer
from samebits.training.process import context
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.compared import Named
from samebits.training.state.generators import Generators
from samebits.training.state.handlers import StateHandler, is_stateful
from samebits.training.state.reporting import Reporter
from samebits.training.state.script.hidden_state import HiddenStateLook

__all__ = ["CommitSink", "State", "source_of_sync"]


class CommitSink(Protocol):
    """Where a state's commits go: the running ``elastic.run``.

    Attributes:
        recovers: whether the training function is called again after a loss.
    """

    recovers: bool

    def before_step(self) -> None:
        """An optimizer is about to step: the last moment at which this rank still is its last commit."""

    def save(self) -> None:
        """The state as it stands is a commit."""

    def flush(self) -> None:
        """Return once everything saved so far is durable."""

    def check(self) -> None:
        """Raise what ended the generation, or asks this rank to leave it."""

    def sync(self) -> None:
        """Make every rank's state rank 0's."""


class State(ABC):
    """Subclass it for a state that keeps its values itself, with Horovod's methods.

    ``save`` copies the values aside, ``restore`` brings the copy back, ``sync`` makes them rank 0's on every rank (with
    ``samebits.horovod.broadcast_object`` and the like), ``reset`` is called when the members have changed. The loss of
    any rank is then survived in memory, rank 0 included: within ``sync`` root rank 0 means the rank with the newest
    commit. What memory cannot outlive, the loss of all ranks at once, needs ``state_dict()`` and ``load_state_dict()``
    in the subclass: without them the job then begins anew.
    """

    def __init__(self, *_: object) -> None:
        """Horovod's two arguments (how to broadcast, how to ask for the rank) may be given, and are not needed."""
        self._session: CommitSink | None = None
        self._rank = 0
        self._committed_steps = 0
        self._point: Point | None = None  # of the last commit
        self._is_kept = False
        self._is_beginning = False
        self._reset_callbacks: list[Callable[[], object]] = []
        self._reporter = Reporter()
        self._hidden: HiddenStateLook | None = None
        self._is_again = False  # the step since the last commit is taken a second or third time
        self._checkpoint = CheckpointConfig() if is_stateful(self) else CheckpointConfig(sys.maxsize)

    # ---- the user's

    def commit(self) -> None:
        """This step is done: remember it, save it where it is time to, and check the membership.

        Raises:
            GenerationEndedError: a member was lost; ``elastic.run`` handles it.
            HostsUpdatedInterrupt: the members change; ``elastic.run`` handles it.
            UsageError: outside ``elastic.run``.
        """
        self._running("commit")
        if not self._defers():
            if self._hidden is not None and not self._hidden.committed(is_again=self._is_again):
                self._hidden = None
            self._is_kept = False
            self.save()
            if not self._is_kept:  # a subclass's own save
                self._keep()
        self.check_host_updates()

    def report(self, *, total_steps: int | None = None, **values: Any) -> None:
        """Tell whoever follows the job how training stands: ``state.report(loss=loss, total_steps=3000)``.

        Call it as often as you like, on every rank: rank 0's newest values are shown, and a tensor is read twice a
        second at most.

        Args:
            total_steps: how many commits the job will have made in the end; remembered, so once is enough.
            values: numbers, or tensors of one element, by the name they are shown under; the loss first.

        Raises:
            UsageError: outside ``elastic.run``, or a value that no line could show.
        """
        self._running("report")
        if self._is_again:
            return
        process = context.current("state.report()")
        self._reporter.take(process, self._rank, self.completed_steps, total_steps, values)

    def flush(self) -> None:
        """Return once every checkpoint saved so far is on disk, or could not be written, which was said.

        A checkpoint is copied aside at its commit and written while training goes on (``CheckpointConfig.async_save``).
        Call this before something else relies on the files. When the training function ends it is not needed.

        Raises:
            UsageError: outside ``elastic.run``.
        """
        self._running("flush").flush()

    @abstractmethod
    def save(self) -> None:
        """Copy the values aside."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what was last saved, on this rank."""

    @abstractmethod
    def sync(self) -> None:
        """Make every rank's values rank 0's. A collective; when the function begins it has been called already."""

    def reset(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """The members have changed: the new group stands, ``sync`` has not been called yet. Empty, to be overridden."""

    def shared_values(self) -> Mapping[str, Any] | None:
        """What must be equal on every rank at a commit, by name: plain values, tensors, and trees of them.

        Ranks that differ in it end the job instead of going on. None, as here: nothing is compared.
        """
        return None

    def check_host_updates(self) -> None:
        """Look at the membership: raises as :meth:`commit`."""
        self._running("check_host_updates").check()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these whenever the members have changed: after the new group stands, before the state is restored.

        A learning rate that follows the world size is set there.
        """
        self._reset_callbacks += callbacks

    @property
    def completed_steps(self) -> int:
        """Commits since the job began, over all recoveries."""
        return self._committed_steps

    # ---- the session's

    @property
    def is_running(self) -> bool:
        """Whether a training function is running with it."""
        return self._session is not None

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """How often to save."""
        return self._checkpoint

    @property
    def uncommitted_steps(self) -> int:
        """Steps since the last commit."""
        return self.completed_steps - self._committed_steps

    @property
    def holds_commit(self) -> bool:
        """Whether the state as it stands is known to be the last commit, because no value was changed since."""
        return self._point is not None and not is_stateful(self)

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's own points hold something no other rank's hold."""
        return False

    @property
    def complete_epoch(self) -> int | None:
        """The epoch whose loop had no batch left when it was entered last; None if there was one."""
        return None

    @property
    def generators(self) -> Generators | None:
        """This process's generators, where they are all that its own points alone hold; else None."""
        return None

    def look_for_hidden(self, look: HiddenStateLook | None) -> None:
        """From the next commit on, let ``look`` find what the script keeps outside the state; None: no longer."""
        self._hidden = look

    def takes_again(self, is_again: bool) -> None:
        """Note that the step since the last commit is taken again only to be compared; its reports are dropped."""
        self._is_again = is_again

    def require_no_anomaly(self) -> None:
        """Before a commit: raises where some rank's report has everybody compute the step again. A collective then."""
        self._reporter.vote(context.current("state.commit()"))

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """From now on commits go there, and random numbers are drawn as this rank."""
        if session is None:
            with contextlib.suppress(UsageError):  # it was said when such a value was reported first
                self._reporter.flush()
        self._session, self._rank = session, rank

    def enter_group(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """A generation's group stands, and this rank holds no point of it yet: what rides on a group gets this one."""

    def on_reset(self) -> None:
        """The members have changed: call :meth:`reset`, then the user's callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def begin(self, point: Point) -> None:
        """A generation begins with the state as it stands, which is ``point``, on the ranks that held it."""
        self._is_beginning = True
        try:
            self._make_equal()
            self.save()
        finally:
            self._is_beginning = False
        self.remember(point)

    def remember(self, point: Point) -> None:
        """The state as it stands is the commit ``point``."""
        self._point = point
        self._committed_steps = self.completed_steps

    def finish(self) -> None:  # noqa: B027 - as reset
        """The training function has returned on this rank; the group still stands."""

    def forget(self) -> None:
        """What stands cannot be given to anybody."""
        self._point = None

    def recall(self) -> Point | None:
        """Become the last commit again, and say which that is; None where it is not to be had from memory."""
        if not self._can_restore():
            return None
        self.restore()
        if self._point is not None:  # a commit that failed may have been counted already
            self._committed_steps = self._point.step
        return self._point

    def contents(self) -> dict[str, Any]:
        """All of it as a tree with tensors: ``shared`` is equal on every rank, ``own`` is this rank's alone."""
        values = {"state": StateHandler(self).contents()} if is_stateful(self) else {}
        return {"shared": {"steps": self.completed_steps, "values": values}, "own": {}}

    def live_contents(self) -> dict[str, Any]:
        """Of ``contents()`` what :meth:`load` may be given again with the same tensors in it, filled anew."""
        return {}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Become what ``contents`` gave; ``own``: they were this rank's.

        Raises:
            CheckpointError: they were another program's.
        """
        values = contents["shared"]["values"]
        if is_stateful(self) and "state" in values:
            StateHandler(self).load(values["state"])
        self._committed_steps = contents["shared"]["steps"]

    def compared(self) -> list[Named] | None:
        """What must be equal on every rank at every commit; None where nothing is known to be."""
        values = self.shared_values()
        return None if values is None else [Named(PartKind.SHARED, name, one) for name, one in values.items()]

    def loose(self) -> list[Named]:
        """What may differ, and is named where it does."""
        return []

    def weights(self) -> list[torch.Tensor]:
        """What must be equal on every rank when a generation begins."""
        return []

    def shards(self) -> list[torch.Tensor]:
        """This rank's pieces of the weights that no rank holds whole."""
        return []

    # ---- for the classes below

    def _running(self, call: str) -> CommitSink:
        if self._session is None:
            raise UsageError(f"state.{call}() belongs into a function that runs under samebits.elastic.run")
        return self._session

    def _keep(self) -> None:
        """The session's half of a commit."""
        if self._is_beginning or self._defers():
            return
        session = self._running("commit")
        self._is_kept = True
        self._count()
        session.save()

    def _defers(self) -> bool:
        """Whether a commit must wait."""
        return False

    def _count(self) -> None:
        """A commit is a step, where nothing else is."""
        self._committed_steps += 1

    def _can_restore(self) -> bool:
        return self._point is not None

    def _make_equal(self) -> None:
        with _synced_from(_newest_holder()):
            self.sync()


_source: ContextVar[int | None] = ContextVar("source_of_sync", default=None)


def source_of_sync() -> int | None:
    """Within a state's ``sync`` when a generation begins: the rank that holds the newest commit; else None."""
    return _source.get()


@contextlib.contextmanager
def _synced_from(rank: int) -> Iterator[None]:
    token = _source.set(rank)
    try:
        yield
    finally:
        _source.reset(token)


def _newest_holder() -> int:
    """The first rank that needed nobody else's copy of the restore point. A collective."""
    process = context.current("state.sync()")
    generation = process.generation
    if generation is None or generation.world_size == 1 or generation.restore is None:
        return 0
    holds = transfer.gather(int(generation.source == generation.rank), process.device)
    return holds.index(1)
