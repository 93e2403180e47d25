"""A classifier trained with Lightning Fabric: its wrappers, its loaders, its seed, its gradient clipping.

The lines that SameBits needs are marked; all others are unchanged.
"""

import argparse
import hashlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits  # SameBits
from samebits.integrations.lightning import Fabric  # SameBits: instead of lightning's own

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()

samebits.init()  # SameBits
fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
fabric.seed_everything(42)
fabric.launch()
torch.use_deterministic_algorithms(True)

images = torch.randn(360, 64)
labels = (images @ torch.randn(64, 4)).argmax(dim=1)
with fabric.rank_zero_first():
    train_set, test_set = TensorDataset(images[:320], labels[:320]), TensorDataset(images[320:], labels[320:])
train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
test_loader = DataLoader(test_set, batch_size=8)
model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * 10)
model, optimizer = fabric.setup(model, optimizer)
train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
checkpoint = samebits.CheckpointConfig(save_checkpoint_steps=5)  # SameBits
state = fabric.elastic_state(  # SameBits
    model=model, optimizer=optimizer, schedule=schedule, epoch=0, checkpoint=checkpoint
)


def evaluate() -> float:
    model.eval()
    right = torch.zeros(())
    for inputs, targets in test_loader:
        with torch.no_grad():
            right += (model(inputs).argmax(dim=1) == targets).sum()
    model.train()
    return float(fabric.all_reduce(right, reduce_op="sum")) / len(test_set)


@samebits.elastic.run  # SameBits: the loop became this function
def train(state: samebits.elastic.TorchState) -> None:
    while state.epoch < args.epochs:  # SameBits: instead of for epoch in range(args.epochs)
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            schedule.step()
            state.commit()  # SameBits
        accuracy = evaluate()
        fabric.print(f"epoch {state.epoch} accuracy {accuracy:.3f}")
        state.epoch += 1  # SameBits


train(state)  # SameBits
weights = b"".join(one.detach().numpy().tobytes() for one in model.module.parameters())
print(f"final step={state.completed_steps} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
