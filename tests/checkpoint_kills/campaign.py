"""The kills: a victim, a random time in its output, kill -9, a check of what is left, and again on the same folder.

The check is the same after every kill: every directory with a point's name is complete, whatever loads is right, what
was durable or something newer is held, at least one point that every rank had is verified, and what was copied to
another host, or something newer, is kept there. Victims succeed each other on one folder, as the processes of one rank
do, so each also starts from what the previous kill left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from samebits.errors import CheckpointError
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.training.checkpoint.kept_copies import KeptCopies
from tests.checkpoint_kills import victim
from tests.checkpoint_kills.keeper import Keeper
from tests.checkpoint_kills.victim import JOB, Life, Place

MOMENTS = ("load", "save", "save", "delete")
VICTIMS = (
    "trainer",
    "trainer",
    "trainer and writer",
    "writer, then trainer",
    "keeper, then trainer",
    "trainer, writer and keeper",
)
ELEMENTS = (1_000, 100_000, 1_000_000)
UNPROVEN = "its writer died before hashing it"
MOST_OCCURRENCES = 6
MEAN_DELAY_S = 0.01
WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Draw:
    """One kill: after which output of the victim, how much later, and of which process."""

    moment: str
    occurrence: int
    delay_s: float
    whom: str
    life: Life

    @classmethod
    def of(cls, chance: random.Random) -> Draw:
        is_async = chance.random() < 0.7
        return cls(
            moment=chance.choice(MOMENTS),
            occurrence=chance.randint(1, MOST_OCCURRENCES),
            delay_s=chance.expovariate(1 / MEAN_DELAY_S),
            whom=chance.choice(VICTIMS) if is_async else "trainer",
            life=Life(chance.choice(ELEMENTS), is_async, is_heard=chance.random() < 0.8),
        )


@dataclass(slots=True)
class Found:
    """The results of all kills."""

    kills: int = 0
    doing: Counter[str] = field(default_factory=Counter)
    """the victim's last output"""
    killed: Counter[str] = field(default_factory=Counter)
    unloadable: list[str] = field(default_factory=list)
    unproven: int = 0
    """slots whose writer was killed before it had hashed them: skipped with a message"""
    copies: int = 0
    """copies on the other host that were verified and right"""
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    least_verified: int | None = None
    """of the points that every rank had, once there was one"""

    @property
    def problems(self) -> list[str]:
        return [*self.unloadable, *self.wrong, *self.lost, *self.failures]


