"""Run a fixed number of virtual workers on any number of ranks, with the script's own loop.

Each rank computes the micro-batches of several virtual workers, one in each iteration of the script's loop, here called
a turn. Only the last turn takes an optimizer step. After each earlier turn, its gradients are added to a sum, and every
other change that it made to the state is undone. Data, random numbers, buffers and the order of the sum belong to the
virtual workers, so the bits do not depend on the world size.

In an HSDP job, the shards of a replica take their turns together, each for a virtual worker of its own. FSDP2 averages
the gradients of such a team within the replica, and the sum is over the teams.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.data import BatchSampler, get_worker_info

from samebits.errors import UsageError
from samebits.training import torch_private
from samebits.training.group import ddp
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context
from samebits.training.process.numerics import settle_threads
from samebits.training.sharding.pieces import in_place_of, is_distributed, local
from samebits.training.sharding.replicas import ReplicaPlace
from samebits.training.state import rng
from samebits.training.state.attributes import PlainAttributes
from samebits.training.state.data.global_batch import BlockSum, TreeNode, block_of, sum_over_ranks
from samebits.training.state.data.sampler import ElasticSampler, filled_up
from samebits.training.state.handlers import (
    ModuleHandler,
    OptimizerHandler,
    SamplerHandler,
    ScalerHandler,
    StateHandler,
    TrainedTensorHandler,
    copied,
    same,
)
from samebits.training.state.sharded_values import ShardedValues

_Slot = tuple[dict[str, Any], str]
"""A buffer: the dictionary that holds it, and its name there."""


class VirtualWorkers:
    """The virtual workers of one state, and the turns that this rank takes for them in each step.

    Outside ``elastic.run`` everything passes through unchanged.

    Args:
        handlers: the handlers of the state's values, by name.
        global_batch: samples in one optimizer step.
        micro_batch: samples in one virtual worker's batch, which the script's loader yields.
        sharded: the sharded part of the state, if any.

    Raises:
        UsageError: the sizes are invalid, or a value of the state cannot be divided among virtual workers.
    """

    def __init__(
        self,
        handlers: Mapping[str, StateHandler],
        *,
        global_batch: int,
        micro_batch: int,
        sharded: ShardedValues | None = None,
    ) -> None:
        if micro_batch < 1 or global_batch < micro_batch or global_batch % micro_batch:
            raise UsageError(
                f"TorchState(global_batch={global_batch}, micro_batch={micro_batch}): expected a global_batch that is "
                "a multiple of micro_batch. Fix: micro_batch is the loader's batch_size, and global_batch / "
                "micro_batch is the number of virtual workers"
            )
        self.sizes = (global_batch, micro_batch)
        settle_threads(1, at_any_size=True)
        self._count = global_batch // micro_batch
        self._handlers = handlers
        self._optimizer = _only_optimizer(handlers)
        _require_supported(handlers, self._optimizer, sharded)
        self._replica = ReplicaPlace(0, 1, shards=1 if sharded is None else sharded.shard_count)
        self._teams = self._count // self._replica.shards
        if self._count % self._replica.shards:
            raise UsageError(
                f"global_batch / micro_batch = {global_batch} / {micro_batch} gives {self._count} virtual workers, and "
                f"each replica on the device mesh computes {self._replica.shards} at a time. Fix: a global_batch "
                f"that is a multiple of {self._replica.shards} x {micro_batch}"
            )
        self._modules = [one.value for one in handlers.values() if isinstance(one, ModuleHandler)]
        inside = [one for module in self._modules for one in module.modules()]
        self._attributes = PlainAttributes({str(number): one for number, one in enumerate(inside)})
        self._samplers = [one.value for one in handlers.values() if isinstance(one.value, ElasticSampler)]
        for sampler in self._samplers:
            sampler.split = self
        for module in self._modules:
            module.register_forward_pre_hook(self._forward)
        _gate_step(self._optimizer, self)
        _gate_classes()
        self._block: TreeNode = (0, self._teams)
        self._is_running = False
        self._is_collecting = False  # whether this module, and not the script, launches collectives
        self._hooks: dict[int, Any] = {}
        self._backward = -1  # number of the backward pass whose end is awaited
        self._statistics: list[_Slot] = []
        self._other_buffers: list[_Slot] = []
        self._begin_share()

    # ---- one generation after another

    def begin(self, replica: ReplicaPlace) -> None:
        """Begin a generation from a commit.

        Args:
            replica: this rank's place among the replicas in this generation.

        Raises:
            UsageError: a wrapper reduces gradients in its own way.
        """
        for wrapper in ddp.wrappers():
            if wrapper.static_graph:
                raise UsageError(
                    "global_batch does not work with DistributedDataParallel(static_graph=True), which reduces in its "
                    "own way. Fix: leave static_graph out"
                )
            wrapper.require_backward_grad_sync = False  # gradients are summed here, and buffers are combined here
            wrapper.require_forward_param_sync = False
        self._replica = replica
        self._block = block_of(replica.index, replica.count, self._teams)
        self._statistics, self._other_buffers = _buffers_of(self._modules)
        self._is_running = True
        _running[:] = [self]
        self._hook_parameters()
        self._begin_share()

    def require_enough_for(self, workers: int) -> None:
        """Raise if the job may have more workers than virtual workers.

        Raises:
            UsageError: the message names both numbers.
        """
        if workers > self._count:
            raise UsageError(
                f"the job may have {workers} workers (MAX_WORKER_NUM), and global_batch / micro_batch = "
                f"{self.sizes[0]} / {self.sizes[1]} gives {self._count} virtual workers, so {workers - self._count} of "
                "them would have no batch. Fix: a smaller micro_batch, or a larger global_batch"
            )

    def end(self) -> None:
        """Let everything pass through from now on."""
        self._is_running = False
        if self in _running:
            _running.clear()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    @property
    def number(self) -> int:
        """The number of the virtual worker whose micro-batch is computed now."""
        return self._worker_of(self._block[0] + self._turn)

    def _worker_of(self, team: int) -> int:
        return team * self._replica.shards + self._replica.shard

    @property
    def takes_step(self) -> bool:
        """Whether the current turn takes the optimizer step.

        This is the rank's last turn in a step, or any turn outside ``elastic.run``.
        """
        return not self._is_running or self._turn + 1 == self._turns

    @property
    def _turns(self) -> int:
        return self._block[1] - self._block[0]

    def _begin_share(self) -> None:
        """Begin the turns of the next step."""
        self._turn = 0
        self._sum = BlockSum(self._teams, self._block)
        self._trained: list[nn.Parameter] = []  # parameters whose gradients are summed in this step
        self._kept: dict[str, Any] | None = None  # what the turns change, as it was before the first one
        self._settings: Any = None  # the optimizer's, at the first turn's commit
        self._buffers_before: list[torch.Tensor] = []  # the statistics, then the other buffers
        self._first_buffers: list[torch.Tensor] | None = None  # the other buffers of virtual worker 0
        self._buffers_after: list[torch.Tensor] = []
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._has_begun = self._has_gradient = self._has_stepped = False
        self._batches = 0
        self._versions = torch_private.versions_of(self._buffers())

    # ---- data, as the sampler's split

    def share_of(self, rest: list[int], order: list[int], name: str) -> list[int]:
        """Return this rank's samples.

        In each global batch, worker v of n takes every n-th sample, beginning with the v-th.
        """
        size, filled, share = self.sizes[0], filled_up(rest, order, self.sizes[0]), list[int]()
        for start in range(0, len(filled), size):
            for worker in map(self._worker_of, range(*self._block)):
                first, *others = filled[start + worker : start + size : self._count]
                place = len(order) - len(rest) + start
                share += [FirstSample(first, f"{name}/{place}/{worker}"), *others]
        return share

    def consumed_by_all(self, taken: int) -> int:
        """Convert this rank's number of samples to the number that all ranks have used in complete steps."""
        share = self._turns * self.sizes[1]
        return taken // share * self.sizes[0]

    def length(self, left: int) -> int:
        """Return how many of the ``left`` samples each virtual worker takes."""
        return -(-left // self.sizes[0]) * self.sizes[1]

    def iterated(self) -> None:
        """Check that no step is incomplete when an iteration over the samples begins."""
        if self._is_running:
            self.require_whole_step("a new iteration over the sampler began")
        self._batches = 0

    def require_whole_step(self, event: str) -> None:
        """Raise if this rank has taken only some of its turns of a step.

        Raises:
            UsageError: the message names the event and the turn.
        """
        if self._turn or self._has_gradient:
            raise UsageError(
                f"{event} after {self._turn} of this rank's {self._turns} micro-batches of a global batch. Fix: leave "
                "the loop over the loader only when state.completed_steps has changed, or at its end"
            )

    def took_batch(self, sampler: object) -> None:
        """Check a batch of training data that a loader has yielded.

        Raises:
            UsageError: the batch is not this turn's micro-batch.
        """
        inner = getattr(sampler, "sampler", None)
        if not any(inner is one or sampler is one for one in self._samplers):
            raise UsageError(
                f"with global_batch, training data must come from the state's ElasticSampler, and this loader's "
                f"sampler is a {type(inner or sampler).__name__}: its order would depend on the world size. Fix: "
                "DataLoader(…, sampler=sampler) with sampler = samebits.ElasticSampler(data, seed=…), and "
                "TorchState(…, sampler=sampler); evaluate under torch.no_grad()"
            )
        size = getattr(sampler, "batch_size", 1)
        if type(sampler) is not BatchSampler or size != self.sizes[1]:
            raise UsageError(
                f"a {type(sampler).__name__} with batch_size={size} yields the batches, but the state's "
                f"micro_batch is {self.sizes[1]}. Fix: DataLoader(data, batch_size={self.sizes[1]}, "
                "sampler=sampler)"
            )
        self._batches += 1
        if self._batches > 1:
            raise UsageError(
                "two batches were taken from the loader for one state.commit(). With global_batch, each iteration of "
                "the loop is one micro-batch of a virtual worker. Fix: one batch, one backward(), one optimizer.step() "
                "and one state.commit() in each iteration"
            )

    # ---- forward and backward passes

    def _forward(self, *_: object) -> None:
        if self._is_running and torch.is_grad_enabled():
            self._begin_computing()

    def _begin_computing(self) -> None:
        """Prepare for a forward pass of the current turn.

        The first turn of a step copies the values that turns change; later turns check that these have not changed
        since.
        """
        if self._has_begun:
            return
        self._has_begun = True
        if any(wrapper.require_backward_grad_sync for wrapper in ddp.wrappers()):
            raise UsageError(
                "DistributedDataParallel was built inside the training function, and reduces gradients in its own way. "
                "Fix: build it before the function that samebits.elastic.run decorates"
            )
        values, buffers = self._values(), self._buffers()
        if torch_private.versions_of(buffers) != self._versions:
            raise UsageError(
                "a buffer of the state, such as BatchNorm statistics, was changed outside the forward passes of a "
                "step, by data that differs between ranks. Fix: call model.eval() before a forward pass that is not "
                "followed by backward()"
            )
        if self._kept is None:
            self._kept = {name: copied(value) for name, value in values.items()}
            self._attributes.remember()
            self._buffers_before = [one.clone() for one in buffers]
        elif changed := [name for name, value in values.items() if not same(value, self._kept[name])]:
            raise UsageError(
                f"state.{changed[0]} changed between state.commit() and the forward pass of a later micro-batch "
                "of the same step: it would change once for each micro-batch, so the result would depend on the "
                "world size. Fix: change it after the backward pass and before state.commit()"
            )

    def _values(self) -> dict[str, Any]:
        """Return the values that a turn may change. They are restored after every turn that does not take the step."""
        values: dict[str, Any] = {}
        if self._turns == 1:
            return values
        for name, handler in self._handlers.items():
            if isinstance(handler, OptimizerHandler):
                values[name] = _settings_of(handler.value)
            elif not isinstance(handler, (ModuleHandler, TrainedTensorHandler, ScalerHandler, SamplerHandler)):
                values[name] = handler.contents()
        return values

    def _undo(self) -> None:
        assert self._kept is not None, "a turn has begun"
        for name, value in self._values().items():
            if same(value, self._kept[name]):
                continue
            handler = self._handlers[name]
            if isinstance(handler, OptimizerHandler):
                for group, settings in zip(handler.value.param_groups, self._kept[name], strict=True):
                    group.update(copied(settings))
            else:
                handler.load_back(self._kept[name])
        self._attributes.undo()
        self._set_buffers(self._buffers_before)

    def _hook_parameters(self) -> None:
        for parameter in self._parameters():
            if parameter.requires_grad and id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._gradient_came)

    def _parameters(self) -> list[nn.Parameter]:
        found = {id(one): one for module in self._modules for one in module.parameters()}
        found |= {id(one): one for group in self._optimizer.param_groups for one in group["params"]}
        return list(found.values())

    def _gradient_came(self, _: torch.Tensor) -> None:
        if self._is_running and (number := torch_private.current_backward()) != self._backward:
            self._backward = number
            torch_private.before_backward_ends(self._backward_ends)

    @torch.no_grad()
    def _backward_ends(self) -> None:
        """Add the turn's gradients to the sum, and clear them.

        In the last turn, set the gradients to the sum over all virtual workers.

        Raises:
            UsageError: the turn's gradients were already added, or cannot be summed.
        """
        if self._has_gradient:
            raise UsageError(
                "a second backward pass before state.commit(). With global_batch, each iteration of the loop is "
                "one micro-batch of a virtual worker, and gradients accumulate by themselves. Fix: add the losses up "
                "and call backward() once, then optimizer.step() and state.commit(); use_reentrant=False in "
                "torch.utils.checkpoint"
            )
        if not self._has_begun and (self._statistics or self._other_buffers):
            raise UsageError(
                "a backward pass came without a call of the state's module, so its buffers were not followed. Fix: "
                "call the module itself, as model(inputs), instead of a part or a method of it"
            )
        self._begin_computing()
        self._has_gradient = True
        trained = [one for one in self._parameters() if one.requires_grad]
        if self._turn == 0:
            self._trained = trained
        elif list(map(id, trained)) != list(map(id, self._trained)):
            raise UsageError(
                "parameters were frozen or unfrozen between two micro-batches of one step. Fix: change requires_grad "
                "only when state.completed_steps has changed"
            )
        buffers = self._buffers()
        if self.number == 0:
            self._first_buffers = [one.clone() for one in buffers[len(self._statistics) :]]
        self._sum.add(self._block[0] + self._turn, self._flat(buffers))
        for parameter in trained:
            parameter.grad = None
        if self.takes_step:
            with self._collecting():
                self._reduce()

    @contextlib.contextmanager
    def _collecting(self) -> Iterator[None]:
        before, self._is_collecting = self._is_collecting, True  # a scaler's step contains an optimizer's
        try:
            yield
        finally:
            self._is_collecting = before

    def require_collective_allowed(self, group: object) -> None:
        """Raise if the script calls a collective in a turn that other ranks may not have.

        Args:
            group: the ranks that call it. Those of one replica have the same turns.

        Raises:
            UsageError: this is a later turn of a step.
        """
        is_within = any(group is one for one in self._replica.within)
        if self._turn and not self._is_collecting and not is_within:
            raise UsageError(
                f"{calling_place()}: a collective in micro-batch {self._turn + 1} of one step. With global_batch, "
                "ranks may compute different numbers of micro-batches, so other ranks may not call it. Fix: "
                "state.report(loss=loss) to show a value; call collectives outside the loop over the loader"
            )

    def _flat(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors to be summed in this turn, flattened.

        They hold the gradients, flags that say which gradients exist, and the changes to batch statistics.
        """
        kind = self._kind()
        grads = [None if one.grad is None else local(one.grad) for one in self._trained]
        for parameter, grad in zip(self._trained, grads, strict=True):
            if parameter.is_complex() or (grad is not None and grad.is_sparse):
                raise UsageError(
                    "global_batch sums only dense and real gradients, but the gradient of a parameter of shape "
                    f"{tuple(parameter.shape)} is not. Fix: sparse=False"
                )
        parts = [
            torch.zeros(local(parameter).numel(), **kind) if grad is None else grad.flatten().to(**kind)
            for parameter, grad in zip(self._trained, grads, strict=True)
        ]
        parts += [
            (after - before).flatten().to(**kind)
            for after, before, _ in zip(buffers, self._buffers_before, self._statistics, strict=False)
        ]
        flat = torch.cat(parts).div_(self._teams)
        has_grad = torch.tensor([float(one is not None) for one in grads], **kind)
        return torch.cat([flat, has_grad])

    def _reduce(self) -> None:
        """Set every parameter's gradient to the mean over the global batch, and combine the buffers. A collective."""
        statistics = self._buffers_before[: len(self._statistics)]
        shapes = [local(one) for one in self._trained]
        lengths = [one.numel() for one in (*shapes, *statistics)] + [len(shapes)]
        total = sum_over_ranks(self._sum.sums(), self._teams, sum(lengths), **self._kind(), group=self._replica.across)
        *parts, has_grad = total.split(lengths)
        for parameter, shape, part, is_there in zip(self._trained, shapes, parts, has_grad.tolist(), strict=False):
            if is_there:
                parameter.grad = in_place_of(part.view_as(shape).to(parameter.dtype, copy=True), parameter)
        changes = parts[len(self._trained) :]
        self._buffers_after = [
            before + change.view_as(before).to(before) for before, change in zip(statistics, changes, strict=True)
        ] + self._of_worker_0()
        self._set_buffers(self._buffers_after)

    def _of_worker_0(self) -> list[torch.Tensor]:
        """Return virtual worker 0's buffers on every rank, as DistributedDataParallel does with rank 0's."""
        like = self._buffers_before[len(self._statistics) :]
        own = like if self._first_buffers is None else self._first_buffers
        if not like or context.get_world_size() == 1:
            return own
        packed = torch.cat([one.contiguous().view(-1).view(torch.uint8).to(self._kind()["device"]) for one in own])
        dist.broadcast(packed, 0)
        sizes = [one.numel() * one.element_size() for one in like]
        return [
            part.clone().view(one.dtype).view(one.shape).to(one.device)
            for part, one in zip(packed.split(sizes), like, strict=True)
        ]

    def _kind(self) -> dict[str, Any]:
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in self._trained), torch.float32)
        return {"dtype": dtype, "device": self._trained[0].device}

    def _buffers(self) -> list[torch.Tensor]:
        """Return the batch statistics, then the other buffers."""
        return [holder[name] for holder, name in (*self._statistics, *self._other_buffers)]

    @torch.no_grad()
    def _set_buffers(self, values: Sequence[torch.Tensor]) -> None:
        for live, value in zip(self._buffers(), values, strict=True):
            live.copy_(value)

    # ---- steps and commits

    def stepping(self) -> None:
        """Handle a call of the optimizer's ``step``.

        Raises:
            UsageError: this turn has no gradient, or has stepped already.
        """
        if not self._has_gradient or self._has_stepped:
            found = "a second time" if self._has_stepped else "without a backward pass"
            raise UsageError(
                f"optimizer.step() was called {found} since the last state.commit(). Fix: with global_batch, one "
                "backward(), one optimizer.step() and one state.commit() in each iteration"
            )
        self._has_stepped = True

    def stepped_by_scaler(self) -> None:
        """Record that a gradient scaler has stepped the optimizer, or skipped the step (infinite gradients)."""
        self._has_stepped = True

    def require_no_metric(self) -> None:
        """Raise if a learning rate schedule is given a value that belongs to a single micro-batch.

        Raises:
            UsageError: a step is under way.
        """
        if self._is_running and (self._turn or self._has_gradient):
            raise UsageError(
                "ReduceLROnPlateau.step() was called with the value of one micro-batch, which differs between ranks. "
                "Fix: call it after the loop over the loader, with a value that is equal on every rank"
            )

    def commits(self, *, weights_changed: bool) -> bool:
        """Handle a call of ``commit()``, and return whether it takes effect. If not, undo the turn's changes.

        Args:
            weights_changed: whether weights were written to since the last commit.

        Raises:
            UsageError: the turn is incomplete, or it has changed what only the step may change.
        """
        if not self._is_running or (self._turn == 0 and not self._has_gradient):
            if self._has_begun:
                self._set_buffers(self._buffers_before)  # a forward pass alone changed them, differently on each rank
            self._begin_share()
            return True
        if not self._has_gradient or not self._has_stepped:
            missing = "optimizer.step()" if self._has_gradient else "a backward pass"
            raise UsageError(
                f"state.commit() was called without {missing} in this iteration of the loop. With global_batch, "
                "gradients accumulate by themselves. Fix: one backward(), one optimizer.step() and one "
                "state.commit() for each batch of the loader"
            )
        self._require_equal_settings()
        if self.takes_step:
            self._set_buffers(self._buffers_after)
            self._begin_share()
            self._hook_parameters()
            return True
        if weights_changed:
            raise UsageError(
                f"weights of the state changed in micro-batch {self._turn + 1} of {self._turns} of one step, and would "
                "change once for each of them. Fix: change them in a hook of the optimizer, "
                "optimizer.register_step_post_hook(…), which is called once per step"
            )
        self._undo()
        self._turn += 1
        self._begin_turn()
        return False

    def clear_gradients(self) -> None:
        """Clear all gradients after a step, so that the next step's gradients are not added to them."""
        for parameter in self._parameters():
            parameter.grad = None

    def _require_equal_settings(self) -> None:
        settings = [_settings_of(self._optimizer)]
        if self._turn == 0:
            self._settings = copied(settings)
        elif not same(settings, self._settings):
            raise UsageError(
                "a setting of the optimizer, such as its learning rate, differs between two micro-batches of one step. "
                "It would follow the number of iterations, which depends on the world size. Fix: give the schedule "
                "to the state, TorchState(…, scheduler=scheduler), and compute settings from state.completed_steps"
            )


