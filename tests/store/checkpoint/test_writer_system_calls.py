"""The writer process is killed as it enters each system call of one save, by strace(1)."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from pathlib import Path

import pytest

from samebits.core.point import Point
from samebits.store.checkpoint import SaveOutcome
from samebits.store.checkpoint.writer import COMMAND
from tests.crash_points.strace import refusal
from tests.store.checkpoint.test_checkpoint_writer import Trainer, names_in, steps_in_memory, whole_steps

_CALL = re.compile(r"(\d+) +(\w+)\((.*)")
# Calls on its own memory and threads: no other process sees their effect, and their number varies with the length of a
# path or the order of threads. A kill there equals one at the next call.
_OF_ITS_OWN = frozenset({"brk", "madvise", "mmap", "mprotect", "mremap", "munmap", "clone", "clone3", "exit", "futex"})
_OF_ITS_OWN |= {"gettid", "rseq", "rt_sigprocmask", "sched_getaffinity", "sched_yield", "set_robust_list"}
COUNTED = 3  # complete saves: a call that one of them skips may never occur again
ATTEMPTS = 12
_TAKES_IT_UP = re.compile(r'recvfrom\(\d+, "\\223')  # the message that names the slot: an array of three
_SAYS_IT_IS_DURABLE = re.compile(r"sendto\(.*durable")


def save_under_strace(place: Path, *options: str) -> SaveOutcome:
    """Save step 1 and then, under strace, step 2; return what was reported."""
    (place / "memory").mkdir(parents=True)
    first = Trainer(place / "memory", place / "points")
    try:
        assert first.save(1).problem is None
    finally:
        first.close()
    command = ("strace", "-f", "-qq", "-o", str(place / "log"), *options, *COMMAND)
    trainer = Trainer(place / "memory", place / "points", command=command)
    try:
        return trainer.save(2)
    finally:
        trainer.close()


def calls_of_a_save(log: Path) -> list[tuple[str, int]]:
    """Return the calls from the message that names the slot to the durable answer, numbered per thread.

    strace counts per thread and acts in the first thread that reaches the number.
    """
    counts: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, int], None] = {}  # in order
    is_saving = False
    for line in log.read_text(errors="replace").splitlines():
        if (match := _CALL.match(line)) is None:
            continue
        thread, name = match[1], match[2]
        counts[thread, name] += 1
        is_saving = is_saving or _TAKES_IT_UP.search(line) is not None
        if is_saving and name not in _OF_ITS_OWN:
            found[name, counts[thread, name]] = None
        if _SAYS_IT_IS_DURABLE.search(line):
            return list(found)
    raise AssertionError("the save has no end in the log")


def killed_in(folder: Path, name: str, number: int) -> Path | None:
    """Return where the writer was killed in that call, or None.

    Two threads share some of the work, so neither may reach the number of calls that one made during counting.
    """
    for attempt in range(ATTEMPTS):
        place = folder / str(attempt)
        if save_under_strace(place, f"--inject={name}:signal=KILL:when={number}").problem is not None:
            return place
    return None


@pytest.mark.system
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_kill_at_any_system_call_of_a_save_leaves_the_older_point_or_both(tmp_path: Path, every: int) -> None:
    """A short run tries a different sample of the calls each day."""
    if (why := refusal()) is not None:
        pytest.skip(f"{why}; test_error_at_any_call_leaves_no_trace_of_the_attempt fails the calls without it")
    counted = []
    for number in range(COUNTED):
        assert save_under_strace(tmp_path / f"whole{number}") == SaveOutcome(Point(2, 1))
        counted.append(calls_of_a_save(tmp_path / f"whole{number}" / "log"))
    calls = [call for call in counted[0] if all(call in others for others in counted)]
    assert {"openat", "pwrite64", "mkdir", "write", "fsync", "rename", "sendto"} <= {name for name, _ in calls}
    left: Counter[str] = Counter()
    today = datetime.datetime.now(datetime.UTC).date().toordinal() % every
    for index, (name, number) in list(enumerate(calls))[today::every]:
        at = f"call {index} of {len(calls)}, {name}"
        place = killed_in(tmp_path / str(index), name, number)
        assert place is not None, f"{at}: was not killed"
        whole = whole_steps(place / "points")
        assert whole in ([1], [2, 1]), at
        in_memory = steps_in_memory(place / "memory")
        assert in_memory in ([1], [2, 1]), at
        left[f"disk {whole}, memory {in_memory}"] += 1
        successor = Trainer(place / "memory", place / "points")
        try:
            assert successor.save(3).problem is None, at
        finally:
            successor.close()
        assert whole_steps(place / "points") == [3, *whole], at
        assert [one for one in names_in(place / "points" / "0") if one.startswith(".tmp")] == [], at
    assert len(left) == 3 or every > 1, f"before it is hashed, before it is durable, after that: {left}"
