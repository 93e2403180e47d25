"""A classifier trained with Lightning's Trainer: its schedule, evaluation, early stopping and gradient clipping.

The lines that SameBits needs are marked; all others are unchanged.
"""

import argparse
import hashlib
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import samebits  # SameBits
from samebits.integrations.lightning import Trainer  # SameBits: instead of lightning's own

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
args = parser.parse_args()


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.model(inputs), targets)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("validation_loss", F.cross_entropy(self.model(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


samebits.init()  # SameBits
L.seed_everything(42)
images = torch.randn(360, 64)
labels = (images @ torch.randn(64, 4)).argmax(dim=1)
train_set, test_set = TensorDataset(images[:320], labels[:320]), TensorDataset(images[320:], labels[320:])
model = Classifier()
trainer = Trainer(
    accelerator="cpu",
    max_epochs=args.epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    deterministic=True,
    callbacks=[EarlyStopping("validation_loss", patience=5)],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=5),  # SameBits
)
trainer.fit(model, DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(test_set, batch_size=8))
weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print(f"final step={trainer.global_step} sha256={hashlib.sha256(weights).hexdigest()}", flush=True)
