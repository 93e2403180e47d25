"""A character model like minGPT: a trainer class, bfloat16 autocast, accumulation, the best loss saved on disk."""

import hashlib
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import samebits

STEPS, BATCH, BLOCK, WINDOW, EVERY = 30, 4, 16, 2, 10


class GPT(nn.Module):
    def __init__(self, letters: int, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(letters, width), nn.Embedding(BLOCK, width)
        self.attend = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
        h = self.tokens(x) + self.places(torch.arange(BLOCK))
        n = self.norm1(h)
        h = h + self.attend(n, n, n, attn_mask=later, need_weights=False)[0]
        return self.head(h + self.mlp(self.norm2(h)))


class Trainer:
    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        self.data = torch.tensor([letters.index(letter) for letter in text])
        self.model = DistributedDataParallel(GPT(len(letters)))
        decay = [p for p in self.model.parameters() if p.dim() > 1]
        plain = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3)
        self.state = samebits.elastic.TorchState(
            self.model,
            self.optimizer,
            best=math.inf,
            rng="per_step",
            seed=7,
            checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=7),
        )

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.data) - BLOCK - 1, (BATCH,)).tolist()
        x = torch.stack([self.data[one : one + BLOCK] for one in starts])
        y = torch.stack([self.data[one + 1 : one + 1 + BLOCK] for one in starts])
        return x, y

    def loss(self) -> torch.Tensor:
        x, y = self.batch()
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(x)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    @torch.no_grad()
    def estimate(self) -> float:
        self.model.eval()
        total = torch.zeros(1)
        for _ in range(2):
            total += self.loss()
        dist.all_reduce(total)
        self.model.train()
        return total.item()

    def step(self) -> None:
        done = self.state.completed_steps
        rate = 3e-3 * min(1.0, (done + 1) / 5) * (0.5 + 0.5 * math.cos(math.pi * done / STEPS))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for part in range(WINDOW):
            self.model.require_backward_grad_sync = part == WINDOW - 1
            (self.loss() / WINDOW).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self) -> None:
        @samebits.elastic.run
        def train(state: samebits.elastic.TorchState) -> None:
            while state.completed_steps < STEPS:
                self.step()
                if (state.completed_steps + 1) % EVERY == 0:
                    loss = self.estimate()
                    if loss < state.best:
                        state.best = loss
                        if samebits.get_rank() == 0:
                            torch.save(self.model.module.state_dict(), "best.pt")
                state.commit()

        train(self.state)


def main() -> None:
    samebits.init()
    torch.manual_seed(1337)
    torch.use_deterministic_algorithms(True)
    trainer = Trainer(Path(__file__).read_text(encoding="utf-8"))
    trainer.train()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()))
    digest.update(repr(trainer.state.best).encode())
    print(f"final step={trainer.state.completed_steps} sha256={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
