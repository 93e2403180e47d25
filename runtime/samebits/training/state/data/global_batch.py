"""A global batch that stays the same when the world's size changes: its micro-batches are dealt out anew.

Here live which micro-batches a rank has, how their gradients are summed over all ranks, and the loop's side of both.
Never here: the data position, which is the sampler's. The one idea: the sum's order belongs to the micro-batches, not
to the ranks. It is a binary tree over their numbers (as in RFC 6962, section 2.1); each rank has a block of them in a
row, sums the subtrees that lie within its block, and the rest of the tree is summed, by everybody alike, from those.
Whatever the size, the same numbers are added in the same order: equal bits.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Sampler

from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.state import rng
from samebits.training.state.data.sampler import ElasticSampler

__all__ = ["GlobalBatch"]

Node = tuple[int, int]
"""A subtree: the micro-batches from the first number up to, and without, the second."""


# ---- the tree


def split_of(node: Node) -> int:
    """Where the tree divides this node: after the largest power of two of its micro-batches that leaves some over."""
    low, high = node
    return low + (1 << (high - low - 1).bit_length() - 1)


def subtrees_within(node: Node, block: Node) -> list[Node]:
    """The largest subtrees of ``node`` that lie within a block, from left to right."""
    low, high = max(node[0], block[0]), min(node[1], block[1])
    if low >= high:
        return []
    if (low, high) == node:
        return [node]
    middle = split_of(node)
    return subtrees_within((node[0], middle), block) + subtrees_within((middle, node[1]), block)


def block_of(rank: int, world_size: int, count: int) -> Node:
    """The micro-batches of one rank, of ``count``: as many as every other has, or one less."""
    return rank * count // world_size, (rank + 1) * count // world_size


def sum_of(node: Node, parts: Mapping[Node, torch.Tensor]) -> torch.Tensor:
    """The sum over a node, made of the subtrees that are there; these are used up.

    Args:
        parts: disjoint subtrees that together are the node.
    """
    if node in parts:
        return parts[node]
    middle = split_of(node)
    return sum_of((node[0], middle), parts).add_(sum_of((middle, node[1]), parts))


class BlockSum:
    """The sums of a block's subtrees, while its micro-batches come one after the other; few are held at a time."""

    def __init__(self, count: int, block: Node) -> None:
        self._wanted = subtrees_within((0, count), block) if count else []
        self._parts: dict[Node, torch.Tensor] = {}

    def add(self, number: int, value: torch.Tensor) -> None:
        """The next micro-batch's; the tensor is used up."""
        node = next(one for one in self._wanted if one[0] <= number < one[1])
        path = []
        while node != (number, number + 1):
            path.append(node)
            middle = split_of(node)
            node = (node[0], middle) if number < middle else (middle, node[1])
        self._parts[node] = value
        for above in reversed(path):
            halves = ((above[0], split_of(above)), (split_of(above), above[1]))
            if not all(half in self._parts for half in halves):
                return
            left, right = (self._parts.pop(half) for half in halves)
            self._parts[above] = left.add_(right)

    def sums(self) -> list[torch.Tensor]:
        """Of the block's subtrees, from left to right, once all of its micro-batches are in."""
        return [self._parts[node] for node in self._wanted]


# ---- the loop's side


