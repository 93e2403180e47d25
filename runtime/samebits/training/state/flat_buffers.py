"""Copy many tensors into one flat tensor, so that a single collective can process all of them.

There is one flat tensor per dtype and device, and each tensor always has the same position in it, so sums have the same
bits. If the operation fails, no tensor is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_Kind = tuple[torch.dtype, torch.device]


class FlatBuffers:
    """Reusable memory for flattening one list of tensors."""

    def __init__(self) -> None:
        self._flat: dict[_Kind, torch.Tensor] = {}

    @torch.no_grad()
    def change(self, tensors: Sequence[torch.Tensor], change: Callable[[torch.Tensor], object]) -> None:
        """Apply ``change`` to the flattened tensors and copy the results back. If it raises, no tensor is changed."""
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
