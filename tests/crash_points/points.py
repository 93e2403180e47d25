"""One run per call and fault, and the judgement of what each left.

A fault is an error (EIO, ENOSPC, a device that is remounted read-only), a SIGKILL before, within or after a call, or a
loss of power at that time. After each: nothing existing is lost, an allowed state is read back, the error (if any) has
path, reason and fix, and the next attempt succeeds, in the same process and in the next one.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

from tests.crash_points.page_cache import Loss, PageCache
from tests.crash_points.scenarios import SCENARIOS, Files, Scenario, files_of

ERRORS = ("EIO", "ENOSPC", "remounted")
SHORT_WRITES = "short writes"
KILLS = ("killed before", "killed within", "killed after")
FAULTS = (*ERRORS, *KILLS, SHORT_WRITES)
FILE_SIZE_LIMITS = (0, 1, 8, 40, 100, 200)
MENDS = {"EIO": "dmesg", "ENOSPC": "df -h", "EROFS": "remount", "EFBIG": "ulimit -f", "EACCES": "ls -ld"}


@dataclass(frozen=True, slots=True)
class Violation:
    scenario: str
    fault: str
    at: str
    what: str

    def __str__(self) -> str:
        return f"{self.scenario}: {self.fault} {self.at}: {self.what}"


class Nursery:
    """The process that forks the children; ended with the ``with`` block."""

    def __init__(self, repository: Path) -> None:
        command = [sys.executable, "-m", "tests.crash_points.child"]
        self._process = subprocess.Popen(
            command, cwd=repository, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def obey(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


class Runner:
    """Runs the points of one scenario below ``place``; ``mutant`` names a broken build of the children."""

    def __init__(self, nursery: Nursery, place: Path, name: str, mutant: str | None = None) -> None:
        self._nursery = nursery
        self._place = place
        self._name = name
        self._mutant = mutant
        self._scenario: Scenario = SCENARIOS[name]
        self._before: Files = {}
        self.runs = 0

    def points(self) -> list[tuple[str, bool]]:
        """Return the calls of an undisturbed run in order, and whether each succeeded (a file may exist already)."""
        answer = self._run("no fault", 0)
        problem = answer["crash"] or answer["error"]
        assert problem is None, problem
        assert answer["unseen"] == [], f"calls that bypassed the layer: {answer['unseen']}"
        return [(call, at in answer["succeeded"]) for at, call in enumerate(answer["calls"])]

    def violations(self, fault: str) -> Iterator[Violation]:
        """Run once per call with this fault at that call; return what is wrong afterwards."""
        if fault == SHORT_WRITES:
            for what in self._after_error(self._run(fault, 0), None):
                yield Violation(self._name, fault, "everywhere", what)
            return
        for at, (call, succeeded) in enumerate(self.points()):
            if fault == "killed within" and not call.startswith("write "):
                continue  # the kernel does it completely or not at all; only a write can end midway
            if fault == "killed after" and not succeeded:
                continue
            answer = self._run(fault, at)
            # A call that fails in every run, such as creating an existing name, may fail otherwise and be skipped.
            reason = None if not succeeded else "EIO" if fault == "remounted" else fault
            problems = self._after_kill(answer) if fault in KILLS else self._after_error(answer, reason)
            for what in problems:
                yield Violation(self._name, fault, f"call {at}, {call}", what)

    def refusals(self) -> Iterator[Violation]:
        """Test what the kernel itself refuses to a process with few rights or a file size limit."""
        for fault, at in (("EACCES", 0), *(("EFBIG", limit) for limit in FILE_SIZE_LIMITS)):
            for what in self._after_error(self._run(fault, at), fault):
                yield Violation(self._name, fault, str(at), what)

    def _run(self, fault: str, at: int) -> dict[str, Any]:
        self.runs += 1
        shutil.rmtree(self._place, ignore_errors=True)
        for folder in (self._folder, self._place / "holds"):
            folder.mkdir(parents=True)
        self._scenario.prepare(self._folder)
        self._before = files_of(self._folder)
        return self._nursery.obey(
            scenario=self._name, folder=str(self._folder), fault=fault, at=at, mutant=self._mutant
        )

    @property
    def _folder(self) -> Path:
        return self._place / "work"

    def _cache(self, answer: dict[str, Any]) -> PageCache:
        return PageCache.from_plain(self._folder, self._place / "holds", answer["cache"])

    # ---- after a kill or a loss of power ---------------------------------------------------------------------------

    def _after_kill(self, answer: dict[str, Any]) -> Iterator[str]:
        if answer["status"] != -signal.SIGKILL:
            yield f"was not killed: {answer}"
            return
        for loss in Loss:
            self._cache(answer).lose(loss, self._place / loss.name)
            yield from _under(f"power lost, with {loss.value}", self._judge(self._place / loss.name, answer))
        shutil.copytree(self._folder, self._place / "killed")
        yield from self._judge(self._place / "killed", answer)
        again = self._nursery.obey(
            scenario=self._name, folder=str(self._folder), fault="no fault", cache=answer["cache"], mutant=self._mutant
        )
        yield from _under("killed, gone on, then power lost", self._judge_end(again))

    # ---- after an error --------------------------------------------------------------------------------------------

    def _after_error(self, answer: dict[str, Any], reason: str | None) -> Iterator[str]:
        if answer["crash"] is not None:
            yield f"no error of ours:\n{answer['crash']}"
        elif answer["error"] is not None:
            yield from judge_text(answer["error"], self._folder, reason)
        if answer["retry"] is not None:
            yield f"the next attempt in the same process failed:\n{answer['retry']}"
            return
        if (self._place / "failed").exists():
            yield from self._judge(self._place / "failed", answer)
        if "cache" not in answer:
            yield from self._judge(self._folder, {"promised": len(self._scenario.states) - 1})
            return
        yield from _under("tried again, then power lost", self._judge_end(answer))

    # ---- what is read back -----------------------------------------------------------------------------------------

    def _judge(self, folder: Path, answer: dict[str, Any]) -> Iterator[str]:
        yield from judge(self._scenario, self._before, folder, answer["promised"])

    def _judge_end(self, answer: dict[str, Any]) -> Iterator[str]:
        """An attempt that succeeded has promised everything, and needs nothing from the kernel's memory."""
        target = self._place / "end"
        self._cache(answer).lose(Loss.EVERYTHING, target)
        try:
            state = self._scenario.read(target)
            if state != self._scenario.states[-1]:
                yield f"it reads {state!r}"
        except Exception:
            yield f"it cannot be read:\n{traceback.format_exc()}"


