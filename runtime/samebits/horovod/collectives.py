"""``hvd.init``, ``rank`` and ``size``; ``allreduce``, ``allgather`` and ``broadcast`` for tensors and objects.

All collectives run on the default group of the current generation, so a lost peer ends each of them, and nothing is
kept between generations. A reduction sums in the group's own order, which is the same in every run of the same world
size, and divides afterwards. None of the calls passes gradients on: a tensor that requires a gradient is refused,
because part of the loss would silently have no effect on training.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from samebits.errors import CheckpointError, UsageError
from samebits.store.checkpoint import tree as plain
from samebits.store.checkpoint.point_format import TensorPart
from samebits.training.group import device, transfer
from samebits.training.process import context
from samebits.training.state import snapshot
from samebits.training.state.base_state import source_of_sync
from samebits.training.state.handlers import OptimizerHandler


class ReduceOp(enum.Enum):
    """The operations that combine the ranks' tensors."""

    AVERAGE = "Average"
    SUM = "Sum"
    MIN = "Min"
    MAX = "Max"


Average, Sum, Min, Max = ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX

_TORCH_OPS = {Average: dist.ReduceOp.SUM, Sum: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX}


class NoneCompressor:
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send, and its original dtype."""
        return tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a received tensor in its original dtype."""
        return tensor.to(dtype)


class FP16Compressor(NoneCompressor):
    """Sends floating point tensors in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to send, and its original dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """The available compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Return the elementwise average (sum, minimum, maximum) over all ranks as a new tensor without a gradient.

    Args:
        tensor: this rank's values.
        average: Horovod's older form of ``op``: whether to average or to sum.
        name: ignored; calls are matched by their order.
        compression: how the tensor is sent.
        op: the reduction; Average by default.

    Raises:
        UsageError: the tensor requires a gradient, which Horovod's call would compute.
    """
    _refuse_gradient("allreduce", "all_reduce", tensor)
    return allreduce_(tensor.detach().clone(), average, name, compression, op)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
) -> torch.Tensor:
    """Reduce in place, as :func:`allreduce` does. An average of integers is rounded towards zero."""
    del name
    if op is None:
        op = Sum if average is False else Average
    with torch.no_grad():
        sent, dtype = compression.compress(tensor.contiguous())
        dist.all_reduce(sent, op=_TORCH_OPS[op])
        if sent is not tensor:
            tensor.copy_(compression.decompress(sent, dtype))
        if op is Average:
            tensor.div_(size(), rounding_mode=None if tensor.is_floating_point() else "trunc")
    return tensor


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return all ranks' tensors concatenated along the first dimension, which may differ between ranks.

    Raises:
        UsageError: as for :func:`allreduce`.
    """
    del name
    _refuse_gradient("allgather", "all_gather", tensor)
    tensor = tensor.detach().contiguous()
    lengths = transfer.gather(tensor.shape[0], tensor.device)
    padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    return torch.cat([one[:length] for one, length in zip(gathered, lengths, strict=True)])


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Return the root's tensor as a new tensor.

    Raises:
        UsageError: as for :func:`allreduce`.
    """
    _refuse_gradient("broadcast", "broadcast", tensor)
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Broadcast in place, as :func:`broadcast` does."""
    del name
    with torch.no_grad():
        sent = tensor.contiguous()
        dist.broadcast(sent, rank_of_root(root_rank))
        if sent is not tensor:
            tensor.copy_(sent)
    return tensor


def _refuse_gradient(call: str, function: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor requires a gradient, in a call that is an autograd function in Horovod.

    Horovod's in-place calls are not autograd functions.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"hvd.{call} gives no gradient, and this tensor requires one. Fix: call it on tensor.detach() or under "
            "torch.no_grad(), or, if a loss depends on its result, use "
            f"torch.distributed.nn.functional.{function}"
        )


def barrier() -> None:
    """Return when every rank has called this."""
    dist.barrier()


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Return the root's value, sent as msgpack and never pickled.

    The value may consist of numbers, strings, bytes, lists, tuples, dicts and tensors.

    Raises:
        UsageError: the root's value holds something else.
    """
    del name
    root = rank_of_root(root_rank)
    packed = pack(obj, "hvd.broadcast_object") if rank() == root else None
    return unpack(transfer.broadcast(packed, root, context.current("hvd.broadcast_object").device))


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return every rank's value in rank order; accepts the same types as :func:`broadcast_object`."""
    del name
    device = context.current("hvd.allgather_object").device
    packed = torch.frombuffer(pack(obj, "hvd.allgather_object"), dtype=torch.uint8).to(device)
    lengths = transfer.gather(len(packed), device)
    gathered = transfer.on_host(allgather(packed)).split(lengths)
    return [unpack(memoryview(one.numpy().data)) for one in gathered]


