"""Training ranks and waiting spares use huge pages, so that their memory is freed fast when they die."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.job import Job
from tests.system.kill_list import GATE, GATED, TRAINED
from tests.system.processes import ColdStarter
from tests.system.scripted import ScriptJob
from tests.training.run.test_huge_pages import knows_collapse

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not knows_collapse(), reason="this kernel moves no memory (madvise(2), MADV_COLLAPSE)"),
]

LONG = ("--steps", "100000", "--interval", "50")  # trains until the test ends it: memory is moved meanwhile
SPARE = 1
NAMES = ("AnonHugePages", "Anonymous")


def share_in_huge_pages(pid: int) -> float:
    """Return the share of the process's anonymous memory in huge pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    huge, anonymous = (int(re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)[0]) for name in NAMES)
    return huge / anonymous


def test_rank_has_its_memory_in_huge_pages(new_job: Callable[..., Job], cold: ColdStarter) -> None:
    """The rank is not forked: memory shared with a parent is not moved."""
    job = new_job(*TRAINED, *GATED, workers=1, starter=cold)
    job.start()
    job.open_gates(0)
    job.wait_for_step(GATE)
    pid = job.worker(0).pid
    job.wait_until(lambda: share_in_huge_pages(pid) > 0.5 or None, "memory in huge pages")
    job.open_gates(GATE)
    job.wait_finished()


@pytest.mark.thorough
def test_ranks_and_spares_have_their_memory_in_huge_pages(script_job: Callable[..., ScriptJob]) -> None:
    job = script_job(*LONG, "--pause-ms", "50", workers=1, settings={"SPARE_NUM": "1"})
    run = job.run()
    job.wait_for(SPARE, "this spare is warm")
    job.wait_for_step(3)
    for node in (0, SPARE):
        pid = job.process(node).pid
        job.wait_until(lambda pid=pid: share_in_huge_pages(pid) > 0.5 or None, f"node {node}'s memory in huge pages")
    run.press_ctrl_c()
    run.wait()
