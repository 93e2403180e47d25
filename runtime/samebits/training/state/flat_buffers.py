"""Lay many tensors end to end in one tensor, so that one collective serves all of them.

There is one flat tensor per dtype and device, in the order in which the tensors are given. The same tensors always have
the same positions, so their sums have the same bits. Either all of the tensors are changed, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["FlatBuffers"]

_Kind = tuple[torch.dtype, torch.device]


class FlatBuffers:
    """Memory for one list of tensors, reused from call to call."""

    def __init__(self) -> None:
        self._flat: dict[_Kind, torch.Tensor] = {}

    @torch.no_grad()
    def change(self, tensors: Sequence[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
        """Let ``change`` alter the flattened tensors; if it raises, all tensors stay as they are."""
        kinds: dict[_Kind, list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        laid_out = {kind: self._laid_out(kind, alike) for kind, alike in kinds.items()}
        for kind, (_, views) in laid_out.items():
            torch._foreach_copy_(views, kinds[kind])
        for flat, _ in laid_out.values():
            change(flat)
        for kind, (_, views) in laid_out.items():
            torch._foreach_copy_(kinds[kind], views)

    def _laid_out(self, kind: _Kind, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sizes = [tensor.numel() for tensor in tensors]
        flat = self._flat.get(kind)
        if flat is None or flat.numel() != sum(sizes):
            flat = self._flat[kind] = torch.empty(sum(sizes), dtype=kind[0], device=kind[1])
        return flat, [part.view(one.shape) for part, one in zip(flat.split(sizes), tensors, strict=True)]
