"""torch's own sampler in a job: refused before ``elastic.run``; inside it each rank gets its share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job

pytestmark = pytest.mark.system

SCRIPT = """\
import torch
from torch.utils.data import DistributedSampler

import samebits

samebits.init()
try:
    DistributedSampler(range(10))
except Exception as error:
    print(type(error).__name__, error, flush=True)
model = torch.nn.Linear(4, 2)
state = samebits.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1))


@samebits.elastic.run
def train(state):
    print("inside", list(DistributedSampler(range(10), shuffle=False)), flush=True)
    state.commit()


train(state)
print("after", list(DistributedSampler(range(10), shuffle=False)), flush=True)
"""


def test_torchs_sampler_divides_the_samples_or_is_refused_with_the_reason(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = new_job(script=script, workers=2)
    job.start()
    assert set(job.wait_ended().values()) == {0}
    for rank in job.ranks:
        part = rf"\[{', '.join(map(str, range(rank, 10, 2)))}\]"
        assert job.matches(
            rank,
            r"^UsageError script\.py:8: a DistributedSampler without num_replicas and rank before samebits\.elastic",
        )
        assert job.matches(rank, f"^inside {part}")
        assert job.matches(rank, f"^after {part}")
