"""The net of the digits example: two convolutions and two linear layers, for square grey images of size 4 and up.

It normalises by groups of channels within one image and not by batch: a batch norm's running averages would differ
between ranks, and with them the hash over all parameters and buffers.
"""

from __future__ import annotations

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Map images, float32 (n, 1, size, size), to the logits of the ten digits, float32 (n, 10)."""

    def __init__(self, image_size: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * (image_size // 4) ** 2, 64),
            nn.ReLU(),
            nn.Dropout(0.25),
            nn.Linear(64, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.classifier(self.features(images))
        return logits