def judge(scenario: Scenario, before: Files, folder: Path, promised: int) -> Iterator[str]:
    """Return what is wrong with the remains: a loss, a forbidden state, or no way to continue."""
    if (lost := scenario.lost(before, files_of(folder))) is not None:
        yield f"after {promised} promises: {lost}"
    try:
        with patch("os.fsync", _no_sync):
            state = scenario.read(folder)
            if state not in scenario.states[promised : promised + 2]:
                yield f"after {promised} promises it reads {state!r}"
                return
            scenario.act(folder, lambda number: None)
            if (state := scenario.read(folder)) != scenario.states[-1]:
                yield f"the next attempt ends with {state!r}"
    except Exception:
        yield f"the next attempt failed:\n{traceback.format_exc()}"


def judge_text(text: str, folder: Path, reason: str | None) -> Iterator[str]:
    """Return what an error's message lacks."""
    if reason is not None and not (f"({reason})" in text and MENDS[reason] in text):
        yield f"the message does not say {reason} and the fix: {text}"
    if str(folder) not in text:
        yield f"the message does not say where: {text}"


def _no_sync(descriptor: int) -> None:
    """Skip syncs: the next attempt's durability is not judged by what a folder shows while the power is on."""


def _under(condition: str, problems: Iterator[str]) -> Iterator[str]:
    for what in problems:
        yield f"{condition}: {what}"
