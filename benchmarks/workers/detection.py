"""A worker that trains until it is ordered to fail, and then fails in a given way at a known line.

The order is a file in the stage's folder, named after the node, that contains the way; it is consumed once. Faults from
outside (kill -9, SIGSTOP, a cut network) need no order.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import samebits
from benchmarks.moments import Notebook
from benchmarks.workers.mlp import Mlp

FOR_EVER_S = 3600.0
PAUSE_S = 0.05
CHECKPOINT_STEPS = 50


class Samples(Dataset[torch.Tensor]):
    """float32 (1,), a function of the index; one of them may never arrive."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._worker.takes("loader"):
            time.sleep(FOR_EVER_S)  # fault: loader
        return torch.tensor([float(index % 7)])


class Worker:
    """Reads its orders, and records when it starts to fail."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._order = Path(f"fault-{os.environ['NODE_ID'].partition('.')[0]}")

    def takes(self, way: str) -> bool:
        """Consume an order to fail in this way; return whether there was one."""
        if not self._order.exists() or self._order.read_text() != way:
            return False
        self._order.unlink()
        self._notebook.note("fault", text=way)
        return True

    def fail_if_told(self) -> None:
        """Cause the ordered fault, if it is one that a line of the script itself causes."""
        if self.takes("exception"):
            raise RuntimeError("a fault")  # fault: exception
        if self.takes("sleep"):
            time.sleep(FOR_EVER_S)  # fault: sleep
        if self.takes("deadlock"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # fault: deadlock
        if self.takes("gil"):
            libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # fault: gil


def main() -> None:
    notebook = Notebook.from_environment()
    worker = Worker(notebook)
    samebits.init()
    mlp = Mlp()
    loader = DataLoader(Samples(worker), batch_size=1)
    state = samebits.elastic.TorchState(
        mlp.model,
        mlp.optimizer,
        rng="per_step",
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=CHECKPOINT_STEPS, keep_checkpoint_max=2),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        for _ in loader:
            worker.fail_if_told()
            if worker.takes("returns"):
                return
            time.sleep(PAUSE_S)
            mlp.step(state.completed_steps)
            state.commit()
            notebook.note("stepped", state.completed_steps)

    train(state)


if __name__ == "__main__":
    main()
