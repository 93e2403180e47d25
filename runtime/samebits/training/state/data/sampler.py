"""Choose the samples that each rank sees next, as a function of (seed, epoch, consumed).

``consumed`` is the number of samples that all ranks together have finished in this epoch. These three numbers are equal
on all ranks and are part of the state. A replacement therefore continues at the same position as the other ranks. After
a change of the world size, the remaining samples are divided among the new ranks, without repeating or skipping any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from samebits.errors import UsageError
from samebits.service import log
from samebits.training.group.calling_place import calling_place
from samebits.training.process import context


def filled_up(rest: list[int], order: list[int], parts: int) -> list[int]:
    """Pad ``rest`` with samples from the beginning of ``order`` to a multiple of ``parts``.

    A sample is repeated more than once only if there are fewer samples than parts.
    """
    filled = list(rest)
    while rest and (missing := -len(filled) % parts):
        filled += order[:missing]
    return filled


class Split(Protocol):
    """An alternative to the sampler's own division of samples among ranks."""

    def share_of(self, rest: list[int], order: list[int], name: str) -> list[int]:
        """Return this rank's samples of the rest of an epoch, in order.

        Args:
            rest: the epoch's unused samples.
            order: all samples of the epoch, used to fill up the last round.
            name: the name of the epoch, from which seeds are derived.
        """

    def consumed_by_all(self, taken: int) -> int:
        """Convert this rank's number of recorded samples to the number that all ranks have finished."""

    def length(self, left: int) -> int:
        """Return the sampler's length while ``left`` samples are unused."""

    def iterated(self) -> None:
        """Handle a new iteration over the samples."""


