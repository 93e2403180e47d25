"""Where this process keeps what torch.compile makes, so that whoever comes after it need not compile again.

Here lives what compiled code depends on. Never here: the folder's bound and who may write in it (``store``). The one
idea: a cache that cannot be used is told of, and training goes on without it.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time

import torch

from samebits import config
from samebits.config import Settings
from samebits.errors import StoreError
from samebits.service import log
from samebits.store import compile_cache

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
        folder = compile_cache.folder_of(root.absolute(), _version(device))
    except StoreError as error:
        log.warn(f"compiled code is not kept: {error}")
        return
    config.keep_compiled_in(folder)
    if settings.op_compile == _CACHE:
        config.keep_operators_in(folder / "ascend")
    if prunes and (removed := compile_cache.prune(root, time.time())):
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
