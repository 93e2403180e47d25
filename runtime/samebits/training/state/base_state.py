"""Define ``State``, the base class of all states: commits for the user's loop, save and restore for ``elastic.run``.

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


class CommitSink(Protocol):
    """Interface through which a state reports its commits to the running ``elastic.run``.

    Attributes:
        recovers: whether the training function is called again after a loss.
    """

    recovers: bool

    def before_step(self) -> None:
        """Prepare for an optimizer step, while the state still equals its last commit."""

    def save(self) -> None:
        """Handle a commit of the current state."""

    def flush(self) -> None:
        """Wait until everything saved so far is durable."""

    def check(self) -> None:
        """Raise the error that ended the generation, or that asks this rank to leave it."""

    def sync(self) -> None:
        """Copy rank 0's state to every rank. A collective."""


class State(ABC):
    """Base class for user-defined states, with Horovod's methods.

    Override ``save``, ``restore`` and ``sync``, and ``reset`` if needed. The job then survives the loss of any rank,
    including rank 0, because every other rank holds a copy in memory. Inside ``sync``, root rank 0 means the rank with
    the newest commit. To survive the loss of all ranks at once, also define ``state_dict()`` and ``load_state_dict()``;
    otherwise the job restarts from its initial state.
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
        self.are_locals_restored = False  # whether the training function itself restores its local values
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
        """React to a membership change; does nothing by default.

        Called in the new process group, before :meth:`sync`.
        """

    def shared_values(self) -> Mapping[str, Any] | None:
        """Return the values that must be equal on every rank at a commit, by name.

        Values may be plain values, tensors, or nested containers of these. If they differ between ranks, the job rolls
        back or ends. Return None, the default, to compare nothing.
        """
        return None

    def check_host_updates(self) -> None:
        """Check for membership changes without a commit. Raises the same errors as :meth:`commit`."""
        self._running("check_host_updates").check()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Register functions to call after each membership change, before the state is restored.

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
        """Whether a training function is currently running with this state."""
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
        """Whether the current values are known to equal the last commit."""
        return self._point is not None and not is_stateful(self)

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's checkpoints contain values that no other rank's checkpoints contain."""
        return False

    def sharding(self, world_size: int) -> Sharding | None:
        """Return which ranks hold the same part of the state, or None if every rank holds all of it."""
        return None

    @property
    def complete_epoch(self) -> int | None:
        """The epoch that had no batches left when its loop was last entered, or None if there were batches left."""
        return None

    @property
    def generators(self) -> Generators | None:
        """This process's random number generators, if they are all that only its own points store; otherwise None."""
        return None

    def look_for_hidden(self, look: HiddenStateLook | None) -> None:
        """Use ``look`` from the next commit on to find values outside the state that change; None stops the search."""
        self._hidden = look

    def look_before_save(self) -> None:
        """Search for values outside the state that have changed, just before the current commit is saved."""
        if self._hidden is not None and not self._hidden.saving():
            self._hidden = None

    def takes_again(self, is_again: bool) -> None:
        """Set whether the current step is repeated for comparison; reports of a repeated step are discarded."""
        self._is_again = is_again

    def require_no_anomaly(self) -> None:
        """Raise before a commit if any rank's report requires the step to be recomputed. May be a collective."""
        self._reporter.vote(context.current("state.commit()"))

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Send commits to ``session`` from now on, and draw this rank's random numbers."""
        if session is None:
            with contextlib.suppress(UsageError):  # the error was reported when the value was first given
                self._reporter.flush()
        else:
            self._reporter.begin()
        self._session, self._rank = session, rank

    def enter_group(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Switch to the new generation's process group, before this rank has received its restore point."""

    def on_reset(self) -> None:
        """Call :meth:`reset` and the registered callbacks after a membership change."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def begin(self, point: Point) -> None:
        """Begin a generation. The current state is ``point`` on the ranks that held it."""
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
        """Record that the last commit has been saved."""

    def finish(self) -> None:  # noqa: B027 - as reset
        """Finish training.

        Called on each rank when its training function has returned; the process group still works.
        """

    def forget(self) -> None:
        """Record that the current values are not a valid commit."""
        self._point = None

    def recall(self) -> Point | None:
        """Restore the last commit from memory and return its point, or None if it is not in memory."""
        if not self._can_restore():
            return None
        self.restore()
        if self._point is not None:  # a commit that failed may have been counted already
            self._committed_steps = self._point.step
        return self._point

    def contents(self) -> dict[str, Any]:
        """Return the complete state as nested dicts.

        ``shared`` holds the values that are equal on every rank; ``own`` holds this rank's own values.
        """
        values = {"state": StateHandler(self).contents()} if is_stateful(self) else {}
        return {"shared": {"steps": self.completed_steps, "values": values}, "own": {}}

    def live_contents(self) -> dict[str, Any]:
        """Return the part of ``contents()`` whose tensors may be overwritten in place before :meth:`load` is called."""
        return {}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Load ``contents``. ``own`` is True if this rank saved them.

        Raises:
            CheckpointError: the contents belong to another program.
        """
        values = contents["shared"]["values"]
        if is_stateful(self) and "state" in values:
            StateHandler(self).load(values["state"])
        self._committed_steps = contents["shared"]["steps"]

    def compared(self) -> list[Named] | None:
        """Return the values that must be equal on every rank at every commit, or None if they are unknown."""
        values = self.shared_values()
        return None if values is None else [Named(PartKind.SHARED, name, one) for name, one in values.items()]

    def loose(self) -> list[Named]:
        """Return the values that may differ between ranks. Differences are only reported."""
        return []

    def at_rest(self, point: Point) -> Sequence[torch.Tensor]:
        """Return the tensors that remain the commit ``point``'s until an optimizer steps; empty if one has changed."""
        return ()

    def weights(self) -> list[torch.Tensor]:
        """Return the tensors that must be equal on every rank when a generation begins."""
        return []

    def shards(
        self, *, moments: bool = False, at_rest: bool = False, gradients: bool = False
    ) -> Mapping[str, torch.Tensor]:
        """Return this rank's shards of the weights, sorted by name.

        Args:
            moments: add their moments.
            at_rest: the same, but return nothing if the script may have written to weights since the last commit.
            gradients: return the reduced gradients of a few shards instead.
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
        """Count a commit as a step. Subclasses with optimizers count optimizer steps instead."""
        self._committed_steps += 1

    def _can_restore(self) -> bool:
        return self._point is not None

    def _make_equal(self) -> None:
        with _synced_from(_newest_holder()):
            self.sync()


_source: ContextVar[int | None] = ContextVar("source_of_sync", default=None)


def source_of_sync() -> int | None:
    """Return the rank with the newest commit if called from ``sync`` at the start of a generation, otherwise None."""
    return _source.get()


@contextlib.contextmanager
def _synced_from(rank: int) -> Iterator[None]:
    token = _source.set(rank)
    try:
        yield
    finally:
        _source.reset(token)


def _newest_holder() -> int:
    """Return the first rank that already held the restore point itself. A collective."""
    process = context.current("state.sync()")
    generation = process.generation
    if generation is None or generation.world_size == 1 or generation.restore is None:
        return 0
    holds = transfer.gather(int(generation.source == generation.rank), process.device)
    return holds.index(1)
