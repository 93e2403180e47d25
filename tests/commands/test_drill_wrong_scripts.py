"""Real drills of faulty scripts: the report names the fault and its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.system, pytest.mark.thorough]

SCRIPT = """
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samebits

samebits.init()
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
data = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
sampler = samebits.ElasticSampler(data, shuffle=True, seed=1)
loader = DataLoader(data, batch_size=8, sampler=sampler, generator=torch.Generator())
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters())
state = samebits.elastic.TorchState(
    model,
    optimizer,
    sampler=sampler,
    epoch=0,
    step=0,
    rng="per_step",
    seed=1,
    checkpoint=samebits.CheckpointConfig(save_checkpoint_steps=50, keep_checkpoint_max=100),
)
seen = 0


@samebits.elastic.run
def train(state):
    while state.step < STEPS:
        for batch, (inputs, labels) in enumerate(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            sampler.record_batch(batch, 8)
            state.step += 1
            state.commit()
            if state.step == STEPS:
                return
        state.epoch += 1
        sampler.set_epoch(state.epoch)


train(state)
"""


def drilled(tmp_path: Path, text: str, *options: str) -> dict[str, Any]:
    """Return the report of a drill of this script in which everything is killed once."""
    (tmp_path / "train.py").write_text(text)
    words = ["--faults", "all", "--kills", "1", "--seed", "1", "--spares", "0", "--json", *options]
    done = subprocess.run(
        [sys.executable, "-m", "samebits", "drill", *words, "--", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "REGISTER_COOLDOWN": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    logs = "\n".join(log.read_text()[-2000:] for log in tmp_path.rglob("follower.log"))
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}\n{logs}"
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["verdict"] == "failed"
    return told


def changed(*pairs: tuple[str, str], steps: int = 300) -> tuple[str, list[str]]:
    text = SCRIPT.replace("STEPS", str(steps))
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text, text.splitlines()


def test_counter_outside_the_state(tmp_path: Path) -> None:
    text, lines = changed(
        ("    while state.step", "    global seen\n    while state.step"),
        (
            "            optimizer.step()\n",
            "            seen += 1\n            optimizer.param_groups[0]['lr'] = 0.01 / (1 + seen)\n"
            "            optimizer.step()\n",
        ),
    )
    told = drilled(tmp_path, text)
    line = lines.index("            seen += 1") + 1
    assert told["problem"].startswith("undisturbed: two runs of step 5 differ")
    assert f"hidden state: seen (train.py:{line}) changed outside the state" in told["problem"]
    assert told["faults"] == []


def test_sampler_outside_the_state(tmp_path: Path) -> None:
    text, lines = changed(("    sampler=sampler,\n", ""))
    told = drilled(tmp_path, text)
    assert told["problem"].startswith("undisturbed: three runs of step 5 all differ")
    line = next(number for number, one in enumerate(lines, 1) if "ElasticSampler(" in one)
    assert any(one.startswith(f"train.py:{line}: the position in the data is in no State") for one in told["advice"])
    assert not any("counted outside" in one or "commit()" in one.split("Fix")[0] for one in told["advice"]), told


def test_forgotten_commit(tmp_path: Path) -> None:
    text, lines = changed(("            state.commit()\n", ""))
    told = drilled(tmp_path, text)
    line = lines.index("            optimizer.step()") + 1
    assert any("never calls commit()" in one and f"in line {line}" in one for one in told["advice"]), told
    assert len(told["advice"]) == 1, told
