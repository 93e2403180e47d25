"""The judgement of the fault campaign and its own failure cases, and one real fault of each kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.causes.campaign import EVERYWHERE, failing_job, plan_of
from tests.causes.faults import BY_NAME, FAULTS, PAIRS, Said, line_of, wrong

NVRX = {
    *("WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC", "OS_ABORT", "LOCK_GIL", "SEGFAULT", "SIGINT", "SIGKILL", "SIGTERM"),
    "SIGSTOP",
}
"""All of its twelve but GPU_ERROR and GPU_SLEEP."""
SEGFAULT = {"1": BY_NAME["segfault"]}
DIED = "was killed by signal 11 (SIGSEGV)"


def test_nvrx_kinds_without_a_gpu_are_included_and_every_line_exists() -> None:
    assert {fault.nvrx for fault in FAULTS} - {""} == NVRX
    assert [fault.name for fault in FAULTS if "LINE" in fault.says and not line_of(fault.name)] == []
    assert {name for pair in PAIRS for name in pair} <= BY_NAME.keys()


def test_plan_has_every_kind_equally_often_and_follows_from_the_seed() -> None:
    kinds = len(FAULTS) + len(PAIRS) + 1
    plan = plan_of(2 * kinds, 7)
    assert {plan.count(one) for one in plan} == {2} and (EVERYWHERE,) in plan
    assert plan == plan_of(2 * kinds, 7) != plan_of(2 * kinds, 8)
    assert plan_of(3, 1, ["sigkill"]) == [("sigkill",)] * 3


def test_correct_records_are_accepted() -> None:
    assert wrong(SEGFAULT, Said([("1", f"{DIED} (software fault; a new process takes its place)")], ())) == ""
    thread = {"1": BY_NAME["thread"]}
    told = (
        f"worker 1 (rank 1), step 9: its thread feeder failed at worker.py:{line_of('thread')}: RuntimeError: a fault"
    )
    assert wrong(thread, Said((), [told])) == ""
    assert wrong(thread, Said((), [told.replace("worker 1", "worker 2")])) != ""


@pytest.mark.parametrize(
    ("causes", "said"),
    [
        ([], "named 0 times"),
        ([("2", f"{DIED} (software fault; x)")], "named 0 times"),
        ([("1", f"{DIED} (node fault; x)")], "another class"),
        ([("1", "its process ended (seen by worker 0 on the same host) (software fault; x)")], "other words"),
        ([("1", f"{DIED} (software fault; x)"), ("0", "its end (node fault; x)")], "worker 0 is blamed as well"),
    ],
)
def test_wrong_records_are_rejected(causes: list[tuple[str, str]], said: str) -> None:
    assert said in wrong(SEGFAULT, Said(causes, ()))


@pytest.mark.system
@pytest.mark.parametrize(
    "plan",
    [
        ("segfault",),
        *(pytest.param((fault.name,), marks=pytest.mark.thorough) for fault in FAULTS if fault.name != "segfault"),
        *(pytest.param(pair, marks=pytest.mark.thorough) for pair in PAIRS),
        pytest.param((EVERYWHERE,), marks=pytest.mark.thorough),
    ],
    ids="+".join,
)
def test_real_fault_is_named_in_the_journal_with_its_class(plan: tuple[str, ...], tmp_path: Path) -> None:
    with failing_job(tmp_path / "job") as job:
        assert job.fail(plan, random.Random(1)) == ""
