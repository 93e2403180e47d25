"""What becomes of a process whose group is broken on an accelerator, when the device or its backend misbehaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samebits.errors import AbortHungError, StuckError
from tests.device import backend
from tests.device.checks import CARD, FOLDER, WHOLE, Verdict, grown, left, peer
from tests.device.here import SOURCES, Here, connected, look
from tests.device.jobs import GATE, GOES_ON, SPARE, DeviceJob
from tests.device.test_backend import BUILD_S, ROOT

CALLS_PER_PARAMETER = 5
"""The ids of its gradient and moments, and its address, are asked for; what is per module counts for two."""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(BUILD_S)]


def run(case: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the cases to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tests.device.breaks", case],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": SOURCES} | environment,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )


def test_a_result_that_is_read_after_an_abort_is_not_trusted() -> None:
    ran = run("undefined", TRIAL_ABORT="undefined")
    assert (ran.stdout, ran.returncode) == ("refused\n", 0), ran.stderr


def test_a_commit_after_a_break_does_not_count_and_no_graph_holds_a_step_or_a_collective(tmp_path: Path) -> None:
    ran = run("alone", folder=tmp_path, TRIAL_DEVICES="2")
    step = ["forward refused True", "step refused True"]
    graph = "collective refused True True"
    told = ["on 0", "from 0", *step, *step, "from 1", *step, *step, graph, "ended at 3"]
    assert ran.stdout.splitlines() == told, ran.stderr


def test_an_abort_that_hangs_ends_the_process_with_its_own_status() -> None:
    ran = run("hanging_abort", TRIAL_ABORT="hangs")
    assert (ran.stdout, ran.returncode) == ("returned True\n", AbortHungError.exit_code), ran.stderr
    assert "did not return within" in ran.stderr and "Fix:" in ran.stderr


def test_groups_whose_aborts_wait_for_each_other_are_aborted_at_once() -> None:
    ran = run("several_groups", TRIAL_ABORT="waits")
    assert (ran.stdout, ran.returncode) == ("aborted 2\n", 0), ran.stderr


def test_a_scripts_own_read_that_no_abort_ends_is_found() -> None:
    ran = run("hanging_item", TRIAL_ABORT="unheard")
    assert (ran.stdout, ran.returncode) == ("", StuckError.exit_code), ran.stderr
    assert "hanging_item" in ran.stderr, "the place is named"


def test_abort_that_waits_for_the_lock_of_a_connecting_communicator_ends_the_process() -> None:
    ran = run("locked_communicator", TRIAL_ABORT="locked")
    assert (ran.stdout, ran.returncode) == ("", AbortHungError.exit_code), ran.stderr
    assert "still connects" in ran.stderr and "Fix:" in ran.stderr


def test_launch_that_spins_after_the_abort_is_found() -> None:
    ran = run("spinning_launch", TRIAL_ABORT="spins")
    assert (ran.stdout, ran.returncode) == ("", StuckError.exit_code), ran.stderr
    assert "spinning_launch" in ran.stderr, "the place is named"


def test_a_rank_whose_device_is_far_behind_is_not_hung(tmp_path: Path) -> None:
    ran = run("long_queue", folder=tmp_path)
    assert (ran.stdout, ran.returncode) == ("read True\nended at 2\n", 0), ran.stderr


def test_the_host_waits_for_collectives_alone_and_a_break_leaves_the_last_commit(tmp_path: Path) -> None:
    ended = []
    for case in ("run_ahead", "break_behind_a_commit"):
        (folder := tmp_path / case).mkdir()
        ran = run(case, folder=folder, TRIAL_LAG_US="2000")
        assert ran.returncode == 0, ran.stderr
        *told, last = ran.stdout.splitlines()
        assert case != "run_ahead" or told == ["nothing 1", "reduces 2", "sends 2"]
        ended.append(last)
    assert ended[0] == ended[1], "a break has changed the bits"


def test_a_step_waits_once_and_calls_little_for_each_parameter(tmp_path: Path) -> None:
    counted = []
    for layers in (10, 30):
        (folder := tmp_path / str(layers)).mkdir()
        ran = run("calls_of_a_step", folder=folder, LAYERS=str(layers))
        assert ran.returncode == 0, ran.stderr
        counted.append(json.loads(ran.stdout.splitlines()[-1]))
    few, many = counted
    waits = {name: times for name, times in many.items() if name != "calls" and times}
    assert waits == {"synchronize": 1}, "the wait for the step's collectives is not the only one"
    assert (many["calls"] - few["calls"]) / (2 * 20) <= CALLS_PER_PARAMETER, counted


def test_ranks_on_one_device_send_and_receive_over_gloo() -> None:
    ran = run("gloo_pair")
    assert (ran.stdout, ran.returncode) == ("received [0.0, 1.0, 2.0, 3.0]\n", 0), ran.stderr


def test_step_that_a_scaler_skips_for_aborted_gradients_is_not_committed(tmp_path: Path) -> None:
    told = []
    for case in ("scaled", "break_behind_a_scaler"):
        (folder := tmp_path / case).mkdir()
        ran = run(case, folder=folder, TRIAL_ABORT="undefined")
        assert ran.returncode == 0, ran.stderr
        told.append(ran.stdout.splitlines())
    (once, undisturbed), (twice, disturbed) = told
    assert (once, twice) == ("1", "2"), "the scaler has not seen the bytes and lowered its scale again"
    assert undisturbed == disturbed, "a break has changed the bits or the scale"


def test_a_receive_from_a_lost_peer_ends_with_the_group() -> None:
    ran = run("waiting_pair")
    assert (ran.stdout, ran.returncode) == ("left True\n", 0), ran.stderr


def test_a_receive_that_an_abort_does_not_reach_ends_the_process() -> None:
    ran = run("waiting_pair", TRIAL_ABORT="pairs")
    assert (ran.stdout, ran.returncode) == ("", StuckError.exit_code), ran.stderr
    assert "waiting_pair" in ran.stderr, "the place is named"


def test_copies_go_on_while_another_stream_waits_for_a_collective() -> None:
    ran = run("streams", TRIAL_ABORT="undefined")
    assert (ran.stdout, ran.returncode) == ("copied 4.0\nleft\n", 0), ran.stderr


@pytest.mark.parametrize("how", ["failing", "hanging"])
def test_a_lost_context_is_not_taken_for_a_lost_peer(how: str) -> None:
    ran = run(f"{how}_context")
    assert ran.returncode == 1 and "DeviceLostError" in ran.stderr.splitlines()[-1], ran.stderr


def test_full_device_is_not_taken_for_a_lost_one_and_is_tested_on_one_stream() -> None:
    ran = run("full_device", TRIAL_DEVICE_BYTES=str(1 << 20))
    assert (ran.stdout, ran.returncode) == ("streams 1\nsound\n", 0), ran.stderr


def test_a_replacement_waits_for_memory_that_is_freed_late(tmp_path: Path) -> None:
    ran = run("late_memory", folder=tmp_path, TRIAL_HELD=str(tmp_path / "held"))
    assert (ran.stdout, ran.returncode) == ("waited True\ngot True\n", 0), ran.stderr


def test_spare_that_takes_over_rank_0_selects_its_own_device_by_local_rank(tmp_path: Path) -> None:
    here = look(tmp_path, simulated=True)
    job = DeviceJob(here, tmp_path / "job", spares=1, settings={"TRIAL_DEVICES": "3"})
    try:
        job.open_gates(0)
        job.start()
        job.wait_for(SPARE, "this spare is warm")
        job.wait_for_step(GATE)
        job.kill(0)
        job.wait_for(SPARE, GOES_ON)
        job.open_gates(GATE)
        statuses = job.wait_ended()
        assert not any(status for name, status in statuses.items() if name not in job.gone), job.tails()
        for node in (0, 1, SPARE):
            found = {(one[1], one[2]) for one in job.matches(node, r"^LOCAL_RANK (\d+) on (\S+) over ")}
            assert found == {(str(node), f"{backend.NAME}:{node}")}, job.tails()
    finally:
        job.end()


@pytest.mark.parametrize("kind", [backend.NAME, "cpu"])
def test_nothing_grows_over_a_hundred_generations(kind: str, tmp_path: Path) -> None:
    """Threads, descriptors, memory and names in /dev/shm, with an abort at the end of each generation."""
    path = f"{backend.autoload_folder(tmp_path)}{os.pathsep}{SOURCES}"
    ran = subprocess.run(
        [sys.executable, str(FOLDER / "groups.py"), str(WHOLE.cycles), kind],
        env=os.environ | {"PYTHONPATH": path, "TRIAL_SHARED_MEMORY": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert grown(told, WHOLE.cycles) == [] and list(tmp_path.glob("nccl-*")) == []


@pytest.mark.parametrize(("how", "text"), [("", r"left \d"), ("locked", f"status {AbortHungError.exit_code}")])
def test_rank_that_connects_to_a_lost_peer_leaves_or_gives_up_its_seat(how: str, text: str, tmp_path: Path) -> None:
    """NCCL's non-blocking communicators connect in the background, and hold the lock that the abort needs."""
    here = look(tmp_path, simulated=True)
    here = replace(here, environment=here.environment | {"TRIAL_ABORT": how})
    found = left(here, tmp_path / "left")
    assert found.verdict is Verdict.PASSED and re.search(text, found.text), found