class GlobalBatch(Sampler[list[int]]):
    """Global batches of a fixed size, in micro-batches that are dealt out to however many ranks there are.

    ::

        sampler = samebits.ElasticSampler(data, seed=5)
        batches = samebits.GlobalBatch(sampler, model.parameters(), size=256, micro=16)
        loader = DataLoader(data, batch_sampler=batches)
        state = samebits.elastic.TorchState(model, optimizer, sampler=sampler)
        ...
        for step in batches.steps(loader):
            optimizer.zero_grad()
            for inputs, labels in step:
                step.backward(F.cross_entropy(model(inputs), labels))
            loss = step.reduce()
            optimizer.step()
            state.commit()

    The gradient and the loss have the same bits in a world of any size, as long as the same kernels compute each
    micro-batch: on one kind of device, with as many threads (OMP_NUM_THREADS). Random numbers are drawn anew for each
    micro-batch. Not the same are batch statistics (BatchNorm), which a rank keeps of the micro-batches it had. The
    model is not wrapped in DistributedDataParallel: the sum is taken here, in float32 or better, and costs about twice
    what its ring costs.

    Args:
        sampler: the data position; it is part of the state.
        parameters: whose gradients are summed; those that need none are left out.
        size: samples of a global batch; the last of an epoch may have fewer.
        micro: samples of a micro-batch; the last of a global batch may have fewer.

    Raises:
        UsageError: the sizes make no sense.
    """

    def __init__(self, sampler: ElasticSampler, parameters: Iterable[nn.Parameter], *, size: int, micro: int) -> None:
        if not 1 <= micro <= size:
            raise UsageError(
                f"GlobalBatch(size={size}, micro={micro}): expected 1 ≤ micro ≤ size. Fix: micro is what one forward "
                "pass takes, size what one optimizer step does"
            )
        self.sampler = sampler
        self.size = size
        self.micro = micro
        self._shares: deque[list[int]] = deque()  # of the steps that a loader was given and that are not done
        self._parameters = [one for one in parameters if one.requires_grad]
        if not self._parameters:
            raise UsageError("GlobalBatch has no parameter that needs a gradient. Fix: give it model.parameters()")

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's micro-batches of all that is left of the epoch, as lists of indices: for a loader."""
        self._shares.clear()
        return self._lists(self.sampler.rest_of_epoch())  # at once: the state's own random numbers come before a step's

    def _lists(self, order: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(order), self.size):
            batch = order[start : start + self.size]
            low, high = self._block(len(batch))
            self._shares.append(batch[low * self.micro : high * self.micro])
            for number in range(low, high):
                yield batch[number * self.micro : (number + 1) * self.micro]

    def take_share(self) -> list[int]:
        """The samples that this rank has of the next step, as far as a loader was given them."""
        return self._shares.popleft() if self._shares else []

    def __len__(self) -> int:
        """How many micro-batches of the rest of the epoch are this rank's."""
        counts = (high - low for low, high in map(self._block, self._sizes()))
        return sum(counts)

    def steps(self, loader: Iterable[Any]) -> Iterator[Step]:
        """The optimizer steps that are left of the epoch.

        Args:
            loader: gives this rank's micro-batches, as a DataLoader with this as its ``batch_sampler`` does.
        """
        sizes = self._sizes()
        given = iter(loader)
        for size in sizes:
            yield Step(self, given, size, self._block(size))

    def _sizes(self) -> list[int]:
        left = len(self.sampler.dataset) - self.sampler.consumed
        return [min(self.size, left - start) for start in range(0, left, self.size)]

    def _block(self, size: int) -> Node:
        return block_of(context.get_rank(), context.get_world_size(), self.count_of(size))

    def count_of(self, size: int) -> int:
        """How many micro-batches so many samples are."""
        return -(-size // self.micro)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Those whose gradients are summed."""
        return self._parameters


class Step:
    """One optimizer step: iterating gives this rank's micro-batches of it, maybe none."""

    def __init__(self, batches: GlobalBatch, given: Iterator[Any], size: int, block: Node) -> None:
        self._batches = batches
        self._given = given
        self._size = size
        self._block = block
        self._count = batches.count_of(size)
        self._sum = BlockSum(self._count, block)
        self._next = block[0]
        self._is_open = False

    def __iter__(self) -> Iterator[Any]:
        sampler = self._batches.sampler
        for number in range(*self._block):
            first = sampler.consumed + number * self._batches.micro
            name = f"{sampler.seed}/{sampler.epoch}/{first}"
            rng.seed_with(name)  # for a dataset that draws in this process
            self._require_closed()
            self._is_open = True
            for parameter in self._batches.parameters:
                parameter.grad = None
            given = next(self._given)
            rng.seed_with(f"{name}/forward")  # whatever a loader that is ahead has drawn meanwhile
            yield given
        self._require_closed()

    def backward(self, loss: torch.Tensor) -> None:
        """Take in a micro-batch.

        Args:
            loss: a scalar, the mean over the micro-batch.
        """
        if not self._is_open:
            raise UsageError("step.backward() is called once for each micro-batch that the step gives")
        number, micro = self._next, self._batches.micro
        share = min(micro, self._size - number * micro) / self._size
        (loss * share).backward()
        grads = [
            torch.zeros_like(one).flatten() if one.grad is None else one.grad.flatten()
            for one in self._batches.parameters
        ]
        told = (loss.detach() * share).to(grads[0].device, torch.promote_types(loss.dtype, torch.float32)).reshape(1)
        self._sum.add(number, torch.cat([*grads, told]))
        self._next, self._is_open = number + 1, False

    def reduce(self) -> float:
        """Give every parameter the gradient of the whole global batch; the mean loss over it, on every rank.

        All ranks call it once a step, also one that had no micro-batch; the sampler counts the batch from then on.

        Raises:
            UsageError: a micro-batch was left out.
        """
        if self._next != self._block[1] or self._is_open:
            raise UsageError(
                f"step.reduce() after {self._next - self._block[0]} of {self._block[1] - self._block[0]} "
                "micro-batches. Fix: iterate over the step, and call step.backward(loss) for each"
            )
        total = self._total()
        offset = 0
        for parameter in self._batches.parameters:
            part = total[offset : offset + parameter.numel()]
            parameter.grad = part.view_as(parameter).to(parameter.dtype, copy=True)
            offset += parameter.numel()
        self._batches.sampler.record_samples(self._size, self._batches.take_share())
        return float(total[-1])

    def _require_closed(self) -> None:
        if self._is_open:
            raise UsageError(
                "a micro-batch was passed over. Fix: call step.backward(loss) for each, without accumulating"
            )

    def _total(self) -> torch.Tensor:
        """The sum over the tree: each rank sums a shard of it, from all ranks' subtrees, and they exchange shards."""
        sums, root = self._sum.sums(), (0, self._count)
        world_size = context.get_world_size()
        if world_size == 1:
            return sum_of(root, dict(zip(subtrees_within(root, self._block), sums, strict=True)))
        blocks = [block_of(rank, world_size, self._count) for rank in range(world_size)]
        nodes = [subtrees_within(root, block) for block in blocks]
        length = sum(one.numel() for one in self._batches.parameters) + 1
        shard = -(-length // world_size)
        kind = self._kind()
        mine = torch.zeros(world_size, len(sums), shard, **kind)
        for place, one in enumerate(sums):
            padded = torch.nn.functional.pad(one, (0, world_size * shard - length))
            mine[:, place] = padded.view(world_size, shard)
        theirs = torch.empty(sum(map(len, nodes)), shard, **kind)
        dist.all_to_all_single(
            theirs.view(-1),
            mine.view(-1),
            [len(of) * shard for of in nodes],
            [len(sums) * shard] * world_size,
        )
        parts = dict(zip([node for of in nodes for node in of], theirs, strict=True))
        total = torch.empty(world_size * shard, **kind)
        dist.all_gather(list(total.view(world_size, shard)), sum_of(root, parts))
        return total[:length]

    def _kind(self) -> dict[str, Any]:
        """dtype and device of the sums; the same on a rank that had no micro-batch."""
        parameters = self._batches.parameters
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in parameters), torch.float32)
        return {"dtype": dtype, "device": parameters[0].device}
