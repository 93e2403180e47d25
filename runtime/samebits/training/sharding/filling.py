"""Initialize a model that was built on the meta device, after its parameters have been sharded.

No process needs memory for the whole model. Random numbers are drawn for one whole parameter at a time, and each rank
keeps its shard, so the initial weights are the same over any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.errors import UsageError
from samebits.training.sharding import pieces

__all__ = ["allocate", "fill", "is_unfilled", "require_fillable"]


def is_unfilled(module: nn.Module) -> bool:
    """Return whether a parameter of the module has no memory yet."""
    return any(one.is_meta for one in module.parameters())


def require_fillable(
    name: str, module: nn.Module, is_apart: Callable[[torch.Tensor], bool] = pieces.is_distributed
) -> None:
    """Raise if a parameter on the meta device could not be initialized.

    Args:
        name, module: the module and its name in the state.
        is_apart: returns whether ranks hold different parts of a parameter.

    Raises:
        UsageError: the parameter is not sharded, or no known method gives it values.
    """
    for path, parameter in module.named_parameters():
        if parameter.is_meta and not is_apart(parameter):
            raise UsageError(
                f"{name}.{path} is on the meta device and not sharded. Fix: apply fully_shard() to the model, or call "
                "to_empty() and give it values before elastic.run"
            )
    for path, one in module.named_modules():
        has_own = any(parameter.is_meta for parameter in one.parameters(recurse=False))
        if has_own and not hasattr(one, "reset_parameters") and not _is_initialized_above(module, path):
            raise UsageError(
                f"{name}{path and '.'}{path} ({type(one).__name__}) is on the meta device and has no "
                "reset_parameters(). Fix: give the model a method init_weights() that fills all its parameters and "
                "buffers"
            )


def _is_initialized_above(module: nn.Module, path: str) -> bool:
    """Return whether a submodule, or a module that contains it, has ``init_weights()``."""
    parts = path.split(".") if path else []
    return any(
        hasattr(module.get_submodule(".".join(parts[:depth])), "init_weights") for depth in range(len(parts) + 1)
    )


def fill(module: nn.Module, own: Sequence[nn.Module], device: torch.device, drawn_from: torch.Tensor) -> None:
    """Allocate this rank's shards, and initialize them with ``init_weights()`` or ``reset_parameters()``.

    Args:
        module: the cut module; parameters that already have values are filled again in place.
        own: the parts of the module that this rank has; the others stay on the meta device.
        device: where to allocate parameters and buffers without memory.
        drawn_from: the initial state of torch's CPU generator for the draws; the generator itself is not changed.
    """
    for part in own:
        if is_unfilled(part):
            allocate(part, device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _WholeDraws():
        torch.set_rng_state(drawn_from)
        _initialize(module)


def _initialize(module: nn.Module) -> None:
    initialize: Any = getattr(module, "init_weights", None)
    if initialize is not None:
        initialize()
        return
    reset: Any = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    for child in module.children():
        _initialize(child)


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give a module's parameters and buffers new memory on a device. The parameter objects stay the same."""
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


class _WholeDraws(TorchDispatchMode):
    """Draws random numbers for a whole tensor, and keeps those of this rank's shard."""

    def __init__(self) -> None:
        initialize: Any = super().__init__  # untyped in torch
        initialize()

    def __torch_dispatch__(
        self,
        draw: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        named = options or {}
        tags: Any = getattr(draw, "tags", ())
        if torch.Tag.nondeterministic_seeded not in tags or not args or not _is_partial(args[0]):
            return draw(*args, **named)
        target = args[0]
        whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        draw(whole, *args[1:], **named)
        if not pieces.is_without_memory(target):
            pieces.local(target).copy_(pieces.Piece.of(target, "a parameter").cut(whole))
        return target


def _is_partial(target: Any) -> bool:
    return isinstance(target, torch.Tensor) and (pieces.is_distributed(target) or target.is_meta)
