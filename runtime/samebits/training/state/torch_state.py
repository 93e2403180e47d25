"""``TorchState``: model, optimizer and data position in a state, with the names and the meaning of Horovod's.

Here lives what only optimizers bring with them: steps that are counted by hooks, so that the user has no counter to
keep, and commits that fall into a window of gradient accumulation. Never here: other values (``object_state``), when a
commit is made durable (``session``). The one idea: gradients are no part of a commit, so a commit waits until no
gradient does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samebits.core.point import Point
from samebits.core.reports import PartKind
from samebits.errors import UsageError
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context
from samebits.training.sharding.pieces import is_distributed
from samebits.training.state.base_state import CommitSink
from samebits.training.state.checkpoint_config import CheckpointConfig
from samebits.training.state.compared import Named, is_hashable, shown
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.generators import Generators
from samebits.training.state.handlers import (
    ModuleHandler,
    OptimizerHandler,
    PlainHandler,
    StateHandler,
    TrainedTensorHandler,
    handler_of,
    is_stateful,
)
from samebits.training.state.object_state import ObjectState
from samebits.training.state.open_steps import Marks, OpenSteps, same_marks
from samebits.training.state.script.loop_habits import LoopHabits
from samebits.training.state.sharded_values import ShardedValues

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """Everything a step depends on.

    Args:
        model: the module to train: as it is, wrapped in DistributedDataParallel, or sharded with ``fully_shard``, which
            makes a rank's own point the only one that holds its part. What Accelerate or Lightning Fabric have wrapped
            is taken for what is inside, here and in all that follows.
        optimizer: its steps are what ``save_checkpoint_steps`` counts. Of several (the others among the attributes) a
            step is one of each, or of the busiest.
        sampler: an :class:`ElasticSampler`: the data position is part of the state.
        checkpoint, rng: as in :class:`ObjectState`.
        copy_commits: copy all tensors at every commit. Without it that begins by itself as soon as the weights are seen
            to change while a collective may still fail: more than one optimizer step between two commits, a backward
            pass between the steps of two optimizers, an optimizer that is given a closure. It is needed by who calls
            :meth:`restore` by hand after a step, or changes a parameter through ``.data``, which leaves no trace.
        attributes: everything else, reachable as attributes: plain values, and objects that a
            :class:`~samebits.training.state.handlers.StateHandler`
            knows: modules, optimizers, and what has ``state_dict()``
            and ``load_state_dict()``, such as learning-rate schedules.
    """

    _follows_optimizers = True

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
        _require_kinds(model, optimizer, sampler)
        given = {"model": model, "optimizer": optimizer, "sampler": sampler}
        values = {name: value for name, value in given.items() if value is not None}
        super().__init__(checkpoint=checkpoint, rng=rng, **values, **attributes)
        for name in given.keys() - values.keys():
            object.__setattr__(self, name, None)
        self._take_trained_tensors()
        self._optimizers = [one.value for one in self.handlers.values() if isinstance(one.value, torch.optim.Optimizer)]
        for _, one in self._optimizer_handlers():
            one.name_of, one.named = self._name_of, self._named
        self._open = OpenSteps(
            self._optimizers,
            about_to_step=self._before_step,
            stepped=self._stepped,
            needs_copies=self._last_commit.copy_from_now_on,
        )
        has_module = any(isinstance(one, ModuleHandler) for one in self.handlers.values())
        if copy_commits or (has_module and not self._optimizers):  # then nothing tells when weights begin to change
            self._last_commit.copy_from_now_on()
        self._sharded = ShardedValues.of(self.handlers)
        self._habits = LoopHabits(
            [one.value for one in self.handlers.values() if isinstance(one, ModuleHandler)],
            [name for name, one in self.handlers.items() if isinstance(one, PlainHandler)],
            lambda: {name: one.value for name, one in self.handlers.items()},
            has_position=lambda: any(one.consumed for one in self._samplers),
            # A copy of a model copies what its hooks hold: a bound method with its object, a function not.
            has_left_gradients=lambda: self._open.has_left_gradients(),
        )
        self._rates: dict[tuple[str, int], Any] = {}  # of each group of each optimizer, at the last commit
        self._rate_steps: dict[tuple[str, int], int] = {}  # at which they changed last, in this generation
        self._deferred: Marks | None = None  # a commit inside an accumulation window, and the gradients there

    def _optimizer_handlers(self) -> list[tuple[str, OptimizerHandler]]:
        return [(name, one) for name, one in self.handlers.items() if isinstance(one, OptimizerHandler)]

    def _take_trained_tensors(self) -> None:
        """Let each value that an optimizer trains be followed as a parameter is, not as plain data.

        Raises:
            UsageError: an optimizer trains a tensor that is neither such a value nor in a module of the state.
        """
        held = {id(one) for handler in self.handlers.values() for one in handler.stepped()}
        for optimizer_name, handler in self._optimizer_handlers():
            for number, group in enumerate(handler.value.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in held and not self._take_trained_tensor(parameter):
                        raise UsageError(
                            f"{type(self).__name__}({optimizer_name}=…): parameter {place} of its group {number}, of "
                            f"shape {tuple(parameter.shape)}, belongs to no module of the state, so a recovery would "
                            "lose it. Fix: give the state what holds it, as another module (criterion=criterion) or "
                            "as the tensor itself (log_alpha=log_alpha)"
                        )

    def _take_trained_tensor(self, parameter: torch.Tensor) -> bool:
        for name, handler in self.handlers.items():
            if isinstance(handler, PlainHandler) and getattr(self, name) is parameter:
                self.handlers[name] = TrainedTensorHandler(parameter)
                self.handlers[name].path = handler.path
            if self.handlers[name].value is parameter:
                return True
        return False

    def commit(self) -> None:
        """As :meth:`State.commit`."""
        frame = sys._getframe(1)
        self._habits.committed(self, frame)
        self._last_commit.begins_in(frame)
        super().commit()
        if self._deferred is None and self._running("commit").recovers:
            self._last_commit.is_made_in(frame)

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since the job began, over all recoveries (commits, where there is no optimizer)."""
        return self._committed_steps + self._open.count

    # ---- the session's

    @property
    def has_own_parts(self) -> bool:
        """Whether a rank's own points hold something no other rank's hold."""
        return self._sharded is not None or super().has_own_parts

    @property
    def generators(self) -> Generators | None:
        """As :meth:`State.generators`: shards are its own points' too."""
        return super().generators if self._sharded is None else None

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """As :meth:`State.bind`.

        Raises:
            UsageError: something is sharded over the ranks that cannot be, or while their number may change.
        """
        if session is not None and self._sharded is not None:
            settings = context.current("samebits.elastic.run").settings
            if settings.enable_recovery:
                self._sharded.require_supported()
            if settings.enable_recovery and settings.min_worker_num != settings.max_worker_num:
                raise UsageError(
                    f"MIN_WORKER_NUM={settings.min_worker_num} and MAX_WORKER_NUM={settings.max_worker_num}: the state "
                    "is sharded (fully_shard), which needs a world of fixed size: set both to WORKER_NUM, or leave "
                    "them out. For another size write a point with `samebits ckpt export --format dcp` and begin anew "
                    "with samebits.elastic.load_dcp"
                )
        super().bind(session, rank)

    def enter_group(self) -> None:
        """As :meth:`State.enter_group`: FSDP2 modules are sharded over the group, or get it instead of the last one.

        Raises:
            UsageError: they cannot.
        """
        if self._sharded is not None:
            self._sharded.enter_group()

    def recall(self) -> Point | None:
        """As :meth:`State.recall`."""
        if self._sharded is not None:
            self._sharded.reset()
        return super().recall()

    def contents(self) -> dict[str, Any]:
        """As :meth:`ObjectState.contents`; what no rank holds whole is in ``own``."""
        contents = super().contents()
        if self._sharded is not None:
            contents["shared"]["values"], contents["own"]["shards"] = self._sharded.take_out(
                contents["shared"]["values"]
            )
        return contents

    def live_contents(self) -> dict[str, Any]:
        """As :meth:`State.live_contents`."""
        contents = super().live_contents()
        if self._sharded is not None:
            values, shards = self._sharded.take_out(contents["shared"]["values"])
            contents = {"shared": {"values": values}, "own": {"shards": shards}}
        return contents

    def begin(self, point: Point) -> None:
        """A generation begins with the state as it stands, which is ``point``, on every rank: no gradient is left."""
        self.drop_gradients()
        super().begin(point)
        self._rate_steps.clear()

    def remember(self, point: Point) -> None:
        """The state as it stands is the commit ``point``."""
        if self._open.count > 1:
            self._last_commit.copy_from_now_on()
        super().remember(point)
        self._note_rates(point.step)
        self._close()

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """As :meth:`ObjectState.load`."""
        super().load(contents, own=own)
        self._close()

    def load_values(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """As :meth:`ObjectState.load_values`; pieces of sharded tensors are put back where they were."""
        if self._sharded is not None:
            values = self._sharded.put_back(values, own.get("shards", {}))
        super().load_values(values, own)

    def weights(self) -> list[torch.Tensor]:
        """All parameters, in the order of their names. Buffers are left out: batch statistics differ between ranks; and
        so is what is sharded.
        """
        return [
            parameter
            for _, handler in sorted(self.handlers.items())
            for _, parameter in sorted(_named_parameters(handler))
            if not is_distributed(parameter)
        ]

    def compared(self) -> list[Named]:
        """As :meth:`State.compared`: also parameters and their moments, but for those that are sharded."""
        return [*super().compared(), *self._named_settings(), *self.named_parameters(), *self._named_moments()]

    def named_parameters(self) -> list[Named]:
        """All parameters that are whole here."""
        trained = {
            id(one) for optimizer in self._optimizers for group in optimizer.param_groups for one in group["params"]
        }
        return [
            Named(PartKind.TRAINED if id(parameter) in trained else PartKind.UNTRAINED, name, parameter)
            for parameter, name in self._whole_parameters()
        ]

    def _whole_parameters(self) -> list[tuple[torch.Tensor, str]]:
        return [
            (parameter, f"{value}.{name}" if name else value)
            for value, handler in sorted(self.handlers.items())
            for name, parameter in _named_parameters(handler)
            if not is_distributed(parameter)
        ]

    def _named(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self._whole_parameters()}

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        return next((name for one, name in self._whole_parameters() if one is parameter), None)

    def _note_rates(self, step: int) -> None:
        """Note which learning rates have changed since the last commit.

        Rates that were unlike for a few steps may be alike again when the ranks are compared; the steps at which they
        changed still differ.
        """
        for name, handler in self._optimizer_handlers():
            for number, group in enumerate(handler.value.param_groups):
                rate, key = group.get("lr"), (name, number)
                if isinstance(rate, float) and self._rates.get(key, rate) != rate:
                    self._rate_steps[key] = step
                self._rates[key] = rate

    def _named_settings(self) -> list[Named]:
        """The hyperparameters of every optimizer's groups, which a schedule may change."""
        named = []
        for name, handler in self._optimizer_handlers():
            for number, group in enumerate(handler.value.param_groups):
                others = {key: group[key] for key in sorted(handler.settings - {"lr"}) if key in group}
                rate = shown(group.get("lr"))
                if type(rate) is str and (name, number) in self._rate_steps:
                    rate += f" since step {self._rate_steps[name, number]}"
                named.append(Named(PartKind.SETTING, f"lr of group {number} of {name}", rate))
                named.append(Named(PartKind.SETTING, f"settings of group {number} of {name}", shown(others)))
        return named

    def _named_moments(self) -> list[Named]:
        names = {id(parameter): name for parameter, name in self._whole_parameters()}
        return [
            Named(PartKind.TRAINED, f"{moment} of {names[id(parameter)]}", value)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in names
            for moment, value in optimizer.state.get(parameter, {}).items()
            if is_hashable(value)
        ]

    def shards(self) -> list[torch.Tensor]:
        """As :meth:`State.shards`."""
        return [] if self._sharded is None else self._sharded.shards()

    @property
    def counts_optimizer_steps(self) -> bool:
        """Whether there is an optimizer; else a commit is a step."""
        return bool(self._optimizers)

    @property
    def beginning_step(self) -> int:
        """The number of the step that an optimizer is about to take."""
        return self._committed_steps + self._open.beginning

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Of every parameter group of every optimizer, in their order."""
        return tuple(float(group["lr"]) for one in self._optimizers for group in one.param_groups if "lr" in group)

    @property
    def step_seed(self) -> int:
        """The seed that ``rng="per_step"`` derives a step's from."""
        return self._seed()

    def follow_samples(self, took: Callable[[Sequence[int]], None] | None) -> None:
        """From now on tell ``took`` the samples that this rank's loop records with its samplers."""
        for sampler in self._samplers:
            sampler.on_record = took

    def drop_gradients(self) -> None:
        """No gradient is left."""
        self._open.drop_gradients()
        for handler in self.handlers.values():
            for parameter in handler.stepped():
                parameter.grad = None

    def copy_every_commit(self) -> None:
        """From now on copy all tensors at every commit."""
        self._last_commit.copy_from_now_on()

    @property
    def last_copy(self) -> Mapping[str, Any] | None:
        """The last commit's contents by name, where they were copied; not to be changed."""
        return self._last_commit.copy

    # ---- steps and gradients

    def _before_step(self) -> None:
        if self._session is not None:
            self._session.before_step()
        self._last_commit.stepping()

    def _went_back(self) -> None:
        self.drop_gradients()
        self._close()

    def _count(self) -> None:
        if not self._optimizers:
            super()._count()

    def _defers(self) -> bool:
        """Whether this is inside a window of gradient accumulation: the commit takes effect where that ends."""
        accumulates = self._sharded is not None and self._sharded.accumulates()
        if not (accumulates or self._open.gradients_wait()):
            return False
        self._deferred = self._open.marks()
        return True

    def _stepped(self) -> None:
        self._last_commit.stepped()
        self._restored_rng = None  # the step it was for is done
        deferred, self._deferred = self._deferred, None
        if deferred is not None and self._session is not None and same_marks(deferred, self._open.marks()):
            self.save()  # nothing was accumulated since: the commit meant the end of this window

    def _close(self) -> None:
        self._open.close()
        self._deferred = None


def _holds_modules(value: object) -> bool:
    """Return whether it is a container of modules, which is refused with a sentence of its own."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(one, nn.Module) for one in items)


def _require_kinds(model: object, optimizer: object, sampler: object) -> None:
    """Raise if an argument is none of its kind: it would be kept as a plain value, and nothing would be trained.

    Raises:
        UsageError: it names the argument, what it is, and what belongs there.
    """
    if isinstance(model, torch.optim.Optimizer) and isinstance(optimizer, nn.Module):
        raise UsageError(
            f"{calling_place()}: TorchState({type(model).__name__}, {type(optimizer).__name__}): the optimizer comes "
            "second. Fix: TorchState(model, optimizer, …)"
        )
    for name, value, kind in (("model", model, ModuleHandler), ("optimizer", optimizer, OptimizerHandler)):
        if value is not None and not isinstance(handler_of(value), kind) and not _holds_modules(value):
            expected = "a torch.nn.Module" if name == "model" else "a torch.optim.Optimizer"
            raise UsageError(
                f"{calling_place()}: TorchState({name}=…): expected {expected}, found a {type(value).__name__}. Fix: "
                "TorchState(model, optimizer, …); several of either get names of their own, such as model_2=…"
            )
    if sampler is not None and not is_stateful(sampler):
        raise UsageError(
            f"{calling_place()}: TorchState(sampler=…): a {type(sampler).__name__} has no position that could be kept "
            "and restored. Fix: samebits.ElasticSampler(data, shuffle=True, seed=…), for the loader and for the state"
        )


def _named_parameters(handler: StateHandler) -> list[tuple[str, torch.Tensor]]:
    """The tensors of one value that an optimizer can train; "" names a value that is such a tensor itself."""
    if isinstance(handler, ModuleHandler):
        return list(handler.value.named_parameters())
    return [("", handler.value)] if isinstance(handler, TrainedTensorHandler) else []
