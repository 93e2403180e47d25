"""Choose this process's device and its ``torch.distributed`` backend, and test whether the device still works.

Everything goes through ``torch.accelerator``. Ascend needs an additional package, which is imported only if the device
is requested or the package is installed. A missing driver is reported in one sentence.

One problem cannot be handled here: with ``torch_npu`` installed and CANN missing, ``import torch`` itself fails,
because torch loads every installed device backend. To prevent this, set ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` in the
environment before Python starts; this module then imports ``torch_npu`` if needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from samebits import config
from samebits.errors import DeviceLostError, SettingsError
from samebits.service import log
from samebits.store import private
from samebits.training import torch_private
from samebits.training.group.breaker import run_aside

__all__ = [
    "KINDS",
    "backend_of",
    "busy_watch",
    "choose_device",
    "claim",
    "is_capturing",
    "local_rank",
    "require_sound",
    "restart",
    "settle",
    "stop",
    "use",
]

KINDS: Final = ("cpu", "cuda", "npu")
"""The device types a process can be asked to train on."""

SOUND_WITHIN_S: Final = 5.0
"""Seconds after which a device that does not answer counts as lost to this process."""
FREE_WITHIN_S: Final = 30.0
"""Seconds to wait for a device that a killed process may still hold."""
_FREE_POLL_S: Final = 0.1
_UNSHARED: Final = ("nccl", "nccl-legacy", "hccl")
"""Backends that refuse two processes on one device."""
_LOOKED_AT: Final = 1024
_CAPTURING: Final = "is_current_stream_capturing"
_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_NPU_PACKAGE: Final = "torch_npu"
_INSTALL_CANN: Final = (
    "source CANN's set_env.sh before starting (or install CANN), "
    "or set DEVICE=cpu and TORCH_DEVICE_BACKEND_AUTOLOAD=0 to train without the NPU"
)


def choose_device(requested: str | None = None, local_rank: int = 0) -> torch.device:
    """Return the device of this process.

    Args:
        requested: ``cpu``, ``cuda``, ``npu``, or another package's device type; None selects the available accelerator
            if its backend is known, else the CPU.
        local_rank: this process's rank on its host, 0-based; the device index is this modulo the number of devices.

    Raises:
        SettingsError: an unknown device type, or one that this process cannot use.
    """
    if requested is not None and requested not in KINDS and torch_private.registered_backend(requested) is None:
        raise SettingsError(
            [f"DEVICE={requested!r} is not a device type; expected one of {', '.join(KINDS)}. Fix: export DEVICE=cpu"]
        )
    if requested == "cpu":
        return torch.device("cpu")
    if requested == "npu" or (requested is None and _npu_is_installed()):
        _import_npu()
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (requested is not None and found.type != requested) or _backend(found) is None:
        if requested is None:
            return torch.device("cpu")
        raise SettingsError([_unusable(requested, found)])
    return torch.device(found.type, local_rank % torch.accelerator.device_count())


def claim(
    preferred: torch.device,
    path: Path,
    host: str,
    backend: str,
    *,
    refuses: bool = True,
    within_s: float = FREE_WITHIN_S,
) -> torch.device | None:
    """Reserve a device that no other process of the job on this host uses, until this process ends.

    The result is ``preferred`` if it is free, else the first free device after it. A reservation is a lock on one byte
    of a file, which the kernel releases however the process ends, and which children do not inherit.

    Args:
        preferred: a device of the type.
        path: the file.
        host: this host's id, since hosts may share the folder.
        backend: what :func:`backend_of` returned.
        refuses: whether to raise if all devices stay in use; otherwise only log it, since a job that trains must not
            end because a replacement has no device.
        within_s: how long to wait if all devices are in use and the backend refuses two ranks on one device.

    Returns:
        the device; None if none can be reserved: on a CPU, without the folder, and if processes share devices.

    Raises:
        SettingsError: all of several devices stayed in use, and the backend refuses two ranks on one device.
    """
    if preferred.type == "cpu" or not path.parent.is_dir():
        return None
    count, first = torch.accelerator.device_count(), preferred.index or 0
    indices = [(first + number) % count for number in range(count)]
    waits = backend in _UNSHARED and count > 1
    until_s = time.monotonic() + within_s
    try:
        descriptor = _reservations(path)
        while True:
            for index in indices:
                if _reserve(descriptor, f"{host} {preferred.type} {_visible(preferred.type, index)}"):
                    return torch.device(preferred.type, index)
            if not waits or time.monotonic() >= until_s:
                break
            time.sleep(_FREE_POLL_S)
    except OSError:  # the file system has no locks
        return None
    if backend not in _UNSHARED:
        return None
    gloo = " or, with slower collectives, set COLLECTIVE_BACKEND=gloo" if preferred.type == "cuda" else ""
    problem = (
        f"no {preferred.type} device is left for this process: other processes of the job use all {count} on this "
        f"host, and {backend} refuses two ranks on one device. A spare needs a device of its own, too. Fix: start "
        f"fewer workers or spares on this host{gloo}"
    )
    if count == 1 or not refuses:  # a tool such as MPS may be meant to share a single device
        log.warn(problem)
        return None
    raise SettingsError([problem])


@functools.cache
def _reservations(path: Path) -> int:
    """Return the file's descriptor.

    It is never closed, because closing any descriptor of the file would release the locks.
    """
    return private.open_to_append(path)


def _reserve(descriptor: int, name: str) -> bool:
    offset = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest())  # file offsets are below 2**63
    with contextlib.suppress(BlockingIOError, PermissionError):  # fcntl(2): either means that it is locked
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        return True
    return False


def _visible(device_type: str, index: int) -> str:
    """Return a device's index or name on the host, because this process may see only some of the devices."""
    names = (config.visible_devices(device_type) or "").split(",")
    return names[index].strip() if index < len(names) and names[index].strip() else str(index)


