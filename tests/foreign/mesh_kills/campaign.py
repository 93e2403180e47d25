"""Draw a mesh, what is killed, when and what makes up for it; run the job, and judge how it ended.

The processes end themselves at exact points of a step (``tests.system.kill_points``). The scheduler is killed while a
rank is suspended at such a point. Jobs that shrink train with virtual workers, so that their bits are equal too.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tests.foreign.kill_campaign import Verdict
from tests.system.elastic_job import ElasticJob
from tests.system.kill_points import Way, mark_of
from tests.system.matrix import is_stopped
from tests.system.processes import REPOSITORY, WarmStarter

__all__ = ["MESHES", "MeshKills"]

SCRIPT = REPOSITORY / "tests" / "system" / "mesh_script.py"
VIRTUAL_SCRIPT = SCRIPT.with_name("virtual_script.py")
STEPS, INTERVAL = 10, 4
TRAINED = ("--steps", str(STEPS), "--interval", str(INTERVAL))
SMALL = (*TRAINED, "--dim", "32", "--length", "32", "--batch-size", "4")
GATE = 7
"""The step after which a job that has shrunk waits until its lost shard group is back."""
FIRST_AT = 3
"""The step of the kill that brings about the formation in which another rank dies."""
FIRST_SPARE = 100  # a node id that names no slot


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the example's dimensions: replicas, ranks that each is sharded over, tensor-parallel ranks, stages.

    A mesh with stages has no replicas.
    """

    replicate: int
    shard: int
    tensor: int
    weight: int
    stages: int = 1

    @property
    def ranks(self) -> range:
        return range(self.replicate * self.shard * self.tensor * self.stages)

    @property
    def arguments(self) -> tuple[str, ...]:
        sizes = (self.replicate, self.shard, self.tensor, self.stages)
        names = ("--dp-replicate", "--dp-shard", "--tp", "--pp")
        return tuple(word for name, size in zip(names, sizes, strict=True) for word in (name, str(size)))

    def shard_groups(self) -> list[list[int]]:
        """Return the ranks of each replica, or stage: those that hold the parts of one copy of the model."""
        size = self.shard * self.tensor
        return [list(self.ranks[first : first + size]) for first in self.ranks[::size]]

    def loses_a_shard(self, ranks: Sequence[int]) -> bool:
        """Return whether no other rank holds what one of these holds."""
        size = self.shard * self.tensor * self.stages
        survivors = {rank % size for rank in self.ranks if rank not in ranks}
        return survivors != set(range(size))


MESHES = {
    "hsdp": Mesh(2, 2, 1, weight=4),
    "fsdp2": Mesh(1, 4, 1, weight=4),
    "fsdp2-tp": Mesh(1, 2, 2, weight=4),
    "pp-fsdp2": Mesh(1, 2, 1, weight=3, stages=2),
    "replicate-tp": Mesh(2, 1, 2, weight=2),
    "tp": Mesh(1, 1, 2, weight=2),
    "hsdp-tp": Mesh(2, 2, 2, weight=1),
}


class Target(StrEnum):
    """The processes that one kill ends."""

    RANK = "one rank"
    TWO = "two ranks of one shard group"
    REPLICA = "a whole replica or stage"
    ZERO = "rank 0"
    SCHEDULER = "the scheduler"
    EVERYTHING = "everything"


class Recovery(StrEnum):
    """What makes up for the killed processes.

    ``SHRINK``: the other replicas continue without them, and they return later.
    """

    SPARE = "spare"
    RESTART = "restart"
    SHRINK = "shrink"


STEP_POINTS = ("forward", "backward", "stepping", "stepped", "committed")
SAVE_POINTS = ("saving", "saved")
FORMATION_POINTS = ("forming", "receiving", "restoring")
DONE_AFTER = ("stepped", "committed", *SAVE_POINTS)
"""Points at which the step that they name is done."""


