"""A dead rank's generators: every order of draws, collectives, commits and the kill gives the right states or none.

Two ranks run the same program, letter by letter: ``d`` draws, ``c`` is a collective that needs both, ``b`` one that the
survivor finishes alone (a broadcast from it), ``k`` commits. The dead rank is killed before any letter, or with a
collective counted but not launched; the survivor is at each letter that it can have reached by then. The generators
that the core reads from the page must be those that the dead rank would have had at the survivor's commit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from samebits.core.messages import LiveStep, Page
from samebits.core.point import Point
from samebits.core.restore import NO_PAGE
from samebits.core.restore import page_obstacle as obstacle
from samebits.errors import CheckpointError
from samebits.training.checkpoint import kept_generators
from samebits.training.checkpoint.kept_generators import KeptGenerators
from samebits.training.state.generators import Generators

JOB, GENERATION = "job", 1
FIRST_STEPS = ("dc", "c", "dcd", "cdc", "")
STEPS = ["".join(one) for size in range(4) for one in itertools.product("dcb", repeat=size)]


class Counted(Generators):
    """Generators whose state is their number of draws."""

    def __init__(self) -> None:
        self.version, self.draws, self._last = 0, 0, -1

    def look(self) -> bool:
        changed, self._last = self.draws != self._last, self.draws
        self.version += changed
        return changed

    def packed(self) -> bytes:
        return b"%d" % self._last


class Rank:
    """One rank on its way through a program."""

    made: ClassVar[list[Rank]] = []

    def __init__(self, memory: Path, slot: int, *, offers: bool = False) -> None:
        self.kept = KeptGenerators(JOB, memory=memory)
        if offers:
            self.kept.offer(slot)
        self.generators = Counted()
        self.slot, self.commits = slot, 0
        self.made.append(self)
        self.commit()

    def commit(self) -> None:
        self.generators.look()
        point = Point(self.commits, GENERATION)
        self.kept.committed(self.generators, self.slot, GENERATION, point, self.commits)

    def does(self, letter: str) -> None:
        if letter == "d":
            self.generators.draws += 1
        elif letter == "k":
            self.commits += 1
            self.commit()
        else:
            self.kept.before_collective()


@dataclass(frozen=True, slots=True)
class Survivor:
    """The survivor's last commit after this many letters."""

    commits: int
    step: LiveStep | None
    draws: int


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """Release every rank of a test, which holds two descriptors until then."""
    yield
    for rank in Rank.made:
        rank.kept.let_go()
    Rank.made.clear()


@pytest.fixture(autouse=True)
def counted_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_generators, "unpack", int)


def survivor_of(memory: Path, program: str) -> list[Survivor]:
    rank, draws = Rank(memory, 1), 0
    stages = [Survivor(0, None, 0)]
    for letter in program:
        rank.does(letter)
        if letter == "k":
            draws = rank.generators.draws
        step = rank.kept.live_step(Point(rank.commits, GENERATION), rank.commits)
        stages.append(Survivor(rank.commits, step, draws))
    return stages


def reached(program: str, dead: int, launched: int) -> list[int]:
    """Return how many letters the survivor can have done, given the dead rank's letters and launches."""
    collectives = [at for at, letter in enumerate(program) if letter == "c"]
    least = max((at for at in collectives if at < dead), default=0)  # it has launched at least that one, too
    most = next((at for at in collectives if at >= launched), len(program))
    return list(range(least, most + 1))


def draws_late(program: str) -> bool:
    steps = program.split("k")
    return any("d" in step[max(step.rfind("c"), step.rfind("b")) + 1 :] for step in steps)


def require_right(page: Page | None, reader: KeptGenerators, survivor: Survivor) -> bool:
    """Return whether the page is used, after checking that its states are right."""
    point = Point(survivor.commits, GENERATION)
    if obstacle(page, point, survivor.commits, [survivor.step]):
        return False
    found: object = reader.states_at(point, survivor.commits)
    assert found == survivor.draws, f"{page}: {found} draws instead of {survivor.draws} at {survivor}"
    return True


@pytest.mark.parametrize("first", FIRST_STEPS)
def test_states_are_right_in_every_order(first: str, tmp_path: Path) -> None:
    used = 0
    for number, (second, third) in enumerate(itertools.product(STEPS, ("dc", "cd"))):
        program = f"{first}k{second}k{third}k"
        memory = tmp_path / str(number)
        memory.mkdir()
        stages = survivor_of(memory, program)
        dead = Rank(memory, 0)
        reader = KeptGenerators(JOB, memory=memory)
        is_plain = "b" not in program and all("c" in step for step in program.split("k")[:-1])
        for done in range(len(program) + 1):
            kills = [done]
            if done < len(program):
                kills += [done + 1] * (program[done] in "cb")  # counted, and launched just before it dies
            for launched in kills:
                if launched > done:
                    dead.does(program[done])
                page = reader.offer(0)
                for stage in reached(program, done, launched):
                    is_used = require_right(page, reader, stages[stage])
                    used += is_used
                    assert is_used or not is_plain or draws_late(program), (program, done, launched, stage, page)
            if done < len(program) and len(kills) == 1:
                dead.does(program[done])
        while Rank.made:
            Rank.made.pop().kept.let_go()
    assert used > 500


