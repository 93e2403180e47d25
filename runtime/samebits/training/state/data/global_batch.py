"""Keep the bits of a global batch's gradient equal at any world size.

Gradients are summed in the order of a binary tree over the micro-batches' numbers, as in RFC 6962, section 2.1, not in
the order of the ranks. Each rank computes a contiguous block of micro-batches and sums the subtrees that lie within its
block. Every rank then sums the rest of the tree from these subtrees. The same values are therefore added in the same
order at any world size.
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
from samebits.training.sharding.pieces import is_distributed
from samebits.training.state import rng
from samebits.training.state.data.sampler import ElasticSampler

TreeNode = tuple[int, int]
"""A subtree: the micro-batches from the first number up to, but not including, the second."""


# ---- the tree


def split_of(node: TreeNode) -> int:
    """Return the index at which a tree node is split: after the largest power of two that leaves a remainder."""
    low, high = node
    return low + (1 << (high - low - 1).bit_length() - 1)


def subtrees_within(node: TreeNode, block: TreeNode) -> list[TreeNode]:
    """Return the largest subtrees of ``node`` that lie within a block, from left to right."""
    low, high = max(node[0], block[0]), min(node[1], block[1])
    if low >= high:
        return []
    if (low, high) == node:
        return [node]
    middle = split_of(node)
    return subtrees_within((node[0], middle), block) + subtrees_within((middle, node[1]), block)


def block_of(rank: int, world_size: int, count: int) -> TreeNode:
    """Return the block of micro-batches that one rank computes. Block sizes differ by at most one."""
    return rank * count // world_size, (rank + 1) * count // world_size


def sum_of(node: TreeNode, parts: Mapping[TreeNode, torch.Tensor]) -> torch.Tensor:
    """Compute a node's sum from the sums of its subtrees, reusing their memory.

    Args:
        node: the node to sum.
        parts: disjoint subtrees that together make up the node.
    """
    if node in parts:
        return parts[node]
    middle = split_of(node)
    return sum_of((node[0], middle), parts).add_(sum_of((middle, node[1]), parts))


class BlockSum:
    """Running sums of the subtrees in one rank's block, which hold few tensors at a time."""

    def __init__(self, count: int, block: TreeNode) -> None:
        self._wanted = subtrees_within((0, count), block) if count else []
        self._parts: dict[TreeNode, torch.Tensor] = {}

    def add(self, number: int, value: torch.Tensor) -> None:
        """Add the next micro-batch's tensor, whose memory is reused."""
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
        """Return the sums of the block's subtrees from left to right, once all micro-batches have been added."""
        return [self._parts[node] for node in self._wanted]


