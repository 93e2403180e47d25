"""A stage leaves nothing behind, and its processes are isolated from surrounding jobs."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.processes import Job, Stage

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
PARENT = """
import signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("started", child.pid, flush=True)
signal.sigwait({signal.SIGTERM})
child.kill()
child.wait()
print("ended", child.pid, flush=True)
"""
"""Blocks SIGTERM and waits for it: with a handler, pause() would wait forever if the signal came just before it."""
BENCHMARK = f"""
import sys
from benchmarks.processes import Stage
with Stage() as stage:
    pid = stage.start("worker_0", {SLEEPER!r}, {{}}).pid
    log = stage.folder / "torchrun.log"
    stage.start("torchrun", [sys.executable, "-c", {PARENT!r}], {{}}, is_parent=True)
    stage.channel.wait_for(lambda: "started" in log.read_text(), 30, "its start")
    print(stage.folder, pid, log.read_text().split()[1], flush=True)
    stage.channel.wait_for(lambda: False, 300, "the end")
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_leaving_a_stage_ends_its_processes_and_removes_its_folder() -> None:
    with Stage() as stage:
        pids = [stage.start(name, SLEEPER, {}).pid for name in ("worker_0", "worker_1")]
        folder = stage.folder
        assert all(map(is_alive, pids))
        assert {entry.name for entry in folder.iterdir()} == {"moments", "worker_0.log", "worker_1.log"}
    assert not any(map(is_alive, pids))
    assert not folder.exists()


def test_error_ends_them_too_and_shows_the_logs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="in the middle"), Stage() as stage:
        stage.start("worker_0", [sys.executable, "-c", "print('my last words')"], {}).wait()
        pid = stage.start("worker_1", SLEEPER, {}).pid
        raise RuntimeError("in the middle")
    assert not is_alive(pid)
    assert "== worker_0.log\nmy last words" in capsys.readouterr().err


def test_process_that_ends_by_itself_ends_the_wait() -> None:
    with pytest.raises(ChildProcessError, match="worker_0 ended with status 3"), Stage() as stage:
        stage.start("worker_0", [sys.executable, "-c", "import sys; sys.exit(3)"], {})
        stage.channel.wait_for(lambda: False, 30, "anything")


def test_parent_gets_time_to_end_its_children() -> None:
    with Stage() as stage:
        log = stage.folder / "torchrun.log"
        stage.start("torchrun", [sys.executable, "-c", PARENT], {}, is_parent=True)
        stage.channel.wait_for(lambda: "started" in log.read_text(), 30, "its start")
        child = int(log.read_text().split()[1])
        stage.end("torchrun")
        assert log.read_text().splitlines()[-1] == f"ended {child}"
    assert not is_alive(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_terminated_benchmark_ends_its_processes(number: signal.Signals) -> None:
    words = ["env", "--default-signal", sys.executable, "-c", BENCHMARK]  # the tests themselves may run under nohup
    with subprocess.Popen(words, cwd=processes.REPOSITORY, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        folder, *pids = benchmark.stdout.readline().split()
        gone = [os.pidfd_open(int(pid)) for pid in pids]
        benchmark.send_signal(number)
        for descriptor in gone:
            assert select.select([descriptor], [], [], 60)[0], "it has outlived the benchmark"
            os.close(descriptor)
    assert Path(folder).exists() == (number == signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def test_environment_of_another_job_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROLE", "NODE_ID", "HEARTBEAT_INTERVAL", "MS_WORKER_NUM", "RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(name, "another")
    monkeypatch.setenv("DATA_PATH", "kept")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    with Stage() as stage:
        program = "import os; print(*(f'{name}={value}' for name, value in os.environ.items()), sep='\\n')"
        stage.start("worker_0", [sys.executable, "-c", program], {"NODE_ID": "0"}).wait()
        environment = dict(line.split("=", 1) for line in (stage.folder / "worker_0.log").read_text().splitlines())
    assert environment["NODE_ID"] == "0"
    assert "another" not in environment.values()
    assert environment["DATA_PATH"] == "kept"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(processes.REPOSITORY), "elsewhere"]


def test_jobs_scheduler_listens_once_it_is_started() -> None:
    with Stage() as stage:
        job = Job(stage, "formation", 2)
        job.start_scheduler()
        assert (stage.folder / "recovery").is_dir()
        assert job.worker_variables(1)["NODE_ID"] == "1"
        stage.require_alive()


def test_no_benchmark_loads_torch_before_its_first_output() -> None:
    names = ["checkpoint", "control_plane", "core_scale", "formation", "recovery", "steady_state"]
    program = f"import sys, {', '.join(f'benchmarks.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=processes.REPOSITORY, timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["formation", "recovery", "steady_state"])
def test_help_says_what_is_measured(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    shown = subprocess.run(command, cwd=processes.REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    assert f"python -m benchmarks.{name}" in shown.stdout
    assert "--quick" in shown.stdout
