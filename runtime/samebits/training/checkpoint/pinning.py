"""Host memory that an accelerator copies into by itself: pages that stay where they are, known to its driver.

Here live making such pages known, and a copy that goes by the accelerator's own engine beside what it computes. Never
here: whose memory it is, what is in it. The one idea: the slot itself is what the driver is told of, so a tensor's way
into the slot is one copy. Only NVIDIA's driver takes memory that exists already; others copy through a buffer of
theirs, as all do where the driver refuses: slower, with the same bytes.

(No accelerator was at hand when this was written: its tests hold what is asked of torch, in which order.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from samebits.service import log


class PinnedMemory:
    """Memory as the driver knows it, until :meth:`release`; without effect where no NVIDIA device copies into it.

    Args:
        memory: bytes on the CPU, whose pages stay mapped until :meth:`release`.
        device: the one whose tensors are copied into it.
    """

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._address = 0
        if device.type != "cuda" or memory.nbytes == 0:
            return
        error = int(_driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if error:
            log.warn(
                f"checkpoints are copied through the driver's own buffer, which is slower: {memory.nbytes} bytes could "
                f"not be pinned (cudaHostRegister: error {error}); see `ulimit -l`"
            )
            return
        self._address = memory.data_ptr()

    def release(self) -> None:
        """The driver forgets it; before the memory goes. Without effect the second time."""
        address, self._address = self._address, 0
        if address:
            _driver().cudaHostUnregister(address)


def _driver() -> Any:
    cudart: Any = torch.cuda.cudart  # untyped
    return cudart()


def fetch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy accelerator tensors to the host, beside what the accelerator computes; returns when they are there."""
    streams = {device: _stream_of(device) for device in {source.device for source in sources}}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))  # what was launched before may still change them
        with stream, torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                if source.device == device:
                    target.copy_(source, non_blocking=True)
    for stream in streams.values():
        stream.synchronize()


@functools.cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
