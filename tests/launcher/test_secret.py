"""A job with a secret through the scripts: it trains, recovers and stops, and the secret is shown nowhere."""

from __future__ import annotations

import json
import re
import signal
import stat
from pathlib import Path

import pytest

from samebits.launcher.job_spec import START_FILE
from samebits.net.curve import derive_keys
from tests.launcher.shell_job import ENDLESS, ROOT, UNTIL_TOLD, Shell, ShellJob

pytestmark = pytest.mark.system

SECRET = "correct-horse-battery-staple"
KEYS = derive_keys(SECRET.encode())
PYTHON = str(ROOT / ".venv" / "bin" / "python")
NEVER_SHOWN = [
    word.encode() if isinstance(word, str) else word
    for word in (SECRET, KEYS.scheduler.secret, KEYS.scheduler.public, KEYS.worker.secret, KEYS.worker.public)
]


def tool(job: ShellJob, *words: str, **settings: str) -> Shell:
    return job.tool(*words, **settings)


def assert_shown_nowhere(job: ShellJob) -> None:
    """Check the output of every script and tool, and every file below the job's folder."""
    said = "\n".join(shell.text for shell in job.shells).encode()
    files = [path for path in job.folder.rglob("*") if path.is_file() and path.name != "the secret"]
    assert len(files) > 5
    for word in NEVER_SHOWN:
        assert word not in said
        assert [path for path in files if word in path.read_bytes()] == []


def assert_on_no_command_line(job: ShellJob) -> None:
    """Check the arguments of all processes, which every user of the machine may read."""
    lines = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                lines.append((process / "cmdline").read_bytes())
            except OSError:
                continue  # ended meanwhile
    assert any(b"tiny_worker" in line for line in lines)
    assert not [line for line in lines for word in NEVER_SHOWN if word in line]


def test_secret_given_by_value_is_asked_for_and_never_shown(job: ShellJob) -> None:
    job.settings["CLUSTER_SECRET"] = SECRET
    shell = job.run(*UNTIL_TOLD)
    job.wait_training()
    assert_on_no_command_line(job)
    assert "encrypted, the secret is required" in job.log("scheduler")
    start = json.loads((job.log_dir / START_FILE).read_text())
    assert start["needs_secret"] is True
    assert not [name for name in start["environment"] if "SECRET" in name]
    assert stat.S_IMODE((job.log_dir / START_FILE).stat().st_mode) == 0o600

    assert tool(job, "status").end() == 85
    assert "requires a secret, and this process has none. Fix: export CLUSTER_SECRET" in job.shells[-1].text
    assert tool(job, "stop", CLUSTER_SECRET=SECRET + "!").end() == 85
    assert "refuses this process's secret" in job.shells[-1].text
    for words in (("status",), ("status", "--json"), ("explain", "variables"), ("doctor",)):
        assert tool(job, *words, CLUSTER_SECRET=SECRET).end() in (0, 1), job.shells[-1].text
    assert "3/3 workers" in job.shells[-4].text

    before = job.kill("worker_1")
    bare = job.recover()
    assert bare.end() == 64
    (line,) = [line for line in bare.text.splitlines() if line.startswith("samebits: ")]
    assert line.startswith("samebits: this job was started with CLUSTER_SECRET, which is never stored. Fix: export ")
    assert job.identity("worker_1") == before
    recover = job.recover(MS_CLUSTER_SECRET=SECRET)
    job.wait_training(generation=2)
    assert_on_no_command_line(job)
    job.let_finish()
    assert recover.end() == 0, recover.text
    assert shell.end() == 0, shell.text
    assert_shown_nowhere(job)


def test_secret_in_a_file_is_found_again(job: ShellJob) -> None:
    """The path is saved and is valid from any folder; the secret of another job is not used."""
    (job.folder / "the secret").write_text(f"{SECRET}\n")
    job.settings["CLUSTER_SECRET_FILE"] = "the secret"
    shell = job.run(*ENDLESS)
    following = job.settings | {"CLUSTER_SECRET_FILE": str(job.folder / "the secret")}
    job.settings = following
    job.wait_training()
    for name in ("scheduler", "worker_0", "worker_1", "worker_2"):
        job.kill(name)
    assert shell.end() == 77, shell.text
    recover = job.recover(CLUSTER_SECRET="the secret of another cluster", MS_CLUSTER_SECRET="and another one")
    job.wait_training(generation=2)
    for name in ("scheduler", "worker_0"):
        assert not {"CLUSTER_SECRET", "MS_CLUSTER_SECRET"} & set(job.proc_environment(name))
    assert tool(job, "status").end() == 0, job.shells[-1].text
    assert re.search(r"step \d+.* · 3/3 workers", job.shells[-1].text)
    assert tool(job, "stop").end() == 0, job.shells[-1].text
    assert recover.end() == 78
    assert_shown_nowhere(job)


def test_secret_given_by_value_may_be_given_in_a_file_on_recovery(job: ShellJob) -> None:
    job.settings["CLUSTER_SECRET"] = SECRET
    shell = job.run(*ENDLESS)
    job.wait_training()
    job.kill("scheduler")
    shell.wait_for("the scheduler .* was killed")
    (job.folder / "the secret").write_text(SECRET)
    recover = job.recover(CLUSTER_SECRET_FILE="the secret")
    view = job.wait_view(lambda view: view.term == 2 and view.alive == 3)
    assert view.generation == 1
    recover.send(signal.SIGINT)
    assert recover.end() == 78
    assert shell.end() == 78
    assert_shown_nowhere(job)


def test_invalid_secret_prevents_any_start(job: ShellJob) -> None:
    for settings in ({"CLUSTER_SECRET": "short"}, {"CLUSTER_SECRET_FILE": "missing"}):
        shell = job.run(*ENDLESS, **settings)
        assert shell.end() == 64
        assert "Fix: " in shell.text
    assert job.identities() == {}


def test_worker_with_another_secret_exits_with_its_own_code(job: ShellJob) -> None:
    """Tested as a process, with the message and status that its launcher sees."""
    job.settings |= {"CLUSTER_SECRET": SECRET, "WORKER_NUM": "3"}
    shell = job.run(*ENDLESS)
    job.wait_training()
    stranger = job.shell(
        PYTHON,
        str(ROOT / "tests" / "launcher" / "tiny_worker.py"),
        **{**job.settings, "CLUSTER_SECRET": SECRET + "!", "ROLE": "worker", "NODE_ID": "1", "ENABLE_RECOVERY": "1"},
        PYTHONPATH=str(ROOT),
    )
    assert stranger.end() == 85, stranger.text
    assert "refuses this process's secret. Fix: compare CLUSTER_SECRET" in stranger.text
    shell.send(signal.SIGINT)
    assert shell.end() == 78
    log = job.log("scheduler")
    refusals = re.findall(r"refused \d+ connections with another secret: .*compare CLUSTER_SECRET", log)
    assert 1 <= len(refusals) <= 2, "one when it happens, and the count of later ones at the end"
    assert "generation 2" not in log
    assert_shown_nowhere(job)
