"""Accelerate's loop ends with the undisturbed bits after a restart and after a replacement by a spare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES, Started, final

pytestmark = [pytest.mark.system, pytest.mark.thorough]

LOOP = EXAMPLES / "accelerate_loop.py"


def test_accelerates_loop_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    ends_with_the_undisturbed_bits(LOOP, steps=30, kills=["1:7", "0:16"])


REFUSED = """\
import torch
from accelerate import DataLoaderConfiguration
from torch.utils.data import DataLoader

import samebits
from samebits.integrations.accelerate import Accelerator

samebits.init()
for options in ({"dataloader_config": DataLoaderConfiguration(split_batches=True)}, {}):
    accelerator = Accelerator(cpu=True, **options)
    accelerator.wait_for_everyone()
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for shuffle in (True, False):
        try:
            loader = accelerator.prepare(DataLoader(torch.ones(8, 4), batch_size=2, shuffle=shuffle))
            accelerator._dataloaders[:] = [] if not shuffle else accelerator._dataloaders
            state = accelerator.elastic_state()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
state = samebits.elastic.TorchState(model, optimizer, rng="per_step")
samebits.elastic.run(lambda state: None)(state)
print(f"final step=0 sha256={0:064x}", flush=True)
"""


def test_unsupported_use_is_refused_in_a_sentence(start: Started, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    job = start(script, workers=1)
    final(job, 0)
    assert job.matches(0, r"^UsageError DataLoaderConfiguration\(split_batches=True\): .* Fix: leave split_batches out")
    assert job.matches(0, r"^UsageError Accelerator\.elastic_state\(\): no loader .* Fix: prepare a DataLoader with")
    assert job.matches(0, r"script\.py:11: wait_for_everyone\(\) before elastic\.run does not wait")
