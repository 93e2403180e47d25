"""Train every rank independently, and average all weights at intervals (local SGD, DiLoCo).

A commit is an average. Between two averages, each rank takes its own steps, and the loss of another rank does not undo
them. A new rank starts from the last average, of which every rank keeps a copy.

Sources: S. U. Stich, Local SGD Converges Fast and Communicates Little, 2019; A. Douillard et al., DiLoCo: Distributed
    Low-Communication Training of Language Models, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.core.point import Point
from samebits.core.reports import PartKind
from samebits.errors import UsageError
from samebits.training.group import transfer
from samebits.training.group.transfer import FlatBuffers
from samebits.training.process import context
from samebits.training.state.base_state import CommitSink, State
from samebits.training.state.compared import Named
from samebits.training.state.handlers import ModuleHandler, OptimizerHandler
from samebits.training.state.torch_state import TorchState


class LocalSGD(State):
    """A state that averages the ranks' weights only every few steps (local SGD, DiLoCo).

    Call :meth:`commit` after every step: between averages it only checks for membership changes, at almost no cost.
    Attributes of the wrapped state are available. Each rank draws its own samples and counts its own steps. A final
    average, after the training function has returned, makes all ranks equal. Buffers are averaged with the weights,
    except integer buffers. Two copies of weights and moments are kept.

    Args:
        state: a :class:`TorchState` with ``rng="per_step"`` whose modules are not wrapped in DistributedDataParallel.
        sync_every: optimizer steps between two averages.
        outer_optimizer: an optimizer of the same parameters. It gets the difference between the last average and the
            new one as a gradient, and its step replaces the average. DiLoCo uses
            ``torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)``. None: use the average.

    Example::

        state = samebits.elastic.TorchState(model, optimizer, rng="per_step", seed=1)
        state = samebits.elastic.LocalSGD(state, sync_every=4)

        @samebits.elastic.run
        def train(state):
            while state.completed_steps < 2:  # averages
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
                state.commit()

        train(state)
    """

    def __init__(
        self, state: TorchState, sync_every: int, outer_optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self._inner = state
        super().__init__()
        self._checkpoint = state.checkpoint_config
        self._sync_every = sync_every
        self._outer = None if outer_optimizer is None else OptimizerHandler(outer_optimizer)
        self._averaged_at = 0  # this rank's steps at the last average
        self._committed_at = 0  # this rank's steps at the last commit
        self._is_through = False
        self._flat = FlatBuffers()
        self._modules = [one for one in state.handlers.values() if isinstance(one, ModuleHandler)]
        self._require_supported(outer_optimizer)
        state.copy_every_commit()

    def _require_supported(self, outer: torch.optim.Optimizer | None) -> None:
        if self._sync_every < 1:
            raise UsageError(f"LocalSGD(sync_every={self._sync_every}): expected 1 or more optimizer steps")
        if self._inner.shards():
            raise UsageError("LocalSGD: a rank that trains by itself needs a whole model, but this one is sharded")
        if self._inner._virtual is not None:
            raise UsageError(
                "LocalSGD: its TorchState has global_batch=…, which sums the gradients of every step. Fix: leave "
                "global_batch out"
            )
        if self._inner.has_own_parts:
            raise UsageError(
                'LocalSGD: create its TorchState with rng="per_step", because a lost rank\'s generators are lost'
            )
        wrapped = [
            name for name in self._inner.handlers if isinstance(getattr(self._inner, name), DistributedDataParallel)
        ]
        if wrapped:
            raise UsageError(
                f"LocalSGD: {', '.join(wrapped)} is in DistributedDataParallel, which averages every step's gradients. "
                "Fix: give the state the module itself"
            )
        known = {id(parameter) for parameter in self._parameters()}
        if outer is not None and {id(one) for group in outer.param_groups for one in group["params"]} - known:
            raise UsageError("LocalSGD: outer_optimizer has parameters that are in none of the state's modules")

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # during construction
            raise AttributeError(name)
        return getattr(self._inner, name)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            own = name.startswith("_") or hasattr(type(self), name)
            object.__setattr__(self if own else self._inner, name, value)

    # ---- for the user

    def commit(self) -> None:
        """Mark a step as complete, average if due, and check for membership changes.

        Raises the same errors as :meth:`State.commit`.
        """
        self._running("commit")
        if self.local_steps >= self._sync_every:
            self.average()
        elif self._inner.completed_steps != self._committed_at:  # unchanged while gradients accumulate
            self._inner.seed_step()
        self._committed_at = self._inner.completed_steps
        self.check_host_updates()

    def average(self) -> None:
        """Average the weights now. Call this on every rank at the same step."""
        self._meet(self._running("average"))

    def save(self) -> None:
        """Average now; see :meth:`average`."""
        self.average()

    def restore(self) -> None:
        """Restore the last average on this rank, and discard the steps that this rank has taken since."""
        self._inner.restore()
        self._averaged_at = self._inner.completed_steps

    def sync(self) -> None:
        """Set every rank's state to rank 0's last average. A collective; called before the training function begins."""
        self.restore()
        self._running("sync").sync()

    @property
    def local_steps(self) -> int:
        """Number of this rank's optimizer steps since the last average."""
        return self._inner.completed_steps - self._averaged_at

    @property
    def completed_steps(self) -> int:
        """Number of averages since the job began, across all recoveries."""
        return self._committed_steps

    # ---- for the session

    def bind(self, session: CommitSink | None, rank: int) -> None:
        """Send averages as commits to ``session`` from now on, and draw this rank's random numbers."""
        super().bind(session, rank)
        self._inner.bind(None, rank)
        self._inner.guard_samplers(session is not None)

    def begin(self, point: Point) -> None:
        """Begin a generation. A rank that held ``point`` keeps the steps that it has taken since."""
        self._is_through = False
        self._inner.drop_gradients()
        if self._point != point:
            self.remember(point)
        self._inner.seed_step()

    def remember(self, point: Point) -> None:
        """Remember the current state as the average ``point``."""
        self._inner.remember(point)
        self._averaged_at = self._inner.completed_steps
        super().remember(point)

    def forget(self) -> None:
        """Mark the current values as not being a valid average."""
        self._inner.forget()
        super().forget()

    def recall(self) -> Point | None:
        """Return the point of the last average, which is always in memory. This rank's later steps are kept."""
        return self._point

    def finish(self) -> None:
        """Take part in averages until all ranks have finished, and in a final average."""
        self._is_through = True
        while self._meet(self._running("finish")):
            pass

    def contents(self) -> dict[str, Any]:
        """Return the last average, and the step count that this rank had at it.

        Before the first average, return the current state.
        """
        inner = self._inner.contents()
        copy = self._copy()
        if copy is not None:
            inner["shared"] |= {"steps": self._averaged_at, "values": dict(copy)}
        outer = {} if self._outer is None else {"outer": self._outer.contents()}
        values = {"inner": inner["shared"], **outer}
        return {"shared": {"steps": self.completed_steps, "values": values}, "own": {}}

    def load(self, contents: dict[str, Any], *, own: bool) -> None:
        """Adopt ``contents`` completely."""
        super().load(contents, own=own)
        values = contents["shared"]["values"]
        self._inner.load({"shared": values["inner"], "own": {}}, own=own)
        if self._outer is not None and "outer" in values:
            self._outer.load(values["outer"])
        self._averaged_at = self._inner.completed_steps
        self._point = None  # begin() sets it

    def compared(self) -> list[Named]:
        """Return the values that are equal right after an average: the parameters and the number of averages."""
        averages = Named(PartKind.STEPS, "averages", str(self.completed_steps))
        return [averages, *self._inner.named_parameters()]

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters of the last average."""
        copy = self._copy()
        if copy is None:
            return self._inner.weights()
        return list(self._at_last_average(copy).values())

    # ---- averages

    def _parameters(self) -> list[nn.Parameter]:
        return [one for module in self._modules for one in module.value.parameters()]

    def _copy(self) -> Mapping[str, Any] | None:
        return None if self._point is None else self._inner.last_copy

    def _at_last_average(self, copy: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """Return each parameter's values at the last average by the parameter's ``id()``, in the order of names."""
        return {
            id(parameter): copy[module][name]
            for module, handler in sorted(self._inner.handlers.items())
            if isinstance(handler, ModuleHandler)
            for name, parameter in sorted(handler.value.named_parameters())
        }

    def _meet(self, session: CommitSink) -> bool:
        """Average if any rank has taken a step; return whether another average may follow."""
        steps, device = self.local_steps, context.current("LocalSGD").device
        told = transfer.gather(2 * steps + self._is_through, device)
        givers = sum(one >= 2 for one in told)
        if givers:
            self._average(givers, gives=steps > 0)
            self._committed_steps += 1
            session.save()
            self._inner.seed_step()
        return not all(one % 2 for one in told)

    @torch.no_grad()
    def _average(self, givers: int, *, gives: bool) -> None:
        """Average over the ranks that have taken a step since the last average. Other ranks contribute zeros."""
        parameters = self._parameters()
        buffers = [one for module in self._modules for one in module.value.buffers() if one.is_floating_point()]

        def change(flat: torch.Tensor) -> None:
            if not gives:
                flat.zero_()
            dist.all_reduce(flat)
            flat.div_(givers)

        self._flat.change([*parameters, *buffers], change)
        if self._outer is not None:
            self._step_outside(parameters)

    def _step_outside(self, parameters: list[nn.Parameter]) -> None:
        copy = self._copy()
        assert copy is not None and self._outer is not None, "a generation begins with a copy"
        before = self._at_last_average(copy)
        for parameter in parameters:
            parameter.grad = before[id(parameter)] - parameter
            parameter.copy_(before[id(parameter)])
        self._outer.value.step()
        for parameter in parameters:
            parameter.grad = None
