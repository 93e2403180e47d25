"""The campaign's faults beside the published lists, its verdicts, and a peer's job that ends or stands still."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import campaign_peers, parts
from benchmarks.campaign import (
    BEGIN,
    END,
    OURS,
    PAGE,
    Result,
    Verdict,
    fill_page,
    finals,
    judged,
    page_table,
    report,
    text_of,
)
from benchmarks.campaign_kinds import KINDS, QUICK, Kind, named
from benchmarks.processes import REPOSITORY
from benchmarks.report import MISSING, problems
from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.plan import DrillFault, DrillOutcome, Injected, NotInjected

FAILURE_TYPES = {
    "checkpoint_corruption",
    "checkpoint_missing",
    "checkpoint_truncation",
    "collective_desync",
    "config_drift",
    "delay",
    "drop",
    "duplicate",
    "exception",
    "hang",
    "io_error",
    "message_drop",
    "network_partition",
    "payload_corruption",
    "process_termination",
    "reorder",
    "resource_exhaustion",
    "resource_unavailable",
    "stale_state",
    "tensor_corruption",
    "timeout",
}
"""lm_resiliency 0.2.0, fault_injection/config.py: FailureType."""
NVRX_FAULTS = {
    "ASYNC_EXC",
    "GPU_ERROR",
    "GPU_SLEEP",
    "LOCK_GIL",
    "OS_ABORT",
    "SEGFAULT",
    "SIGINT",
    "SIGKILL",
    "SIGNAL_EXC",
    "SIGSTOP",
    "SIGTERM",
    "WORKLOAD_EXC",
}
"""nvidia_resiliency_ext 0.4.1, inprocess/tools/inject_fault.py: Fault."""


def test_campaign_has_every_published_kind_of_fault_and_every_fault_of_the_drill() -> None:
    sources = [source for kind in KINDS for source in kind.sources]
    assert {one.removeprefix("lm-resiliency: ") for one in sources if one.startswith("lm")} == FAILURE_TYPES
    assert {one.removeprefix("NVRx: ") for one in sources if one.startswith("NVRx")} == NVRX_FAULTS
    assert len(FAILURE_TYPES) == 21 and len(NVRX_FAULTS) == 12
    assert {kind.fault for kind in KINDS} - {None} == set(DrillFault)
    assert [kind.name for kind in KINDS if kind.fault is None] == ["GPU error", "GPU sleep"]
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert [kind.name for kind in named(QUICK)] == [kind.name for kind in KINDS if kind.name in QUICK]


KILL = KINDS[0]
GIVEN = Injected(DrillFault.KILL, "worker_1", 40, 10.0, recovered_s=0.25, did="SIGKILL to worker_1 (pid 7)")
MISSED = NotInjected(DrillFault.KILL, "no rank trains")
STOPPED = JobEvent(EventKind.INTERRUPTED, 1.0, 1, 1, 40, "worker 1 differs")


@pytest.mark.parametrize(
    ("outcome", "is_same", "verdict"),
    [
        (DrillOutcome(injected=[GIVEN]), True, Verdict.SAME),
        (DrillOutcome(injected=[GIVEN]), False, Verdict.OTHER),
        (DrillOutcome(injected=[GIVEN], problem="worker 1 differs from worker 0"), False, Verdict.ENDED),
        (DrillOutcome(injected=[GIVEN], problem="it did not finish: no step"), False, Verdict.HUNG),
        (DrillOutcome(not_injected=[MISSED]), True, Verdict.NOT_GIVEN),
        (DrillOutcome(injected=[GIVEN], not_injected=[MISSED]), True, Verdict.NOT_GIVEN),
        (DrillOutcome(), True, Verdict.NOT_GIVEN),
    ],
)
def test_only_a_job_with_its_fault_and_the_undisturbed_bits_is_right(
    outcome: DrillOutcome, is_same: bool, verdict: Verdict
) -> None:
    found = judged(KILL, "digits", outcome, is_same)
    assert (found.verdict, found.is_wrong) == (verdict, verdict is not Verdict.SAME)
    assert found.seconds == (0.25 if outcome.injected else None)


def test_resumed_job_is_reported_as_such() -> None:
    found = judged(KILL, "digits", DrillOutcome(injected=[GIVEN], events=[STOPPED]), is_same=True)
    assert found.verdict is Verdict.SAME
    assert found.detail == "resumed by `samebits recover`; after step 40: SIGKILL to worker_1 (pid 7)"


def test_final_bits_are_those_that_workers_printed(tmp_path: Path) -> None:
    one, other = "a" * 64, "b" * 64
    (tmp_path / "worker_0.log").write_text(f"step 3\nfinal step=3 loss=0.1 accuracy=0.9 sha256={one}\n")
    (tmp_path / "worker_1.log").write_text(f"final step=3 sha256={other}\n")
    (tmp_path / "worker_2.log").write_text("killed before it printed anything\n")
    (tmp_path / "scheduler.log").write_text(f"final step=3 sha256={'c' * 64}\n")
    assert finals(tmp_path) == {one.encode(), other.encode()}


def test_table_has_a_column_for_each_job_and_a_line_for_each_wrong_one() -> None:
    results = [
        Result("kill", OURS, "digits", Verdict.SAME, 0.25),
        Result("kill", OURS, "mesh", Verdict.OTHER, 1.5, "after step 40: SIGKILL"),
        Result("GPU error", OURS, "digits", Verdict.NO_DEVICE),
        Result("kill", "torchrun", "", Verdict.SAME, 4.0),
        Result("tensor corruption", "torchrun", "", Verdict.OTHER, 0.1),
    ]
    text = text_of(results, {kind.name: kind.sources for kind in KINDS})
    lines = text.splitlines()
    assert [cell.strip() for cell in lines[0].split("  ") if cell.strip()] == [
        *("SameBits digits", "SameBits mesh", "torchrun", "source")
    ]
    (kill,) = [line for line in lines if line.startswith("kill ")]
    assert "same bits, 0.2 s" in kill and "other bits, 1.5 s" in kill and "same bits, 4.0 s" in kill
    assert "SameBits, mesh, kill: other bits: after step 40: SIGKILL" in lines
    assert "torchrun, tensor corruption: other bits: " in lines
    document = report(results, {"torchft": "ModuleNotFoundError: No module named 'torchft'"}).document()
    assert problems(document) == []
    assert document["ratios"] == {"same_bits": 0.5}
    assert document["ours"]["mesh"]["other_bits_count"] == 1
    assert document["peers"]["torchrun"]["same_bits_count"] == 1 and document["peers"]["torchft"] == MISSING


def test_page_has_the_newest_verdict_on_each_kind_in_each_job(tmp_path: Path) -> None:
    page = tmp_path / PAGE
    page.parent.mkdir(parents=True)
    page.write_text(f"above\n{BEGIN}earlier\n{END}\nbelow\n")
    results = [
        Result("kill", "torchrun", "", Verdict.OTHER, 4.0),
        Result("kill", OURS, "mesh", Verdict.HUNG),
        Result("segfault", OURS, "digits", Verdict.SAME, 0.25),
        Result("kill", OURS, "mesh", Verdict.SAME, 1.5),
    ]
    for _ in range(2):
        fill_page(results, tmp_path)
        assert page.read_text().splitlines() == [
            "above",
            BEGIN.strip(),
            "| fault | published as | digits | mesh | torchrun |",
            "|---|---|---|---|---|",
            "| kill | lm-resiliency: process_termination, NVRx: SIGKILL | – | same bits | other bits |",
            "| segfault | NVRx: SEGFAULT | same bits | – | – |",
            END,
            "below",
        ]


def test_page_shows_the_stored_results() -> None:
    results = parts.read(REPOSITORY / "docs" / "campaign.jsonl", Result)
    assert f"{BEGIN}{page_table(results)}{END}" in (REPOSITORY / PAGE).read_text()


# --- a peer's job -----------------------------------------------------------------------------------------------------

ENDS = """
import signal
from benchmarks.moments import Notebook
notebook = Notebook.from_environment()
notebook.note("stepped", 1)
notebook.note("ended", 1, "the bits")
signal.pause()
"""
HANGS = """
import signal
from benchmarks.moments import Notebook
Notebook.from_environment().note("stepped", 1)
signal.pause()
"""
WAITS = """
import signal
from benchmarks.moments import Notebook
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
notebook = Notebook.from_environment()
notebook.note("stepped", 1)
signal.sigwait({signal.SIGUSR1})
notebook.note("stepped", 2)
notebook.note("ended", 2, "the bits")
signal.pause()
"""


@pytest.fixture
def peer_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace a peer's launcher and its four ranks by one process that runs this code."""
    monkeypatch.setattr(campaign_peers, "WORLD_SIZE", 1)
    monkeypatch.setattr(campaign_peers, "FAULT_AT", 1)

    def use(code: str) -> None:
        def start(job: campaign_peers._Job) -> None:
            job._stage.start("peer", [sys.executable, "-c", code], {})

        monkeypatch.setattr(campaign_peers._Job, "start", start)

    return use


def run(kind: Kind | None) -> campaign_peers.Ended:
    return campaign_peers.run("torchrun", sys.executable, kind, random.Random(1))


def test_peers_bits_are_those_of_its_ranks_at_the_end(peer_job: Callable[[str], None]) -> None:
    peer_job(ENDS)
    assert run(None) == campaign_peers.Ended(frozenset({"the bits"}))


def test_peer_that_ends_with_its_fault_is_reported_with_its_status(peer_job: Callable[[str], None]) -> None:
    peer_job(WAITS)
    found = run(KILL)
    assert found.ended == "ended with status -9: no error in its logs"
    assert found.did.startswith("SIGKILL to pid ") and found.seconds is None


def test_peer_that_takes_no_step_any_more_hangs(
    peer_job: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer_job(HANGS)
    monkeypatch.setattr(campaign_peers, "QUIET_S", 0.2)
    assert run(None).hung == "no step for 0.2 s"


def test_peer_that_survives_its_fault_ends_with_its_bits(peer_job: Callable[[str], None]) -> None:
    peer_job(WAITS)
    found = run(Kind("usr1", (), by_signal=signal.SIGUSR1))
    assert found.digests == {"the bits"} and found.seconds is not None
