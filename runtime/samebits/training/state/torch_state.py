"""Define ``TorchState``, a state with model, optimizer and data position, with Horovod's names and semantics.

Optimizer hooks count the steps, so the user needs no counter. Gradients are not part of a commit, so a commit during
gradient accumulation takes effect when the accumulation is complete.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from samebits.core.messages import Sharding
from samebits.core.point import Point
from samebits.core.reports import PartKind
from samebits.errors import UsageError
from samebits.training import torch_private
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context
from samebits.training.sharding import pieces, regrouping
from samebits.training.sharding import pipeline as pipelines
from samebits.training.sharding.replicas import ReplicaPlace
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
from samebits.training.state.virtual_workers import VirtualWorkers

_UNCOUNTED = 2
"""Number of commits with changed weights and without an optimizer step after which the state is refused."""


class TorchState(ObjectState):
    """The state of a PyTorch script: everything that a training step depends on.

    Args:
        model: the module to train: bare, wrapped in DistributedDataParallel, or sharded with ``fully_shard``. Wrappers
            of Accelerate and Lightning Fabric are accepted, also in the other arguments.
        optimizer: ``completed_steps`` and ``save_checkpoint_steps`` count its steps. With several optimizers (the
            others among the attributes), a step is one step of each optimizer, or of the optimizer that steps most
            often.
        sampler: an :class:`ElasticSampler`, whose position becomes part of the state.
        checkpoint, rng: as in :class:`ObjectState`; ``rng`` is ``"saved"`` by default, and ``"per_step"`` with
            ``global_batch``.
        copy_commits: copy all tensors at every commit. By default, copying begins when the need is detected: more than
            one optimizer step between two commits, a backward pass between the steps of two optimizers, or an optimizer
            with a closure. Set it to call :meth:`restore` yourself, or to change a parameter through ``.data``, which
            cannot be detected.
        pipeline: the mesh dimension over which the stages of a pipeline are spread, as ``mesh["pp"]``; ``model`` is
            then an ``nn.ModuleList`` with the part of every stage, in order.
        global_batch, micro_batch: divide each optimizer step into ``global_batch / micro_batch`` virtual workers, so
            that the bits of the result are the same at any world size up to that number; with HSDP, at any number of
            replicas. ``global_batch`` is the number of samples in a step, ``micro_batch`` the loader's batch size. The
            loop runs one iteration for each micro-batch, and only a rank's last iteration in a step changes the state.
        attributes: everything else, available as attributes: plain values, and objects supported by a
            :class:`~samebits.training.state.handlers.StateHandler`, such as modules, optimizers, and all with
            ``state_dict()`` and ``load_state_dict()``.
    """

    _follows_optimizers = True

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sampler: ElasticSampler | None = None,
        checkpoint: CheckpointConfig | None = None,
        rng: str | None = None,
        copy_commits: bool = False,
        pipeline: DeviceMesh | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        **attributes: Any,
    ) -> None:
        _require_kinds(model, optimizer, sampler)
        given = {"model": model, "optimizer": optimizer, "sampler": sampler}
        values = {name: value for name, value in given.items() if value is not None}
        sizes = _sizes_of(global_batch, micro_batch, rng, is_pipeline=pipeline is not None)
        rng = rng or ("saved" if sizes is None else "per_step")
        super().__init__(checkpoint=checkpoint, rng=rng, **values, **attributes)
        for name in given.keys() - values.keys():
            object.__setattr__(self, name, None)
        self._take_trained_tensors()
        self._optimizers = [one.value for one in self.handlers.values() if isinstance(one.value, torch.optim.Optimizer)]
        self._require_inner_optimizers()
        for _, one in self._optimizer_handlers():
            one.name_of, one.named = self._name_of, self._named
        self._open = OpenSteps(
            self._optimizers,
            about_to_step=self._before_step,
            stepped=self._stepped,
            needs_copies=self._last_commit.copy_from_now_on,
        )
        has_module = any(isinstance(one, ModuleHandler) for one in self.handlers.values())
        if copy_commits or (has_module and not self._optimizers):  # without a hook, nothing shows when weights change
            self._last_commit.copy_from_now_on()
        parts = None if model is None else self.handlers["model"].value
        self._sharded = ShardedValues.of(
            self.handlers, None if pipeline is None else pipelines.Pipeline("model", parts, pipeline)
        )
        self._virtual = (
            None
            if sizes is None
            else VirtualWorkers(self.handlers, global_batch=sizes[0], micro_batch=sizes[1], sharded=self._sharded)
        )
        self.is_world_size_free = self._virtual is not None
        self._habits = LoopHabits(
            [one.value for one in self.handlers.values() if isinstance(one, ModuleHandler)],
            [name for name, one in self.handlers.items() if isinstance(one, PlainHandler)],
            lambda: {name: one.value for name, one in self.handlers.items()},
            has_position=lambda: any(one.consumed for one in self._samplers),
            # Copying a model also copies its hooks: a bound method together with its object, but not a function.
            has_left_gradients=lambda: self._open.has_left_gradients(),
        )
        self._rates: dict[tuple[str, int], Any] = {}  # rate of each group of each optimizer, at the last commit
        self._rate_steps: dict[tuple[str, int], int] = {}  # the step of each rate's last change in this generation
        self._deferred: Marks | None = None  # gradients at a commit inside an accumulation window
        self._uncounted = 0  # commits of changed weights before any optimizer has stepped

    def _optimizer_handlers(self) -> list[tuple[str, OptimizerHandler]]:
        return [(name, one) for name, one in self.handlers.items() if isinstance(one, OptimizerHandler)]

    def _require_inner_optimizers(self) -> None:
        """Check that the state includes optimizers wrapped by another optimizer that does not save their moments.

        Raises:
            UsageError: such an optimizer is not in the state.
        """
        for name, handler in self._optimizer_handlers():
            outer = handler.value
            if type(outer).state_dict is not torch.optim.Optimizer.state_dict:
                continue  # a wrapper that saves what is in it
            for inner_name, inner in vars(outer).items():
                is_own = isinstance(inner, torch.optim.Optimizer) and inner.state is not outer.state
                if is_own and not any(inner is one for one in self._optimizers):
                    free = f"inner_{inner_name}" if inner_name in self.handlers else inner_name
                    raise UsageError(
                        f"{calling_place()}: {type(self).__name__}({name}=…): the {type(outer).__name__} keeps a "
                        f"{type(inner).__name__} in its attribute {inner_name}, whose moments are not in "
                        f"{type(outer).__name__}.state_dict(), so a recovery would lose them. Fix: "
                        f"{type(self).__name__}(…, {free}=optimizer.{inner_name})"
                    )

    def _require_steps(self) -> None:
        """Check before a commit that changed weights were changed by an optimizer of the state.

        Raises:
            UsageError: weights have changed before two commits, and no optimizer has stepped yet.
        """
        self._uncounted += self._last_commit.weights_have_signs
        if self._uncounted == _UNCOUNTED:
            kinds = " or ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers))
            raise UsageError(
                f"{calling_place()}: the weights have changed before {_UNCOUNTED} commits, but step() of the {kinds} "
                "in the state was never called, so no step is counted, saved or recovered. Fix: give the state the "
                "optimizer whose step() changes the weights, or change the weights only in step()"
            )

    def _take_trained_tensors(self) -> None:
        """Handle each tensor that an optimizer trains as a parameter, not as plain data.

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
                            "lose it. Fix: pass its owner to the state, as another module (criterion=criterion) or as "
                            "the tensor itself (log_alpha=log_alpha)"
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
        """Mark a step as complete; see :meth:`State.commit`."""
        frame = sys._getframe(1)
        if self._virtual is not None and not self._is_beginning and not self._takes_step(self._virtual):
            return
        self._habits.committed(self, frame)
        if not self._is_beginning:
            self._last_commit.require_unchanged_since_commit()
            if self._optimizers and not self.completed_steps:
                self._require_steps()
        super().commit()
        if self._virtual is not None and not self._is_beginning:
            self._virtual.clear_gradients()
        if self._deferred is None and self._running("commit").recovers:
            self._last_commit.is_made_in(frame)

    def _takes_step(self, virtual: VirtualWorkers) -> bool:
        """Return whether a commit takes effect, and switch to the next virtual worker's random numbers."""
        self._running("commit")
        takes_step = virtual.commits(weights_changed=self._last_commit.weights_were_written)
        self._draws_as = virtual.number
        self.seed_step()  # also here, because a commit is postponed if a gradient scaler skips the step
        return takes_step

    @property
    def completed_steps(self) -> int:
        """Optimizer steps since the job began, over all recoveries; without an optimizer, commits."""
        return self._committed_steps + self._open.count

    # ---- for the session

    def sharding(self, world_size: int) -> Sharding | None:
        """Return how the state is divided among ranks, as :meth:`State.sharding` does."""
        return None if self._sharded is None else self._sharded.sharding(world_size)

    @property
    def generators(self) -> Generators | None:
        """The generators, as in :attr:`State.generators`, or None if the state has shards without replicas."""
        return super().generators if self._sharded is None or self._sharded.has_replicas else None

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Send commits to ``session`` from now on, and draw this rank's random numbers.

        Raises:
            UsageError: the sharded values are not supported, or the world is of variable size and its mesh is not.
        """
        if session is not None and self._sharded is None:
            regrouping.refuse_sequences()
        if session is not None and self._sharded is not None:
            settings = context.current("samebits.elastic.run").settings
            if settings.enable_recovery:
                self._sharded.require_supported()
            else:
                self._sharded.keep_own_stages()
                if self._sharded.drawn_from is not None:
                    self._sharded.fill()
            if settings.enable_recovery and settings.min_worker_num != settings.max_worker_num:
                self._sharded.let_shrink(settings.min_worker_num, settings.max_worker_num)
        if session is not None and session.recovers:
            for handler in self.handlers.values():
                if isinstance(handler, ModuleHandler):
                    torch_private.build_replicated(handler.value)  # before it could be built in one rank's generation
        if self._virtual is not None:
            self._bind_virtual(self._virtual, session)
        super().bind(session, rank)
        # At the end of training, an error may have left FSDP2's parameters unsharded, with no mesh to read.
        if session is None or self._sharded is None:
            return
        if (place := self._sharded.data_place(rank)) is not None:
            self._draws_as = place[0]
            for sampler in self._samplers:
                sampler.place = place

    def _bind_virtual(self, virtual: VirtualWorkers, session: CommitSink | None) -> None:
        if session is None:
            virtual.end()
            if self._sharded is not None:
                self._sharded.reduce_over_replicas()
            return
        if not session.recovers:
            raise UsageError(
                "TorchState(global_batch=…) with ENABLE_RECOVERY=0: virtual workers need recovery. Fix: leave "
                "ENABLE_RECOVERY out"
            )
        settings = context.current("samebits.elastic.run").settings
        virtual.require_enough_for(max(settings.max_worker_num, context.get_world_size()))
        if settings.audit or self._checkpoint.step_log:
            found = "AUDIT" if settings.audit else "CheckpointConfig(step_log=…)"
            raise UsageError(
                f"TorchState(global_batch=…) with {found}, which repeats the steps of one rank. Fix: leave one of them "
                "out"
            )

    def enter_group(self) -> None:
        """Attach sharded modules to the new generation's process group.

        Raises:
            UsageError: the modules cannot be attached.
        """
        if self._sharded is not None:
            self._sharded.enter_group()
        if self._sharded is None or not self._sharded.is_pipeline:
            pipelines.refuse()

    def recall(self) -> Point | None:
        """Return to the last commit; see :meth:`State.recall`."""
        if self._sharded is not None:
            self._sharded.reset()
        return super().recall()

    def contents(self) -> dict[str, Any]:
        """Return everything as :meth:`ObjectState.contents` does; sharded tensors are in ``own``."""
        contents = super().contents()
        if self._sharded is not None:
            contents["shared"]["values"], contents["own"]["shards"] = self._sharded.take_out(
                contents["shared"]["values"]
            )
            if self._sharded.drawn_from is not None:
                contents["shared"]["drawn_from"] = self._sharded.drawn_from
        return contents

    def live_contents(self) -> dict[str, Any]:
        """Return the values whose tensors may be overwritten in place before :meth:`load` is called."""
        contents = super().live_contents()
        if self._sharded is not None:
            values, shards = self._sharded.take_out(contents["shared"]["values"])
            contents = {"shared": {"values": values}, "own": {"shards": shards}}
        return contents

    def begin(self, point: Point) -> None:
        """Begin a generation, and drop all gradients. The current state is ``point`` on every rank."""
        self.drop_gradients()
        if self._virtual is not None:
            self._virtual.begin(self._replica_place())
            self._draws_as = self._virtual.number
        super().begin(point)
        self._rate_steps.clear()

    def _replica_place(self) -> ReplicaPlace:
        """Return this rank's place among the replicas, which are the ranks if no value is sharded."""
        if self._sharded is None:
            return ReplicaPlace(context.get_rank(), context.get_world_size())
        return self._sharded.reduce_within_shard_groups()

    def remember(self, point: Point) -> None:
        """Remember the current state as the commit ``point``."""
        if self._open.count > 1:
            self._last_commit.copy_from_now_on()
        super().remember(point)
        self._note_rates(point.step)
        self._close()

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Adopt ``contents``; see :meth:`ObjectState.load`."""
        if self._sharded is not None and "drawn_from" in contents["shared"]:
            self._sharded.draw_from(contents["shared"]["drawn_from"])
        super().load(contents, own=own)
        self._close()

    def load_values(self, values: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Load values by name, and put the shards back into sharded tensors."""
        if self._sharded is not None:
            values = self._sharded.put_back(values, own.get("shards", {}))
        super().load_values(values, own)

    def weights(self) -> list[torch.Tensor]:
        """Return all parameters except sharded ones, sorted by name.

        Buffers are left out, because batch statistics differ between ranks.
        """
        return [
            parameter
            for _, handler in sorted(self.handlers.items())
            for _, parameter in sorted(_named_parameters(handler))
            if not self._is_apart(parameter)
        ]

    def compared(self) -> list[Named]:
        """Return the values that are compared between ranks.

        These are progress, settings, and unsharded parameters with their moments.
        """
        sizes = [] if self._virtual is None else [Named(PartKind.SETTING, "global_batch", shown(self._virtual.sizes))]
        return [*super().compared(), *sizes, *self._named_settings(), *self.named_parameters(), *self._named_moments()]

    def _is_apart(self, parameter: torch.Tensor) -> bool:
        return self._sharded is not None and self._sharded.is_apart(parameter)

    def named_parameters(self) -> list[Named]:
        """Return all parameters that are not sharded."""
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
            if not self._is_apart(parameter)
        ]

    def _named(self) -> dict[str, torch.Tensor]:
        return {name: parameter for parameter, name in self._whole_parameters()}

    def _name_of(self, parameter: torch.Tensor) -> str | None:
        return next((name for one, name in self._whole_parameters() if one is parameter), None)

    def _note_rates(self, step: int) -> None:
        """Record which learning rates have changed since the last commit.

        If rates differed between ranks for a few steps, they may be equal again at the next comparison, but the
        recorded steps of their last change still differ.
        """
        for name, handler in self._optimizer_handlers():
            for number, group in enumerate(handler.value.param_groups):
                rate, key = group.get("lr"), (name, number)
                if isinstance(rate, float) and self._rates.get(key, rate) != rate:
                    self._rate_steps[key] = step
                self._rates[key] = rate

    def _named_settings(self) -> list[Named]:
        """Return the hyperparameters of every optimizer's groups, which a schedule may change."""
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

    def shards(
        self, *, moments: bool = False, at_rest: bool = False, gradients: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return this rank's shards of the weights, as :meth:`State.shards` does."""
        if self._sharded is None or (at_rest and self._last_commit.weights_have_signs):
            return {}
        if gradients:
            return self._some_gradients()
        parameters = self._sharded.shards()
        found = {name: pieces.local(parameter) for name, parameter in parameters.items()}
        if moments or at_rest:
            found |= {
                f"{moment} of {name}": pieces.local(value)
                for optimizer in self._optimizers
                for name, parameter in parameters.items()
                for moment, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor)
            }
        return found

    def _some_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the first and the last shard of each parameter group."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        some = [one for group in groups for one in (*group[:1], *group[-1:]) if self._is_apart(one)]
        return {f"{at}": pieces.local(one.grad) for at, one in enumerate(some) if one.grad is not None}

    @property
    def counts_optimizer_steps(self) -> bool:
        """Whether optimizer steps are counted; otherwise, each commit counts as a step."""
        return bool(self._optimizers)

    @property
    def beginning_step(self) -> int:
        """The number of the step that an optimizer is about to take."""
        return self._committed_steps + self._open.beginning

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rate of every parameter group of every optimizer, in order."""
        return tuple(float(group["lr"]) for one in self._optimizers for group in one.param_groups if "lr" in group)

    @property
    def step_seed(self) -> int:
        """The seed from which ``rng="per_step"`` derives each step's seed."""
        return self._seed()

    def follow_samples(self, took: Callable[[Sequence[int]], None] | None) -> None:
        """Call ``took`` with each set of samples that this rank records with its samplers; None stops this."""
        for sampler in self._samplers:
            sampler.on_record = took

    def drop_gradients(self) -> None:
        """Remove all gradients."""
        self._open.drop_gradients()
        for handler in self.handlers.values():
            for parameter in handler.stepped():
                parameter.grad = None

    def copy_every_commit(self) -> None:
        """Copy all tensors at every commit from now on."""
        self._last_commit.copy_from_now_on()

    @property
    def last_copy(self) -> Mapping[str, Any] | None:
        """The last commit's contents by name, if it was copied; read-only."""
        return self._last_commit.copy

    # ---- steps and gradients

    def _before_step(self) -> None:
        if self._session is not None:
            self._session.before_step()
        self._last_commit.stepping()

    def _require_whole_step(self) -> None:
        if self._virtual is not None:
            self._virtual.require_whole_step("the training function returned")

    def _went_back(self) -> None:
        self.drop_gradients()
        self._close()

    def _count(self) -> None:
        if not self._optimizers:
            super()._count()

    def _defers(self) -> bool:
        """Return whether gradients are being accumulated, so that the commit takes effect later."""
        accumulates = self._sharded is not None and self._sharded.accumulates()
        if not (accumulates or self._open.gradients_wait()):
            return False
        self._deferred = self._open.marks()
        return True

    def _stepped(self) -> None:
        self._last_commit.stepped()
        self._restored_rng = None  # the step that needed it is done
        deferred, self._deferred = self._deferred, None
        if deferred is not None and self._session is not None and same_marks(deferred, self._open.marks()):
            self.save()  # no gradient was accumulated since, so the commit was for the end of this window

    def _close(self) -> None:
        self._open.close()
        self._deferred = None