def _only_optimizer(handlers: Mapping[str, StateHandler]) -> torch.optim.Optimizer:
    optimizers = [one.value for one in handlers.values() if isinstance(one, OptimizerHandler)]
    if len(optimizers) != 1:
        raise UsageError(
            f"TorchState(global_batch=…) with {len(optimizers)} optimizers: expected one. Fix: one optimizer with "
            "several parameter groups, or leave global_batch out"
        )
    found: torch.optim.Optimizer = optimizers[0]
    return found


def _require_supported(
    handlers: Mapping[str, StateHandler], optimizer: torch.optim.Optimizer, sharded: ShardedValues | None
) -> None:
    if sharded is not None:
        _require_summable(sharded, handlers, optimizer)
    for name, handler in handlers.items():
        value, reason = handler.value, ""
        if isinstance(handler, ModuleHandler):
            if any(isinstance(one, nn.SyncBatchNorm) for one in value.modules()):
                reason = "SyncBatchNorm, which computes statistics over the ranks. Fix: use BatchNorm"
            elif handler.has_extra_state:
                reason = "extra state (get_extra_state), which each rank changes in its own way. Fix: remove it"
            elif sharded is None and any(one.is_meta for one in value.parameters()):
                reason = "parameters on the meta device. Fix: build the model in memory"
        elif isinstance(value, torch.optim.LBFGS):
            reason = "LBFGS, whose step computes gradients itself. Fix: use another optimizer"
        elif hasattr(value, "_averages"):
            reason = "hvd.DistributedOptimizer, which averages over the ranks. Fix: give the state the inner optimizer"
        elif hasattr(value, "dataset") and not isinstance(value, ElasticSampler):
            reason = (
                f"a {type(value).__name__}, whose order depends on the world size. Fix: sampler = "
                "samebits.ElasticSampler(data, seed=…) for the loader and the state"
            )
        if reason:
            raise UsageError(f"TorchState(global_batch=…, {name}=…): virtual workers are not possible with {reason}")
    devices = {one.device for group in optimizer.param_groups for one in group["params"]}
    if len(devices) > 1:
        raise UsageError(
            f"TorchState(global_batch=…): the parameters are on several devices ({', '.join(map(str, devices))}). Fix: "
            "put the model on one device, or leave global_batch out"
        )


