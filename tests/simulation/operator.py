"""The user who starts processes with ``run.sh`` and ``recover.sh``, hastily or slowly while faults happen.

The operator checks from time to time and starts what is missing, as ``recover.sh`` does: the scheduler, and a process
for every node without a live one. Once the run is calm it checks often and wakes what is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samebits.core.end_kinds import EndKind
from samebits.core.replacement_names import may_be_replaced, root_of, successor_of
from tests.simulation.main_thread import ENDED_KINDS, FIRST_STEPS
from tests.simulation.mix import Naming

if TYPE_CHECKING:
    from tests.simulation.main_thread import Hold
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

CALM_SWEEP_S = 2.0
RESTARTS_AFTER_S = (0.1, 0.1, 0.1, 3.0, 3.0, 31.0)


class Operator:
    """Starts processes; in some mixes it also replaces dead ones, as a launcher does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.crash_loops = 0  # how often the scheduler will die again soon after its start
        self._fresh_names = 0
        self._added = 0  # nodes beyond those that the job was started with
        self._scheduler_comes = False
        self._leaves_some_held = world.random_of("calm").random() < 0.8
        self._last_of: dict[str, str] = {}  # first node of a line → its last replacement
        rng = world.rng
        world.after(rng.uniform(0.0, 3.0), self._start_scheduler)
        for node in self.nodes():
            world.after(rng.uniform(0.0, 5.0), self._start_worker, node)
        world.after(world.mix.sweep_s, self._sweep)

    def nodes(self) -> list[str]:
        """Return the node ids of the job: one for every slot of the initial world and every spare, and those added
        since.
        """
        if self._world.mix.naming is Naming.FRESH:
            return [self._fresh_name() for _ in range(self._wanted())]
        if self._world.mix.naming is Naming.NAMES:
            return [f"node-{number}" for number in range(self._wanted())]
        mix = self._world.mix
        slots = [*range(mix.world_size + self._added), *range(mix.max_world_size, mix.most_nodes)]
        return [self._last_of.get(str(slot), str(slot)) for slot in slots]

    def _wanted(self) -> int:
        return self._world.mix.world_size + self._world.mix.spare_num + self._added

    def add_node(self) -> bool:
        """Add a node to the job if it has room."""
        if self._wanted() >= self._world.mix.most_nodes:
            return False
        self._added += 1
        if self._world.mix.naming is not Naming.FRESH:
            self.start_worker_later(self.nodes()[self._world.mix.world_size + self._added - 1])
        return True

    def start_scheduler_later(self) -> None:
        """The scheduler has died."""
        self._scheduler_comes = True
        delay = self._world.rng.choice((0.2, 1.0, 6.0, 35.0)) * self._world.rng.uniform(0.5, 1.5)
        self._world.after(0.2 if self.crash_loops else delay, self._start_scheduler)

    def start_worker_later(self, node: str, *, duplicate: bool = False) -> None:
        """A node's process has died, or with ``duplicate`` the user only believes so."""
        delay = self._world.rng.choice(RESTARTS_AFTER_S) * self._world.rng.uniform(0.5, 1.1)
        if self._world.mix.replaces and may_be_replaced(node) and not duplicate and self._world.witness.job:
            node = self._last_of[root_of(node)] = successor_of(self._last_of.get(root_of(node), node))
        self._world.after(delay, self._start_worker, node, duplicate)

    def calm_down(self) -> None:
        """From now on only help: wake everything stopped, start everything missing."""
        world = self._world
        self.crash_loops = 0
        world.after(world.rng.uniform(0.0, 1.0), world.host.resume)
        for worker in list(world.workers):
            if worker.is_of_another_job():
                worker.die()  # the user who lost the journal has noticed, and ends what is left of that job
            world.after(world.rng.uniform(0.0, 1.0), worker.resume)
        world.groups.let_all_go()
        self._let_go_of_the_held()
        world.after(CALM_SWEEP_S, self._sweep)

    def leaves_held(self, worker: Worker) -> Hold | None:
        """Leave the worker's hold, if the detector has to end it once the run is calm."""
        world, thread = self._world, worker.thread
        is_tested = world.mix.ends_stuck and world.mix.step_timeout_s is not None and self._leaves_some_held
        fits = thread.hold is not None and thread.hold.kind in ENDED_KINDS and thread.steps >= FIRST_STEPS
        return thread.hold if is_tested and fits else None

    def _let_go_of_the_held(self) -> None:
        """Release all but those that test the detector, and finally these, too."""
        world = self._world
        for worker in [one for one in world.workers if one.thread.hold is not None]:
            hold = worker.thread.hold
            assert hold is not None
            most_s = world.patience.most_s(worker.step) + 1.0 if self.leaves_held(worker) is hold else 0.0
            world.after(most_s, worker.let_go, hold)

    def _sweep(self) -> None:
        world = self._world
        world.after(CALM_SWEEP_S if world.is_calm else world.mix.sweep_s, self._sweep)
        if world.host.ended is EndKind.FINISHED:
            return
        if world.host.core is None and (world.is_calm or not self._scheduler_comes):
            self._start_scheduler()
        finished = world.host.path.is_finished()
        if world.mix.naming is Naming.FRESH:
            wanted = self._not_done() if finished else self._wanted()
            missing = wanted - sum(not worker.is_of_another_job() for worker in world.workers)
            names = [self._fresh_name() for _ in range(missing)]
        else:
            present = {worker.node for worker in world.workers if not worker.is_of_another_job()}
            nodes = dict.fromkeys([*self.nodes(), *(self._only_in_journal() if finished else ())])
            names = [node for node in nodes if node not in present and not self._is_through(node, finished)]
        for node in names:
            self._start_worker(node)

    def _is_through(self, node: str, finished: bool) -> bool:
        """Return whether the node has finished: it left after the end of training."""
        core = self._world.host.core
        seats = () if core is None else core.state.seats.values()
        line = [seat for seat in seats if root_of(seat.node) == root_of(node) and seat.slot is not None]
        return finished and all(seat.has_left for seat in line)

    def _only_in_journal(self) -> list[str]:
        """Return the nodes that hold a slot although they were replaced: their replacement had a slot already."""
        core = self._world.host.core
        held = () if core is None else core.state.by_slot.values()
        return [node for node in held if {node, self._last_of.get(root_of(node), node)} <= set(held)]

    def _not_done(self) -> int:
        """Return how many slots' scripts have not ended after training, as far as the scheduler knows."""
        core = self._world.host.core
        return 0 if core is None else sum(not core.state.seats[node].has_left for node in core.state.by_slot.values())

    def _has_process(self, node: str) -> bool:
        workers = self._world.workers
        return any(worker.node == node and worker.is_alive and not worker.is_of_another_job() for worker in workers)

    def _start_scheduler(self) -> None:
        world = self._world
        self._scheduler_comes = False
        if world.host.core is not None or world.host.ended is EndKind.FINISHED:
            return
        world.host.start()
        if self.crash_loops and not world.is_calm:
            self.crash_loops -= 1
            life = world.host.life
            world.after(world.rng.uniform(0.1, 6.0), self._crash_again, life)

    def _crash_again(self, life: int) -> None:
        if self._world.host.life == life and self._world.host.core is not None and not self._world.is_calm:
            self._world.host.die()
            self.start_scheduler_later()

    def _start_worker(self, node: str, duplicate: bool = False) -> None:
        world = self._world
        if world.host.ended is EndKind.FINISHED or world.driver.keeps_away(node):
            return
        if world.mix.naming is Naming.FRESH:
            node = self._fresh_name() if any(worker.node == node for worker in world.started) else node
            if sum(not worker.is_of_another_job() for worker in world.workers) >= self._wanted() + duplicate:
                return
        elif self._has_process(node) and not duplicate:
            return
        world.start_worker(node)

    def _fresh_name(self) -> str:
        self._fresh_names += 1
        return f"w{self._fresh_names}"
