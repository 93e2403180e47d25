"""Regression with ReduceLROnPlateau driven by a reduced validation loss, a loader with processes, SWA at the end."""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import samebits

EPOCHS, BATCH, SWA_FROM = 5, 8, 3


class Curves(Dataset):
    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        x = torch.rand(4, generator=generator)
        noise = 0.05 * torch.randn((), generator=generator)
        return x, torch.sin(3 * x).sum() + noise


def validate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total[0] += F.mse_loss(model(x).squeeze(1), y, reduction="sum")
            total[1] += len(y)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


def main() -> None:
    samebits.init()
    torch.manual_seed(17)
    torch.use_deterministic_algorithms(True)
    data = Curves(80, 0)
    held_out = DataLoader(Curves(16, 1000), batch_size=8)
    sampler = samebits.ElasticSampler(data, shuffle=True, seed=17)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=1, generator=torch.Generator())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
    average = AveragedModel(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        average=average,
        epoch=0,
        rng="per_step",
        seed=17,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=6),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            for batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x).squeeze(1), y)
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()
                sampler.record_batch(batch, BATCH)
                state.commit()
            error = validate(model, held_out)
            schedule.step(error)
            if state.epoch >= SWA_FROM:
                average.update_parameters(model.module)
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    digest = hashlib.sha256(repr([group["lr"] for group in optimizer.param_groups]).encode())
    for one in (model, average):
        for value in one.state_dict().values():
            digest.update(value.numpy().tobytes())
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