def _require_summable(
    sharded: ShardedValues, handlers: Mapping[str, StateHandler], optimizer: torch.optim.Optimizer
) -> None:
    """Raise unless FSDP2 shards everything that is trained, and shards it within the replicas of a mesh.

    Raises:
        UsageError: the message names the reason.
    """
    reason = sharded.not_summable
    modules = [(name, one.value) for name, one in handlers.items() if isinstance(one, ModuleHandler)]
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    if not reason and not all(map(is_distributed, trained)):
        reason = "trained parameters that are not sharded. Fix: fully_shard() without ignored_params"
    for name, module in modules:
        if any(isinstance(one, _NormBase) and one.track_running_stats for one in module.modules()):
            reason = reason or f"batch statistics in state.{name}, which is sharded. Fix: LayerNorm or GroupNorm"
    if reason:
        raise UsageError(f"TorchState(global_batch=…): virtual workers are not possible with {reason}")


def _buffers_of(modules: Sequence[nn.Module]) -> tuple[list[_Slot], list[_Slot]]:
    """Return the batch statistics of the modules, which are averaged, and all other buffers."""
    statistics: list[_Slot] = []
    others: list[_Slot] = []
    seen: set[int] = set()
    for module in modules:
        for one in module.modules():
            for name, buffer in one._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                averaged = isinstance(one, _NormBase) and buffer.is_floating_point()
                (statistics if averaged else others).append((one._buffers, name))
    return statistics, others


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- calls of the script that take effect only in the last turn

