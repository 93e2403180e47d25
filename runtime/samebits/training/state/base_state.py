"""Define ``State``: what a commit does for the user, and what ``elastic.run`` needs from any state.

A subclass implements Horovod's methods ``save``, ``restore``, ``sync`` and ``reset``, which are called at three points
only. A commit calls ``save`` and then notifies the session. The loss of a peer calls ``restore``. The beginning of a
generation calls ``sync`` and then ``save``, so that a newcomer starts with the leader's values.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from samebits.core.messages import Sharding
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
from samebits.training.state.script.hidden_state import HiddenMessages, HiddenStateLook

__all__ = ["CommitSink", "State", "source_of_sync"]


class CommitSink(Protocol):
    """Receiver of a state's commits: the running ``elastic.run``.

    Attributes:
        recovers: whether the training function is called again after a loss.
    """

    recovers: bool

    def before_step(self) -> None:
        """Prepare for an optimizer step; the state is still its last commit."""

    def save(self) -> None:
        """Handle a commit of the current state."""

    def flush(self) -> None:
        """Wait until everything saved so far is durable."""

    def check(self) -> None:
        """Raise the error that ended the generation, or that asks this rank to leave it."""

    def sync(self) -> None:
        """Copy rank 0's state to every rank. A collective."""


class State(ABC):
    """Base class for a state of your own, with Horovod's methods.

    Override ``save``, ``restore`` and ``sync``; ``reset`` if needed. The job then survives the loss of any rank,
    including rank 0, with a copy in memory: within ``sync``, root rank 0 is the rank with the newest commit. To survive
    the loss of all ranks at once, also define ``state_dict()`` and ``load_state_dict()``; otherwise the job restarts
    from its initial state.
    """

    def __init__(self, *_: object) -> None:
        """Accept and ignore Horovod's two arguments (a function to broadcast, and one to get the rank)."""
        self._session: CommitSink | None = None
        self._rank = 0
        self._committed_steps = 0
        self._point: Point | None = None  # the last commit
        self._is_kept = False
        self._is_beginning = False
        self._reset_callbacks: list[Callable[[], object]] = []
        self._reporter = Reporter()
        self._hidden: HiddenStateLook | None = None
        self.hidden_messages = HiddenMessages()
        self.is_world_size_free = False  # whether the bits of the result do not depend on the world size
        self._is_again = False  # the step since the last commit is being retaken for comparison
        self._checkpoint = CheckpointConfig() if is_stateful(self) else CheckpointConfig(sys.maxsize)

    # ---- for the user

    def commit(self) -> None:
        """Mark a step as complete, save a checkpoint if one is due, and check for membership changes.

        After a loss, training resumes at the last commit.

        Raises:
            GenerationEndedError: a member was lost; ``elastic.run`` handles it.
            HostsUpdatedInterrupt: members join or leave; ``elastic.run`` handles it.
            UsageError: called outside ``elastic.run``.
        """
        self._running("commit")
        if not self._defers():
            if self._hidden is not None and not self._hidden.committed(is_again=self._is_again):
                self._hidden = None
            self._is_kept = False
            self.save()
            if not self._is_kept:  # a subclass overrides save
                self._keep()
        self.check_host_updates()

    def report(self, *, total_steps: int | None = None, **values: Any) -> None:
        """Report values for the progress line, the page and LOSS_ANOMALY.

        Call this on every rank, as often as you like. Rank 0's newest values are shown, and tensors are read at most
        twice a second.

        Args:
            total_steps: number of commits at the end of the job; passing it once is enough.
            values: numbers or one-element tensors by display name; ``loss`` and ``grad_norm`` are also checked.

        Raises:
            UsageError: called outside ``elastic.run``, or a value cannot be shown.
        """
        self._running("report")
        if self._is_again:
            return
        process = context.current("state.report()")
        self._reporter.take(process, self._rank, self.completed_steps, total_steps, values)

    def flush(self) -> None:
        """Wait until every checkpoint saved so far is on disk, or has failed with a warning.

        Call this before another program reads the files. It is not needed at the end of training.

        Raises:
            UsageError: called outside ``elastic.run``.
        """
        self._running("flush").flush()

    @abstractmethod
    def save(self) -> None:
        """Copy the values for :meth:`restore`."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the values last saved on this rank."""

    @abstractmethod
    def sync(self) -> None:
        """Give every rank the values of rank 0, for example with ``samebits.horovod.broadcast_object``.

        Called on all ranks, before the training function begins.
        """

    def reset(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Handle a membership change, in the new group and before :meth:`sync`. Does nothing by default."""

    def shared_values(self) -> Mapping[str, Any] | None:
        """Return the values that must be equal on every rank at a commit, by name.

        The values are plain values, tensors, and trees of these. If ranks differ, the job rolls back or ends. None, the
        default, means that nothing is compared.
        """
        return None

    def check_host_updates(self) -> None:
        """Check for membership changes without a commit. Raises the same errors as :meth:`commit`."""
        self._running("check_host_updates").check()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these functions whenever the members have changed, before the state is restored.

        The functions run in the new group. They can set a learning rate that depends on the world size.
        """
        self._reset_callbacks += callbacks

    @property
    def completed_steps(self) -> int:
        """Number of commits since the job began, across all recoveries."""
        return self._committed_steps

    # ---- for the session

    @property
    def is_running(self) -> bool:
        """Whether a training function runs with this state."""
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
        """Whether the state is known to be the last commit, because no value has changed since."""
        return self._point is not None and not is_stateful(self)

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's own points hold values that no other rank's points have."""
        return False

    def sharding(self, world_size: int) -> Sharding | None:
        """Return which of the job's ranks hold the same part of the state; None if each holds all of the state."""
        return None

    @property
    def complete_epoch(self) -> int | None:
        """The epoch whose loop had no batch left when it was last entered; None if batches were left."""
        return None

    @property
    def generators(self) -> Generators | None:
        """This process's generators if nothing else is stored only in its own points, else None."""
        return None

    def look_for_hidden(self, look: HiddenStateLook | None) -> None:
        """Make ``look`` search for values outside the state from the next commit on; None ends the search."""
        self._hidden = look

    def look_before_save(self) -> None:
        """Search for values outside the state that changed before the current commit, which is about to be saved."""
        if self._hidden is not None and not self._hidden.saving():
            self._hidden = None

    def takes_again(self, is_again: bool) -> None:
        """Set whether the step since the last commit is retaken for comparison; its reports are then discarded."""
        self._is_again = is_again

    def require_no_anomaly(self) -> None:
        """Raise before a commit if any rank's report requires the step to be computed again. May be a collective."""
        self._reporter.vote(context.current("state.commit()"))

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Send commits to ``session`` from now on, and draw random numbers for this rank."""
        if session is None:
            with contextlib.suppress(UsageError):  # the error was reported when the value was first given
                self._reporter.flush()
        self._session, self._rank = session, rank

    def enter_group(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Use a new generation's group, before this rank holds a point of it."""

    def on_reset(self) -> None:
        """Call :meth:`reset`, then the user's callbacks, after a change of members."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def begin(self, point: Point) -> None:
        """Begin a generation with the current state, which is ``point`` on the ranks that held it."""
        self._is_beginning = True
        try:
            self._make_equal()
            self.save()
        finally:
            self._is_beginning = False
        self.remember(point)

    def remember(self, point: Point) -> None:
        """Remember the current state as the commit ``point``."""
        self._point = point
        self._committed_steps = self.completed_steps

    def was_saved(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Note that the last commit has been saved."""

    def finish(self) -> None:  # noqa: B027 - as reset
        """Finish training once the training function has returned on this rank; the group can still be used."""

    def forget(self) -> None:
        """Mark the current values as not being a valid commit."""
        self._point = None

    def recall(self) -> Point | None:
        """Return to the last commit and return its point; None if the commit is not in memory."""
        if not self._can_restore():
            return None
        self.restore()
        if self._point is not None:  # a commit that failed may have been counted already
            self._committed_steps = self._point.step
        return self._point

    def contents(self) -> dict[str, Any]:
        """Return everything as a tree with tensors: ``shared`` is equal on every rank, ``own`` is this rank's only."""
        values = {"state": StateHandler(self).contents()} if is_stateful(self) else {}
        return {"shared": {"steps": self.completed_steps, "values": values}, "own": {}}

    def live_contents(self) -> dict[str, Any]:
        """Return the part of ``contents()`` whose tensors may be filled in place before :meth:`load`."""
        return {}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Adopt ``contents``; ``own`` is True if they were saved by this rank.

        Raises:
            CheckpointError: the contents belong to another program.
        """
        values = contents["shared"]["values"]
        if is_stateful(self) and "state" in values:
            StateHandler(self).load(values["state"])
        self._committed_steps = contents["shared"]["steps"]

    def compared(self) -> list[Named] | None:
        """Return the values that must be equal on every rank at every commit; None if unknown."""
        values = self.shared_values()
        return None if values is None else [Named(PartKind.SHARED, name, one) for name, one in values.items()]

    def loose(self) -> list[Named]:
        """Return the values that may differ between ranks, and are listed if they do."""
        return []

    def at_rest(self, point: Point) -> Sequence[torch.Tensor]:
        """Return the tensors that remain the commit ``point``'s until an optimizer steps; empty if one has changed."""
        return ()

    def weights(self) -> list[torch.Tensor]:
        """Return the tensors that must be equal on every rank when a generation begins."""
        return []

    def shards(self, *, at_rest: bool = False) -> Mapping[str, torch.Tensor]:
        """Return this rank's pieces of sharded weights by name, sorted by name.

        Args:
            at_rest: add their moments, and return nothing if the script may have written to weights since the last
                commit.
        """
        return {}

    # ---- for subclasses

    def _running(self, call: str) -> CommitSink:
        if self._session is None:
            raise UsageError(
                f"state.{call}() was called outside samebits.elastic.run. Fix: call it in the function that "
                "samebits.elastic.run decorates"
            )
        return self._session

    def _keep(self) -> None:
        """Notify the session of a commit."""
        if self._is_beginning or self._defers():
            return
        session = self._running("commit")
        self._is_kept = True
        self._count()
        session.save()

    def _defers(self) -> bool:
        """Return whether a commit must be postponed."""
        return False

    def _count(self) -> None:
        """Count a commit as a step; classes with optimizers count optimizer steps instead."""
        self._committed_steps += 1

    def _can_restore(self) -> bool:
        return self._point is not None

    def _make_equal(self) -> None:
        with _synced_from(_newest_holder()):
            self.sync()


_source: ContextVar[int | None] = ContextVar("source_of_sync", default=None)


def source_of_sync() -> int | None:
    """Return the rank with the newest commit if called inside ``sync`` at a generation's beginning, else None."""
    return _source.get()


@contextlib.contextmanager
def _synced_from(rank: int) -> Iterator[None]:
    token = _source.set(rank)
    try:
        yield
    finally:
        _source.reset(token)


def _newest_holder() -> int:
    """Return the first rank that needed no other rank's copy of the restore point. A collective."""
    process = context.current("state.sync()")
    generation = process.generation
    if generation is None or generation.world_size == 1 or generation.restore is None:
        return 0
    holds = transfer.gather(int(generation.source == generation.rank), process.device)
    return holds.index(1)