def local_rank(device: torch.device, counted: int) -> int:
    """Return LOCAL_RANK: the device's index, with which scripts select their device; on a CPU, ``counted``.

    A device belongs to its process as long as the process lives: a spare that takes over rank 0 keeps its own device.
    """
    return counted if device.index is None else device.index


def use(device: torch.device) -> None:
    """Make this accelerator the calling thread's current device.

    A new thread begins with device 0. A library that restores "the current device" there, as NCCL's abort does, creates
    a context of hundreds of MB on device 0 in every process.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def settle(device: torch.device) -> None:
    """Wait until all work queued on the accelerator's current stream is done."""
    torch.accelerator.current_stream(device).synchronize()


def busy_watch(device: torch.device) -> Callable[[], bool]:
    """Return a function that reports, in any thread, whether this thread's current stream has unfinished work."""
    if device.type == "cpu":
        return lambda: False
    stream = torch.accelerator.current_stream(device)

    def is_busy() -> bool:
        try:
            return not stream.query()
        except RuntimeError:  # an error of the device persists; other checks report it
            return False

    return is_busy


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's stream is being captured into a graph; False for devices without graphs."""
    asked = None if device.type == "cpu" else getattr(torch.get_device_module(device), _CAPTURING, None)
    return asked is not None and bool(asked())


