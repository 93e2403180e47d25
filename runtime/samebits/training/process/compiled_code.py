"""Where this process keeps what torch.compile makes, so that whoever comes after it need not compile again.

Here lives what compiled code depends on. Never here: the folder's bound and who may write in it (``store``). The one
idea: a cache that cannot be used is told of, and training goes on without it.
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
"""Of all versions together."""

KEPT_FOR_S = 24 * 3600.0
"""What was written or read since then stays in any case: another process may be about to load it."""


def folder_of(root: Path, version: Iterable[str]) -> Path:
    """The folder for what this version compiles, made where it is missing.

    Args:
        root: COMPILE_CACHE_PATH.
        version: all that compiled code depends on and does not name by itself: the first is shown in the name.

    Raises:
        StoreError: one of the two is another user's, or one that others may write, or cannot be made.
    """
    facts = list(version)
    digest = xxhash.xxh3_64_hexdigest("\0".join(facts).encode())
    private.make_folder(root, VARIABLE)
    folder = root / f"{facts[0]}-{digest}"
    private.make_folder(folder, VARIABLE)
    return folder


def prune(root: Path, now_s: float, most_bytes: int = MOST_BYTES) -> int:
    """Remove what was not used for longest until no more than ``most_bytes`` are left; how many bytes went.

    What cannot be removed stays. ``now_s`` is in seconds since the epoch.
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


__all__ = ["keep_compiled_code"]

_CACHE = "cache"


def keep_compiled_code(settings: Settings, device: torch.device, *, prunes: bool) -> None:
    """Use COMPILE_CACHE_PATH, if that is set, from now on, and OP_COMPILE where operators are compiled (Ascend).

    Args:
        settings: the process's.
        device: that it computes on.
        prunes: whether this process, as one of all, removes what was not used for long where there is too much.
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
        log.say(f"{root}: removed {removed / 2**20:.0f} MiB of compiled code that was not used for longest")


def _choose_operators(op_compile: str, device: torch.device) -> None:
    """As torch_npu's ``set_compile_mode`` has it; CANN reads where it may keep them when the device is first used."""
    if device.type != "npu":
        log.warn(f"OP_COMPILE={op_compile} is Ascend's alone; this process trains on {device.type}. Fix: unset it")
        return
    torch.get_device_module(device).set_compile_mode(jit_compile=op_compile == _CACHE)


def _version(device: torch.device) -> list[str]:
    """All that compiled code depends on and its own keys may not name, torch first."""
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