_running: list[VirtualWorkers] = []
"""The virtual workers of the running training function, if it has any; at most one."""


def took_batch(sampler: object) -> None:
    """Check a batch that a loader of this process has yielded.

    Args:
        sampler: the loader's batch sampler or sampler; None for an iterable dataset.

    Raises:
        UsageError: the batch is not a virtual worker's.
    """
    if _running and torch.is_grad_enabled():
        _running[0].took_batch(sampler)


def require_collective_allowed(group: object) -> None:
    """Raise if a collective of a group is called in a turn that its other ranks may not have.

    Raises:
        UsageError: the message names the line that calls the collective.
    """
    if _running:
        _running[0].require_collective_allowed(group)


def _gate_step(optimizer: torch.optim.Optimizer, workers: VirtualWorkers) -> None:
    inner: Any = optimizer.step

    @functools.wraps(inner)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not workers._is_running:
            return inner(*args, **kwargs)
        if any(one is not None for one in (*args[:1], kwargs.get("closure"))):
            raise UsageError(
                "optimizer.step(closure) computes gradients inside the step, which global_batch cannot divide among "
                "virtual workers. Fix: call backward() before, and step() without arguments"
            )
        workers.stepping()
        if workers.takes_step:
            with workers._collecting():  # for the collectives that all ranks launch before a step
                return inner(*args, **kwargs)
        torch_private.count_as_stepped(self)
        return None

    gated: Any = optimizer
    gated.step = types.MethodType(step, optimizer)


