"""A recipe with dropout and batch statistics in which one rank's gradient is wrong before it is reduced.

``--wrong RANK:STEP``: that rank's gradient at that step, once; with ``--always``, everything it computes from there on.
``--wrong-again RANK``: that rank's recomputation of another's gradient, once. ``--aside``: part of the loss is no
output of the module. DIES=RANK in the environment: that rank is killed while it recomputes another's gradient.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import samebits

parser = argparse.ArgumentParser()
parser.add_argument("--wrong", default="-1:0", help="RANK:STEP")
parser.add_argument("--wrong-again", type=int, default=-1, metavar="RANK")
parser.add_argument("--always", action="store_true")
parser.add_argument("--steps", type=int, default=110)
parser.add_argument("--aside", action="store_true")
arguments = parser.parse_args()
wrong_rank, wrong_step = map(int, arguments.wrong.split(":"))

samebits.init()
torch.manual_seed(1)


class Net(torch.nn.Sequential):
    """Keeps a loss of its own as an attribute."""

    aside: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self[0](inputs)
        self.aside = hidden.square().mean()
        return self[3](self[2](self[1](hidden)))


net = Net(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=20, keep_checkpoint_max=20)
state = samebits.elastic.TorchState(model, optimizer, step=0, checkpoint=checkpoint)
trains, has_erred = False, False


def err(gradient: torch.Tensor) -> torch.Tensor | None:
    """Let this device err, in training or in a recomputation."""
    global has_erred
    rank = samebits.get_rank()
    if not trains and os.environ.get("DIES") == str(rank):
        os.kill(os.getpid(), signal.SIGKILL)
    in_step = rank == wrong_rank and (trains or arguments.always) and state.step + 1 >= wrong_step
    if not (in_step or (rank == arguments.wrong_again and not trains)) or (has_erred and not arguments.always):
        return None
    has_erred = True
    print(f"erred at step {state.step + 1}", flush=True)
    wrong = gradient.clone()
    wrong.view(torch.int32)[0, 3] ^= 1 << 20
    return wrong


net[0].weight.register_hook(err)


@samebits.elastic.run
def train(state: samebits.elastic.TorchState) -> None:
    global trains
    while state.step < arguments.steps:
        optimizer.zero_grad()
        inputs = torch.sin(torch.arange(8 * 16).reshape(8, 16) * (state.step + 1.0) + samebits.get_rank())
        loss = F.cross_entropy(model(inputs), torch.arange(8) % 4)
        if arguments.aside:
            loss = loss + net.aside
        trains = True
        loss.backward()
        trains = False
        optimizer.step()
        state.step += 1
        state.commit()


train(state)
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in net.parameters())).hexdigest()
print(f"final step={state.step} sha256={digest}", flush=True)
