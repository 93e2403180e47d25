"""``samebits cluster``: real hosts on this machine, their cuts, kills and ends, and everything it refuses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from samebits.__main__ import main
from samebits.hosts import local_cluster
from samebits.hosts.local_cluster import Cluster, ClusterFile, ClusterHost, Holder, Isolation, Power
from tests.launcher.shell_job import Shell, ShellJob
from tests.system.processes import found_below

pytestmark = pytest.mark.system

LISTEN = "import socket; s = socket.create_server(('', 8118)); print('listening', flush=True)\nwhile True: s.accept()"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 8118), 3); print('connected')"
WAIT = "import time; print('waiting', flush=True); time.sleep(600)"
PYTHON = sys.executable


@pytest.fixture
def typed(job: ShellJob) -> Iterator[Callable[..., Shell]]:
    """Type ``samebits cluster WORDS``; afterwards nothing may be left, whatever happened."""

    def start(*words: str, **settings: str) -> Shell:
        return job.tool("cluster", *words, **settings)

    yield start
    if (job.folder / "cluster").exists():
        assert start("down").end() == 0
    assert not (job.folder / "cluster").exists()
    assert not [one for one in found_below(job.folder) if not one.wait_for_exit(30.0)]


def said(shell: Shell, status: int = 0) -> str:
    """Return what a command printed, once it has ended with this status."""
    assert shell.end() == status, shell.text
    return shell.text


def opened(address: str) -> int:
    """Open the page as a browser does, with cookies; return the HTTP status."""
    with urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(address, timeout=60) as answer:
        return int(answer.status)


@pytest.fixture
def needs_namespaces() -> None:
    if problem := local_cluster.refusal():
        pytest.skip(problem)


@pytest.mark.usefixtures("needs_namespaces")
def test_hosts_are_apart_can_be_cut_off_killed_and_healed(job: ShellJob, typed: Callable[..., Shell]) -> None:
    before = set(Path("/sys/class/net").iterdir())
    text = said(typed("up", "--hosts", "2"))
    assert "2 hosts in network namespaces on this machine: host0 (192.0.2.1), host1 (192.0.2.2)" in text
    assert stat.S_IMODE((job.folder / "cluster").stat().st_mode) == 0o700
    page = re.search(r"the page is at (\S+)", text)
    assert page is not None, text
    assert opened(page[1]) == 200

    assert said(typed("exec", "1", "hostname")) == "host1\n"
    assert said(typed("exec", "1", "--", "pwd")) == f"{job.folder}/cluster/host1\n"
    foreign = {"MS_SCHED_HOST": "203.0.113.1", "SCHED_PORT": "1", "CLUSTER_SECRET": "s" * 32}
    assert "at 192.0.2.1, port 8118" in said(typed("exec", "0", "samebits", "status", **foreign), 80)
    said(typed("exec", "0", "--", "sh", "-c", 'test "$SCHED_HOST" = 192.0.2.1 && test -s "$CLUSTER_SECRET_FILE"'))
    assert said(typed("exec", "0", "--", "sh", "-c", "exit 7"), 7) == ""

    server = typed("exec", "1", "--", PYTHON, "-c", LISTEN)
    server.wait_for("listening")
    connect = ("exec", "0", "--", PYTHON, "-c", CONNECT, "192.0.2.2")
    assert said(typed(*connect)) == "connected\n"
    assert "host 1 was cut off" in said(typed("cut", "1"))
    assert "cut off already" in said(typed("cut", "1"))
    assert "timed out" in said(typed(*connect), 1), "a cut loses packets; it refuses nothing"
    assert said(typed("heal")) == "samebits: host 1 reaches the other hosts again\n"
    assert said(typed(*connect)) == "connected\n"

    assert "every process on host 1 was killed" in said(typed("kill", "1"))
    assert server.end() == 128 + signal.SIGKILL
    assert "host 1 is off. Fix: samebits cluster heal 1" in said(typed("exec", "1", "--", "true"), 80)
    assert "host 1 is off" in said(typed("kill", "1"), 80)
    (job.folder / "cluster" / "host1" / "kept").touch()
    assert "host 1 was started" in said(typed("heal", "1"))
    assert said(typed("exec", "1", "--", "ls")) == "kept\n"
    assert "nothing to heal" in said(typed("heal"))

    assert "has a cluster already. Fix: samebits cluster down" in said(typed("up"), 80)
    said(typed("down"))
    assert set(Path("/sys/class/net").iterdir()) == before


@pytest.mark.usefixtures("needs_namespaces")
def test_down_ends_a_cluster_whose_start_was_killed(job: ShellJob, typed: Callable[..., Shell]) -> None:
    """In turn: before, while and after the first hosts are recorded."""
    for hosts_on in range(3):
        up = typed("up")
        file = job.folder / "cluster" / "cluster.json"
        up.wait_until(lambda: file.exists() and file.read_text().count('"on"') >= hosts_on)  # noqa: B023
        up.process.kill()
        up.process.wait()
        assert "has a cluster already" in said(typed("up"), 80)
        said(typed("down"))
        assert not [one for one in found_below(job.folder) if not one.wait_for_exit(30.0)]


def test_without_iproute2_hosts_are_groups_of_processes(
    job: ShellJob, typed: Callable[..., Shell], tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sh", "sleep"):
        (tools / name).symlink_to(shutil.which(name) or "")
    path = {"PATH": str(tools)}
    text = said(typed("up", "--hosts", "2", **path))
    page = re.search(r"the page is at (\S+)", text)
    assert page is not None, text
    assert "so the 2 hosts are groups of processes that share this machine's network" in text
    assert "not found on this machine" in text or "needs root" in text
    waits = [typed("exec", number, "--", PYTHON, "-c", WAIT, **path) for number in ("0", "1")]
    for shell in waits:
        shell.wait_for("waiting")
    assert "host 1 was suspended (SIGSTOP)" in said(typed("cut", "1", **path))
    waits[1].wait_until(lambda: states(job.folder / "cluster" / "host1") == {"T"})
    assert "T" not in states(job.folder / "cluster" / "host0")
    assert "host 1 is suspended" in said(typed("exec", "1", "--", PYTHON, "-c", "", **path), 80)
    said(typed("heal", **path))
    waits[1].wait_until(lambda: "T" not in states(job.folder / "cluster" / "host1"))
    said(typed("kill", "1", **path))
    assert waits[1].end() == 128 + signal.SIGKILL
    assert waits[0].process.poll() is None
    said(typed("kill", "0", **path))
    assert waits[0].end() == 128 + signal.SIGKILL
    assert opened(page[1]) == 200, "the page outlives host 0"
    said(typed("down", **path))


@pytest.mark.usefixtures("needs_namespaces")
def test_without_root_the_reason_is_one_sentence() -> None:
    child = os.fork()
    if child == 0:  # another user from here on, so that this process is not
        os.setresuid(65534, 65534, 65534)
        os._exit(0 if local_cluster.refusal() == "creating network namespaces needs root" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def states(disk: Path) -> set[str]:
    """Return the states (proc(5)) of the processes that work in this host's folder."""
    return {Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0] for one in found_below(disk)}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("exec", "1", "--", "true"), "has no cluster. Fix: samebits cluster up --hosts 3"),
        (("kill", "1"), "has no cluster"),
        (("down",), "has no cluster"),
    ],
)
def test_verbs_without_a_cluster_are_refused(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cluster", *words]) == 80
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    ["cut", "exec 1", "kill 1 -- x", "down 1", "up --hosts 17", "up --hosts 0", "kill -1", "kill 1 2", "burn", ""],
)
def test_wrong_words_are_refused(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        main(["cluster", *words.split()])
    assert refused.value.code == 2
    assert not list(tmp_path.iterdir())


def test_only_a_cluster_is_opened_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").touch()
    for words in (["up"], ["down"], ["heal"]):
        assert main(["cluster", *words]) == 80
    assert "exists and is not a cluster. Fix: move it away" in capsys.readouterr().err
    for content in (b"", b"{", b"\xff", b'{"way": "magic", "hosts": [], "port": 1}', b"[" * 9999, b"\0" * 4096):
        (folder / "cluster.json").write_bytes(content)
        assert main(["cluster", "down"]) == 71
        assert "expected the file of a cluster" in capsys.readouterr().err
    folder.chmod(0o777)
    assert main(["cluster", "down"]) == 71
    assert "other users can write to this folder" in capsys.readouterr().err
    assert (folder / "notes.txt").exists()


def test_recorded_pid_of_another_process_is_not_touched(tmp_path: Path) -> None:
    folder, holder = tmp_path / "cluster", Holder(os.getpid(), 1)  # this process started later
    with Cluster.created(folder, 1, Isolation.NAMESPACES, 8118):
        (folder / "cluster.json").write_bytes(
            msgspec.json.encode(
                ClusterFile(Isolation.NAMESPACES, (ClusterHost(0, Power.ON, holder),), 8118, holder, holder)
            )
        )
    with Cluster.locked(folder) as cluster:
        assert cluster.host(0).power is Power.OFF
        cluster.remove()
    assert not folder.exists()
