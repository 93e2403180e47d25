"""A worker with torchft's manager and optimizer: survivors skip a spoiled step, a newcomer fetches a peer's state.

Each worker is a replica group of its own; the lighthouse's address is in the environment. The gradients are averaged by
``Manager.allreduce``, in one tensor like DDP's bucket: torchft's own ``DistributedDataParallel`` (0.2.0) raises an
AssertionError within ``backward()`` of every survivor once gloo has lost a peer.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchft import Manager, Optimizer, ProcessGroupGloo

from benchmarks.moments import Notebook
from benchmarks.workers.mlp import Mlp
from benchmarks.workers.paced import ENDLESSLY, LAST_STEP

WORLD_SIZE = 4


def main() -> None:
    notebook = Notebook.from_environment()
    notebook.note("asks")
    rank = int(os.environ["BENCHMARK_RANK"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def state_dict() -> dict[str, Any]:
        return {"model": mlp.model.state_dict(), "optimizer": mlp.optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        mlp.model.load_state_dict(state["model"])
        mlp.optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{rank}",
    )
    mlp = Mlp(lambda module: module)
    optimizer = Optimizer(manager, mlp.optimizer)
    notebook.note("trains")
    last_step = int(os.environ.get(LAST_STEP, ENDLESSLY))
    while manager.current_step() < last_step:
        train_one_step(mlp, manager, optimizer, rank)
        notebook.note("stepped", manager.current_step())
    notebook.note("ended", manager.current_step(), mlp.digest())
    manager.shutdown(wait=False)


def train_one_step(mlp: Mlp, manager: Manager, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    mlp.loss(mlp.model, manager.current_step(), rank, WORLD_SIZE).backward()
    gradients = [parameter.grad for parameter in mlp.model.parameters()]
    flat = parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    vector_to_parameters(flat, gradients)
    optimizer.step()


if __name__ == "__main__":
    main()