def sum_over_ranks(
    sums: Sequence[torch.Tensor],
    count: int,
    length: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Sum over the tree on every rank. A collective.

    Each rank sums one shard of all ranks' subtrees; then the ranks exchange the shards. The memory of ``sums`` is
    reused.

    Args:
        sums: the result of this rank's :meth:`BlockSum.sums`, possibly empty; 1-D tensors of the same length, dtype and
            device.
        count: micro-batches of all ranks.
        length: elements of each sum.
        dtype, device: those of the sums.
        group: the ranks to sum over, in the order of their blocks; None: all.
    """
    root, world_size = (0, count), context.get_world_size() if group is None else group.size()
    blocks = [block_of(rank, world_size, count) for rank in range(world_size)]
    nodes = [subtrees_within(root, block) for block in blocks]
    if world_size == 1:
        return sum_of(root, dict(zip(nodes[0], sums, strict=True)))
    shard = -(-length // world_size)
    mine = torch.zeros(world_size, len(sums), shard, dtype=dtype, device=device)
    for place, one in enumerate(sums):
        padded = torch.nn.functional.pad(one, (0, world_size * shard - length))
        mine[:, place] = padded.view(world_size, shard)
    theirs = torch.empty(sum(map(len, nodes)), shard, dtype=dtype, device=device)
    dist.all_to_all_single(
        theirs.view(-1),
        mine.view(-1),
        [len(of) * shard for of in nodes],
        [len(sums) * shard] * world_size,
        group=group,
    )
    parts = dict(zip([node for of in nodes for node in of], theirs, strict=True))
    total = torch.empty(world_size * shard, dtype=dtype, device=device)
    dist.all_gather(list(total.view(world_size, shard)), sum_of(root, parts), group=group)
    return total[:length]


# ---- for the training loop


class GlobalBatch(Sampler[list[int]]):
    """A batch sampler that keeps the global batch, and the bits of its gradient, equal at any world size.

    Each global batch is split into micro-batches, which are distributed among the present ranks. Gradient and loss have
    the same bits at any world size if each micro-batch is computed by the same kernels, on one kind of device and with
    the same number of threads (OMP_NUM_THREADS). Random numbers are seeded for each micro-batch. BatchNorm statistics
    are not equal: a rank keeps the statistics of its own micro-batches. Do not wrap the model in
    DistributedDataParallel: this class computes the sum, in float32 or better, at about twice the cost of DDP's ring.
    ``TorchState(…, global_batch=…)`` gives the same guarantee to a loop with DistributedDataParallel, and includes
    BatchNorm statistics.

    Args:
        sampler: the data position; also pass it to the state.
        parameters: the parameters whose gradients are summed, except those without ``requires_grad``.
        size: samples per global batch; the last batch of an epoch may have fewer.
        micro: samples per micro-batch; the last one in a global batch may have fewer.

    Raises:
        UsageError: a size is invalid, no parameter needs a gradient, or a parameter is sharded.

    Example::

        sampler = samebits.ElasticSampler(data, seed=5)
        batches = samebits.GlobalBatch(sampler, model.parameters(), size=32, micro=8)
        loader = DataLoader(data, batch_sampler=batches)
        state = samebits.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)

        @samebits.elastic.run
        def train(state):
            while state.epoch < 2:
                for step in batches.steps(loader):
                    optimizer.zero_grad()
                    for inputs, labels in step:
                        step.backward(F.mse_loss(model(inputs), labels))
                    loss = step.reduce()  # over all 32 samples
                    optimizer.step()
                    state.commit()
                state.epoch += 1
                sampler.set_epoch(state.epoch)

        train(state)
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
        self._shares: deque[list[int]] = deque()  # samples of the steps that a loader has fetched and that are not done
        self._parameters = [one for one in parameters if one.requires_grad]
        if not self._parameters:
            raise UsageError("GlobalBatch has no parameter that needs a gradient. Fix: give it model.parameters()")
        self._require_whole()

    def _require_whole(self) -> None:
        if any(is_distributed(one) or one.is_meta for one in self._parameters):
            raise UsageError(
                "GlobalBatch sums whole gradients over all ranks, but the given parameters are sharded "
                "(fully_shard, parallelize_module, a pipeline). Fix: leave GlobalBatch out, and give the state "
                "an ElasticSampler"
            )

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's remaining micro-batches of the epoch, each as a list of sample indices."""
        if self.sampler.split is not None:
            raise UsageError(
                "GlobalBatch is used with a state that has global_batch=…, and both divide the samples. Fix: leave one "
                "of them out"
            )
        self._require_whole()  # the stages of a pipeline are known once the first generation has begun
        self._shares.clear()
        return self._lists(self.sampler.rest_of_epoch())  # eagerly: the state seeds its generators before a step

    def _lists(self, order: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(order), self.size):
            batch = order[start : start + self.size]
            low, high = self._block(len(batch))
            self._shares.append(batch[low * self.micro : high * self.micro])
            for number in range(low, high):
                yield batch[number * self.micro : (number + 1) * self.micro]

    def take_share(self) -> list[int]:
        """Return this rank's samples of the next step that a loader has already fetched."""
        return self._shares.popleft() if self._shares else []

    def __len__(self) -> int:
        """Return the number of micro-batches that this rank still has in the epoch."""
        counts = (high - low for low, high in map(self._block, self._sizes()))
        return sum(counts)

    def steps(self, loader: Iterable[Any]) -> Iterator[Step]:
        """Iterate over the optimizer steps left in the epoch.

        Each step yields this rank's micro-batches. ``step.backward(loss)`` adds a micro-batch's gradients;
        ``step.reduce()`` sums them over all ranks into ``.grad`` and returns the loss of the global batch.

        Args:
            loader: a DataLoader with this object as its ``batch_sampler``.
        """
        sizes = self._sizes()
        given = iter(loader)
        for size in sizes:
            yield Step(self, given, size, self._block(size))

    def _sizes(self) -> list[int]:
        left = len(self.sampler.dataset) - self.sampler.consumed
        return [min(self.size, left - start) for start in range(0, left, self.size)]

    def _block(self, size: int) -> TreeNode:
        return block_of(context.get_rank(), context.get_world_size(), self.count_of(size))

    def count_of(self, size: int) -> int:
        """Return the number of micro-batches in ``size`` samples."""
        return -(-size // self.micro)

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients are summed."""
        return self._parameters


class Step:
    """One optimizer step. Iterate over it to get this rank's micro-batches; there may be none."""

    def __init__(self, batches: GlobalBatch, given: Iterator[Any], size: int, block: TreeNode) -> None:
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
            rng.seed_with(name)  # for a dataset that draws numbers in this process
            self._require_closed()
            self._is_open = True
            for parameter in self._batches.parameters:
                parameter.grad = None
            given = next(self._given)
            rng.seed_with(f"{name}/forward")  # a prefetching loader may have drawn numbers meanwhile
            yield given
        self._require_closed()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute a micro-batch's gradient and add it to the sum.

        Args:
            loss: a scalar, the mean over the micro-batch.
        """
        if not self._is_open:
            raise UsageError("call step.backward() once for each micro-batch that the step yields")
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
        """Set every parameter's gradient to that of the global batch, and return the batch's mean loss.

        A collective: all ranks call it once per step, even without a micro-batch. It also advances the sampler.

        Raises:
            UsageError: a micro-batch was skipped.
        """
        if self._next != self._block[1] or self._is_open:
            raise UsageError(
                f"step.reduce() was called after only {self._next - self._block[0]} of "
                f"{self._block[1] - self._block[0]} micro-batches. "
                "Fix: iterate over the step, and call step.backward(loss) for each micro-batch"
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
            raise UsageError("a micro-batch was skipped. Fix: call step.backward(loss) for each, without accumulating")

    def _total(self) -> torch.Tensor:
        length = sum(one.numel() for one in self._batches.parameters) + 1
        return sum_over_ranks(self._sum.sums(), self._count, length, **self._kind())

    def _kind(self) -> dict[str, Any]:
        """Return the dtype and device of the sums. A rank without a micro-batch must use the same."""
        parameters = self._batches.parameters
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in parameters), torch.float32)
        return {"dtype": dtype, "device": parameters[0].device}