class Campaign:
    """One folder, and the kills on it."""

    def __init__(self, place: Place, seed: int) -> None:
        for memory in (place.memory, place.elsewhere):
            memory.mkdir(mode=0o700, exist_ok=True)
        self.keeper = Keeper(place.elsewhere)
        self.found = Found()
        self._place = place
        self._chance = random.Random(seed)
        self._durable = 0
        self._copied = 0
        self._global: set[int] = set()

    def kill_once(self) -> None:
        """Run one victim, from its start to the check of what it left."""
        draw = Draw.of(self._chance)
        life = draw.life if not draw.life.is_async else replace(draw.life, buddy=self.keeper.endpoint())
        pid, listen = victim.start(self._place, life)
        with os.fdopen(listen, "rb", buffering=0) as pipe:
            lines = Lines(pipe.fileno())
            try:
                writers = self._kill(pid, draw, lines)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            lines.read_to_the_end()
        for writer in writers:
            _wait_for_end(writer)
        self._note(draw, lines, status)
        self._judge()

    def _kill(self, pid: int, draw: Draw, lines: Lines) -> list[int]:
        """Kill; return the writers, which may have work left."""
        lines.read_until(draw.moment, draw.occurrence)
        time.sleep(draw.delay_s)  # the time is drawn: no event is waited for
        writers = _children(pid)
        if draw.whom == "trainer":
            os.kill(pid, signal.SIGKILL)
            return writers
        if draw.whom == "writer, then trainer":
            _kill_all(writers)
        elif draw.whom == "keeper, then trainer":
            self.keeper.kill()
        if "then" in draw.whom:
            lines.read_until("save", 2)
            writers = _children(pid)
        os.kill(pid, signal.SIGKILL)
        if "and" in draw.whom:
            _kill_all(writers)
        if "and keeper" in draw.whom:
            self.keeper.kill()
        return writers

    def _note(self, draw: Draw, lines: Lines, status: int) -> None:
        self.found.kills += 1
        self.found.killed[draw.whom] += 1
        self.found.doing[lines.all[-1].split()[0] if lines.all else "nothing yet"] += 1
        said = [line for line in lines.all if line.startswith("error")]
        if said or os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            self.found.failures.append(f"{draw}: the victim ended by itself: {said or status}")
        self._durable = max([self._durable, *lines.numbers("durable")])
        self._global.update(lines.numbers("global"))

    def _judge(self) -> None:
        """Check as the next process of the rank would."""
        found = self.found
        case = f"after kill {found.kills}"
        on_disk = checkpoints.scan(self._place.rank_folder, JOB)
        for one in on_disk:
            try:
                one.require_manifest()
                checkpoints.verify(one)
            except CheckpointError as error:
                found.unloadable.append(f"{case}: {error}")
        with _warnings() as warnings:
            rank_checkpoints = self._place.open()
            held = rank_checkpoints.held()
            for point in held:
                if not victim.is_right(rank_checkpoints.load(point)):
                    found.wrong.append(f"{case}: {point}")
            rank_checkpoints.release()
        self._judge_copies(case)
        unproven = [warning for warning in warnings if UNPROVEN in warning]
        found.unproven += len(unproven)
        found.unloadable += [f"{case}: {warning}" for warning in warnings if warning not in unproven]
        if self._durable and (not held or held[0].step < self._durable):
            found.lost.append(f"{case}: step {self._durable} was durable, held are {held}")
        if self._global:
            verified = len([one for one in on_disk if one.point.step in self._global])
            found.least_verified = verified if found.least_verified is None else min(verified, found.least_verified)
            if not verified:
                found.lost.append(f"{case}: of the points that every rank had, none is left: {on_disk}")

    def _judge_copies(self, case: str) -> None:
        """Check as a process of the other host would after the loss of this one."""
        found, copies = self.found, KeptCopies(JOB, memory=self._place.elsewhere)
        copies.begin(1, (victim.SLOT,))
        self.keeper.stop()
        with _warnings() as warnings:
            kept = copies.look()
            found.wrong += [f"{case}: the copy {copy}" for copy in kept if not victim.is_right(copies.read(copy))]
        self.keeper.go_on()
        found.unloadable += [f"{case}: {warning}" for warning in warnings]
        found.copies += len(kept)
        newest = max((copy.point.step for copy in kept), default=0)
        if newest < self._copied:
            found.lost.append(f"{case}: step {self._copied} was copied, kept are {kept}")
        self._copied = max(newest, self._copied)


class Lines:
    """A victim's output as it arrives."""

    def __init__(self, descriptor: int) -> None:
        self.all: list[str] = []
        self._descriptor = descriptor
        self._partial = b""

    def numbers(self, word: str) -> list[int]:
        """Return the numbers of all lines with that word."""
        return [int(line.split()[1]) for line in self.all if line.startswith(f"{word} ")]

    def read_until(self, word: str, times: int) -> None:
        """Read until the word has appeared ``times`` more times, or the output ends."""
        begin = len(self.all)
        deadline_s = time.monotonic() + WITHIN_S
        while sum(line.split()[0] == word for line in self.all[begin:]) < times:
            if not select.select([self._descriptor], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError(f"no {word!r} within {WITHIN_S:g} s; the victim has said {self.all[-5:]}")
            if not self._read():
                return

    def read_to_the_end(self) -> None:
        while self._read():
            """A pipe ends with its last writer."""

    def _read(self) -> bool:
        data = os.read(self._descriptor, 1 << 16)
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.all += [line.decode() for line in lines]
        return bool(data)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _wait_for_end(pid: int) -> None:
    """Wait for the end of a process whose parent is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([descriptor], [], [], WITHIN_S)[0]:
            raise TimeoutError(f"the writer {pid} has outlived its trainer by {WITHIN_S:g} s")
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collect the warnings to the user within the block."""
    told: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    collector = Collector(logging.WARNING)
    log.LOGGER.addHandler(collector)
    try:
        yield told
    finally:
        log.LOGGER.removeHandler(collector)
