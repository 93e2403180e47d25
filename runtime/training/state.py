"""What goes back together when a job goes back: model, optimizer, data position, attributes, random numbers.

``TorchState`` has the names and the meaning of Horovod's. It counts optimizer steps by a hook, so that the user has no
counter to keep; it remembers its last commit (``last_commit``), and hands out its contents as a tree with tensors. When
a commit is made durable, and where a lost one comes from, is the session's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from runtime.core.point import Point
from runtime.errors import CheckpointError, UsageError
from runtime.training import rng
from runtime.training.checkpointing import CheckpointConfig
from runtime.training.handlers import PlainHandler, StateHandler, bare, handler_of
from runtime.training.last_commit import LastCommit
from runtime.training.rng import RngMode
from runtime.training.sampler import ElasticSampler

Marks = list[tuple[int, int] | None]


class Session(Protocol):
    """Where a state's commits go: the running ``elastic.run``."""

    def before_step(self) -> None:
        """An optimizer is about to step: the last moment at which this rank still is its last commit."""

    def save(self) -> None:
        """The state as it stands is a commit."""

    def check(self) -> None:
        """Raise what ended the generation, or asks this rank to leave it."""

    def sync(self) -> None:
        """Make every rank's state rank 0's."""


class TorchState:
    """Everything a step depends on.

    Args:
        model: the module to train, wrapped in DistributedDataParallel or not.
        optimizer: its steps are what ``save_checkpoint_steps`` counts.
        sampler: an :class:`ElasticSampler`: the data position is part of the state.
        checkpoint: how often to save; by default every 100 steps.
        rng: ``"per_step"``: the generators are seeded from (seed, rank, step) at every commit, so any rank's copy makes
            a recovery exact. ``"saved"``: each rank's generators are saved in its own points.
        copy_commits: copy all tensors at every commit. Without it that begins by itself as soon as more than one
            optimizer step lies between two commits; it is needed by who calls :meth:`restore` by hand after a step.
        attributes: everything else, reachable as attributes: plain values, and objects that a
            :class:`~runtime.training.handlers.StateHandler` knows: modules, optimizers, and what has ``state_dict()``
            and ``load_state_dict()``, such as learning-rate schedules. An integer ``seed`` among them is the seed of
            ``rng="per_step"``; else the sampler's is.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sampler: ElasticSampler | None = None,
        checkpoint: CheckpointConfig | None = None,
        rng: str = "saved",
        copy_commits: bool = False,
        **attributes: Any,
    ) -> None:
        if rng not in {mode.value for mode in RngMode}:
            raise UsageError(f"rng={rng!r}: expected 'saved' or 'per_step'")
        self._handlers: dict[str, StateHandler] = {}
        self.model = model
        self.optimizer = optimizer
        self.sampler = sampler
        self._checkpoint = checkpoint or CheckpointConfig()
        self._rng = RngMode(rng)
        self._session: Session | None = None
        self._rank = 0
        self._steps = 0
        self._committed_steps = 0
        self._deferred: Marks | None = None  # a commit inside an accumulation window, and the gradients there
        self._gradients: Marks = []  # at the last commit
        self._own: dict[str, Any] = {}  # of the last commit: this rank's alone
        self._reset_callbacks: list[Callable[[], object]] = []
        for name, value in attributes.items():
            if hasattr(self, name):
                raise UsageError(f"TorchState({name}=…): this name is the state's own; choose another")
            setattr(self, name, value)
        values = {"model": model, "optimizer": optimizer, "sampler": sampler}
        for name, value in {**{name: one for name, one in values.items() if one is not None}, **attributes}.items():
            self._handlers[name] = handler_of(value) or PlainHandler(self, name)
        self._last_commit = LastCommit(self._handlers, copies=copy_commits)
        self._hook_optimizers()
        self._restored_rng: dict[str, Any] | None = None  # until the data is iterated again
        if sampler is not None:
            sampler.on_iterate = self._iterated

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name) if name != "_handlers" else None
        object.__setattr__(self, name, value)
        if handler is not None and type(handler) is not PlainHandler and value is not handler.value:
            raise UsageError(f"state.{name} cannot be another object now: make the TorchState with it")

    if TYPE_CHECKING:  # the user's own attributes, whose types only the user knows

        def __getattr__(self, name: str) -> Any: ...

    def _hook_optimizers(self) -> None:
        optimizers = [one.value for one in self._handlers.values() if isinstance(one.value, torch.optim.Optimizer)]
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        self._counts_commits = not optimizers
        if optimizers:
            optimizers[0].register_step_post_hook(self._stepped)

    # ---- the user's

    def commit(self) -> None:
        """This step is done: remember it, save it where it is time to, and check the membership.

        Inside a window of gradient accumulation it takes effect at the optimizer step that ends the window.

        Raises:
            GenerationEndedError: a member was lost; ``elastic.run`` handles it.
            HostsUpdatedInterrupt: the members change; ``elastic.run`` handles it.
            UsageError: outside ``elastic.run``.
        """
        self.save()
        self.check_host_updates()

    def save(self) -> None:
        """:meth:`commit` without a look at the membership."""
        session = self._running("commit")
        if self._is_in_window():
            self._deferred = self._gradient_marks()
            return
        if self._counts_commits:
            self._steps += 1
        session.save()
        self._seed_step()

    def check_host_updates(self) -> None:
        """Look at the membership: raises as :meth:`commit`."""
        self._running("check_host_updates").check()

    def restore(self) -> None:
        """Go back to the last commit, on this rank.

        Raises:
            UsageError: an optimizer has stepped since, and no copy was made (``copy_commits``).
        """
        if self.recall() is None:
            raise UsageError(
                "state.restore(): steps were taken since the last commit, which was not copied; make the state with "
                "TorchState(…, copy_commits=True) to go back by hand. After a lost peer this is not needed"
            )

    def sync(self) -> None:
        """Make every rank's state rank 0's. A collective; ``elastic.run`` has done it when the function begins."""
        self._running("sync").sync()

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call these whenever the members have changed: after the new group stands, before the state is restored.

        A learning rate that follows the world size is set there.
        """
        self._reset_callbacks += callbacks

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since the job began, over all recoveries (commits, where there is no optimizer)."""
        return self._steps

    # ---- the session's

    @property
    def checkpoint_config(self) -> CheckpointConfig:
        """How often to save."""
        return self._checkpoint

    @property
    def uncommitted_steps(self) -> int:
        """Steps since the last commit."""
        return self._steps - self._committed_steps

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's own points hold something no other rank's hold."""
        return self._rng is RngMode.SAVED

    def bind(self, session: Session | None, rank: int) -> None:
        """From now on commits go there, and random numbers are drawn as this rank."""
        self._session, self._rank = session, rank

    def reset(self) -> None:
        """The members have changed: call the user's reset callbacks."""
        for callback in self._reset_callbacks:
            callback()

    def begin(self, point: Point) -> None:
        """A generation begins with the state as it stands, which is ``point``: no gradient is left."""
        self._drop_gradients()
        self.remember(point)
        self._seed_step()

    def remember(self, point: Point) -> None:
        """The state as it stands is the commit ``point``."""
        if self.uncommitted_steps > 1:
            self._last_commit.copy_from_now_on()
        self._last_commit.remember(point)
        self._committed_steps, self._deferred = self._steps, None
        self._gradients = self._gradient_marks()
        self._own = {"rng": rng.capture()} if self.has_own_parts else {}

    def forget(self) -> None:
        """What stands cannot be given to anybody."""
        self._last_commit.forget()

    def recall(self) -> Point | None:
        """Become the last commit again, and say which that is; None where it is not to be had from memory."""
        point = self._last_commit.recall()
        if point is not None:
            self._steps = self._committed_steps
            self._drop_gradients()
            if self.has_own_parts:
                self._restored_rng = self._own["rng"]
                rng.restore(self._own["rng"])
            else:
                self._seed_step()
        return point

    def contents(self) -> dict[str, Any]:
        """All of it as a tree with tensors: ``shared`` is equal on every rank, ``own`` is this rank's alone."""
        shared = {"steps": self._steps, "values": {name: one.contents() for name, one in self._handlers.items()}}
        return {"shared": shared, "own": {"rng": rng.capture()} if self.has_own_parts else {}}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Become what ``contents`` gave; ``own``: they were this rank's.

        Raises:
            CheckpointError: they were another program's.
        """
        values = contents["shared"]["values"]
        if values.keys() != self._handlers.keys():
            raise CheckpointError(
                f"the restore point holds {sorted(values)}, this program's state has {sorted(self._handlers)}: "
                "go on with the program the job was started with, or begin anew with `bash scripts/run.sh --fresh`"
            )
        for name, handler in self._handlers.items():
            handler.load(values[name])
        self._steps = contents["shared"]["steps"]
        if self.has_own_parts:
            if own:
                self._restored_rng = contents["own"]["rng"]
                rng.restore(contents["own"]["rng"])
            else:
                rng.seed_for(self._seed(), self._rank, self._steps)

    def weights(self) -> list[torch.Tensor]:
        """All parameters, in the order of their names. Buffers are left out: batch statistics differ between ranks."""
        return [] if self.model is None else [one for _, one in sorted(bare(self.model).named_parameters())]

    # ---- steps and gradients

    def _running(self, call: str) -> Session:
        if self._session is None:
            raise UsageError(f"state.{call}() belongs into a function that runs under runtime.elastic.run")
        return self._session

    def _before_step(self, *_: object) -> None:
        if self._session is not None:
            self._session.before_step()
        self._last_commit.stepping()

    def _stepped(self, *_: object) -> None:
        self._steps += 1
        deferred, self._deferred = self._deferred, None
        if deferred is not None and deferred == self._gradient_marks() and self._session is not None:
            self.save()  # nothing was accumulated since: the commit meant the end of this window

    def _is_in_window(self) -> bool:
        """Whether gradients were accumulated since the last commit and no optimizer has used them yet."""
        if self._counts_commits or self.uncommitted_steps:
            return False
        return any(
            mark is not None and mark != before
            for mark, before in zip(self._gradient_marks(), self._gradients, strict=True)
        )

    def _gradient_marks(self) -> Marks:
        """Which gradients there are, and how often each was changed."""
        if self.model is None:
            return []
        return [
            None if (gradient := parameter.grad) is None else (id(gradient), gradient._version)
            for parameter in self._handlers["model"].stepped()
        ]

    def _drop_gradients(self) -> None:
        if self.model is not None:
            for parameter in self.model.parameters():
                parameter.grad = None

    # ---- random numbers

    def _iterated(self, goes_on: bool) -> None:
        """A loader draws a number whenever it is iterated. Where a recovery makes it begin again in the middle of an
        epoch, that draw must not shift the numbers of the step that follows.
        """
        self._seed_step()
        if self._restored_rng is not None and goes_on:
            rng.restore(self._restored_rng)
        self._restored_rng = None

    def _seed_step(self) -> None:
        if self._rng is RngMode.PER_STEP:
            rng.seed_for(self._seed(), self._rank, self._steps)

    def _seed(self) -> int:
        seed = getattr(self, "seed", None)
        if seed is None and self.sampler is not None:
            seed = self.sampler.seed
        return int(seed or 0)
