"""Store what torch.compile produces in a folder, so that later processes need not compile again.

The folder's name depends on everything that compiled code depends on. If the cache cannot be used, a warning is logged
and training continues without it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import xxhash

from samebits import config
from samebits.config import Settings
from samebits.errors import StoreError
from samebits.service import log
from samebits.store import private

VARIABLE = "COMPILE_CACHE_PATH"
MOST_BYTES = 8 * 2**30
"""Size limit for all versions together, in bytes."""

KEPT_FOR_S = 24 * 3600.0
"""Seconds after its last use during which a file is never removed; another process may be about to load it."""


def folder_of(root: Path, version: Iterable[str]) -> Path:
    """Return the folder for code compiled by this version, creating it if missing.

    Args:
        version: everything that compiled code depends on and that its own keys do not contain; the first item appears
            in the folder's name.

    Raises:
        StoreError: one of the two folders cannot be created, or another user owns it or can write to it.
    """
    facts = list(version)
    digest = xxhash.xxh3_64_hexdigest("\0".join(facts).encode())
    private.make_folder(root, VARIABLE)
    folder = root / f"{facts[0]}-{digest}"
    private.make_folder(folder, VARIABLE)
    return folder


def prune(root: Path, now_s: float, most_bytes: int = MOST_BYTES) -> int:
    """Remove the least recently used files until at most ``most_bytes`` are left; return the bytes removed.

    Files that cannot be removed stay. ``now_s`` is in seconds since the epoch.
    """
    files = sorted(_files(root))
    excess = sum(size for _, size, _ in files) - most_bytes
    removed = 0
    for used_s, size, path in files:
        if removed >= excess or used_s > now_s - KEPT_FOR_S:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            removed += size
    return removed


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):
                found = path.lstat()
                yield max(found.st_mtime, found.st_atime), found.st_size, path


_CACHE = "cache"


def keep_compiled_code(settings: Settings, device: torch.device, *, prunes: bool) -> None:
    """Use COMPILE_CACHE_PATH, if set, and OP_COMPILE on devices that compile operators (Ascend).

    Args:
        settings: this process's settings.
        device: the device it computes on.
        prunes: whether this process prunes the folder; one process of the job does.
    """
    root = settings.compile_cache_path
    if settings.op_compile is not None:
        _choose_operators(settings.op_compile, device)
    if root is None:
        return
    try:
        folder = folder_of(root.absolute(), _version(device))
    except StoreError as error:
        log.warn(f"compiled code is not kept: {error}")
        return
    config.keep_compiled_in(folder)
    if settings.op_compile == _CACHE:
        config.keep_operators_in(folder / "ascend")
    if prunes and (removed := prune(root, time.time())):
        log.say(f"{root}: removed {removed / 2**20:.0f} MiB of the least recently used compiled code")


def _choose_operators(op_compile: str, device: torch.device) -> None:
    """Set torch_npu's compile mode.

    CANN reads the location of its cache when the device is first used.
    """
    if device.type != "npu":
        log.warn(f"OP_COMPILE={op_compile} applies only to Ascend; this process trains on {device.type}. Fix: unset it")
        return
    torch.get_device_module(device).set_compile_mode(jit_compile=op_compile == _CACHE)


def _version(device: torch.device) -> list[str]:
    """Return everything that affects compiled code but may be missing in its own cache keys; torch's version first."""
    chip = platform.processor() or platform.machine()
    if device.type == "cuda":
        chip = f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return [
        f"torch-{torch.__version__}",
        str(torch.version.git_version),
        platform.python_implementation() + platform.python_version(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        device.type,
        chip,
        triton,
    ]
