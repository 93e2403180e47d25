"""Carry out orders inside a drill's processes; a copy of this file runs in each of them.

The drill copies this file into its folder as ``sitecustomize.py`` and puts that folder first on the job's PYTHONPATH.
Python's own ``site`` loads it before the script, and it needs only the standard library.

Faults that only the process itself can cause (a flipped bit of its parameters, a held interpreter, used-up memory) are
triggered by the signal SIGRTMAX if an order lies beside this file. A signal handler runs in the main thread between two
lines of the script, where such a fault would strike, and records each action before taking it. Every rank waits at the
commit that the drill names, so that a fault strikes a script of any speed at the drawn step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import json
import mmap
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
LEFT_BYTES = 64 << 20  # additional memory allowed to a process that is to run out of memory
CHUNK_BYTES = 1 << 20
HOLD_FILE, STEP = "hold", struct.Struct("=q")  # the step at which to wait; 0: no step
MOST_HELD_S = 120.0  # limit in case the drill is gone
_HELD_LOOK_S = 0.005
_STATES = "samebits.training.state.base_state"


def main() -> None:
    """Listen for orders, and load the ``sitecustomize`` that this file hides."""
    signal.signal(signal.SIGRTMAX, _take)
    signal.siginterrupt(signal.SIGRTMAX, False)
    sys.meta_path.insert(0, _StatesFinder())
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _take(_: int, __: FrameType | None) -> None:
    path = HERE / f"order-{os.getpid()}.json"
    try:
        order = json.loads(path.read_text())
        path.unlink()
    except (OSError, ValueError):
        return
    {"flip": _flip, "hold": _hold, "eat": _eat, "clock": _tell_time}[order["do"]](order)


def _did(text: str) -> None:
    _write(HERE / f"did-{os.getpid()}.txt", text)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


class _StatesFinder:
    """Makes commits wait once the module of states is imported, which happens only in workers."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> Any:
        """Find this one module as Python does; ignore all others."""
        if name != _STATES:
            return None
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_wait(module: ModuleType) -> None:
            execute(module)
            _wait_at_commits(vars(module)["State"])

        spec.loader.exec_module = execute_and_wait
        return spec


def _wait_at_commits(states: Any) -> None:
    """Make the membership check at the end of every commit return only when the drill allows it."""
    look = states.check_host_updates
    with (HERE / HOLD_FILE).open("rb") as file:
        asked = mmap.mmap(file.fileno(), STEP.size, access=mmap.ACCESS_READ)
    given_up = 0

    def check_host_updates(state: Any) -> None:
        nonlocal given_up
        look(state)
        (at,) = STEP.unpack(asked)
        step = state.completed_steps - state.uncommitted_steps
        if not 0 < at <= step or at == given_up:
            return
        held = HERE / f"held-{os.getpid()}.txt"
        _write(held, f"{at} {step}")
        deadline = time.monotonic() + MOST_HELD_S
        try:
            while STEP.unpack(asked)[0] == at:
                if time.monotonic() > deadline:
                    given_up = at
                    return
                time.sleep(_HELD_LOOK_S)
                look(state)  # raises as soon as a member is lost
        finally:
            held.unlink()

    states.check_host_updates = check_host_updates


def _tell_time(_: dict[str, Any]) -> None:
    _did(repr(time.time()))


def _hold(order: dict[str, Any]) -> None:
    """Hold the interpreter with a C function called through PyDLL, which does not release the GIL (ctypes.PyDLL)."""
    seconds = int(order["seconds"])
    _did(f"held the interpreter for {seconds} s")
    ctypes.PyDLL(None).sleep(ctypes.c_uint(seconds))


def _eat(order: dict[str, Any]) -> None:
    """Allocate memory until none is left; the MemoryError, or the kernel's SIGKILL, is the fault."""
    if order["limit"] == "RLIMIT_AS":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + LEFT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _did(f"allocated beyond {order['limit']}")
    taken = []
    while True:
        taken.append(b"\1" * CHUNK_BYTES)


def _flip(order: dict[str, Any]) -> None:
    """Flip one bit of a mantissa, as faulty memory might without being detected by the machine."""
    torch: Any = sys.modules.get("torch")
    found = [] if torch is None else _parameters(torch)
    if not found:
        _did("")
        return
    name, parameter = found[int(order["draw"] * len(found))]
    width = parameter.element_size()
    element = int(order["draw"] * 7919) % parameter.numel()
    place, bit = element * width + max(0, width - 2), 3
    # A separate tensor over the same memory, so that neither a version nor the parameter itself reveals the write.
    storage, start = parameter.untyped_storage(), parameter.storage_offset()
    memory = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    memory.set_(storage, start, (parameter.numel(),))
    before = memory[element].item()
    memory.view(torch.uint8)[place] ^= 1 << bit
    _did(f"bit {bit} of byte {place} of {name}: {before!r} became {memory[element].item()!r}")


def _parameters(torch: Any) -> list[tuple[str, Any]]:
    """Return the trained parameters of the module with the most of them, by name."""
    modules = [one for one in gc.get_objects() if torch.nn.Module in getattr(type(one), "__mro__", ())]
    found = [[pair for pair in one.named_parameters() if _is_trained(pair[1])] for one in modules]
    return max(found, key=len, default=[])


def _is_trained(parameter: Any) -> bool:
    is_here = parameter.is_contiguous() and parameter.numel() > 0
    return bool(parameter.requires_grad and parameter.is_floating_point() and is_here)


if __name__ == "sitecustomize":
    main()
