"""Files that the user names: anything but a plain file is refused at once in one sentence."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits import config
from samebits.__main__ import main
from samebits.dashboard import report
from samebits.errors import CheckpointError, SettingsError, StoreError
from samebits.hosts import rank_table
from samebits.launcher.job_spec import version_of
from samebits.named_file import read_named_file
from samebits.net.address_book import read_file
from samebits.net.curve import secret_words
from samebits.scheduler_hosts import NotHostsError
from samebits.service.cause_file import table_of
from samebits.store import durable
from samebits.store.probe_note import ProbeNote, ProbeState
from samebits.store.probe_note import read as read_probe
from samebits.store.process_identity import ProcessIdentity
from samebits.training.checkpoint.dcp import read_dcp
from tests.store.test_store_no_plain_file import a_socket

OTHERS: dict[str, Callable[[Path], object]] = {
    "a fifo": os.mkfifo,
    "a link to a fifo": lambda path: (os.mkfifo(f"{path}.fifo"), path.symlink_to(f"{path}.fifo")),
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
}


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    """Opening a fifo waits forever; a test that would is ended."""

    def late(*_: object) -> None:
        raise AssertionError("it was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def cause_table(path: Path) -> object:
    settings, _ = config.read({"ROLE": "scheduler", "WORKER_NUM": "1", "CAUSE_TABLE": str(path)})
    return table_of(settings)


def index_in(path: Path) -> object:
    path.rename(path.with_name(".metadata"))
    return read_dcp(path.parent)


READ: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "CLUSTER_SECRET_FILE": (lambda path: secret_words(None, path), SettingsError),
    "CAUSE_TABLE": (cause_table, SettingsError),
    "SCHED_HOST": (lambda path: read_file(path, 1), NotHostsError),
    "ranktable check": (lambda path: rank_table.main(["check", str(path)]), SettingsError),
    "ranktable join": (lambda path: rank_table.main(["join", str(path), str(path)]), SettingsError),
    "ranktable make --hccn": (lambda path: rank_table.main(["make", "--hccn", str(path)]), SettingsError),
    "PROBE_FILE": (read_probe, StoreError),
    "load_dcp": (index_in, CheckpointError),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", READ)
def test_other_than_a_plain_file_is_reported_at_once(name: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    OTHERS[other](path)
    read, kind = READ[name]
    with pytest.raises(kind) as refused:
        read(path)
    assert len(str(refused.value).splitlines()) == 1
    assert "plain file" in str(refused.value) or "expected a file" in str(refused.value)


@pytest.mark.parametrize("other", OTHERS)
def test_complete_command_reports_it(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OTHERS[other](tmp_path / "named")
    monkeypatch.setenv("CLUSTER_SECRET_FILE", str(tmp_path / "named"))
    monkeypatch.setenv("WORKER_NUM", "1")
    monkeypatch.setenv("RECOVERY_PATH", str(tmp_path / "recovery"))
    assert main(["scheduler"]) == SettingsError.exit_code


def test_link_to_a_file_is_followed_and_a_long_one_is_cut(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to("file")
    assert read_named_file(tmp_path / "link", 10) == b"x" * 11
    assert version_of(tmp_path / "link") is not None and version_of(tmp_path / "none") is None


WRITE: dict[str, Callable[[Path], object]] = {
    "PROBE_FILE": lambda path: ProbeNote(ProcessIdentity(7, 42), ProbeState.READY, 1.0).write(path),
    "export --force": lambda path: durable.new_file(path, replace=True).__enter__(),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", WRITE)
def test_other_than_a_plain_file_is_not_replaced(name: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "named"
    OTHERS[other](path)
    before = path.lstat()
    with pytest.raises(StoreError, match="which is not replaced"):
        WRITE[name](path)
    assert path.lstat() == before and {one.name for one in tmp_path.iterdir()} <= {"named", "named.fifo"}


def test_report_does_not_replace_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECOVERY_PATH", str(tmp_path))
    durable.write_file_atomically(tmp_path / "events.jsonl", b'{"kind":"job","at":1.0,"term":1}\n')
    (tmp_path / "null").symlink_to("/dev/null")
    assert main(["history", "--html", str(tmp_path / "null")]) == 80
    assert (tmp_path / "null").is_symlink() and report.LOG_CHARACTERS


def test_rank_table_is_processed_in_linear_time() -> None:
    def seconds(devices: int) -> float:
        text = rank_table.text_of(rank_table.made("a", range(devices), {})).encode()
        took = []
        for _ in range(3):
            began = time.process_time()
            assert rank_table.parse(text, "a.json", strict=False).table.world_size == devices
            took.append(time.process_time() - began)
        return min(took)

    assert seconds(60_000) < 30 * seconds(6_000)  # quadratic would be a hundred times
