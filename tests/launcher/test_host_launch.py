"""The template that starts a worker on another host: what is refused, and that no value becomes a command."""

from __future__ import annotations

import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from samebits.errors import UsageError
from samebits.launcher.spawning import EXAMPLE, Program, is_here, shell_line, template_of

HOSTILE = "$(touch owned); `touch owned` && touch owned | \"'\\ \n x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it names no {command}"),
        ("ssh {host}", "it names no {command}"),
        ("sh -c {command}", "or neither {host} nor {node}"),
        ("ssh {hots} {command}", "{hots} is no placeholder"),
        ("ssh {} {host} {command}", "{} is no placeholder"),
        ("ssh {host} {command} | tee x", "'|' is a shell's"),
        ("cd x && ssh {host} {command}", "'&&' is a shell's"),
        ("ssh {host} '{command}", "cannot be split into words"),
        ("{host} {command}", "its first word is the program"),
    ],
)
def test_invalid_template_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        template_of(text)
    assert said in str(refused.value) and "Fix: " in str(refused.value)


def test_words_stay_words_whatever_is_filled_in() -> None:
    template = template_of("srun -w {host} --job-name=w-{node} 'sh' -c {command}")
    assert template.filled("b", "3", HOSTILE) == ["srun", "-w", "b", "--job-name=w-3", "sh", "-c", HOSTILE]
    assert template_of(EXAMPLE).filled("b", "3", "{host}")[-1] == "{host}", "a filled-in value is not expanded again"


def test_line_becomes_exactly_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "a 'folder' $HOME"
    folder.mkdir()
    words = ["python3", "-c", "import os, sys; print(os.getcwd(), os.environ['X'], sys.argv[1:])", HOSTILE]
    line = shell_line(folder, {"X": HOSTILE}, words)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder} {HOSTILE} {[HOSTILE]}\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize(("command", "status"), [("exit 82", 82), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_remote_shell_reports_how_the_command_ended(command: str, status: int, shell: str, tmp_path: Path) -> None:
    """Without this, ssh exits with 255 after a signal, as it does for an unreachable host."""
    line = shell_line(tmp_path, {}, ["sh", "-c", command])
    assert subprocess.run([shell, "-c", line], capture_output=True, check=False).returncode == status
    nowhere = shell_line(tmp_path / "not there", {}, ["sh", "-c", command])
    assert subprocess.run([shell, "-c", nowhere], capture_output=True, check=False).returncode in (1, 2)


def test_remote_worker_gets_the_template_and_only_the_settings_it_needs() -> None:
    environment = {"WORKER_NUM": "2", "HOST_LAUNCH": EXAMPLE, "EDITOR": "ed", "CLUSTER_SECRET": "sixteen bytes of it"}
    program = Program(Path("/job"), "/py", "train.py", ("--x", "a b"), environment, {}, elsewhere={"1": "b"})
    assert program.words("worker_0") == ["/py", "train.py", "--x", "a b"]
    *before, line = program.words("worker_1")
    assert before == ["ssh", "-o", "BatchMode=yes", "b"]
    assert shlex.split(line)[:4] == ["cd", "/job", "&&", "env"]
    assert {"NODE_ID=1", "ROLE=worker", "WORKER_NUM=2"} <= {*shlex.split(line)}
    assert "EDITOR" not in line and "sixteen" not in line
    assert shlex.split(line)[-6:] == ["/py", "train.py", "--x", "a b;", "exit", "$?"]


def test_which_hosts_are_this_machine() -> None:
    assert all(map(is_here, ("localhost", "127.0.0.1", "::1", socket.gethostname())))
    assert not any(map(is_here, ("192.0.2.77", "another.example", "2001:db8::77")))
