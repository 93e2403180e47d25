"""A transformer layer sharded by FSDP2, clipped, with a schedule and an evaluation at each epoch's end."""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS, BATCH, WIDTH = 3, 8, 16


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def main() -> None:
    samebits.init()
    torch.manual_seed(5)
    torch.use_deterministic_algorithms(True)
    inputs, labels = torch.randn(176, 4, WIDTH), torch.randint(3, (176,))
    data = TensorDataset(inputs[:160], labels[:160])
    held_out = DataLoader(TensorDataset(inputs[160:], labels[160:]), batch_size=8)
    sampler = samebits.ElasticSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    model = Classifier()
    fully_shard(model.layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * 10)
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        epoch=0,
        losses=[],
        rng="per_step",
        seed=5,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=4),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            model.train()
            for batch, (x, y) in enumerate(loader):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                sampler.record_batch(batch, BATCH)
                state.commit()
            model.eval()
            with torch.no_grad():
                total = sum((F.cross_entropy(model(x), y) for x, y in held_out), torch.zeros(()))
            dist.all_reduce(total)
            state.losses = [*state.losses, total.item()]
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    digest = hashlib.sha256(repr(state.losses).encode())
    for p in model.parameters():
        digest.update(p.full_tensor().detach().numpy().tobytes())
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
