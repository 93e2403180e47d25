"""What goes back together when a job goes back: model, optimizer, data position, attributes, random numbers.

``TorchState`` has the names and the meaning of Horovod's. It counts optimizer steps by a hook, so that the user has no
counter to keep, and hands out its contents as a tree with tensors; where and when that is saved is the session's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime.errors import CheckpointError, UsageError
from runtime.training import rng
from runtime.training.checkpointing import CheckpointConfig
from runtime.training.rng import RngMode
from runtime.training.sampler import ElasticSampler

RESERVED = ("sampler", "checkpoint", "rng")


class Session(Protocol):
    """Where a state's commits go: the running ``elastic.run``."""

    def commit(self) -> None:
        """A commit was asked for."""


class TorchState:
    """Everything a step depends on.

    Args:
        model: the module to train, wrapped in DistributedDataParallel or not.
        optimizer: its steps are what ``save_checkpoint_steps`` counts.
        sampler: an :class:`ElasticSampler`: the data position is part of the state.
        checkpoint: how often to save; by default every 100 steps.
        rng: ``"per_step"``: the generators are seeded from (seed, rank, step) at every commit, so any rank's copy makes
            a recovery exact. ``"saved"``: each rank's generators are saved in its own points.
        attributes: everything else, reachable as attributes: plain values, and objects with ``state_dict()`` and
            ``load_state_dict()`` such as learning-rate schedulers. An integer ``seed`` among them is the seed of
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
        **attributes: Any,
    ) -> None:
        if rng not in {mode.value for mode in RngMode}:
            raise UsageError(f"rng={rng!r}: expected 'saved' or 'per_step'")
        self.model = model
        self.optimizer = optimizer
        self.sampler = sampler
        self._checkpoint = checkpoint or CheckpointConfig()
        self._rng = RngMode(rng)
        self._attributes = tuple(attributes)
        self._session: Session | None = None
        self._rank = 0
        self._steps = 0
        self._committed_steps = 0
        for name, value in attributes.items():
            if hasattr(self, name):
                raise UsageError(f"TorchState({name}=…): this name is the state's own; choose another")
            setattr(self, name, value)
        if optimizer is not None:
            optimizer.register_step_post_hook(self._stepped)
        self._restored_rng: dict[str, Any] | None = None  # until the data is iterated again
        if sampler is not None:
            sampler.on_iterate = self._iterated

    if TYPE_CHECKING:  # the user's own attributes, whose types only the user knows

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    # ---- the user's

    def commit(self) -> None:
        """This step is done: save it where it is time to, and check the membership.

        Raises:
            GenerationEndedError: a member was lost; ``elastic.run`` handles it.
            UsageError: outside ``elastic.run``.
        """
        if self._session is None:
            raise UsageError("state.commit() belongs into a function that runs under runtime.elastic.run")
        if self.optimizer is None:
            self._steps += 1
        self._committed_steps = self._steps
        self._session.commit()
        self._seed_step()

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

    def begin(self) -> None:
        """A generation begins with the state as it stands: nothing is uncommitted, no gradient is left."""
        self._committed_steps = self._steps
        if self.model is not None:
            for parameter in self.model.parameters():
                parameter.grad = None
        self._seed_step()

    def contents(self) -> dict[str, Any]:
        """All of it as a tree with tensors: ``shared`` is equal on every rank, ``own`` is this rank's alone."""
        shared = {
            "steps": self._steps,
            "states": {name: part.state_dict() for name, part in self._stateful().items()},
            "plain": {name: getattr(self, name) for name in self._plain()},
        }
        return {"shared": shared, "own": {"rng": rng.capture()} if self.has_own_parts else {}}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Become what ``contents`` gave; ``own``: they were this rank's.

        Raises:
            CheckpointError: they were another program's.
        """
        shared = contents["shared"]
        stateful, plain = self._stateful(), self._plain()
        if shared["states"].keys() != stateful.keys() or shared["plain"].keys() != set(plain):
            raise CheckpointError(
                f"the restore point holds {_names(shared)}, this program's state has {sorted([*stateful, *plain])}: "
                "go on with the program the job was started with, or begin anew with `bash scripts/run.sh --fresh`"
            )
        for name, part in stateful.items():
            part.load_state_dict(shared["states"][name])
        for name, value in shared["plain"].items():
            setattr(self, name, value)
        self._steps = shared["steps"]
        if self.has_own_parts:
            if own:
                self._restored_rng = contents["own"]["rng"]
                rng.restore(contents["own"]["rng"])
            else:
                rng.seed_for(self._seed(), self._rank, self._steps)

    def weights(self) -> list[torch.Tensor]:
        """All parameters, in the order of their names. Buffers are left out: batch statistics differ between ranks."""
        return [] if self.model is None else [one for _, one in sorted(_bare(self.model).named_parameters())]

    def _stateful(self) -> dict[str, Any]:
        parts = {"model": None if self.model is None else _bare(self.model), "optimizer": self.optimizer}
        parts["sampler"] = self.sampler
        parts |= {name: getattr(self, name) for name in self._attributes if _is_stateful(getattr(self, name))}
        return {name: _bare(part) for name, part in parts.items() if part is not None}

    def _plain(self) -> list[str]:
        return [name for name in self._attributes if not _is_stateful(getattr(self, name))]

    def _stepped(self, *_: object) -> None:
        self._steps += 1

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


def _is_stateful(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _bare(part: Any) -> Any:
    return part.module if isinstance(part, DistributedDataParallel) else part


def _names(shared: dict[str, Any]) -> list[str]:
    return sorted([*shared["states"], *shared["plain"]])
