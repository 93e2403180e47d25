"""``hvd.DistributedOptimizer``: an optimizer whose steps use the average of all ranks' gradients.

Gradients are averaged just before the step, in one flat tensor per dtype in the optimizer's own order. No reference to
the group is kept, and if a peer is lost meanwhile, weights and moments stay as they were committed. There is no
overlap with the backward pass; use DistributedDataParallel for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from samebits.errors import UsageError
from samebits.horovod import collectives
from samebits.horovod.collectives import Average, Compression, NoneCompressor, ReduceOp, Sum, allreduce_
from samebits.training.group.transfer import FlatBuffers

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class _Averaging(torch.optim.Optimizer):
    """Methods added to a wrapped optimizer."""

    _averages: _Averages

    def synchronize(self) -> None:
        """Average the gradients now, for example to clip them, and then step inside :meth:`skip_synchronize`."""
        self._averages.run()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context manager in which steps use the gradients as they are, without averaging them."""
        self._averages.is_skipped = True
        try:
            yield
        finally:
            self._averages.is_skipped = False


class _Averages:
    """Averages the gradients of one optimizer over all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        compression: type[NoneCompressor],
        op: ReduceOp,
        *,
        sparse_as_dense: bool,
    ) -> None:
        self.is_skipped = False
        self._optimizer = optimizer
        self._compression = compression
        self._op = op
        self._sparse_as_dense = sparse_as_dense
        self._flat = FlatBuffers()

    def before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise UsageError(
                "hvd.DistributedOptimizer.step(closure): a closure computes gradients inside the step, after they "
                "were averaged. Fix: compute them before, and call step() without arguments"
            )
        if not self.is_skipped:
            self.run()

    @torch.no_grad()
    def run(self) -> None:
        if collectives.size() == 1:
            return
        self._flat.change(self._gradients(), lambda flat: allreduce_(flat, compression=self._compression, op=self._op))

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the same parameters on every rank; missing gradients are set to zero."""
        gradients: list[torch.Tensor] = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                elif parameter.grad.is_sparse:
                    if not self._sparse_as_dense:
                        raise UsageError(
                            "hvd.DistributedOptimizer: a gradient is sparse (nn.Embedding(sparse=True)). Fix: "
                            "create the optimizer with sparse_as_dense=True"
                        )
                    parameter.grad = parameter.grad.to_dense()
                gradients.append(parameter.grad)
        return gradients


def DistributedOptimizer(
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[NoneCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    *,
    sparse_as_dense: bool = False,
) -> AnyOptimizer:
    """Make this optimizer average all ranks' gradients before each step, and return the same object.

    Args:
        optimizer: an optimizer of any class; its steps take no closure.
        named_parameters: checked for duplicate names, otherwise ignored.
        compression: ``Compression.fp16`` sends gradients in 16 bits.
        backward_passes_per_step: has no effect: gradients are averaged when ``step()`` is called, after any number of
            backward passes.
        op: ``Average`` or ``Sum``.
        sparse_as_dense: convert sparse gradients to dense ones.
    """
    names = [name for name, _ in named_parameters or ()]
    if len(names) != len(set(names)):
        raise UsageError(
            "hvd.DistributedOptimizer: named_parameters gives a name twice. Fix: give each parameter its own name"
        )
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step={backward_passes_per_step}: expected 1 or more")
    if op not in (Average, Sum):
        raise UsageError(f"hvd.DistributedOptimizer(op={op.value}): expected hvd.Average or hvd.Sum")
    if isinstance(optimizer, _Averaging):
        raise UsageError(
            "hvd.DistributedOptimizer was given an optimizer that it has wrapped already. Fix: wrap it once"
        )
    kind = type(optimizer)
    averaging = cast(Any, optimizer)
    averaging.__class__ = type(
        kind.__name__, (_Averaging, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__}
    )
    averaging._averages = averages = _Averages(optimizer, compression, op, sparse_as_dense=sparse_as_dense)
    handle = optimizer.register_step_pre_hook(averages.before_step)
    # Runs before a state's own hook: while gradients are averaged, the weights are still those of the last commit.
    averaging._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)
    return optimizer
