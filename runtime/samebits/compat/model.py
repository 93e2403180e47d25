"""Run MindSpore's training loop over a PyTorch network, loss and optimizer, with ``samebits.Model``.

For any other loop, start from the one in docs/tutorials/recoverable-script.md, which recovers in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from samebits.compat.checkpoints import ModelCheckpoint
from samebits.errors import UsageError


class Callback(Protocol):
    """An object that is called after each step, such as :class:`samebits.LossMonitor`."""

    def step_end(self, step: int, loss: Any, epoch: int | None = None) -> Any:
        """Handle a completed step and its loss."""


class Model:
    """MindSpore's ``Model``, for a PyTorch module.

    Args:
        network: the module, not wrapped in DistributedDataParallel.
        loss_fn: called with the network's output and the labels; returns a one-element tensor.
        optimizer: an optimizer of the network's parameters.

    Example::

        sampler = samebits.ElasticSampler(data)
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        samebits.Model(model, F.mse_loss, optimizer).train(2, loader, samebits.LossMonitor(4))
    """

    def __init__(self, network: Any, loss_fn: Any, optimizer: Any) -> None:
        self._network, self._loss_fn, self._optimizer = network, loss_fn, optimizer

    def train(self, epoch: int, train_dataset: Any, callbacks: Callback | ModelCheckpoint | Sequence[Any] = ()) -> None:
        """Train until ``epoch`` epochs are complete, counted from the job's first start.

        Args:
            epoch: the total number of epochs.
            train_dataset: a DataLoader of (inputs, labels) with a :class:`samebits.ElasticSampler`.
            callbacks: objects with ``step_end(step, loss, epoch)``, called on every rank. A :class:`ModelCheckpoint`
                only provides its ``config``: the job saves the checkpoints.

        Raises:
            UsageError: the loader has another sampler or no batch size, or there are several ModelCheckpoints.
        """
        from samebits.integrations.epochs import train_epochs

        called = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
        saving = [one for one in called if isinstance(one, ModelCheckpoint)]
        if len(saving) > 1:
            raise UsageError(
                f"Model.train: found {len(saving)} ModelCheckpoint callbacks, expected at most one. Fix: pass one"
            )
        monitors = [one for one in called if not isinstance(one, ModelCheckpoint)]

        def step_end(step: int, loss: Any, number: int) -> None:
            for one in monitors:
                one.step_end(step, loss, number)

        train_epochs(
            self._network,
            self._loss_fn,
            self._optimizer,
            train_dataset,
            epochs=epoch,
            checkpoint=saving[0].config if saving else None,
            step_end=step_end,
        )