def refusing(folder: Path, how: str) -> tuple[Here, str]:
    """Return how two ranks are connected on a device that refuses them: as NCCL, or as NCCL since 2.30 if asked."""
    here = look(folder, simulated=True)
    here = replace(here, environment=here.environment | {"TRIAL_SHARED": how})
    return connected(here, folder / "connected", BUILD_S)


def test_ranks_share_a_device_if_its_backend_allows_it_when_asked(tmp_path: Path) -> None:
    here, why = refusing(tmp_path, "asked")
    assert why == f"{backend.COLLECTIVES}, two ranks on one device"
    assert here.pair == here.environment and "COLLECTIVE_BACKEND" not in here.environment


@pytest.mark.parametrize(("how", "verdict"), [("", Verdict.PASSED), ("unheard", Verdict.FAILED)])
def test_abort_of_a_collective_that_waits_for_a_killed_peer_is_tried_on_two_devices(
    how: str, verdict: Verdict, tmp_path: Path
) -> None:
    here, why = refusing(tmp_path, "0")
    assert "Duplicate GPU detected" in why and here.environment["COLLECTIVE_BACKEND"] == "gloo"
    assert here.pair is not None and here.pair["TRIAL_DEVICES"] == "2"
    here = replace(here, pair=here.pair | {"TRIAL_ABORT": how})
    (found,) = peer(here, tmp_path / "peer", CARD)
    assert (found.verdict, found.backend) == (verdict, backend.COLLECTIVES * (not how)), found
    assert how == "" or f"status {StuckError.exit_code}" in found.text


def test_kill_of_a_peer_is_not_tried_where_no_two_ranks_connect(tmp_path: Path) -> None:
    here = look(tmp_path, simulated=True)
    assert here.environment["PYTHONPATH"].endswith(SOURCES), "its processes may import an installed package"
    (found,) = peer(replace(here, pair=None), tmp_path / "peer", CARD)
    assert found.verdict is Verdict.NOT_HERE
