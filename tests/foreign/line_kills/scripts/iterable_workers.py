"""A stream read by an IterableDataset with two loader processes, split between ranks; RMSprop, a StepLR."""

import hashlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import samebits

STEPS, BATCH = 24, 4


class Stream(IterableDataset):
    """Records of an endless log: number n belongs to one rank and one of its loader processes."""

    def __init__(self, rank: int, ranks: int, first: int) -> None:
        self.rank, self.ranks, self.first = rank, ranks, first

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        batch = self.first + worker  # a loader asks its processes in turn
        while True:
            for place in range(BATCH):
                number = (batch * BATCH + place) * self.ranks + self.rank
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(10, generator=generator)
                yield x, int(x.sum() > 0)
            batch += workers


def main() -> None:
    samebits.init()
    torch.manual_seed(11)
    torch.use_deterministic_algorithms(True)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        schedule=schedule,
        mean=0.0,
        rng="per_step",
        seed=11,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=6),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        stream = Stream(samebits.get_rank(), samebits.get_world_size(), state.completed_steps)
        loader = DataLoader(stream, batch_size=BATCH, num_workers=2, generator=torch.Generator())
        for x, y in loader:
            if state.completed_steps == STEPS:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            state.commit()

    train(state)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
