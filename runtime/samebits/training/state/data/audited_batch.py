"""Keep one micro-batch of a DistributedDataParallel module so that another rank can recompute its local gradient.

A local gradient depends only on the weights, which are equal on all ranks, and on inputs, buffers, generators and the
outputs' gradients. A hook on a parameter sees its gradient before DDP reduces it. Nothing here raises into the user's
forward or backward pass: a value that cannot be kept is recorded as a problem.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samebits.errors import CheckpointError
from samebits.training.state import generators, rng, snapshot
from samebits.training.state.data import batch_bytes
from samebits.training.state.generators import Generators

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(slots=True)
class _KeptBatch:
    inputs: tuple[Any, ...]  # positional and keyword arguments
    buffers: dict[str, torch.Tensor]
    generators: bytes
    modes: bytes  # per module: whether it is in training mode
    autocast: tuple[bool, str, bool]  # whether it is on, its dtype, and whether casts are cached
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # the outputs' gradients, by position
    digests: dict[int, int] = field(default_factory=dict)  # digests of the parameters' gradients, by position
    outputs: int = 0  # digest of the outputs
    has_outputs: bool = False
    problem: str = ""

    def keep_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Keep the gradient of an output."""
        if place in self.gradients:
            raise ValueError("several backward passes go through one forward pass")
        self.gradients[place] = batch_bytes.copied(gradient)

    def keep_digest(self, place: int, gradient: torch.Tensor) -> None:
        """Store the digest of one parameter's complete local gradient."""
        if gradient.layout is not torch.strided:
            raise ValueError("one of its gradients is sparse")
        if place in self.digests:
            raise ValueError("several backward passes go through one forward pass")
        self.digests[place] = _digest(gradient)

    def packed(self, most_bytes: int) -> bytearray:
        """Return the batch encoded for sending."""
        gradients = {place: self.gradients[place] for place in sorted(self.gradients)}
        return batch_bytes.pack(
            {"inputs": self.inputs, "buffers": self.buffers, "gradients": gradients},
            {
                "trained": sorted(self.digests),
                "generators": self.generators,
                "modes": self.modes,
                "autocast": list(self.autocast),
            },
            most_bytes,
        )

    def hook(self, keep: Callable[[int, torch.Tensor], None], place: int) -> Callable[[torch.Tensor], None]:
        """Return a tensor hook that records the gradient, never changes it, and never raises."""

        def keep_or_tell(gradient: torch.Tensor | None) -> None:
            try:
                if gradient is not None:  # None if the tensor got no gradient
                    keep(place, gradient)
            except Exception as error:
                self.problem = str(error)

        return keep_or_tell


@dataclass(frozen=True, slots=True)
class Computed:
    """The digests of a local gradient, one per parameter in the order of :func:`names_of`; 0 means no gradient.

    The last entry is the digest of the model's outputs if a gradient of an output is not finite, else 0. If the loss is
    NaN, all gradients are NaN regardless of the outputs, so the outputs must be compared, too. With finite gradients,
    they are not compared, because their low bits may depend on the memory alignment of the inputs.
    """

    digests: tuple[int, ...]

    def value(self) -> int:
        """Return a 63-bit digest of the complete gradient."""
        return xxhash.xxh3_64_intdigest(msgpack.packb(self.digests)) >> 1

    def first_other(self, other: Computed) -> int:
        """Return the index of the first parameter whose gradient differs."""
        pairs = zip(self.digests, other.digests, strict=True)
        return next((place for place, (one, its) in enumerate(pairs) if one != its), 0)


