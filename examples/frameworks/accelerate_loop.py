"""A classifier trained with Hugging Face Accelerate: its loader, its schedule, its accumulation, its evaluation.

The lines that SameBits needs are marked; all others are unchanged.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits  # SameBits
from samebits.integrations.accelerate import Accelerator  # SameBits: instead of accelerate's own

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

samebits.init()  # SameBits
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(42)
torch.use_deterministic_algorithms(True)

images = torch.randn(360, 64)
labels = (images @ torch.randn(64, 4)).argmax(dim=1)
with accelerator.main_process_first():
    train_set, test_set = TensorDataset(images[:320], labels[:320]), TensorDataset(images[320:], labels[320:])
train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
test_loader = DataLoader(test_set, batch_size=8)
model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * 40)
model, optimizer, train_loader, test_loader, schedule = accelerator.prepare(
    model, optimizer, train_loader, test_loader, schedule
)
checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=5)  # SameBits
state = accelerator.elastic_state(epoch=0, checkpoint=checkpoint)  # SameBits: all that was prepared


def evaluate() -> float:
    model.eval()
    right = total = 0
    for inputs, targets in test_loader:
        with torch.no_grad():
            found = model(inputs).argmax(dim=1)
        found, targets = accelerator.gather_for_metrics((found, targets))
        right, total = right + int((found == targets).sum()), total + len(targets)
    model.train()
    return right / total


@samebits.elastic.run  # SameBits: the loop became this function
def train(state: samebits.elastic.TorchState) -> None:
    while state.epoch < args.epochs:  # SameBits: instead of for epoch in range(args.epochs)
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            state.commit()  # SameBits
        accelerator.print(f"epoch {state.epoch} accuracy {evaluate():.3f}")
        state.epoch += 1  # SameBits


train(state)  # SameBits
weights = b"".join(one.detach().numpy().tobytes() for one in accelerator.unwrap_model(model).parameters())
print(f"final step={state.completed_steps} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
accelerator.end_training()
