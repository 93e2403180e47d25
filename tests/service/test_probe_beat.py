"""PROBE_FILE: the process writes it from start to end, and `samebits probe` reads it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.service.probe_beat import ProbeBeat
from samebits.store.probe_note import read
from tests.system.processes import environment_of_tests

PROGRAM = """
import sys
from pathlib import Path
from samebits.service.probe_beat import ProbeBeat
beat = ProbeBeat(Path(sys.argv[1]))
for word in sys.stdin:
    if word == "ready\\n":
        beat.ready()
    print(word, end="", flush=True)
"""


def ask(
    question: str, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setenv("PROBE_FILE", str(path))
    status = main(["probe", question])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_process_reports_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "probe"
    assert ask("alive", path, monkeypatch, capsys)[0] == 1

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)],
            env=environment_of_tests(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(process: subprocess.Popen[str], word: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        print(word, file=process.stdin, flush=True)
        assert process.stdout.readline() == word + "\n"

    with started() as process:
        tell(process, "hello")
        assert ask("alive", path, monkeypatch, capsys)[0] == 0
        assert ask("ready", path, monkeypatch, capsys)[0] == 1
        tell(process, "ready")
        assert ask("ready", path, monkeypatch, capsys)[0] == 0
        first, deadline = read(path), time.monotonic() + 60
        while read(path) == first:
            assert time.monotonic() < deadline, "it reports nothing more"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    status, said = ask("alive", path, monkeypatch, capsys)
    assert (status, "gone" in said) == (1, True)
    with started() as process:
        tell(process, "ready")
    assert process.returncode == 0
    status, said = ask("alive", path, monkeypatch, capsys)
    assert (status, "ended by itself" in said) == (0, True)
    assert ask("ready", path, monkeypatch, capsys)[0] == 1


def test_without_a_probe_file_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ProbeBeat(None).ready()
    monkeypatch.delenv("PROBE_FILE", raising=False)
    assert main(["probe", "alive"]) == 64
    assert "PROBE_FILE is not set" in capsys.readouterr().err


def test_unwritable_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    beat = ProbeBeat(tmp_path / "missing" / "probe")
    beat.ready()
    beat.ready()
    assert caplog.text.count("liveness probe") == 1
