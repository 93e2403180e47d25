"""A small residual net: EMA weights swapped in for evaluation, early stopping by patience, the best model kept."""

import copy
import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS, BATCH, PATIENCE = 8, 8, 2


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class EMA:
    """Averages of the weights, as timm's and torch-ema's: shadow copies, swapped in and back through ``.data``."""

    def __init__(self, net: nn.Module, decay: float = 0.8) -> None:
        self.net, self.decay = net, decay
        self.shadow = copy.deepcopy(net).requires_grad_(False)
        self.backup: list[torch.Tensor] = []

    def update(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.shadow.parameters(), self.net.parameters(), strict=True):
                mean.mul_(self.decay).add_(p, alpha=1 - self.decay)

    def apply(self) -> None:
        self.backup = [p.data.clone() for p in self.net.parameters()]
        for mean, p in zip(self.shadow.parameters(), self.net.parameters(), strict=True):
            p.data.copy_(mean.data)

    def restore(self) -> None:
        for kept, p in zip(self.backup, self.net.parameters(), strict=True):
            p.data.copy_(kept)
        self.backup = []


@torch.no_grad()
def evaluate(net: nn.Module, loader: DataLoader) -> float:
    net.eval()
    right = torch.zeros(1)
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    net.train()
    return right.item() / dist.get_world_size()


def main() -> None:
    samebits.init()
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    patterns = torch.randn(4, 1, 6, 6)
    labels = torch.randint(4, (80,))
    pictures = patterns[labels] + torch.randn(80, 1, 6, 6)
    data = TensorDataset(pictures[:64], labels[:64])
    held_out = DataLoader(TensorDataset(pictures[64:], labels[64:]), batch_size=8)
    sampler = samebits.ElasticSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    net = nn.Sequential(nn.Conv2d(1, 4, 3), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
    model = DistributedDataParallel(net)
    ema = EMA(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=EPOCHS * 4)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        ema=ema.shadow,
        epoch=0,
        best=-1.0,
        bad=0,
        rng="per_step",
        seed=3,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.epoch < EPOCHS and state.bad < PATIENCE:
            for batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
                loss.backward()
                optimizer.step()
                schedule.step()
                ema.update()
                sampler.record_batch(batch, BATCH)
                state.commit()
            ema.apply()
            accuracy = evaluate(net, held_out)
            if accuracy > state.best:
                state.best, state.bad = accuracy, 0
                if samebits.get_rank() == 0:
                    torch.save(net.state_dict(), "best.pt")
            else:
                state.bad += 1
            ema.restore()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    digest = hashlib.sha256()
    for one in (net, ema.shadow):
        for value in one.state_dict().values():
            digest.update(value.numpy().tobytes())
    digest.update(repr((state.epoch, state.best, state.bad)).encode())
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