def test_program_that_always_draws_late_resumes_from_commits_only(tmp_path: Path) -> None:
    """An optimizer that draws: if it is killed before a commit that its peer has made, its draws are unknown."""
    program = "dcdkdcdk"
    stages = survivor_of(tmp_path, program)
    dead = Rank(tmp_path, 0)
    reader = KeptGenerators(JOB, memory=tmp_path)
    for letter in program[:-1]:
        dead.does(letter)
    assert not require_right(reader.offer(0), reader, stages[-1])
    dead.does("k")
    assert require_right(reader.offer(0), reader, stages[-1])


def test_rank_that_alone_has_drawn_late_resumes_from_commits_only(tmp_path: Path) -> None:
    """The other ranks never draw late, so they cannot tell what this rank had drawn when it was killed."""
    stages = survivor_of(tmp_path, "ckckck")
    dead = Rank(tmp_path, 0)
    reader = KeptGenerators(JOB, memory=tmp_path)
    for letter in "cdkckcd":
        dead.does(letter)
    assert not require_right(reader.offer(0), reader, stages[-1])
    assert require_right(reader.offer(0), reader, Survivor(2, stages[3].step, 1))


def test_successor_starts_with_its_predecessors_page(tmp_path: Path) -> None:
    first = Rank(tmp_path, 0)
    for letter in "dckdc":
        first.does(letter)
    reader = KeptGenerators(JOB, memory=tmp_path)
    before = reader.offer(0)
    second = KeptGenerators(JOB, memory=tmp_path)
    assert second.offer(0) == reader.offer(0) == before  # even if it is killed before its first commit
    generators = Counted()
    generators.draws = 2
    generators.look()
    second.committed(generators, 0, 2, Point(2, 1), 2)
    page = reader.offer(0)
    assert page is not None
    assert (page.generation, page.next_commit, page.collectives) == (2, 3, 0)
    for commits, draws in ((1, 1), (2, 2)):
        found: object = reader.states_at(Point(commits, 1), commits)
        assert found == draws
    second.let_go()


def test_successor_of_a_rank_that_drew_late_counts_as_one_that_does(tmp_path: Path) -> None:
    first = Rank(tmp_path, 0)
    for letter in "cdk":
        first.does(letter)
    second = Rank(tmp_path, 0, offers=True)
    page = second.kept.offer(0)
    assert page is not None
    assert page.draws_late


def test_page_of_another_slot_is_not_used(tmp_path: Path) -> None:
    Rank(tmp_path, 1).does("k")
    kept = KeptGenerators(JOB, memory=tmp_path)
    assert kept.offer(1) is not None
    generators = Counted()
    kept.committed(generators, 0, 1, Point(7, 1), 7)
    page = kept.offer(0)
    assert page is not None
    assert [one.commits for one in page.commits] == [7]
    kept.let_go()


def test_only_pages_of_dead_processes_in_other_slots_are_lent(tmp_path: Path) -> None:
    for slot in (0, 1, 2):
        Rank(tmp_path, slot).does("k")
    for rank in Rank.made[:2]:
        rank.kept.let_go()
    lender = KeptGenerators(JOB, memory=tmp_path)
    assert [one.slot for one in lender.offer_orphaned(0)] == [1]
    borrower = KeptGenerators(JOB, memory=tmp_path / "another host")
    borrower.borrow(1, memoryview(lender.lent[1]), "here")
    found: object = borrower.states_at(Point(1, GENERATION), 1)
    assert found == 0


def test_page_of_an_earlier_generation_is_valid_for_its_commits_only(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0)
    for letter in "dckdc":
        rank.does(letter)
    page = KeptGenerators(JOB, memory=tmp_path).offer(0)
    assert not obstacle(page, Point(2, 1), 2, [LiveStep(1, False)])
    assert obstacle(page, Point(2, 2), 2, [LiveStep(1, False)])
    assert obstacle(page, Point(2, 1), 2, [None])
    assert not obstacle(page, Point(1, 1), 1, [None])
    assert obstacle(None, Point(1, 1), 1, []) == NO_PAGE


def test_missing_or_unreadable_page_offers_nothing(tmp_path: Path) -> None:
    kept = KeptGenerators(JOB, memory=tmp_path)
    assert kept.offer(0) is None
    with pytest.raises(CheckpointError, match="has nothing of step 1 of generation 1"):
        kept.states_at(Point(1, 1), 1)
    Rank(tmp_path, 0)
    page = next(tmp_path.glob("samebits-*/job/0/page"))
    page.write_bytes(b"nonsense")
    assert kept.offer(0) is None


def test_unavailable_memory_is_reported_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path / "missing", 0)
    rank.does("d")
    rank.does("c")
    rank.does("k")
    assert caplog.text.count("generator states are saved only in checkpoints") == 1
    assert rank.kept.offer(0) is None