class FirstSample(int):
    """The index of a micro-batch's first sample.

    It also carries the name that seeds a DataLoader worker process for the batch.
    """

    name: str

    def __new__(cls, index: int, name: str) -> FirstSample:
        """Create the index, and make this process check every batch for such indices."""
        torch_private.before_fetches(_about_to_fetch)  # also in a loader's process, which unpickles the index
        made = super().__new__(cls, index)
        made.name = name
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the index in a DataLoader worker process."""
        return FirstSample, (int(self), self.name)


def _about_to_fetch(indices: Any) -> Any:
    """Seed a DataLoader worker process for a micro-batch, and return the indices as plain integers."""
    if type(indices) is not list or not indices or type(indices[0]) is not FirstSample:
        return indices
    if get_worker_info() is not None:  # in the training process, the loop has done so for the entire turn
        rng.seed_with(indices[0].name)
    return [int(indices[0]), *indices[1:]]


def _gate_classes() -> None:
    """Make gradient scalers act only on the micro-batch that takes the step. Called once per process.

    The classes are changed, because a method on an object would become part of a schedule's ``state_dict()``, and a
    scaler need not be in the state.
    """
    scaler: Any = torch.amp.GradScaler
    for name in ("step", "unscale_", "update"):
        method = getattr(scaler, name)
        if not hasattr(method, "__wrapped__"):
            setattr(scaler, name, _gated_scaling(name, method))
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau
    if not hasattr(plateau.step, "__wrapped__"):
        plateau.step = _told_before(plateau.step)


def _told_before(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        if _running:
            _running[0].require_no_metric()
        return method(*args, **kwargs)

    return step


def _gated_scaling(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        workers = _running[0] if _running else None
        if workers is None or not scaler.is_enabled():
            return method(scaler, *args, **kwargs)
        if not workers.takes_step:
            if name == "step":
                workers.stepping()
                torch_private.count_as_stepped(args[0] if args else kwargs["optimizer"])
            return None
        with workers._collecting():  # for a check of sharded gradients for infinite values
            result = method(scaler, *args, **kwargs)
        if name == "step":
            workers.stepped_by_scaler()
        return result

    return call
