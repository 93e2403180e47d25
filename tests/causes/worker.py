"""A worker that trains until a test orders it to fail, and then fails in the ordered way in a known line.

The order is a file in the job's folder, named after the worker's place, with the way and the step from which it is due,
so that several can fail at one step; it is consumed once. Signals from outside need no order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import samebits

FOR_EVER_S = 3600.0
PAUSE_S = 0.02


class Samples(Dataset[torch.Tensor]):
    """float32 (2,); one of them may never arrive."""

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if takes("loader"):
            time.sleep(FOR_EVER_S)  # fault: loader
        return torch.tensor([float(index % 7), 1.0])


class Deadly(Dataset[int]):
    """One sample that ends the process which loads it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


class Progress:
    """The number of this worker's steps."""

    step = 0


def takes(way: str) -> bool:
    """Return whether this worker is to fail this way now."""
    order = Path(f"order-{os.environ['NODE_ID'].partition('.')[0]}")
    if not order.exists():
        return False
    asked, due = order.read_text().split()
    if asked != way or Progress.step < int(due):
        return False
    order.unlink()
    return True


def fail_in_a_thread() -> None:
    """Fail in a thread that is not joined."""
    raise RuntimeError("a fault")  # fault: thread


def raise_at_signal(*_: object) -> None:
    """The script's own handler."""
    raise RuntimeError("a fault")  # fault: signal-exception


def fail_if_told() -> None:
    """Cause a fault that is a line of the script's own."""
    if takes("exception"):
        raise RuntimeError("a fault")  # fault: exception
    if takes("async-exception"):
        ident = ctypes.c_ulong(threading.get_ident())
        thread = threading.Thread(
            target=ctypes.pythonapi.PyThreadState_SetAsyncExc, args=(ident, ctypes.py_object(RuntimeError))
        )
        thread.start()
        time.sleep(1)  # fault: async-exception
    if takes("abort"):
        os.abort()
    if takes("sigkill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if takes("segfault"):
        ctypes.string_at(0)
    if takes("exit"):
        sys.exit(3)
    if takes("os-exit"):
        os._exit(3)
    if takes("disk"):
        raise OSError(28, "No space left on device", "/data/log")  # fault: disk
    if takes("memory"):
        bytearray(1 << 62)  # fault: memory
    if takes("nan"):
        raise FloatingPointError("loss is nan")  # fault: nan
    if takes("data"):
        b"\xff".decode()  # fault: data
    if takes("device"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")  # fault: device
    if takes("loader-killed"):
        for _ in DataLoader(Deadly(), num_workers=1, timeout=0):  # fault: loader-killed
            pass
    if takes("thread"):
        # otherwise reported only once in a while
        threading.Thread(target=fail_in_a_thread, name=f"feeder-{Progress.step}").start()
    fail_to_go_on_if_told()


def fail_to_go_on_if_told() -> None:
    """Cause a fault that ends nothing, so that the others wait."""
    if takes("sleep"):
        time.sleep(FOR_EVER_S)  # fault: sleep
    if takes("deadlock"):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # fault: deadlock
    if takes("gil"):
        libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)  # fault: gil


def main() -> None:
    signal.signal(signal.SIGUSR1, raise_at_signal)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `samebits run` makes workers ignore it
    samebits.init()
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Samples(), batch_size=1)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        rng="per_step",
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=2),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        for sample in loader:
            Progress.step = state.completed_steps
            fail_if_told()
            if takes("returns"):
                return
            time.sleep(PAUSE_S)
            optimizer.zero_grad()
            model(sample).square().sum().backward()
            optimizer.step()
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