def _sizes_of(
    global_batch: int | None, micro_batch: int | None, rng: str | None, *, is_pipeline: bool
) -> tuple[int, int] | None:
    """Return the sizes of the global batch and of a virtual worker's batch, or None without virtual workers.

    Raises:
        UsageError: one of the two is missing, or another argument contradicts them.
    """
    if global_batch is None and micro_batch is None:
        return None
    if global_batch is None or micro_batch is None:
        raise UsageError(
            f"TorchState(global_batch={global_batch}, micro_batch={micro_batch}): expected both. Fix: global_batch is "
            "the number of samples in one optimizer step, micro_batch the loader's batch_size"
        )
    if rng == "saved":
        raise UsageError(
            'TorchState(global_batch=…, rng="saved"): random numbers belong to virtual workers, not to a process. Fix: '
            'leave rng out, or rng="per_step"'
        )
    if is_pipeline:
        raise UsageError(
            "TorchState(global_batch=…, pipeline=…): the stages of a pipeline have a fixed number of ranks. Fix: leave "
            "one of them out"
        )
    return global_batch, micro_batch


def _holds_modules(value: object) -> bool:
    """Return whether the value is a container of modules, for which there is a separate error message."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(one, nn.Module) for one in items)


def _require_kinds(model: object, optimizer: object, sampler: object) -> None:
    """Raise if an argument has the wrong type, because it would be stored as a plain value and not be trained.

    Raises:
        UsageError: the message names the argument, its type, and the expected type.
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
    """Return the tensors of one value that an optimizer can train; the name is "" if the value is itself a tensor."""
    if isinstance(handler, ModuleHandler):
        return list(handler.value.named_parameters())
    return [("", handler.value)] if isinstance(handler, TrainedTensorHandler) else []
