"""The floors and the peers' ways to save a state to disk and load it, each as in its own documentation.

The ways are memcpy, write + fsync, ``torch.save``, torch.distributed.checkpoint (DCP) and safetensors, all made
durable, and none overwrites its last file. Every way gets the same state, reports when training may continue, and
reports when the bytes are on disk.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from samebits.training.state import snapshot

WRITE_BYTES: Final = 8 * 1024 * 1024
ALIGNMENT_BYTES: Final = 64
State = Mapping[str, Any]


class Way(Protocol):
    """One way to save a state."""

    def prepare(self) -> None:
        """Remove the last save's files, which is not measured."""

    def save(self) -> Callable[[], None]:
        """Save; return when training may continue. The returned function waits until everything is durable."""

    def load(self) -> None:
        """Load the last save into the existing tensors."""


class MemoryCopy:
    """Floor: every tensor copied into memory that was touched before; an accelerator's, into pinned memory.

    Attributes:
        memory: the memory into which they are copied, one after the other.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._live = list(tensors.values())
        sizes = [-(-one.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for one in self._live]
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=not self._live[0].is_cpu)
        places = zip(self.memory.split(sizes), self._live, strict=True)
        self._copies = [place[: one.nbytes].view(one.dtype).view(one.shape) for place, one in places]

    def prepare(self) -> None:
        """Do nothing: there is nothing to remove."""

    @torch.no_grad()
    def save(self) -> Callable[[], None]:
        torch._foreach_copy_(self._copies, self._live, non_blocking=True)
        arrive()
        return _is_durable

    @torch.no_grad()
    def load(self) -> None:
        torch._foreach_copy_(self._live, self._copies, non_blocking=True)


class Files:
    """A folder of one way with at most one save in it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "state"
        folder.mkdir()

    def prepare(self) -> None:
        for entry in self._folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def publish(self, temporary: Path) -> None:
        """Sync the file, rename it to its final name, and sync the folder."""
        for path, rename in ((temporary, True), (self._folder, False)):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
            if rename:
                temporary.rename(self.path)

    @property
    def temporary(self) -> Path:
        return self._folder / "temporary"


class DiskWrite(Files):
    """Floor: the same bytes, from one place in memory, written to one file, and fsync."""

    def __init__(self, folder: Path, memory: torch.Tensor) -> None:
        super().__init__(folder)
        self._data = snapshot.bytes_of(memory)

    def save(self) -> Callable[[], None]:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        rest = self._data
        while rest:
            rest = rest[os.write(descriptor, rest[:WRITE_BYTES]) :]
        os.fsync(descriptor)
        os.close(descriptor)
        return _is_durable


class BareWriter(Files):
    """Floor of what training loses meanwhile: as many bytes, written directly and durably by a separate process."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        super().__init__(folder)
        self._size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        super().prepare()
        if self._process is None:
            command = [sys.executable, "-m", "benchmarks.workers.bare_writer", str(self._size_bytes), str(self.path)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._hear()

    def save(self) -> Callable[[], None]:
        assert self._process is not None and self._process.stdin is not None, "prepared"
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._hear

    def _hear(self) -> None:
        assert self._process is not None and self._process.stdout is not None, "prepared"
        if not self._process.stdout.readline():
            raise OSError("the bare writer has ended; its error stands above")


class TorchSave(Files):
    """``torch.save`` to a temporary file + fsync + rename."""

    def __init__(self, folder: Path, state: State, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(folder)
        self._state, self._tensors = state, tensors

    def save(self) -> Callable[[], None]:
        torch.save(self._state, self.temporary)
        self.publish(self.temporary)
        return _is_durable

    @torch.no_grad()
    def load(self) -> None:
        loaded = flat(torch.load(self.path, weights_only=True))
        torch._foreach_copy_(list(self._tensors.values()), [loaded[name] for name in self._tensors])


class Safetensors(Files):
    """``safetensors.torch.save_file`` to a temporary file + fsync + rename."""

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(folder)
        self._tensors = tensors

    def save(self) -> Callable[[], None]:
        from safetensors.torch import save_file

        save_file(dict(self._tensors), self.temporary)
        self.publish(self.temporary)
        return _is_durable

    @torch.no_grad()
    def load(self) -> None:
        from safetensors.torch import load_file

        loaded = load_file(self.path)
        torch._foreach_copy_(list(self._tensors.values()), [loaded[name] for name in self._tensors])


class Dcp(Files):
    """``torch.distributed.checkpoint.save``, which syncs its files itself."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder)
        self._state = dict(state)

    def save(self) -> Callable[[], None]:
        dcp.save(self._state, checkpoint_id=self.path, no_dist=True)
        return _is_durable

    def load(self) -> None:
        dcp.load(self._state, checkpoint_id=self.path, no_dist=True)


class DcpAsync(Files):
    """``async_save`` with a stager that keeps its memory, its fastest mode."""

    def __init__(self, folder: Path, state: State) -> None:
        super().__init__(folder)
        self._state = dict(state)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self) -> Callable[[], None]:
        saving = dcp.async_save(self._state, checkpoint_id=self.path, no_dist=True, async_stager=self._stager)
        assert isinstance(saving, concurrent.futures.Future)

        def wait() -> None:
            saving.result()

        return wait


def ways(folder: Path, state: State) -> dict[str, Any]:
    """Return all installed ways by name."""
    tensors = flat(state)
    copy = MemoryCopy(tensors)
    found = {
        "memcpy": copy,
        "write_fsync": DiskWrite(folder / "write_fsync", copy.memory),
        "bare_writer": BareWriter(folder / "bare_writer", copy.memory.nbytes),
        "torch_save": TorchSave(folder / "torch_save", state, tensors),
        "dcp": Dcp(folder / "dcp", state),
        "dcp_async": DcpAsync(folder / "dcp_async", state),
    }
    if importlib.util.find_spec("safetensors") is not None:
        found["safetensors"] = Safetensors(folder / "safetensors", tensors)
    return found


def flat(state: Any, path: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state by their path in it."""
    if isinstance(state, torch.Tensor):
        return {path: state}
    if not isinstance(state, Mapping):
        return {}
    return {
        name: one
        for key, value in state.items()
        for name, one in flat(value, f"{path}.{key}" if path else str(key)).items()
    }


def arrive() -> None:
    """Wait until an accelerator, if there is one, has finished its queued work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _is_durable() -> None:
    """Return at once, because the save is durable already."""
