"""``torchx run samebits.torchx:dist`` with the real TorchX: what it starts, and a ported job on two nodes."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from samebits import torchx
from tests.system import torchrun_ported_script
from tests.system.processes import environment_of_tests, found_below, free_port, signal_process

pytestmark = [pytest.mark.system, pytest.mark.thorough, pytest.mark.timeout(600)]

SCRIPT = Path(torchrun_ported_script.__file__)
TORCHX = (sys.executable, "-c", "from torchx.cli.main import main; main()")
JOB_S = 400.0


@pytest.fixture(autouse=True)
def installed() -> None:
    if importlib.util.find_spec("torchx") is None:
        pytest.skip("TorchX is not installed: pip install 'samebits[torchx]'")


def test_nodes_meet_on_the_first_one_with_standbys_and_a_single_node_alone() -> None:
    app = torchx.dist("--steps", "9", script="train.py", j="2:3x4", port=8200, env={"HEALTH": "off"}, max_restarts=5)
    (role,) = app.roles
    command = role.args[1]
    assert "--rdzv_backend samebits" in command and ":8200" in command and command.endswith("train.py --steps 9")
    assert "--nnodes 2:3" in command and "--nproc_per_node 4" in command and role.num_replicas == 3
    assert role.env["PET_MAX_RESTARTS"] == "5" and role.env["HEALTH"] == "off"
    assert "--rdzv_backend c10d" in torchx.dist(m="train", j="1x4").roles[0].args[1]


def test_torchx_starts_a_ported_job_on_two_nodes(tmp_path: Path) -> None:
    for step in torchrun_ported_script.GATES:
        (tmp_path / f"pass_{step}").touch()
    environment = environment_of_tests() | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    told = f"HEALTH=off,OMP_NUM_THREADS=1,PYTHONPATH={environment['PYTHONPATH']}"
    words = ("run", "--wait", "--log", "-s", "local_cwd", "samebits.torchx:dist", "-j", "2x1")
    options = ("--port", str(free_port()), "--script", str(SCRIPT), "--env", told)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [*TORCHX, *words, *options], env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        status = job.wait(JOB_S)
    finally:
        job.kill()
        job.wait()
        left = [one for one in found_below(tmp_path) if not one.wait_for_exit(30.0)]
        for one in left:
            signal_process(one, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert status == 0, text
    assert set(re.findall(r"ends with (\w{64})", text)) == {torchrun_ported_script.undisturbed_bits()}
    assert not left
