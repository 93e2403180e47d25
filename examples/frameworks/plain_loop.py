"""A small language model with a hand-written training loop, in the style of nanoGPT.

It was written for torchrun: ``init_process_group``, DDP, gradient accumulation, random batches,
``destroy_process_group`` at the end. The lines that SameBits needs are marked; all others are unchanged, and torchrun
still runs the script without them.
"""

import argparse
import hashlib
import math
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

import samebits  # SameBits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--width", type=int, default=32)
args = parser.parse_args()
BATCH, BLOCK, WINDOW = 8, 32, 2

samebits.init()  # SameBits
init_process_group(backend="gloo")
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
if device.type != "cpu":
    torch.accelerator.set_device_index(samebits.get_local_rank())  # SameBits: a spare's environment has none
torch.manual_seed(1337)
torch.use_deterministic_algorithms(True)

text = Path(__file__).read_text(encoding="utf-8")
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


class Block(nn.Module):
    """Attention to earlier positions, then a small network; both with residual connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.think = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm1(x)).chunk(3, dim=-1)
        weights = (query @ key.transpose(1, 2)) / math.sqrt(x.size(2))
        later = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        x = x + weights.masked_fill(later, -math.inf).softmax(dim=-1) @ value
        return x + self.think(self.norm2(x))


class Model(nn.Module):
    """Letters in, the logits of the next ones out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(letters), width)
        self.places = nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.out = nn.Linear(width, len(letters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.letters(x) + self.places(torch.arange(x.size(1), device=x.device))))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,)).tolist()
    x = torch.stack([data[start : start + BLOCK] for start in starts])
    y = torch.stack([data[start + 1 : start + 1 + BLOCK] for start in starts])
    return x.to(device), y.to(device)


def learning_rate(step: int) -> float:
    return 3e-3 * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps))


model = DDP(Model(args.width).to(device))
optimizer = torch.optim.AdamW(model.parameters())
state = samebits.elastic.TorchState(  # SameBits: what the next step depends on
    model,
    optimizer,
    rng="per_step",
    seed=1337,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=50),
)


@samebits.elastic.run  # SameBits: the loop became this function, its counter the state's
def train(state: samebits.elastic.TorchState) -> None:
    while state.completed_steps < args.steps:
        step = state.completed_steps
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        for part in range(WINDOW):
            inputs, labels = get_batch()  # drawn in the step that uses it, not by the one before
            with nullcontext() if part == WINDOW - 1 else model.no_sync():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()) / WINDOW
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.commit()  # SameBits
        if step % 20 == 19 and samebits.get_rank() == 0:  # SameBits: here it is this generation's rank
            print(f"step {step + 1} loss {WINDOW * loss.item():.4f}", flush=True)


train(state)  # SameBits
weights = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
print(f"final step={state.completed_steps} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
destroy_process_group()
