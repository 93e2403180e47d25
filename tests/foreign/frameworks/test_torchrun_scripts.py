"""Loops written for torchrun: their environment variables, init and destroy work, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.foreign.frameworks.conftest import EXAMPLES, Started, final

pytestmark = pytest.mark.system


def test_loop_for_torchrun_ends_with_the_undisturbed_bits(
    ends_with_the_undisturbed_bits: Callable[..., None],
) -> None:
    ends_with_the_undisturbed_bits(EXAMPLES / "plain_loop.py", "--steps", "40", steps=40, kills=["1:17", "0:29"])


@pytest.mark.thorough
def test_loop_over_epochs_ends_with_the_undisturbed_bits(ends_with_the_undisturbed_bits: Callable[..., None]) -> None:
    """With a schedule, batch norm, dropout and a test between epochs; killed in the middle of one and at its end."""
    loop, words = EXAMPLES / "classifier_loop.py", ("--epochs", "2", "--pictures", "640")
    ends_with_the_undisturbed_bits(loop, *words, steps=40, kills=["1:17", "0:20"])


ASKS = """\
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, get_rank, init_process_group

import samebits

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def say(where):
    asked = (get_rank(), dist.get_rank(), dist.get_world_size())
    print(where, asked, *(os.environ.get(name) for name in NAMES), flush=True)


samebits.init()
init_process_group("gloo")
dist.init_process_group("gloo", init_method="env://")
say("module")
destroy_process_group()
try:
    dist.barrier()
except Exception as error:
    print(type(error).__name__, error, flush=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = samebits.elastic.TorchState(model, optimizer, rng="per_step")


@samebits.elastic.run
def train(state):
    init_process_group("gloo")
    say(f"from {state.completed_steps}")
    while state.completed_steps < 10:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit()
    dist.destroy_process_group()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("total", total.item(), flush=True)


train(state)
say("after")
print(f"final step={state.completed_steps} sha256={0:064x}", flush=True)
"""


def test_torchruns_calls_keep_their_meaning(start: Started, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ASKS)
    job = start(script, kills=["1:5"], spares=1)
    job.wait_died(1)
    final(job, 10)
    for rank in (0, 1):
        job.wait_for(rank, rf"^module \({rank}, {rank}, 2\) {rank} {rank} 2 2")
        assert len(job.matches(rank, r"script\.py:19: init_process_group\(\) does nothing: samebits\.init\(\)")) == 1
        assert len(job.matches(rank, r"script\.py:20: init_process_group\(\) does nothing")) == 1
        assert len(job.matches(rank, r"script\.py:22: destroy_process_group\(\) does nothing")) == 1
        assert job.matches(rank, r"^UsageError script\.py:24: a collective before samebits\.elastic\.run")
        assert job.matches(rank, rf"^from 0 \({rank}, {rank}, 2\) {rank} {rank} 2 2")
    assert job.matches(2, r"^module \(2, 2, 2\) None None None None")
    assert len(job.matches(2, r"script\.py:14: the rank was requested in a spare, .*returned 2, ")) == 1
    job.wait_for(2, r"^from [45] \(1, 1, 2\) 1 1 2 2")
    assert job.matches(2, r"^after \(1, 1, 2\) 1 1 2 2")
    for node in (0, 2):
        assert job.matches(node, r"^total 2\.0")
        assert len(job.matches(node, r"script\.py:41: destroy_process_group\(\) does nothing")) == 1


def test_restarted_worker_of_a_finished_job_has_its_own_rank(start: Started, tmp_path: Path) -> None:
    """With a wrong rank, each restarted worker would be rank 0 of its own group and save as rank 0 does."""
    script = tmp_path / "script.py"
    script.write_text(ASKS + "import time\nwhile not os.path.exists('../done'): time.sleep(0.01)\n")
    job = start(script)
    job.wait_for(1, "^after")
    job.wait_for(0, "^after")
    since = job.count(1)
    job.kill(1)
    job.start_worker(1)
    job.wait_for(1, r"^after \(1, 1, 2\) 1 1 2 2", since=since)
    (tmp_path / "done").touch()
    final(job, 10)
