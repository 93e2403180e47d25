"""Define ``ObjectState``, whose attributes are saved and restored, together with the random number generators.

Each value has a handler, which remembers, restores and saves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from samebits.core.point import Point
from samebits.core.reports import PartKind
from samebits.errors import CheckpointError, UsageError
from samebits.spelling import spelled
from samebits.training.state import rng
from samebits.training.state.base_state import CommitSink, State
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.compared import Named
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.generators import Generators, unpack
from samebits.training.state.handlers import (
    ModuleHandler,
    OptimizerHandler,
    PlainHandler,
    StateHandler,
    handler_of,
    require_savable,
)
from samebits.training.state.last_commit import LastCommit
from samebits.training.state.rng import RngMode
from samebits.training.state.script.hidden_state import HIDDEN_MESSAGES


class ObjectState(State):
    """A state without a model: the given values and the random number generators.

    Each commit is a step. Attributes added later are not part of the state.

    Args:
        checkpoint: how often to save; by default every 100 steps.
        rng: ``"per_step"``: seed the generators of torch, NumPy and Python from (seed, rank, step) at every commit, so
            that a copy from any rank is enough for an exact recovery. ``"saved"``: save each rank's generators in its
            own checkpoints, and keep them in a page of its host's memory that outlives its process.
        attributes: plain values, samplers, and objects supported by a
            :class:`~samebits.training.state.handlers.StateHandler`, including all with ``state_dict()`` and
            ``load_state_dict()``. With ``rng="per_step"``, the seed is the integer attribute ``seed``, otherwise the
            first sampler's seed.
    """

    _follows_optimizers: ClassVar[bool] = False

    def __init__(self, *, checkpoint: CheckpointConfig | None = None, rng: str = "saved", **attributes: Any) -> None:
        self.handlers: dict[str, StateHandler] = {}
        super().__init__()
        if rng not in {mode.value for mode in RngMode}:
            raise UsageError(f"rng={rng!r}: expected 'saved' or 'per_step'")
        self._checkpoint = checkpoint or CheckpointConfig()
        self._rng = RngMode(rng)
        self._generators = Generators()
        self._own_generators = b""  # this rank's own generators at the last commit, packed
        self._draws_as = 0  # the rank, or in a mesh the part of the data, that per-step seeds are derived from
        self._first_own: dict[str, Any] = {}  # the script's generators before this process's first session
        self._restored_rng: dict[str, Any] | None = None  # restored generators, until the data is iterated again
        for name, value in attributes.items():
            if name in self.__dict__ or hasattr(type(self), name) or name.startswith("_"):
                raise UsageError(
                    f"{type(self).__name__}({name}=…): this name is reserved by the state. Fix: choose another"
                )
            setattr(self, name, value)
            self.handlers[name] = handler = self._handler_of(name, value)
            handler.path = f"state.{name}"
            if isinstance(handler, PlainHandler):
                require_savable(value, handler.path)
        self._samplers = [one.value for one in self.handlers.values() if isinstance(one.value, ElasticSampler)]
        for sampler in self._samplers:
            sampler.on_iterate = self._iterated
        self._last_commit = LastCommit(self.handlers)

    def _handler_of(self, name: str, value: Any) -> StateHandler:
        handler = handler_of(value) or PlainHandler(self, name)
        inside = _kept_inside(value)
        if isinstance(handler, PlainHandler) and inside is not None:
            raise UsageError(
                f"{type(self).__name__}({name}=…): a {type(inside).__name__} inside a {type(value).__name__} cannot be "
                f"followed, saved or restored. Fix: give each its own name, as "
                f"{type(self).__name__}(model, optimizer, model_2=…, optimizer_2=…)"
            )
        if isinstance(handler, (ModuleHandler, OptimizerHandler)) and not self._follows_optimizers:
            raise UsageError(
                f"{type(self).__name__}({name}=…): a {type(value).__name__} changes in an optimizer step, which only "
                "TorchState follows. Fix: create the state with samebits.elastic.TorchState"
            )
        return handler

    def __setattr__(self, name: str, value: Any) -> None:
        handler = None if name[0] == "_" or name == "handlers" else self.handlers.get(name)
        if handler is not None and type(handler) is not PlainHandler and value is not handler.value:
            raise UsageError(
                f"state.{name} cannot be replaced. Fix: create the {type(self).__name__} with the other object, or "
                "load that object's state_dict() into this one"
            )
        if handler is not None and self._session is not None:
            self._last_commit.is_assigned(name)
        object.__setattr__(self, name, value)

    if TYPE_CHECKING:  # the user's own attributes, whose types are unknown here

        def __getattr__(self, name: str) -> Any: ...

    # ---- for the user

    def save(self) -> None:
        """Commit without checking for membership changes."""
        self._keep()

    def restore(self) -> None:
        """Return to the last commit on this rank. Afterwards, restart the iteration over the data.

        Raises:
            UsageError: an optimizer has stepped since the last commit, and no copy was made (``copy_commits``).
        """
        if self._last_commit.recall() is None:
            raise UsageError(
                "state.restore(): steps were taken since the last commit, which was not copied. Fix: create the "
                "state with TorchState(…, copy_commits=True) to restore by hand; after a lost peer this is not needed"
            )
        self._went_back()
        if self._rng is RngMode.SAVED:
            self._restored_rng = unpack(self._own_generators)
            rng.restore(self._restored_rng)
        else:
            self.seed_step()

    def sync(self) -> None:
        """Set every rank's state to rank 0's. A collective; called before the training function begins."""
        if not self._is_beginning:
            self._running("sync").sync()

    # ---- for the session

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's checkpoints contain values that no other rank's checkpoints contain."""
        return self._rng is RngMode.SAVED

    @property
    def generators(self) -> Generators | None:
        """This process's random number generators, if they are all that only its own points store; otherwise None."""
        is_all = self.has_own_parts and all(one.is_alike for one in self.handlers.values())
        return self._generators if is_all else None

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Send commits to ``session`` from now on, and draw this rank's random numbers."""
        super().bind(session, rank)
        self._draws_as = rank
        self.guard_samplers(session is not None)
        self._last_commit.is_running = session is not None
        self._first_own = self._first_own or self._own_rng()

    def begin(self, point: Point) -> None:
        """Begin a generation. The current state is ``point`` on every rank."""
        super().begin(point)
        self.seed_step()

    def remember(self, point: Point) -> None:
        """Remember the current state as the commit ``point``."""
        self._last_commit.remember(point)
        super().remember(point)
        if self._rng is RngMode.SAVED:
            self._generators.look()
            self._own_generators = self._generators.packed()

    def was_saved(self) -> None:
        """Record that the last commit has been saved."""
        self._last_commit.is_saved = True

    def recall(self) -> Point | None:
        """Undo changes to the objects, and restore the last commit if it is in memory."""
        self._last_commit.undo()
        return super().recall()

    def finish(self) -> None:
        """Finish training, as :meth:`State.finish` does.

        Raises:
            HiddenStateError: the loop changed the state after the last commit.
            UsageError: the loop ended inside a step.
        """
        self._require_whole_step()
        self._last_commit.require_unchanged_since_commit(at_end=True)

    @property
    def holds_commit(self) -> bool:
        """Whether the current values are known to equal the last commit."""
        if self._rng is RngMode.SAVED:
            self._generators.look()
            if self._generators.packed() != self._own_generators:
                return False
        return self._last_commit.is_unchanged

    def hold_copy(self, *, on: bool) -> None:
        """Copy commits to host memory from the next one on, so that they can be restored; or stop copying."""
        self._last_commit.hold_copy(on=on)

    @property
    def holds_copy(self) -> bool:
        """Whether the last commit can be restored from memory, and later commits are copied, too."""
        return self._last_commit.holds_copy and self._last_commit.is_held

    def at_rest(self, point: Point) -> Sequence[torch.Tensor]:
        """Return the tensors that an optimizer changes if they are still the commit's, as :meth:`State.at_rest`."""
        weights = self._last_commit.at_rest(point)
        if not weights:
            return ()
        optimizers = [one.value for one in self.handlers.values() if isinstance(one, OptimizerHandler)]
        states = [state for one in optimizers for state in one.state.values() if isinstance(state, dict)]
        moments = [value for state in states for value in state.values()]
        return [*weights, *(one for one in moments if type(one) is torch.Tensor)] if optimizers else ()

    def forget(self) -> None:
        """Record that the current values are not a valid commit."""
        self._last_commit.forget()
        super().forget()

    def contents(self) -> dict[str, Any]:
        """Return the complete state as nested dicts.

        ``shared`` holds the values that are equal on every rank; ``own`` holds this rank's own values.
        """
        values = {name: one.contents() for name, one in self.handlers.items()}
        unlisted = {name: told for name, one in self.handlers.items() if (told := one.unlisted())}
        shared = {"steps": self.completed_steps, "values": values, "unlisted": unlisted}
        if self.hidden_messages.named:
            shared[HIDDEN_MESSAGES] = list(self.hidden_messages.named)
        return {"shared": shared, "own": self._own_rng()}

    def live_contents(self) -> dict[str, Any]:
        """Return the values whose tensors may be overwritten in place before :meth:`load` is called."""
        values = {name: one.contents() for name, one in self.handlers.items() if one.loads_in_place}
        return {"shared": {"values": values}}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Load ``contents``. ``own`` is True if this rank saved them.

        Raises:
            CheckpointError: the contents belong to another program.
        """
        values = contents["shared"]["values"]
        if values.keys() != self.handlers.keys():
            raise CheckpointError(
                f"the restore point holds {sorted(values)}, but this program's state has {sorted(self.handlers)}. "
                "Fix: continue with the program that started the job, or start over with "
                f"`{spelled('run', '--fresh')}`"
            )
        for name, unlisted in contents["shared"].get("unlisted", {}).items():  # absent in points of SameBits 0.1
            self.handlers[name].load_unlisted(unlisted)
        self.load_values(values, contents["own"])  # also a replica's shards; each description contains its position
        self._committed_steps = contents["shared"]["steps"]
        self.hidden_messages.load(contents["shared"].get(HIDDEN_MESSAGES, []))  # absent if nothing was named
        if self._rng is not RngMode.SAVED:
            return
        if own:
            self._restored_rng = contents["own"]["rng"]
            rng.restore(contents["own"]["rng"])
        elif self._committed_steps == 0 and self._first_own:  # only the script has drawn numbers, as in this process
            rng.restore(self._first_own["rng"])
        else:
            rng.seed_for(self._seed(), self._draws_as, self._committed_steps)

    def load_values(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Load values by name. ``own`` holds the values that only this rank had.

        Raises:
            CheckpointError: the values belong to another program.
        """
        for name, value in values.items():
            self.handlers[name].load(value)

    def seed_step(self) -> None:
        """Seed the generators for the next step, if ``rng="per_step"``."""
        if self._rng is RngMode.PER_STEP:
            rng.seed_for(self._seed(), self._draws_as, self.completed_steps)

    def compared(self) -> list[Named]:
        """Return the values that are compared between ranks: this rank's progress, and the shared values."""
        steps = Named(PartKind.STEPS, "completed_steps", str(self.completed_steps))
        samplers = [
            Named(PartKind.SAMPLER, name, handler.value.position)
            for name, handler in self.handlers.items()
            if isinstance(handler.value, ElasticSampler)
        ]
        marked = super().compared() or []
        return [steps, *samplers, *marked]

    def loose(self) -> list[Named]:
        """Return plain values, buffers, and other objects, which may differ between ranks."""
        return [
            Named(PartKind.LOOSE, f"{name}.{inner}" if inner else name, value)
            for name, handler in self.handlers.items()
            for inner, value in handler.loose().items()
        ]

    @property
    def complete_epoch(self) -> int | None:
        """The epoch that had no batches left when its loop was last entered, or None if there were batches left."""
        return next((one.epoch for one in self._samplers if one.found_empty), None)

    def guard_samplers(self, is_running: bool) -> None:
        """Make the samplers accept only epochs that fit the state while a training function runs."""
        for sampler in self._samplers:
            sampler.is_guarded = is_running

    # ---- for subclasses

    def _own_rng(self) -> dict[str, Any]:
        return {"rng": rng.capture()} if self._rng is RngMode.SAVED else {}

    def _keep(self) -> None:
        super()._keep()
        if self._is_kept:
            self.seed_step()

    def _require_whole_step(self) -> None:
        """Raise if the loop has ended in the middle of a step."""

    def _went_back(self) -> None:
        """Hook for subclasses, called after all values have returned to the last commit."""

    def _can_restore(self) -> bool:
        return self._last_commit.is_held

    def _make_equal(self) -> None:
        if type(self).sync is not ObjectState.sync:  # otherwise the session has synchronized already
            super()._make_equal()

    def _iterated(self, goes_on: bool) -> None:
        """Keep a loader's own random draw from shifting the random numbers of the next step.

        A loader draws a number each time it is iterated, including when a recovery restarts it in the middle of an
        epoch.
        """
        self.seed_step()
        if self._restored_rng is not None and goes_on:
            rng.restore(self._restored_rng)
        self._restored_rng = None

    def _seed(self) -> int:
        seed = getattr(self, "seed", None)
        if seed is None and self._samplers:
            seed = self._samplers[0].seed
        return int(seed or 0)


def _kept_inside(value: Any) -> object | None:
    """Return the first item of a list, tuple or dict that has a state of its own and needs its own name."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((one for one in items if hasattr(one, "state_dict")), None)
