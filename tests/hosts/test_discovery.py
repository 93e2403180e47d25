"""The discovery script: its output, and every failure reported within a bounded time."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest

from samebits.errors import UsageError
from samebits.hosts.discovery import MAX_OUTPUT_BYTES as MOST
from samebits.hosts.discovery import DiscoveryScript, ask, words_of
from samebits.hosts.host_list import Host


def script(folder: Path, text: str) -> list[str]:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return words_of("hosts.sh --all", folder)


def test_printed_lines_are_the_hosts(tmp_path: Path) -> None:
    words = script(tmp_path, 'echo "not for us" >&2; echo "a:2"; echo b; echo "c:0 # later"; test "$1" = --all')
    assert words == ["./hosts.sh", "--all"]
    assert ask(words, tmp_path, 4) == (Host("a", 2), Host("b", 4), Host("c", 0))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo a; echo; echo 'no such cluster' >&2; exit 3", "./hosts.sh ended with status 3: no such cluster"),
        ("echo a; kill -9 $$", "./hosts.sh was killed by signal 9"),
        ("echo a; exec sleep 60", "./hosts.sh has not ended after 0.5 s"),
        ("exec >&- 2>&-; exec sleep 60", "./hosts.sh closed its output and has not ended after 0.5 s"),
        ("echo a; sleep 60 & exit 0", "./hosts.sh has not ended after 0.5 s"),
        ("exec cat /dev/zero", "./hosts.sh printed more than 1 MiB"),
        ("echo 'a b'", "line 1 of the discovered hosts is 'a b'"),
        ("exit 0", "./hosts.sh named no host with a slot"),
        ("echo a:0", "./hosts.sh named no host with a slot"),
        ("printf 'a\\377\\n'", "line 1 of the discovered hosts is 'a\\ufffd'"),
    ],
)
def test_any_other_behaviour_is_reported_in_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    began = time.monotonic()
    patience_s = 30.0 if "zero" in text else 0.5
    answer = ask(script(tmp_path, text), tmp_path, 1, patience_s)
    assert isinstance(answer, str) and answer.startswith(said)
    assert time.monotonic() - began < 30 and MOST == 1 << 20


def test_missing_or_invalid_script(tmp_path: Path) -> None:
    assert ask(["./none.sh"], tmp_path, 1) == "./none.sh cannot be run: No such file or directory"
    for text, said in (
        ("'./a", "No closing quotation"),
        (" ", "names no command"),
        ("cat hosts && echo b", "the command runs without a shell, but '&&' needs one"),
    ):
        with pytest.raises(UsageError, match=said):
            words_of(text, tmp_path)


def test_script_is_run_repeatedly_and_ended_with_its_caller(tmp_path: Path) -> None:
    words = script(tmp_path, 'echo "a:$(cat slots)"; test ! -e hang || { echo $$ >pid; exec sleep 600; }')
    (tmp_path / "slots").write_text("1")
    asker = DiscoveryScript(words, tmp_path, 1)
    try:
        wait_for(asker, (Host("a", 1),))
        (tmp_path / "slots").write_text("2")
        wait_for(asker, (Host("a", 2),))
        (tmp_path / "hang").touch()
        until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text().strip()))
    finally:
        asker.close()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


def wait_for(asker: DiscoveryScript, answer: tuple[Host, ...]) -> None:
    until(lambda: asker.take() == answer)


def until(is_so: object) -> None:
    deadline = time.monotonic() + 60
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_children_of_a_script_end_with_it(tmp_path: Path) -> None:
    """A child holds the only write end of a fifo, so the fifo's end of file shows that the child has ended."""
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    text = "echo a; exec 3>held; echo x >&3; sleep 1000 >&- 2>&- & exit 0"
    assert ask(script(tmp_path, text), tmp_path, 1, 30.0) == (Host("a", 1),)
    assert os.read(reader, 10) == b"x\n", "it had started"
    assert select.select([reader], [], [], 30)[0], "its child is still running"
    assert os.read(reader, 10) == b""
    os.close(reader)