@dataclass(frozen=True, slots=True)
class Kill:
    """One disturbed job.

    Attributes:
        ranks: the ranks that die; for the scheduler, the one that is suspended meanwhile.
        point, number: where they die, see ``kill_points``.
        first: a rank that dies before, at ``FIRST_AT``, so that a second generation forms; None: none does.
        copy_every: SHARD_COPY_EVERY.
        forgets: whether shared memory is lost as well, as if the host had rebooted.
    """

    mesh: str
    target: Target
    ranks: tuple[int, ...]
    point: str
    number: int
    first: int | None
    recovery: Recovery
    copy_every: str
    forgets: bool

    @property
    def words(self) -> list[str]:
        """Return the kills as the script takes them."""
        way = f":{Way.STOP}" if self.target is Target.SCHEDULER else ""
        kills = [f"{self.first}:committed:{FIRST_AT}"] if self.first is not None else []
        return [*kills, *(f"{rank}:{self.point}:{self.number}{way}" for rank in self.ranks)]

    def __str__(self) -> str:
        memory = ", memory lost" if self.forgets else ""
        return f"{self.mesh}, {self.target} ({' '.join(self.words)}), {self.recovery}, copies {self.copy_every}{memory}"


class MeshKills:
    """Jobs of the example in folders below this one, or jobs that shrink."""

    def __init__(
        self, folder: Path, starter: WarmStarter, meshes: Sequence[str] = ("hsdp",), *, shrinks: bool = False
    ) -> None:
        self._folder = folder
        self._starter = starter
        self._meshes = meshes
        self._shrinks = shrinks
        self._number = 0
        self._bits: dict[str, str] = {}

    # --- drawing

    def draws(self, chance: random.Random) -> Iterator[Kill]:
        while True:
            yield self._draw_to_shrink(chance) if self._shrinks else self._draw(chance)

    def _draw(self, chance: random.Random) -> Kill:
        (name,) = chance.choices(self._meshes, [MESHES[one].weight for one in self._meshes])
        mesh, target = MESHES[name], chance.choice(list(Target))
        group = chance.choice(mesh.shard_groups())
        ranks = {
            Target.RANK: [chance.choice(mesh.ranks)],
            Target.TWO: chance.sample(group, 2),
            Target.REPLICA: group,
            Target.ZERO: [0],
            Target.SCHEDULER: [chance.choice(mesh.ranks)],
            Target.EVERYTHING: list(mesh.ranks),
        }[target]
        points = chance.choice((STEP_POINTS, STEP_POINTS, SAVE_POINTS, FORMATION_POINTS))
        point, first = chance.choice(points), None
        if points is STEP_POINTS:
            number = chance.randint(1, STEPS)
        elif points is SAVE_POINTS:
            number = chance.randrange(0, STEPS, INTERVAL)
            if number == 0 and 0 in ranks and len(ranks) > 1:
                number = INTERVAL  # rank 0 saves its initial state before it sends it to the others
        else:
            number = 1 if point == "forming" and chance.random() < 0.5 else 2
            first = chance.choice(mesh.ranks) if number == 2 else None
        if point == "receiving" and first is not None:
            ranks = [first]  # no other rank surely receives something
            target = target if target is Target.SCHEDULER else Target.RANK
        is_spare = target is not Target.EVERYTHING and chance.random() < 0.5
        return Kill(
            name,
            target,
            tuple(sorted(ranks)),
            point,
            number,
            first,
            Recovery.SPARE if is_spare else Recovery.RESTART,
            chance.choice(("1", "1", "1", "auto", "off")),
            forgets=target is Target.EVERYTHING and chance.random() < 0.5,
        )

    @staticmethod
    def _draw_to_shrink(chance: random.Random) -> Kill:
        """Draw ranks of one replica, or the scheduler of a job that has shrunk."""
        mesh = MESHES["hsdp"]
        target = chance.choice((Target.RANK, Target.TWO, Target.ZERO, Target.SCHEDULER))
        first, least = None, 1
        ranks = [0] if target is Target.ZERO else [chance.choice(mesh.ranks)]
        if target is Target.TWO:
            ranks = chance.choice(mesh.shard_groups())
        elif target is Target.SCHEDULER:
            # A rank may be in the step after the first kill before it learns of the loss.
            first, least = chance.choice(mesh.ranks), FIRST_AT + 2
            ranks = [chance.choice((0, 1))]  # of the two that are left
        point = chance.choice((*STEP_POINTS, *STEP_POINTS, *SAVE_POINTS))
        if point == "saved" and len(ranks) > 1:
            point = "saving"  # ranks learn in different steps that a save is over, and would wait for each other
        number = INTERVAL if point in SAVE_POINTS else chance.randint(least, GATE - 1)
        copies = chance.choice(("1", "auto", "off"))
        return Kill("hsdp", target, tuple(ranks), point, number, first, Recovery.SHRINK, copies, forgets=False)

    # --- running

    def run(self, kill: Kill) -> Verdict:
        expected = self._expected(kill.mesh)
        job = self._job(kill.mesh, kill)
        shrinks = kill.recovery is Recovery.SHRINK
        killed: list[int] = []
        try:
            job.start()
            spares = self._spares(kill)
            for node in spares:
                job.start_worker(node)
            if kill.first is not None:
                self._bury(job, kill, killed, kill.words[:1])
                if shrinks:
                    job.wait_until(lambda: _begun_with(job, 2, 2), "generation without the lost shard group")
            if kill.target is Target.SCHEDULER:
                self._replace_scheduler(job, kill)
            elif kill.target is Target.EVERYTHING:
                self._restart_everything(job, kill, killed)
            else:
                self._bury(job, kill, killed, kill.words)
            if shrinks:
                self._bring_back(job, killed)
            return self._judge(job, kill, killed, expected)
        except (AssertionError, TimeoutError) as error:
            return Verdict("ENDLESS", str(error).splitlines()[0])
        finally:
            job.end()

    @staticmethod
    def _spares(kill: Kill) -> range:
        if kill.recovery is not Recovery.SPARE:
            return range(0)
        lost = 0 if kill.target is Target.SCHEDULER else len(kill.ranks)
        return range(FIRST_SPARE, FIRST_SPARE + lost + (kill.first is not None))

    def _bury(self, job: ElasticJob, kill: Kill, killed: list[int], words: Sequence[str]) -> None:
        """Wait until these kills have happened; restart the processes unless spares take over."""
        marks = [mark_of(job.folder, word) for word in words]
        job.wait_until(lambda: all(mark.exists() for mark in marks) or None, "kill")
        while len(killed) < len(words):
            buried = [] if kill.recovery is Recovery.RESTART else killed
            node = job.wait_until(lambda buried=buried: _dead(job, buried), "end of a killed process")
            job.wait_killed(node)
            killed.append(node)
            if kill.recovery is Recovery.RESTART:
                job.start_worker(node)

    @staticmethod
    def _bring_back(job: ElasticJob, killed: Sequence[int]) -> None:
        """Wait until the job trains without the killed processes' shard group, then until it trains with it."""
        job.wait_until(lambda: _begun_with(job, 2, 2), "generation without the lost shard group")
        for node in killed:
            job.start_worker(node)
        job.wait_until(lambda: _begun_with(job, 4, 4), "generation with the lost shard group")
        job.open_gates(GATE)

    @staticmethod
    def _replace_scheduler(job: ElasticJob, kill: Kill) -> None:
        mark = mark_of(job.folder, kill.words[-1].removesuffix(f":{Way.STOP}"))
        job.wait_until(lambda: mark.exists() or None, "suspension")
        stopped = job.wait_until(
            lambda: next((node for node in job.nodes if is_stopped(job.worker(node).pid)), None), "suspended worker"
        )
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.start_scheduler()
        job.worker(stopped).signal(signal.SIGCONT)

    def _restart_everything(self, job: ElasticJob, kill: Kill, killed: list[int]) -> None:
        marks = [mark_of(job.folder, word) for word in kill.words]
        job.wait_until(lambda: all(mark.exists() for mark in marks) or None, "kill of every rank")
        for rank in MESHES[kill.mesh].ranks:
            job.wait_killed(rank)
            killed.append(rank)
        job.scheduler.signal(signal.SIGKILL)
        job.scheduler.wait()
        job.wait_for_writers()
        if kill.forgets:
            job.forget_memory()
        job.start()

    # --- judging

    def _judge(self, job: ElasticJob, kill: Kill, killed: Sequence[int], expected: str) -> Verdict:
        statuses = job.wait_ended()
        is_gone = kill.recovery is Recovery.SPARE
        failed = {name: status for name, status in statuses.items() if status and not (is_gone and name in killed)}
        if failed:
            return Verdict("NO SENTENCE", f"{failed}")
        finals = [found[-1] for node in job.nodes if (found := job.finals_of(job.log(node)))]
        if set(finals) - {expected}:
            return Verdict("OTHER BITS", f"{finals}, expected {expected}")
        survivors = [rank for rank in MESHES[kill.mesh].ranks if rank not in killed]
        if len(finals) < max(1, len(survivors)):
            return Verdict("SILENT", f"{len(finals)} ranks have a result")
        if replaced := [rank for rank in survivors if job.seatings(rank) != 1]:
            return Verdict("SURVIVOR", f"{replaced} were seated again")
        redone, most = self._redone(job, kill), self._most_redone(kill)
        if redone > most:
            return Verdict("REDONE", f"{redone} steps, at most {most} are promised")
        return Verdict("same bits", f"redone {redone}")

    @staticmethod
    def _redone(job: ElasticJob, kill: Kill) -> int:
        """Return how many steps each kill has cost at most: those done when it happened, and not at the next begin."""
        begins = [
            (int(one[1]), int(one[2]))
            for node in job.nodes
            for one in job.matches(node, r"generation (\d+): rank \d+ of \d+ (?:begins at|continues from) step (\d+)")
        ]
        worst = 0
        if kill.point in (*STEP_POINTS, *SAVE_POINTS) and kill.target is not Target.SCHEDULER:
            done = kill.number if kill.point in DONE_AFTER else kill.number - 1
            begun = [step for generation, step in begins if generation == 2]
            worst = done - max(begun) if begun else 0
        if kill.first is not None:
            begun = [step for generation, step in begins if generation >= 2]
            worst = max(worst, FIRST_AT - min(begun)) if begun else worst
        return max(worst, 0)

    @staticmethod
    def _most_redone(kill: Kill) -> int:
        mesh = MESHES[kill.mesh]
        lost = {*kill.ranks} if kill.target is not Target.SCHEDULER else set()
        lost |= {kill.first} if kill.first is not None else set()
        if kill.forgets or (mesh.loses_a_shard(sorted(lost)) and kill.copy_every != "1"):
            return STEPS  # back to a checkpoint, or to the newest copy
        # A replica that died while others waited for its gradients may leave the shards at different steps.
        return int(mesh.loses_a_shard(sorted(lost)) or kill.point == "stepping")

    # --- jobs

    def _expected(self, mesh: str) -> str:
        if mesh not in self._bits:
            job = self._job(mesh, None)
            job.start()
            self._bits[mesh] = job.finish() if self._shrinks else job.wait_finished()
            job.end()
            self.forget()
        return self._bits[mesh]

    def _job(self, mesh: str, kill: Kill | None) -> ElasticJob:
        self._number += 1
        folder = self._folder / f"{self._number}-{mesh}"
        folder.mkdir()
        args, settings = [*SMALL, *MESHES[mesh].arguments], {"ENABLE_RECOVERY": "0"}
        if self._shrinks:
            args, settings = [*TRAINED, "--mesh", "2", "2"], {}
        if kill is not None:
            settings = {
                "SHARD_COPY_EVERY": kill.copy_every,
                "REGISTER_COOLDOWN": "0",
                "SPARE_NUM": str(len(self._spares(kill))),
            }
            args += [word for one in kill.words for word in ("--kill", one)] + ["--marks", str(folder)]
        if self._shrinks and kill is not None:
            settings |= {"MIN_WORKER_NUM": "2", "GRACE": "shrink=0"}
            args += ["--gate", str(GATE)]
        script, workers = VIRTUAL_SCRIPT if self._shrinks else SCRIPT, len(MESHES[mesh].ranks)
        return ElasticJob(folder, self._starter, script=script, args=args, workers=workers, settings=settings)

    def forget(self) -> None:
        for folder in self._folder.glob(f"{self._number}-*"):
            shutil.rmtree(folder)


def _begun_with(job: ElasticJob, ranks: int, nodes: int) -> bool | None:
    """Return True once this many nodes have begun a generation of this size after a loss."""
    lines = rf"generation (?!1:)\d+: rank \d+ of {ranks} (?:begins at|continues from) step"
    return sum(bool(job.matches(node, lines)) for node in job.nodes) >= nodes or None


def _dead(job: ElasticJob, buried: Sequence[int]) -> int | None:
    """Return a node whose process has ended, other than these; a restarted one may end again."""
    return next((node for node in job.nodes if node not in buried and not job.worker(node).is_alive()), None)