def require_sound(device: torch.device) -> None:
    """Test this accelerator: allocate, compute and copy on a separate stream.

    A CUDA error such as an illegal access persists in its process: every later call fails or hangs, even after the
    group is formed again. A device whose memory is full passes the test, since its driver has answered.

    Raises:
        DeviceLostError: the test failed, or took longer than ``SOUND_WITHIN_S`` seconds.
    """
    if device.type == "cpu":
        return
    outcome: Future[float] = Future()

    def look() -> None:
        try:
            with _testing_stream(device):
                outcome.set_result(float(torch.ones(_LOOKED_AT, device=device).sum().item()))
        except torch.OutOfMemoryError:
            outcome.set_result(float(_LOOKED_AT))
        except RuntimeError as error:
            outcome.set_exception(error)

    run_aside(look, "samebits-device-check")
    try:
        found = outcome.result(SOUND_WITHIN_S)
        problem = "" if found == _LOOKED_AT else f"the sum of {_LOOKED_AT} ones was {found:g}"
    except TimeoutError:
        problem = f"a sum of {_LOOKED_AT} numbers was not there within {SOUND_WITHIN_S:g} s"
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
    if problem:
        raise DeviceLostError(
            f"{device} no longer works in this process: {problem}. A lost peer does not cause this, so the process "
            "gives up its seat. Fix: nothing to do; a spare or a restart takes over; if it recurs, have this device "
            "checked"
        )


@functools.cache
def _testing_stream(device: torch.device) -> torch.Stream:
    """Return the stream that all tests share. New streams for each test would exhaust torch's pool of 32."""
    return torch.Stream(device)


def backend_of(device: torch.device, wanted: str | None = None) -> str:
    """Return the name of the ``torch.distributed`` backend for devices of this type.

    Args:
        device: a device of the type.
        wanted: COLLECTIVE_BACKEND: ``gloo``, or None for the device type's own backend.

    Raises:
        SettingsError: no backend is known for the device, or the wanted backend does not support it.
    """
    if wanted == dist.Backend.GLOO and device.type != "cpu":
        if device.type not in dist.Backend.backend_capability[dist.Backend.GLOO]:
            problem = f"COLLECTIVE_BACKEND='gloo' takes no tensors of {device.type}"
            raise SettingsError([f"{problem}; unset COLLECTIVE_BACKEND, or set DEVICE=cpu"])
        return wanted
    found = _backend(device)
    if found is None:
        raise SettingsError(
            [f"DEVICE={device.type!r} has no known backend; expected one of {', '.join(KINDS)}. Fix: export DEVICE=cpu"]
        )
    return found


def stop(device: torch.device) -> bool:
    """Stop all work on the device if its backend cannot abort collectives (Ascend), and return whether it was stopped.

    May be called from any thread. Until :func:`restart`, every use of the device fails with FORCE STOP.
    """
    stop_device = getattr(torch.get_device_module(device), "stop_device", None)
    if stop_device is None:
        return False
    stop_device(device.index or 0)
    return True


def restart(device: torch.device) -> None:
    """Make a stopped device usable again; its memory is unchanged."""
    torch.get_device_module(device).restart_device(device.index or 0)


def _backend(device: torch.device) -> str | None:
    if device.type == "cuda" and config.wants_nccl2() is None:
        return torch_private.first_nccl()
    return _BACKENDS.get(device.type) or torch_private.registered_backend(device.type)


def _unusable(requested: str, found: torch.device | None) -> str:
    there = f"torch {torch.__version__} finds {found.type!r}" if found else f"torch {torch.__version__} finds none"
    fix = "install a torch built for CUDA" if requested == "cuda" else _INSTALL_CANN
    return f"DEVICE={requested!r} was asked for, but of accelerators {there}; {fix}, or export DEVICE=cpu"


def _npu_is_installed() -> bool:
    return importlib.util.find_spec(_NPU_PACKAGE) is not None


def _import_npu() -> None:
    try:
        import torch_npu  # noqa: F401 - registers the device with torch
    except ModuleNotFoundError as error:
        raise SettingsError(
            [f"DEVICE='npu' needs the package {_NPU_PACKAGE} ({error}). Fix: pip install 'samebits[npu]'"]
        ) from error
    except (ImportError, OSError) as error:
        raise SettingsError([f"{_NPU_PACKAGE} is installed but cannot load CANN ({error}); {_INSTALL_CANN}"]) from error