def pack(obj: Any, call: str) -> memoryview:
    """Encode a value as bytes for another rank."""
    try:
        tree, parts = snapshot.split(obj, "object")
        named = [(one.name, one.dtype, one.shape, bytes(one.data)) for one in parts]
        return memoryview(bytearray(plain.encode({"tree": tree, "parts": named})))
    except CheckpointError as error:
        raise UsageError(f"{call} sends only plain values and tensors, and never pickles: {error}") from None


def unpack(packed: memoryview) -> Any:
    """Decode the result of :func:`pack`."""
    content: Any = plain.decode(bytes(packed))
    parts = [
        TensorPart(name, dtype, tuple(shape), memoryview(bytearray(data)))
        for name, dtype, shape, data in content["parts"]
    ]
    return snapshot.join(content["tree"], {one.name: one for one in parts})


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0) -> None:
    """Set the tensors of ``model.state_dict()`` or ``model.named_parameters()`` to the root's values on every rank.

    Before ``elastic.run`` this has no effect: ``elastic.run`` makes its state equal on all ranks.
    """
    items = params.items() if isinstance(params, Mapping) else list(params)
    wrong = [name for name, one in items if one is not None and not isinstance(one, torch.Tensor)]
    if wrong:
        raise UsageError(
            f"hvd.broadcast_parameters: {', '.join(wrong)} is not a tensor. Fix: use hvd.broadcast_object for it"
        )
    if not has_group():
        return
    for _, tensor in sorted(items, key=lambda item: item[0]):
        if tensor is not None:
            broadcast_(tensor, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Set the optimizer's state to the root's on every rank, without taking a step.

    Before ``elastic.run`` this has no effect.
    """
    if not has_group():
        return
    handler, root = OptimizerHandler(optimizer), rank_of_root(root_rank)
    is_root = rank() == root
    packed = pack(handler.contents(), "hvd.broadcast_optimizer_state") if is_root else None
    received = transfer.broadcast(packed, root, context.current("hvd.broadcast_optimizer_state").device)
    if not is_root:
        handler.load(unpack(received))


# ---- ``hvd.init``, ``rank``, ``size``, and which rank is the root
#
# Between ``init`` and ``elastic.run``, a process has the rank of its future seat but no group yet. A script may
# therefore scale its learning rate and name its files, but not communicate.


def init() -> None:
    """Take this process's role and, in a worker, wait for a seat: ``samebits.init()``.

    With ``ENABLE_RECOVERY=0`` this also creates the process group.
    """
    context.init()
    process = context.current("hvd.init()")
    if not dist.is_initialized():
        dist.init_process_group(device.backend_of(process.device))


def shutdown() -> None:
    """Do nothing: a worker leaves the job when its process exits.

    The exit status shows whether this was intended.
    """


def is_initialized() -> bool:
    """Return whether :func:`init` was called."""
    try:
        context.current("hvd.is_initialized()")
    except UsageError:
        return False
    return True


def rank() -> int:
    """Return this process's rank. Before ``elastic.run``, it is the rank that its seat will have."""
    return context.get_rank()


def size() -> int:
    """Return the number of workers. Before ``elastic.run``, it is the job's intended number."""
    return context.get_world_size()


def local_rank() -> int:
    """Return this process's index among its host's workers."""
    return context.get_local_rank()


def local_size() -> int:
    """Return the number of workers on this host.

    Before ``elastic.run``, it is the number of all workers, as if they shared one host.
    """
    generation = context.current("hvd.local_size()").generation
    return size() if generation is None else generation.local_world_size


def has_group() -> bool:
    """Return whether this process is part of a generation and can reach the other ranks."""
    return context.current("a collective").generation is not None


def rank_of_root(rank: int) -> int:
    """Return the rank to use as root. In a state's ``sync``, 0 means the rank with the newest commit, as in Horovod."""
    source = source_of_sync()
    return rank if source is None or rank != 0 else source
