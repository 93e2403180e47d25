"""Lightning's Trainer ends with the undisturbed bits after a restart and after a replacement by a spare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES, Started, final

pytestmark = [pytest.mark.system, pytest.mark.thorough]

TRAINER = EXAMPLES / "lightning_trainer.py"
REFUSED = """
import contextlib
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
import samebits
from samebits.errors import UsageError
from samebits.integrations.lightning import Trainer

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
    def training_step(self, batch, batch_idx):
        return self.weight.sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

@contextlib.contextmanager
def refused():
    try:
        yield
    except UsageError as error:
        print("UsageError", error, flush=True)

samebits.init()
quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
with refused():
    Trainer(strategy="fsdp", **quiet)
with refused():
    Trainer(reload_dataloaders_every_n_epochs=1, **quiet)
with refused():
    Trainer(**quiet).fit(Module(), ckpt_path="last")
data = TensorDataset(torch.zeros(4, 1))
with refused():
    Trainer(**quiet).fit(Module(), DataLoader(data))
Trainer(**quiet).fit(Module(), DataLoader(data, shuffle=True))
print(f"final step=4 sha256={'0' * 64}", flush=True)
"""


def test_trainers_fit_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    """Rank 0 dies after the step that ends the first epoch, whose evaluation is repeated."""
    ends_with_the_undisturbed_bits(TRAINER, steps=15, kills=["0:4", "1:7"])


def test_unsupported_use_is_refused_in_a_sentence(start: Started, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    job = start(script, workers=1)
    final(job, 4)
    for what in (
        r"strategy='fsdp'",
        "reload_dataloaders_every_n_epochs",
        r"fit\(ckpt_path=…\)",
        ".* SequentialSampler",
    ):
        pattern = rf"^UsageError samebits\.integrations\.lightning\.Trainer: {what}.* is not supported\. Fix: "
        assert job.matches(0, pattern), job.tails()