class AuditedBatch:
    """Stores forward passes of a wrapped module so that another rank can recompute their gradients.

    Args:
        wrapper: the wrapper of the module.
        wants: returns whether to store this rank's next forward pass.
    """

    def __init__(self, wrapper: DistributedDataParallel, wants: Callable[[], bool]) -> None:
        self._wrapper = wrapper
        self.module: nn.Module = wrapper.module
        self._wants = wants
        self._batch: _KeptBatch | None = None
        self._is_again = False
        self._outputs_again = 0  # digest of the outputs that were recomputed
        self._on_parameters: list[Any] = []
        self._hooks = [
            self.module.register_forward_pre_hook(self._before, with_kwargs=True),
            self.module.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Stop keeping batches."""
        self._drop()
        for hook in self._hooks:
            hook.remove()

    def take(self, most_bytes: int) -> tuple[bytearray, Computed] | str:
        """Return the stored batch, encoded for sending, with its gradient digests; or the reason why there is none."""
        batch = self._batch
        self._drop()
        if batch is None:
            return "its module was not called with gradients, or only in compiled code"
        if batch.problem or not batch.digests or not batch.gradients:
            return batch.problem or "its last forward pass had no backward pass"
        count = len(_parameters(self.module))
        outputs = 0 if _are_finite(batch.gradients) else batch.outputs
        digests = (*(batch.digests.get(place, 0) for place in range(count)), outputs)
        try:
            return batch.packed(most_bytes), Computed(digests)
        except (CheckpointError, TypeError, ValueError, OverflowError) as error:
            return f"its inputs cannot be sent ({error})"

    def compute_again(self, packed: memoryview) -> Computed:
        """Recompute another rank's batch without changing this rank's buffers, generators or gradients.

        Raises:
            Exception: whatever the module raises; ValueError if the bytes are not a batch.
        """
        self._is_again = True
        try:
            digests, is_finite = compute_again(self.module, packed)
            return Computed((*digests, 0 if is_finite else self._outputs_again))
        finally:
            self._is_again = False

    # ---- hooks

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._is_again or not torch.is_grad_enabled():
            return
        if not self._wants():
            if self._batch is not None:  # left by a skipped step, as with a GradScaler
                self._drop()
            return
        if not self._wrapper.require_backward_grad_sync:  # only the last part of an accumulated gradient is audited
            return
        is_second = self._batch is not None and not self._batch.digests
        self._drop()
        self._batch = batch = _KeptBatch((), {}, b"", _modes(module), _autocast_now(_kind_of(module)))
        if is_second:
            batch.problem = "its module is called several times before a backward pass"
            return
        if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
            batch.problem = "its SyncBatchNorm computes with all ranks"
            return
        try:
            batch.inputs = batch_bytes.copy_of((args, kwargs))
            batch.buffers = {name: one.detach().clone() for name, one in module.named_buffers()}
            batch.generators = _generators_now()
        except Exception as error:
            batch.problem = f"its inputs cannot be kept ({error})"
            return
        for place, parameter in enumerate(_parameters(module).values()):
            self._on_parameters.append(parameter.register_hook(batch.hook(batch.keep_digest, place)))

    def _after(self, module: nn.Module, _: object, outputs: Any) -> Any:
        batch = self._batch
        if self._is_again and not torch.compiler.is_compiling():
            self._outputs_again = _digest_of_outputs(outputs)
        if torch.compiler.is_compiling() or self._is_again or batch is None or batch.has_outputs or batch.problem:
            return None
        batch.has_outputs = True
        batch.outputs = _digest_of_outputs(outputs)
        differentiable = [(place, one) for place, one in enumerate(_tensors(outputs)) if one.requires_grad]
        if len(differentiable) == 1:
            ((place, output),) = differentiable
            output.register_hook(batch.hook(batch.keep_gradient, place))
            return None
        # One output may be computed from another. Return copies, which receive only gradients from outside the
        # module.
        try:
            return _given_out(outputs, batch)
        except Exception as error:
            batch.problem = f"its outputs cannot be followed ({error})"
            return None

    def _drop(self) -> None:
        """Discard the stored batch, if there is one."""
        self._batch = None
        for hook in self._on_parameters:
            hook.remove()
        self._on_parameters = []


def names_of(module: nn.Module) -> list[str]:
    """Return the names of the trained parameters, in order, and a name for the outputs."""
    return [*_parameters(module), "the outputs"]


def compute_again(module: nn.Module, packed: memoryview) -> tuple[list[int], bool]:
    """Recompute a batch, as :meth:`AuditedBatch.compute_again` does.

    Returns:
        The digests of the parameters' gradients, and whether the outputs' gradients are finite.
    """
    device = next(module.parameters()).device
    tree, about = batch_bytes.unpack(packed, device)
    (args, kwargs), buffers, gradients = tree["inputs"], tree["buffers"], tree["gradients"]
    is_on, dtype, keeps_casts = about["autocast"]
    before, modes = rng.capture(), _modes(module)
    try:
        _set_modes(module, about["modes"])
        rng.restore(generators.unpack(about["generators"]))
        with (
            _with_buffers(module, buffers),
            torch.enable_grad(),
            torch.autocast(device.type, _AUTOCAST[dtype], enabled=is_on, cache_enabled=keeps_casts),
        ):
            outputs = list(_tensors(module(*args, **kwargs)))
        found = torch.autograd.grad(
            [outputs[place] for place in gradients],
            list(_parameters(module).values()),
            list(gradients.values()),
            allow_unused=True,
        )
    finally:
        _set_modes(module, modes)
        rng.restore(before)
    if any(found[place] is None for place in about["trained"]):
        raise ValueError(
            "a gradient was computed in a different way, such as torch.utils.checkpoint with use_reentrant=True"
        )
    return [0 if one is None else _digest(one) for one in found], _are_finite(gradients)


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: one for name, one in module.named_parameters() if one.requires_grad}


def _digest(gradient: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(snapshot.bytes_of(gradient)) | 1


def _are_finite(gradients: Mapping[int, torch.Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in gradients.values())


def _digest_of_outputs(outputs: Any) -> int:
    """Return a digest of the outputs that have gradients; 0 if one cannot be hashed."""
    digest = xxhash.xxh3_64()
    for one in _tensors(outputs):
        if one.requires_grad:
            if one.layout is not torch.strided:
                return 0
            digest.update(snapshot.bytes_of(one))
    return digest.intdigest() | 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _given_out(outputs: Any, batch: _KeptBatch) -> Any:
    """Copy each output tensor that has a gradient, and record the gradients of the copies with hooks."""
    place = -1

    def given(value: Any) -> Any:
        nonlocal place
        if isinstance(value, torch.Tensor):
            place += 1
            if not value.requires_grad:
                return value
            one = value.clone()
            if one.stride() != value.stride():
                raise ValueError("one of its outputs is expanded or has gaps")
            one.register_hook(batch.hook(batch.keep_gradient, place))
            return one
        if isinstance(value, Mapping):
            changed: Any = copy.copy(value)
            for key, item in value.items():
                changed[key] = given(item)
            return changed
        if isinstance(value, (list, tuple)):
            items = [given(item) for item in value]
            make: Callable[[list[Any]], Any] = getattr(type(value), "_make", type(value))
            return make(items)
        return value

    return given(outputs)


def _generators_now() -> bytes:
    now = Generators()
    now.look()
    return now.packed()


def _modes(module: nn.Module) -> bytes:
    return bytes(one.training for one in module.modules())


def _set_modes(module: nn.Module, modes: bytes) -> None:
    for one, is_training in zip(module.modules(), modes, strict=True):
        one.training = bool(is_training)


@contextlib.contextmanager
def _with_buffers(module: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace the module's buffers inside the ``with`` block, then put the original tensors back."""
    names = {id(buffer): name for name, buffer in module.named_buffers()}
    own = [(one._buffers, dict(one._buffers)) for one in module.modules()]
    if set(names.values()) != set(values):
        raise ValueError(f"its buffers differ from the other rank's: {sorted(set(names.values()) ^ set(values))}")
    try:
        for buffers, before in own:
            for name, buffer in before.items():
                if buffer is not None:
                    buffers[name] = values[names[id(buffer)]]
        yield
    finally:
        for buffers, before in own:
            buffers.clear()
            buffers.update(before)


def _kind_of(module: nn.Module) -> str:
    return next(module.parameters()).device.type


def _autocast_now(kind: str) -> tuple[bool, str, bool]:
    dtype = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return torch.is_autocast_enabled(kind), dtype, torch.is_autocast_cache_enabled()
