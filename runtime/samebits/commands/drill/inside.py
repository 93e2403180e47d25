"""Carry out orders inside a drill's processes; a copy of this file runs in each of them.

The drill copies this file into its folder as ``sitecustomize.py`` and puts that folder first on the job's PYTHONPATH.
Python's own ``site`` loads it before the script, and it needs only the standard library.

Some faults can be caused only by the process itself: wrong values, an exception, a held interpreter, exhausted memory.
They are triggered by the signal SIGRTMAX if there is an order beside this file. A signal handler runs in the main
thread between two lines of the script, where such a fault would strike, and records each action before taking it. An
order that fails before that is reported, and does not reach the script. Every rank waits at the commit that the drill
names, so that a fault strikes a script of any speed at the intended step.
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
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
LEFT_BYTES = 64 << 20  # additional memory allowed to a process before it runs out of memory
CHUNK_BYTES = 1 << 20
FAILED = "failed: "  # the beginning of the report on an order that could not be carried out
HOLD_FILE, STEP = "hold", struct.Struct("=q")  # the step at which to wait; 0: no step
MOST_HELD_S = 120.0  # limit in case the drill is gone
_HELD_LOOK_S = 0.005
_STATES = "samebits.training.state.base_state"


def main() -> None:
    """Listen for orders, and load the ``sitecustomize`` module that this file hides."""
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
    try:
        _ORDERS[order["do"]](order)
    except Exception as error:
        if _answer().exists():
            raise  # the fault itself
        _did(f"{FAILED}{type(error).__name__}: {error}")


def _answer() -> Path:
    return HERE / f"did-{os.getpid()}.txt"


def _did(text: str) -> None:
    _write(_answer(), text)


def _write(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").replace(path)


class _StatesFinder:
    """Import hook that makes commits wait once the module of states is imported, which happens only in workers."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, _: ModuleType | None = None) -> Any:
        """Find this one module as Python does, and ignore all others."""
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
    """Make the membership check at the end of every commit wait until the drill lets it return."""
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
    """Hold the GIL with a C function called through PyDLL, which does not release it (ctypes.PyDLL)."""
    seconds = int(order["seconds"])
    _did(f"held the interpreter for {seconds} s")
    ctypes.PyDLL(None).sleep(ctypes.c_uint(seconds))


def _eat(order: dict[str, Any]) -> None:
    """Allocate memory until none is left. The MemoryError, or the kernel's SIGKILL, is the fault."""
    if order["limit"] == "RLIMIT_AS":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + LEFT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    _did(f"allocated beyond {order['limit']}")
    taken = []
    while True:
        taken.append(b"\1" * CHUNK_BYTES)


def _raise(order: dict[str, Any]) -> None:
    """Raise in the main thread, at once or (``pending``) asynchronously with PyThreadState_SetAsyncExc."""
    if not order["pending"]:
        _did("raised RuntimeError")
        raise RuntimeError("a fault of the drill")
    _did("was sent a pending RuntimeError")
    thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(RuntimeError))


def _hang(_: dict[str, Any]) -> None:
    _did("sleeps in its main thread")
    while True:
        time.sleep(1.0)


def _drawn(order: dict[str, Any]) -> tuple[Any, str, Any]:
    """Return torch, the name of the trained parameter that the order selects, and this rank's shard of it.

    If there is none, report that and return None in place of the shard.
    """
    torch: Any = sys.modules.get("torch")
    found = [] if torch is None else _parameters(torch)
    if not found:
        _did("")
        return torch, "", None
    return torch, *found[int(order["draw"] * len(found))]


def _flip(order: dict[str, Any]) -> None:
    """Flip one bit of a parameter's mantissa, as faulty memory might do unnoticed."""
    torch, name, shard = _drawn(order)
    if shard is None:
        return
    _did(f"{_flipped(torch, shard, order['draw'])} of {name}")


def _flipped(torch: Any, tensor: Any, draw: float) -> str:
    width = tensor.element_size()
    element = int(draw * 7919) % tensor.numel()
    place, bit = element * width + max(0, width - 2), 3
    memory = _memory(torch, tensor)
    before = memory[element].item()
    memory.view(torch.uint8)[place] ^= 1 << bit
    return f"{before!r} became {memory[element].item()!r} by bit {bit} of byte {place}"