class ElasticSampler(Sampler[int]):
    """A sampler that divides an epoch's samples among the ranks and tracks how many all ranks have used.

    The order is a permutation drawn from (seed, epoch). Rank r of n takes every n-th of the remaining samples. The last
    round is filled up from the beginning of the order, so that all ranks take the same number of steps.

    Args:
        dataset: anything with a length.
        shuffle: draw a new permutation every epoch; False: keep the dataset's order.
        seed: the same integer on every rank.

    Example::

        sampler = samebits.ElasticSampler(data, seed=5)
        loader = DataLoader(data, batch_size=16, sampler=sampler)
        state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

        @samebits.elastic.run
        def train(state):
            while state.epoch < 2:
                for number, (inputs, labels) in enumerate(loader):
                    optimizer.zero_grad()
                    F.mse_loss(model(inputs), labels).backward()
                    sampler.record_batch(number, batch_size=16)
                    optimizer.step()
                    state.commit()
                state.epoch += 1
                sampler.set_epoch(state.epoch)

        train(state)
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.consumed = 0
        self.place: tuple[int, int] | None = None  # in a mesh, this rank's part of the data and the number of parts
        self.split: Split | None = None  # set by a state with virtual workers
        self.is_guarded = False  # whether a training function runs with this sampler in its state
        self.on_iterate: Callable[[bool], None] | None = None  # called with True if an epoch continues
        self.on_record: Callable[[Sequence[int]], None] | None = None  # called with the samples that this rank finished
        self._empty_epoch: int | None = None  # the last epoch that was iterated without samples left
        self._began_at = 0
        self._taken = 0  # samples that this rank recorded since the iteration began
        self._batch_size = 0  # the largest batch size recorded since then
        self._share: Sequence[int] = ()  # this rank's samples of the iteration
        self._given = 0  # how many of them a loader has fetched
        self.was_told = False  # whether samples were ever recorded
        self.found_empty = False  # whether an epoch's end was iterated, as after a loss at its last batch
        self._is_told_of_early = False

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. If ``epoch`` is the current one, as after a recovery, the position is kept.

        Raises:
            UsageError: inside ``elastic.run``, the epoch is neither the current nor the next one. A counter that is not
                part of the state restarts at 0 with its process.
        """
        if self.is_guarded and epoch not in (self.epoch, self.epoch + 1):
            caller = sys._getframe(1)
            where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            raise UsageError(
                f"{where} calls sampler.set_epoch({epoch}), but the state's sampler is in epoch {self.epoch}: inside "
                "samebits.elastic.run only that epoch or the next is allowed. Fix: pass an epoch that is kept in the "
                "state; for a framework that counts epochs itself, use a loader whose sampler it does not move"
            )
        if epoch != self.epoch:
            self._warn_of_unrecorded_samples()
            self.epoch = epoch
            self._go_to(0)

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has used a batch. Call this before ``state.commit()``.

        Args:
            batch_idx: number of the batch, from 0 in each iteration over the loader.
            batch_size: the loader's batch size; for the last batch of an epoch, its own smaller size is also accepted.

        Raises:
            UsageError: this rank's loader has not yielded that many samples yet.
        """
        if not self._share and len(self.dataset):
            self._warn_of_an_early_iteration()
        self._batch_size = max(self._batch_size, batch_size)
        taken = batch_idx * self._batch_size + batch_size
        self._require_possible(batch_idx, batch_size, taken)
        self._record(taken, self._share[self._taken : taken])

    def record_indices(self, indices: Collection[int]) -> None:
        """Record that this rank has used these samples, and every other rank the same number."""
        self._record(self._taken + len(indices), [int(index) for index in indices])

    def record_samples(self, count: int, own: Sequence[int] = ()) -> None:
        """Record that all ranks together have used the next ``count`` samples of :meth:`rest_of_epoch`.

        Args:
            count: samples of all ranks.
            own: this rank's samples among them.
        """
        self.was_told = True
        if self.on_record is not None:
            self.on_record(own)
        self._go_to(min(self.consumed + count, len(self.dataset)))

    def rest_of_epoch(self) -> list[int]:
        """Return the indices of this epoch's unused samples in order, the same on every rank."""
        self._go_to(self.consumed)
        if self.on_iterate is not None:
            self.on_iterate(self.consumed > 0)
        rest = self._order()[self.consumed :]
        self.found_empty = bool(len(self.dataset)) and not rest
        if self.found_empty:
            self._warn_of_a_second_time()
        return rest

    def _require_possible(self, batch_idx: int, batch_size: int, taken: int) -> None:
        """Raise if more samples were recorded than the loader has yielded.

        Typical causes are a global instead of a local batch size, or a wrong batch number. The last batch of an epoch
        may be smaller than its recorded size.
        """
        is_at_end = self._given == len(self._share)
        if self._share and taken > self._given and not (is_at_end and taken - batch_size < self._given):
            raise UsageError(
                f"{calling_place()}: record_batch({batch_idx}, {batch_size}) records {taken} samples of this "
                f"iteration, but this rank's loader has yielded only {self._given}. Fix: pass the loader's own "
                "batch_size, and a batch_idx that counts from 0 in every iteration, as enumerate(loader) does"
            )

    def _record(self, taken: int, indices: Sequence[int]) -> None:
        self.was_told = True
        if self.on_record is not None:
            self.on_record(indices)
        self._taken = taken
        by_all = taken * self._part_count() if self.split is None else self.split.consumed_by_all(taken)
        self.consumed = min(self._began_at + by_all, len(self.dataset))

    def __iter__(self) -> Iterator[int]:
        rank, world_size = self._parts()
        if self.split is not None:
            self.split.iterated()
        rest = self.rest_of_epoch()
        order = rest if self.consumed == 0 else self._order()
        if self.split is None:
            self._share = filled_up(rest, order, world_size)[rank::world_size]
        else:
            self._share = self.split.share_of(rest, order, f"{self.seed}/{self.epoch}")
        self._given = 0
        return self._give(self._share)

    def _give(self, share: Sequence[int]) -> Iterator[int]:
        for number, index in enumerate(share, 1):
            if share is self._share:  # False if another iteration has begun
                self._given = number
            yield index

    def __len__(self) -> int:
        """Return the number of samples that this rank takes in the current iteration, or in one that begins now.

        With virtual workers, this is the number that each virtual worker takes, so that ``len(loader)`` is the number
        of optimizer steps at any world size.
        """
        if self.split is not None:
            return self.split.length(len(self.dataset) - self._began_at)
        return -(-(len(self.dataset) - self._began_at) // self._part_count())

    def _parts(self) -> tuple[int, int]:
        """Return this rank's index and the number of parts into which the samples are divided."""
        return self.place or (context.get_rank(), context.get_world_size())

    def _part_count(self) -> int:
        """Return the number of parts.

        It also works in a spare, whose script may use it to compute the number of steps.
        """
        return self.place[1] if self.place is not None else context.get_world_size()

    def _go_to(self, consumed: int) -> None:
        self.consumed = self._began_at = consumed
        self._taken = self._batch_size = self._given = 0
        self._share, self.found_empty = (), False

    def _warn_of_a_second_time(self) -> None:
        """Warn if a finished epoch is iterated a second time.

        Once is normal after a recovery; twice is an endless loop.
        """
        if self._empty_epoch == self.epoch:
            log.warn(
                f"epoch {self.epoch} has no samples left and is iterated again. Fix: call sampler.set_epoch() with "
                "the next epoch after each one"
            )
        self._empty_epoch = self.epoch

    def _warn_of_unrecorded_samples(self) -> None:
        """Warn if an iteration is complete but not all of its samples were recorded; a recovery would repeat them."""
        missing = len(self._share) - self._taken
        is_whole = bool(self._share) and self._given == len(self._share)
        if self.is_guarded and is_whole and self._taken > 0 and missing >= self._batch_size:
            log.warn(
                f"{calling_place()}: of the {len(self._share)} samples that this rank got in epoch {self.epoch}, "
                f"record_batch() recorded {self._taken}: after a loss, {missing} samples of each rank are repeated. "
                "Fix: sampler.record_batch(batch, batch_size) for every batch, with the loader's own batch_size"
            )

    def _warn_of_an_early_iteration(self) -> None:
        """Warn about an iterator created before ``set_epoch()``, whose order a recovery would not repeat."""
        if not self._is_told_of_early:
            self._is_told_of_early = True
            log.warn(
                f"{calling_place()}: this batch is from an iteration that began before epoch {self.epoch}: after a "
                "loss, the epoch has other batches. Fix: call sampler.set_epoch() before iter(loader), even to look at "
                "a single batch"
            )

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator()
        generator.manual_seed(((self.seed << 20) + self.epoch) % 2**63)
        order: list[int] = torch.randperm(len(self.dataset), generator=generator).tolist()
        return order

    @property
    def position(self) -> str:
        """Seed, epoch and position as text, for comparison and display."""
        return f"seed {self.seed}, epoch {self.epoch}, {self.consumed} consumed"

    def state_dict(self) -> dict[str, Any]:
        """Return seed, epoch and position."""
        return {"seed": self.seed, "epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position from ``state_dict()``. It takes effect in a loader's next iteration."""
        self.seed, self.epoch = state["seed"], state["epoch"]
        self._go_to(state["consumed"])
