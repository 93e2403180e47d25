"""The event log: bounded, readable after torn writes, and never fatal for its writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store import text_log
from samebits.store.text_log import EVENTS_FILE, MOST_PARTS, EventLog, Tail, read_lines


def log_in(folder: Path, told: list[str] | None = None, part_bytes: int = 1000) -> EventLog:
    failures = [] if told is None else told
    return EventLog(folder, lambda lines: f"carried {len(lines)} {lines[-1]}", failures.append, part_bytes=part_bytes)


def test_lines_are_read_in_order_and_are_private(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.append(["a", "b"])
    log.append(["c"])
    log.close()
    log.append(["d"])
    assert read_lines(tmp_path) == ["a", "b", "c", "d"]
    assert stat.S_IMODE((tmp_path / EVENTS_FILE).stat().st_mode) == 0o600


def test_torn_end_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_bytes(b"whole\nto")
    (tmp_path / EVENTS_FILE).chmod(0o600)
    assert read_lines(tmp_path) == ["whole"]
    log = log_in(tmp_path)
    log.append(["next"])
    assert read_lines(tmp_path) == ["whole", "to", "next"]


def test_log_is_bounded_and_carries_sums_of_what_it_drops(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    for number in range(4000):
        log.append([f"line {number} {'x' * 60}"])
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == MOST_PARTS
    assert sum(part.stat().st_size for part in parts) < MOST_PARTS * 1300
    lines = read_lines(tmp_path)
    assert lines[0].startswith("carried ") and lines[-1].startswith("line 3999 ")
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line ")]
    assert numbers == list(range(numbers[0], 4000))


def test_failing_disk_is_reported_once_and_costs_the_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    log = log_in(tmp_path, told)
    log.append(["before"])
    full = OSError(28, "No space left on device")

    def refuse(*_: object) -> int:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(text_log.os, "write", refuse)
        log.append(["lost"])
        log.append(["lost too"])
    log.append(["after"])
    assert read_lines(tmp_path) == ["before", "after"]
    assert len(told) == 1 and "No space left on device" in told[0]


def test_half_a_write_tears_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(text_log.os, "write", lambda descriptor, data: write(descriptor, data[:3]))
        log.append(["torn away"])
    log.append(["after"])
    assert read_lines(tmp_path) == ["tor", "after"]


def test_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    told: list[str] = []
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (tmp_path / EVENTS_FILE).symlink_to(victim)
    log_in(tmp_path, told).append(["theirs"])
    assert victim.read_text() == "mine\n"
    assert len(told) == 1
    with pytest.raises(StoreError):
        read_lines(tmp_path)


def test_file_of_any_size_is_read_up_to_a_bound(tmp_path: Path) -> None:
    with (tmp_path / EVENTS_FILE).open("wb") as file:
        file.write(b"first\n" + b"y" * 200_000 + b"\nsecond\n")
        file.truncate(1 << 34)
    (tmp_path / EVENTS_FILE).chmod(0o600)
    assert read_lines(tmp_path) == ["first", "second"]


def test_reading_again_returns_what_is_new(tmp_path: Path) -> None:
    log, tail = log_in(tmp_path), Tail(tmp_path)
    assert tail.new_lines() == ([], False)
    log.append(["a"])
    assert tail.new_lines() == (["a"], True)
    assert tail.new_lines() == ([], False)
    log.append(["b", "c"])
    assert tail.new_lines() == (["b", "c"], False)
    for number in range(40):
        log.append([f"{number} {'x' * 60}"])
    lines, is_all = tail.new_lines()
    assert is_all and lines == read_lines(tmp_path)


def test_line_ends_only_at_a_newline(tmp_path: Path) -> None:
    """A script's error may contain other Unicode line ends, which JSON keeps unescaped."""
    log, tail = log_in(tmp_path), Tail(tmp_path)
    log.append(["first"])
    assert tail.new_lines() == (["first"], True)
    text = "a\u2028b\x85c\x0bd"
    log.append([text])
    assert tail.new_lines() == ([text], False)
    assert read_lines(tmp_path) == ["first", text]


def test_reading_again_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    path.write_bytes(b"a\n")
    path.chmod(0o600)
    tail = Tail(tmp_path)
    tail.new_lines()
    with path.open("ab") as file:
        file.write(b"half")
        file.flush()
        assert tail.new_lines() == ([], False)
        file.write(b" and half\n")
        file.flush()
        assert tail.new_lines() == (["half and half"], False)