def _memory(torch: Any, tensor: Any) -> Any:
    """Return a second tensor over the same memory, so that a write does not change the version counter."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),))


def _stale(order: dict[str, Any]) -> None:
    """Set one parameter back to its present value after the next step has changed it."""
    torch, name, shard = _drawn(order)
    if shard is None:
        return
    memory = _memory(torch, shard.detach())
    old = memory.clone()

    def put_back() -> None:
        until = time.monotonic() + MOST_HELD_S
        while torch.equal(memory, old) and time.monotonic() < until:
            time.sleep(_HELD_LOOK_S)
        memory.copy_(old)

    threading.Thread(target=put_back, name="drill-stale", daemon=True).start()
    _did(f"{name} is set back to its current value after the next step changes it")


def _gradient(order: dict[str, Any]) -> None:
    """Flip one bit of a gradient after it was reduced, just before the optimizer's next step."""
    torch: Any = sys.modules.get("torch")
    found = [] if torch is None else [one for one in _objects(torch.optim.Optimizer) if _takes_hooks(one)]
    if not found:
        _did("")
        return
    draw = order["draw"]

    def flip(optimizer: Any, *_: Any) -> None:
        handle.remove()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [_shard(one.grad) for one in parameters if one.grad is not None]
        gradients = [one for one in gradients if one.numel() > 0]
        _flipped(torch, gradients[int(draw * len(gradients))], draw)

    handle = max(found, key=lambda one: len(one.param_groups)).register_step_pre_hook(flip)
    _did("one bit of a reduced gradient changes before the next step")


def _drift(_: dict[str, Any]) -> None:
    """Change the learning rate on this rank alone."""
    torch: Any = sys.modules.get("torch")
    groups = [] if torch is None else [group for one in _objects(torch.optim.Optimizer) for group in one.param_groups]
    for group in groups:
        group["lr"] = group["lr"] * 1.5
    _did(f"the learning rate of {len(groups)} groups of parameters is 1.5 times as large" if groups else "")


def _collective(_: dict[str, Any]) -> None:
    """Call a collective that no other rank calls."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        _did("")
        return
    _did("entered an all_reduce that no other rank enters")
    torch.distributed.all_reduce(torch.zeros(3))


def _unreduced(_: dict[str, Any]) -> None:
    """Skip the reduction of the gradients in one step of this rank."""
    torch: Any = sys.modules.get("torch")
    found = [] if torch is None else _objects(torch.nn.parallel.DistributedDataParallel)
    for model in found:
        _leave_out_reduction(model)
    _did("does not reduce the gradients of its next backward pass" if found else "")


def _leave_out_reduction(model: Any) -> None:
    """Switch the next reduction off, during one forward pass outside ``no_sync()``, which would restore the flag."""

    handles: list[Any] = []

    def begin(*_: Any) -> None:
        if model.training and model.require_backward_grad_sync:
            model.require_backward_grad_sync = False
            handles.append(model.register_forward_hook(end))

    def end(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        model.require_backward_grad_sync = True

    handles.append(model.register_forward_pre_hook(begin))


def _objects(kind: Any) -> list[Any]:
    return [one for one in gc.get_objects() if kind in getattr(type(one), "__mro__", ())]


def _takes_hooks(optimizer: Any) -> bool:
    """Return False for a wrapper that never initialized its base class, as Accelerate's."""
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def _parameters(torch: Any) -> list[tuple[str, Any]]:
    """Return the trained parameters of the module with the most of them: names and this rank's shards."""
    modules = _objects(torch.nn.Module)
    found = [[(name, _shard(one)) for name, one in module.named_parameters() if _is_trained(one)] for module in modules]
    return max(found, key=len, default=[])


def _shard(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def _is_trained(parameter: Any) -> bool:
    shard = _shard(parameter)
    return bool(parameter.requires_grad and shard.is_floating_point() and shard.is_contiguous() and shard.numel() > 0)


_ORDERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "clock": _tell_time,
    "hold": _hold,
    "eat": _eat,
    "raise": _raise,
    "hang": _hang,
    "flip": _flip,
    "stale": _stale,
    "gradient": _gradient,
    "drift": _drift,
    "collective": _collective,
    "unreduced": _unreduced,
}

if __name__ == "sitecustomize":
    main()
