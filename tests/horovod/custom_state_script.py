"""A user-defined state as documented by Horovod, with every collective checked on every rank of every generation.

It keeps a number and a tensor, in memory only. A step multiplies in the sum over all ranks, so that a lost or repeated
commit, or one taken from a rank that lacks it, shows in the last line.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch

import samebits.horovod as hvd
from tests.system.gate import wait_at_gate

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause-ms", type=float, default=20.0)
parser.add_argument("--gate", type=int, default=-1, help="wait behind so many steps until the test opens it")
args = parser.parse_args()

hvd.init()


class Tally(hvd.elastic.State):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.total = torch.ones(3, dtype=torch.float64)
        self.save()

    def save(self) -> None:
        self.saved = (self.step, self.total.clone())

    def restore(self) -> None:
        self.step, self.total = self.saved[0], self.saved[1].clone()

    def sync(self) -> None:
        self.step = hvd.broadcast_object(self.step, root_rank=0)
        self.total = hvd.broadcast(self.total, root_rank=0)

    def reset(self) -> None:
        print(f"reset to {hvd.size()} workers", flush=True)


def check_collectives() -> None:
    rank, size = hvd.rank(), hvd.size()
    ranks = torch.arange(size, dtype=torch.float32)
    mine = torch.full((2,), float(rank))
    assert torch.equal(hvd.allreduce(mine), torch.full((2,), ranks.mean().item()))
    assert torch.equal(hvd.allreduce(mine, average=False), torch.full((2,), ranks.sum().item()))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), torch.zeros(2))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), torch.full((2,), size - 1.0))
    assert torch.equal(hvd.allreduce(torch.tensor([rank]), op=hvd.Average), torch.tensor([(size - 1) // 2]))
    assert mine.tolist() == [rank] * 2
    hvd.allreduce_(mine, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert mine.dtype is torch.float32 and mine.tolist() == [ranks.sum().item()] * 2
    strided = torch.full((2, 3), float(rank)).t()
    hvd.broadcast_(strided, root_rank=size - 1)
    assert torch.equal(strided, torch.full((3, 2), size - 1.0))
    gathered = hvd.allgather(torch.full((rank, 2), rank))
    assert gathered.tolist() == [[one, one] for one in range(size) for _ in range(one)]
    told = {"rank": rank, "pair": (rank, [None, b"x", 2**80]), "tensor": torch.tensor([rank])}
    for one, other in enumerate(hvd.allgather_object(told)):
        assert (other["rank"], other["pair"]) == (one, (one, [None, b"x", 2**80])) and other["tensor"].tolist() == [one]
    assert hvd.broadcast_object(told, root_rank=1)["rank"] == 1
    check_broadcast_of_state(rank)
    hvd.barrier()


def check_broadcast_of_state(rank: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), weight_decay=0.5)
    for _ in range(rank + 1):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    held = torch.cat([one.detach().flatten() for one in model.parameters()])
    moments = torch.cat([one["exp_avg"].flatten() for one in optimizer.state.values()])
    for value in (held, moments):
        everybodys = hvd.allgather(value.unsqueeze(0))
        assert torch.equal(everybodys, everybodys[:1].expand_as(everybodys))
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert {int(one["step"]) for one in optimizer.state.values()} == {2}


@hvd.elastic.run
def train(state: Tally) -> None:
    check_collectives()
    while state.step < args.steps:
        if state.step == args.gate:
            wait_at_gate(args.gate)
        time.sleep(args.pause_ms / 1000)
        state.step += 1
        added = hvd.allreduce(torch.full((3,), float(state.step * (hvd.rank() + 1)), dtype=torch.float64), op=hvd.Sum)
        state.total = state.total * 0.75 + added
        state.commit()
        print(f"step {state.step} of {hvd.size()}", flush=True)


state = Tally()
train(state)
digest = hashlib.sha256(state.total.numpy().tobytes())
print(f"final step={state.step} sha256={digest.hexdigest()}", flush=True)
