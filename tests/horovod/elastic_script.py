"""An elastic script in the style of Horovod's documentation and examples, with its calls and no other.

``--loop sampler`` is like its ImageNet example: the data position is an ElasticSampler's, and commits come at the start
of a batch. ``--loop counter`` is like its guide: random batches, and a loop over ``state.batch``.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import samebits.horovod as hvd
from tests.system.gate import wait_at_gate

BATCH_SIZE = 4
SAMPLES = 160
EPOCHS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(36, 16)
        self.last = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.norm(self.conv(x)), 2)).flatten(1)
        x = F.dropout(F.relu(self.first(x)), training=self.training)
        return F.log_softmax(self.last(x), dim=1)


parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["sampler", "counter"], default="sampler")
parser.add_argument("--base-lr", type=float, default=0.0125)
parser.add_argument("--batches-per-commit", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--pause-ms", type=float, default=20.0)
parser.add_argument("--gate", type=int, default=-1, help="wait before this epoch until the test opens it")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

images = torch.randn(SAMPLES, 1, 8, 8)
labels = torch.randint(0, 10, (SAMPLES,))
train_dataset = TensorDataset(images, labels)
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=BATCH_SIZE, sampler=train_sampler)

model = Net()
optimizer = optim.SGD(model.parameters(), lr=args.base_lr * hvd.size(), momentum=0.9, weight_decay=5e-5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def train_one_batch(data: torch.Tensor, target: torch.Tensor) -> float:
    time.sleep(args.pause_ms / 1000)
    optimizer.zero_grad()
    loss = F.nll_loss(model(data), target)
    loss.backward()
    optimizer.step()
    return metric_average(loss.item(), "loss")


def train_epoch(state: hvd.elastic.TorchState) -> None:
    state.model.train()
    batch_offset = state.batch
    for batch_idx, (data, target) in enumerate(train_loader):
        state.batch = batch_offset + batch_idx
        if state.batch % args.batches_per_commit == 0:
            state.commit()
        else:
            state.check_host_updates()
        loss = train_one_batch(data, target)
        state.train_sampler.record_batch(batch_idx, BATCH_SIZE)
        print(f"epoch {state.epoch} batch {state.batch} loss {loss:.5f}", flush=True)


@hvd.elastic.run
def train_by_sampler(state: hvd.elastic.TorchState) -> None:
    while state.epoch < EPOCHS:
        if state.epoch == args.gate:
            wait_at_gate(args.gate)
        train_epoch(state)
        state.epoch += 1
        state.batch = 0
        state.train_sampler.set_epoch(state.epoch)
        state.commit()


@hvd.elastic.run
def train_by_counter(state: hvd.elastic.TorchState) -> None:
    for state.epoch in range(state.epoch, EPOCHS):  # noqa: B020 - the guide's own loop
        if state.epoch == args.gate:
            wait_at_gate(args.gate)
        for state.batch in range(state.batch, SAMPLES // BATCH_SIZE // hvd.size()):  # noqa: B020
            loss = train_one_batch(torch.randn(BATCH_SIZE, 1, 8, 8), torch.randint(0, 10, (BATCH_SIZE,)))
            print(f"epoch {state.epoch} batch {state.batch} loss {loss:.5f}", flush=True)
            if state.batch % args.batches_per_commit == 0:
                state.commit()
        state.batch = 0


def on_state_reset() -> None:
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.base_lr * hvd.size()
    print(f"reset to {hvd.size()} workers", flush=True)


state = hvd.elastic.TorchState(model, optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
(train_by_sampler if args.loop == "sampler" else train_by_counter)(state)

digest = hashlib.sha256()
for _, parameter in sorted(model.named_parameters()):
    digest.update(parameter.detach().numpy().tobytes())
print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)
