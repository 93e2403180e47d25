"""Process groups as their members see them: a group forms, and a step completes, only with every member in it.

Two facts about gloo shape the model: only the ring's neighbours notice a death, and in half of the runs a rank that
leaves a collective keeps its sockets open, so that all others hang until the scheduler calls them. No member notices
a stopped one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from samebits.core.messages import RankPosition

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

FORMS_S = (0.003, 0.05)
NOTICES_S = (0.005, 0.1)


def blob_of(session: str, place: RankPosition) -> bytes:
    """A member's part of the address map, made for one place."""
    return f"{session}|{place.slot}.{place.rank}.{place.world_size}".encode()


def session_in(blob: bytes) -> str:
    """Return whose part it is."""
    return blob.decode().partition("|")[0]


@dataclass(slots=True, eq=False)
class Group:
    """The members of one generation that have its address map."""

    job: str
    generation: int
    sessions: tuple[str, ...]  # by rank, from the address map
    members: dict[int, Worker] = field(default_factory=dict)
    is_formed: bool = False
    is_stepping: bool = False
    is_held: bool = False  # its collective never ends, though all are in it
    let_go_at: float = -1e9


class Groups:
    """Every group of the run, by job and generation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[str, int], Group] = {}

    def arrive(self, worker: Worker, blobs: tuple[bytes, ...]) -> None:
        """A member has the address map and connects to all in it."""
        sessions = tuple(session_in(blob) for blob in blobs)
        job, generation = worker.agent.job, worker.generation
        group = self._groups.setdefault((job, generation), Group(job, generation, sessions))
        if group.sessions != sessions:
            group.sessions = sessions
            group.members.clear()
        group.members[worker.rank] = worker
        self.look_again(worker)

    def look_again(self, worker: Worker) -> None:
        """Check whether a member of this group can continue now."""
        group = self._groups.get((worker.agent.job, worker.generation))
        if group is None or len(group.members) < len(group.sessions):
            return
        members = group.members.values()
        if not group.is_formed and all(member.is_forming_in(group.generation) for member in members):
            group.is_formed = True
            for member in members:
                self._world.after(self._world.rng.uniform(*FORMS_S), member.group_stands, group.generation)
        elif group.is_formed and not group.is_stepping and not group.is_held and self._all_train(group):
            group.is_stepping = True
            self._world.after(self._world.mix.step_s, self._step, group)

    def of(self, worker: Worker) -> Group | None:
        """Return the group of the worker's current generation."""
        return self._groups.get((worker.agent.job, worker.generation))

    def let_all_go(self) -> None:
        """End all held collectives."""
        for group in self._groups.values():
            if group.is_held:
                group.is_held, group.let_go_at = False, self._world.now
                for member in group.members.values():
                    self.look_again(member)

    def _all_train(self, group: Group) -> bool:
        for member in group.members.values():  # noqa: SIM110  (a loop takes half the time, and every step asks twice)
            if not member.trains_in(group.generation):
                return False
        return True

    def _step(self, group: Group) -> None:
        group.is_stepping = False
        if group.is_held or not self._all_train(group):
            return
        for watch in self._world.watch_trained:
            watch(group)
        for member in list(group.members.values()):
            member.completes_step()
        if self._all_train(group):
            group.is_stepping = True
            self._world.after(self._world.mix.step_s, self._step, group)

    def died(self, worker: Worker) -> None:
        """A member's process is gone with its sockets; others may have finished the step it died in."""
        rng = self._world.rng
        for group in self._groups.values():
            if group.job != worker.agent.job or group.members.get(worker.rank_in(group.generation)) is not worker:
                continue
            if group.is_stepping and rng.random() < 0.2:
                for rank in sorted(group.members):
                    member = group.members[rank]
                    if member is not worker and member.trains_in(group.generation) and rng.random() < 0.5:
                        member.completes_step()
            self._neighbours_notice(group, worker)

    def left(self, worker: Worker) -> None:
        """A member has left the collective; if it breaks the group's sockets too, its neighbours notice."""
        group = self._groups.get((worker.agent.job, worker.generation))
        if group is not None and self._world.mix.breaks_sockets:
            self._neighbours_notice(group, worker)

    def _neighbours_notice(self, group: Group, worker: Worker) -> None:
        size, rank = len(group.sessions), worker.rank_in(group.generation)
        for other in sorted({(rank - 1) % size, (rank + 1) % size}):
            neighbour = group.members.get(other)
            if neighbour is not None and neighbour is not worker:
                delay = self._world.rng.uniform(*NOTICES_S)
                self._world.after(delay, neighbour.collective_failed, group.generation)

    def was_left(self, worker: Worker) -> bool:
        """Return whether a member has left this worker's group, so that its collective cannot end."""
        group = self._groups.get((worker.agent.job, worker.generation))
        return group is not None and any(
            not member.is_alive or member.generation != group.generation or not member.is_in_group()
            for member in group.members.values()
        )
