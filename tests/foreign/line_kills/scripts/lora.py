"""A frozen base with LoRA adapters and a trained head: warm-up, accumulation, only the adapters saved at the end."""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits

EPOCHS, BATCH, WINDOW, WIDTH = 4, 4, 2, 16


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(rank))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale, self.dropout = alpha / rank, nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(self.dropout(x), self.down), self.up)


def adapted(net: nn.Sequential) -> nn.Sequential:
    for index, layer in enumerate(net):
        if isinstance(layer, nn.Linear) and index < len(net) - 1:
            net[index] = LoRA(layer)
        elif isinstance(layer, nn.LayerNorm):
            layer.requires_grad_(False)
    return net


def main() -> None:
    samebits.init()
    torch.manual_seed(13)
    torch.use_deterministic_algorithms(True)
    data = TensorDataset(torch.randn(128, WIDTH), torch.randint(3, (128,)))
    sampler = samebits.ElasticSampler(data, shuffle=True, seed=13)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator())
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.Linear(32, 3))
    model = DistributedDataParallel(adapted(net))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 6))
    state = samebits.elastic.TorchState(
        model,
        optimizer,
        sampler=sampler,
        schedule=schedule,
        epoch=0,
        rng="per_step",
        seed=13,
        checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5),
    )

    @samebits.elastic.run
    def train(state: samebits.elastic.TorchState) -> None:
        while state.epoch < EPOCHS:
            for batch, (x, y) in enumerate(loader):
                is_last = (batch + 1) % WINDOW == 0
                model.require_backward_grad_sync = is_last
                loss = F.cross_entropy(model(x), y) / WINDOW
                loss.backward()
                sampler.record_batch(batch, BATCH)
                if is_last:
                    nn.utils.clip_grad_norm_(trained, 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    adapters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    if samebits.get_rank() == 0:
        torch.save(adapters, "adapters.pt")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"final step={state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
