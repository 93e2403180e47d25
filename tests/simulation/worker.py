"""A worker's process: the real agent, and a small model of the training around it.

The main thread enters the rendezvous with the points on its disk, forms its group, restores, steps, saves, and waits at
the end until the scheduler announces that all are done. The control thread reacts to notices at once. Both are paused
while the process is stopped, and messages that arrive meanwhile wait in its queue.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING

from samebits.core.agent.agent_core import AgentPolicy
from samebits.core.agent.agent_events import (
    Addressed,
    AgentEvent,
    AgentNotice,
    Answered,
    Began,
    BreakGroup,
    Completed,
    Connected,
    Disconnected,
    EnterAgain,
    Entered,
    Failed,
    Heard,
    LeaveGently,
    Leaving,
    MustEnd,
    Observed,
    Over,
    Passed,
    SchedulerAway,
    SchedulerBack,
    Trains,
)
from samebits.core.end_kinds import EndKind
from samebits.core.membership.replacement_proofs import proof_of
from samebits.core.messages import (
    PROTOCOL,
    AddressMap,
    Admitted,
    CommittedPoint,
    Depart,
    FromScheduler,
    FromWorker,
    Holdings,
    Pairs,
    Process,
    RankPosition,
    Register,
    RoundId,
    StopAt,
)
from samebits.core.point import Point
from samebits.core.replacement_names import number_of
from samebits.core.reports import FINAL, Digest, Digests, LastWords, PeerGone, SavedPoints, StallReport, StopsAfter
from samebits.core.values import replace
from tests.simulation.group import blob_of
from tests.simulation.main_thread import MainThread
from tests.simulation.network import Connection
from tests.simulation.odd_states import EQUAL

if TYPE_CHECKING:
    from tests.simulation.main_thread import Kind
    from tests.simulation.world import World

CLOCK_STEP_S = 1e-6
END_GRACE_S = 10.0
HAND_OVER_S = 20.0
FIRST_COMMITS, LAST_SAVES = 3, 8
NUMERICS: Pairs = (("threads", "1"), ("torch", "2.13.0"))


class Stage(enum.Enum):
    """Where the main thread is."""

    STARTING = "starting"  # imports, init(), the user's own preparations
    LEAVING_GROUP = "leaving its group"
    RENDEZVOUS = "in the rendezvous"
    FORMING = "forming"
    TRAINING = "training"
    SAVING = "saving the last commit"
    DONE = "done"
    OVER = "over"
    ENDING = "ending"


class Oddity(enum.Enum):
    """Why a process does not belong in this job."""

    NONE = "none"
    OTHER_JOB = "another job's name"
    OTHER_SETTINGS = "other settings"
    PROTOCOL = "another version"


_JOB_ENDED = (
    EndKind.STOPPED,
    EndKind.INTERRUPTED,
    EndKind.FORMATION_TIMEOUT,
    EndKind.UNEQUAL,
    EndKind.POINTS_LOST,
)
IN_GROUP = (Stage.FORMING, Stage.TRAINING, Stage.SAVING, Stage.DONE)


def process_on(host: str, number: int) -> Process:
    """Return the process of this number on that host."""
    return Process(host, 1000 + number, number, "cpu")


class Worker:
    """One process from its start to its end; a restart of the same node is another one."""

    def __init__(self, world: World, node: str, number: int, *, oddity: Oddity = Oddity.NONE) -> None:
        rng, mix = world.rng, world.mix
        self.world = world
        self.node = node
        self.session = f"{node}#{number}"
        self.oddity = oddity
        self.is_alive = True
        self.is_paused = False
        self.resumed_at = 0.0
        self.stage = Stage.STARTING
        self.generation = 0
        self.rank = -1
        self._ranks: dict[int, int] = {}  # generation → its rank in it
        self.step = 0
        self.restored: Point | None = None
        self.memory: Point | None = None  # its last commit
        self.committed: Point | None = None  # the point that every member's disk holds, as announced
        self._in_hand: list[Point] = []  # being saved, in this order
        self.bits = EQUAL  # stands for its state
        self._first: list[Digest] = []  # of its generation's first commits
        self._saves: list[Digest] = []
        self._is_dirty = False  # between a step and its commit: that memory is incomplete
        self._leaves_at_commit = False
        self.is_asked = False  # to leave the job, at its next commit
        self._handing_over: Point | None = None  # it leaves once its buddy has this point
        self.commits = 0
        self.commits_here = 0  # in its generation
        self.stops_after = 0  # the commit after which it stops; 0: it was not asked
        self.is_stop_agreed = False
        self._knows_place = rng.random() < 0.7  # otherwise it makes its address for a full world, whatever it learns
        self.slot: int | None = None
        self.world_size = world.mix.world_size
        self._clock_offset = rng.uniform(-1e4, 1e4)
        self.rate = 1.0 + rng.uniform(-mix.clock_spread, mix.clock_spread)
        self._addresses_early = rng.random() < mix.addresses_early
        self._registered_at: float | None = None
        self._waiting_at = 0.0
        self._inbox: deque[AgentEvent] = deque()
        self._held_back: deque[tuple[object, tuple[object, ...]]] = deque()  # the main thread's, while it is stopped
        self.connection: Connection | None = None
        self.thread = MainThread(self)
        self._tick_at: float | None = None
        self.process = process_on(f"host-{rng.randrange(3)}", number)
        is_foreign, job = oddity is Oddity.OTHER_JOB, world.launched_job
        policy = AgentPolicy(
            node,
            self.session,
            self.process,
            "other.py" if is_foreign and not job else world.policy.job_name,
            (("WORKER_NUM", "1000"),) if oddity is Oddity.OTHER_SETTINGS else world.policy.settings,
            first_beat_s=rng.uniform(0.001, 1.0),
            topo_timeout_s=world.policy.topo_timeout_s,
            job="another launcher's" if is_foreign and job else job,
            proof=self._proof(),
        )
        self.agent = world.agent_type(policy, self._now)
        world.after(rng.uniform(0.01, 1.0), self._connect)
        world.unwell.begin(self)
        world.keys.begin(self)
        self._agent_step(Passed(0))

    def _proof(self) -> bytes:
        """Return a launcher's proof for a replacement; before there is a job it can make none."""
        token, job = self.world.policy.token, self.world.witness.job
        is_one = token and job and number_of(self.node) > 0
        return proof_of(token, job, self.node, self.session) if is_one else b""

    def __str__(self) -> str:
        return self.session

    @property
    def _now(self) -> float:
        return self.world.now * self.rate + self._clock_offset

    @property
    def joined(self) -> RoundId | None:
        """The last round it joined."""
        return self.agent.joined

    def registered_for_s(self) -> float:
        """How long its agent has known that the scheduler knows it, or 0."""
        return self.world.now - self._registered_at if self._registered_at is not None else 0.0

    def waiting_for_s(self) -> float:
        """How long ago it entered the rendezvous."""
        return self.world.now - self._waiting_at

    def rank_in(self, generation: int) -> int:
        """Return its rank in this generation, or -1 if it was no member."""
        return self._ranks.get(generation, -1)

    def is_of_another_job(self) -> bool:
        """Whether it belongs to a job whose journal was wiped, or never belonged to this one."""
        return self.oddity is not Oddity.NONE or self.agent.expected_job not in ("", self.world.witness.job)

    def is_in_group(self) -> bool:
        """Whether its sockets to the group's other members are open."""
        return self.stage in IN_GROUP

    @property
    def is_training(self) -> bool:
        """Whether it takes steps."""
        return self.stage is Stage.TRAINING and self._runs()

    def is_forming_in(self, generation: int) -> bool:
        """Return whether it is ready to complete the group."""
        return self.stage is Stage.FORMING and self.generation == generation and self._runs()

    def trains_in(self, generation: int) -> bool:
        """Return whether it is ready for the next step."""
        return (
            self.stage is Stage.TRAINING
            and self.generation == generation
            and self.is_alive
            and not self.is_paused
            and self.thread.hold is None
            and not self.waits_at_commit
            and self._handing_over is None
        )

    @property
    def waits_at_commit(self) -> bool:
        """Whether it has made the last commit that it may make for now."""
        return self.stops_after > 0 and self.commits_here >= self.stops_after

    def _runs(self) -> bool:
        return self.is_alive and not self.is_paused

    # ---- life and death

    def die(self, *, unnoticed: bool = False) -> None:
        """kill -9; if the host or its link is lost too, its connection's end is ``unnoticed``."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.world.note("worker", self, "is gone", self.stage.value)
        if self.connection is not None:
            self.world.network.close(self.connection, unnoticed=unnoticed)
            if not unnoticed:
                self.world.host.process_died(self)
        if not unnoticed and self.stage is not Stage.ENDING:  # there it has given up its sign of life
            self._be_seen_dead()
        self.world.groups.died(self)
        self.world.worker_gone(self)

    def _be_seen_dead(self) -> None:
        """Members of its generation on its host may watch it: they know at once, and report it later."""
        world, rng = self.world, self.world.rng
        for worker in world.workers:
            beside = worker is not self and worker.process.host == self.process.host
            if beside and worker.rank_in(self.generation) >= 0 and rng.random() < 0.7:
                world.after(rng.uniform(0.0005, 0.01), worker.sees_dead, self.session)

    def sees_dead(self, session: str) -> None:
        """A process on this host has died, and this one watched it."""
        if not self._held(self.sees_dead, session):
            self._agent_step(Observed(PeerGone(session)))

    def pause(self) -> None:
        """SIGSTOP."""
        if self._runs():
            self.is_paused = True
            self.world.note("worker", self, "is stopped")

    def resume(self) -> None:
        """SIGCONT: first the content of the sockets, then the main thread."""
        if not self.is_alive or not self.is_paused:
            return
        self.is_paused, self.resumed_at = False, self.world.now
        self.world.note("worker", self, "goes on")
        while self._inbox and self._runs():
            self._agent_step(self._inbox.popleft())
        while self._held_back and self._runs():
            action, arguments = self._held_back.popleft()
            action(*arguments)  # type: ignore[operator]
        if self._runs():
            self._pass()
            self._look_at_group()

    def _look_at_group(self) -> None:
        """The main thread continues: into a collective that may be broken."""
        if self.is_in_group() and self.world.groups.was_left(self):
            self.world.after(0.02, self.collective_failed, self.generation)
        self.world.groups.look_again(self)

    # ---- the main thread is held

    def hold(self, kind: Kind, lasts_s: float | None, *, is_pause: bool = False) -> None:
        """Hold the main thread; with ``lasts_s`` None, forever unless released."""
        self.thread.grab(kind, is_pause=is_pause)
        self.world.note("worker", self, f"is held: {kind.name}, {lasts_s} s")
        if lasts_s is not None:
            self.world.after(lasts_s, self.let_go, self.thread.hold)

    def let_go(self, hold: object) -> None:
        """Release the main thread."""
        if self.thread.hold is not hold or self._held(self.let_go, hold):
            return
        self.world.note("worker", self, "is let go")
        self.thread.let_go()
        if self.stage is not Stage.TRAINING:
            return
        if self.thread.must_break or self.thread.has_failed:
            has_failed, self.thread.has_failed = self.thread.has_failed, False
            self._leave_group()
            if has_failed:
                self._agent_step(Failed())
        else:
            self._look_at_group()

    def _held(self, action: object, *arguments: object) -> bool:
        """Return whether the process is gone or stopped; if stopped, ``action`` waits for SIGCONT."""
        if self.is_alive and not self.is_paused:
            return False
        if self.is_alive:
            self._held_back.append((action, arguments))
        return True

    def fail(self, text: str) -> None:
        """The user's function raises."""
        if self._runs() and self.thread.hold is None:
            self._agent_step(Observed(LastWords(text)))
            self._leave(on_purpose=False, text=text)

    def terminate(self) -> None:
        """SIGTERM: the process leaves on purpose, as soon as its main thread gets to it."""
        if self._runs() and self.thread.hold is None:
            self._leave(on_purpose=True, text="SIGTERM")

    def _leave(self, *, on_purpose: bool, text: str) -> None:
        self.stage = Stage.ENDING
        self._agent_step(Leaving(on_purpose, text))
        self.world.after(0.03, self._exit)  # its messages are on the way

    def _exit(self) -> None:
        if not self._held(self._exit):
            self.die()

    # ---- the connection

    def _connect(self) -> None:
        if self._held(self._connect) or self.connection is not None:
            return
        self.connection = self.world.network.connect(self)
        if self.connection is None:
            self.world.after(self.world.rng.uniform(0.1, 0.7), self._connect)
        else:
            self._agent_step(Connected())

    def connection_closed(self, connection: Connection) -> None:
        """The worker's end of a connection learns that it is closed."""
        if self._held(self.connection_closed, connection) or connection is not self.connection:
            return
        self.connection = None
        self._agent_step(Disconnected())
        self.world.after(self.world.rng.uniform(0.01, 0.4), self._connect)

    def flap(self) -> None:
        """The connection breaks, but not the process."""
        if self.connection is not None:
            self.world.network.close(self.connection)

    def receive(self, message: FromScheduler) -> None:
        """A message arrives."""
        if self.is_alive and self.is_paused:
            self._inbox.append(Heard(message))
        elif self.is_alive:
            self.world.note("hears", self, message)
            for watch in self.world.when_delivered.get(type(message), ()):
                watch(self, message)
            self._agent_step(Heard(message))

    # ---- the agent

    def says(self, event: AgentEvent) -> None:
        """Another thread of the process has something to report."""
        if not self._held(self.says, event) and self.stage is not Stage.ENDING:
            self._agent_step(event)

    def _agent_step(self, event: AgentEvent) -> None:
        world = self.world
        ready = self.agent.step(event, world.now * self.rate + self._clock_offset)
        for watch in world.watch_agent:
            watch(self)
        if ready.sends and self.connection is not None:
            for message in ready.sends if self.oddity is Oddity.NONE else map(self._worded, ready.sends):
                for watch_sent in world.when_sent.get(type(message), ()):
                    watch_sent(self, message)
                world.network.up(self.connection, message)
        for notice in ready.notices:
            self._obey(notice)
        if ready.wake_at is not None and self.is_alive:
            at = max((ready.wake_at - self._clock_offset) / self.rate, world.now) + CLOCK_STEP_S
            if self._tick_at is None or at < self._tick_at:
                self._tick_at = at
                world.at(at, self._tick, at)

    def _worded(self, message: FromWorker) -> FromWorker:
        if self.oddity is Oddity.PROTOCOL and isinstance(message, Register):
            return replace(message, protocol=PROTOCOL + 1)
        return message

    def _tick(self, at: float) -> None:
        if at == self._tick_at:
            self._tick_at = None
            if self._runs():
                self._pass()

    def _pass(self) -> None:
        trains = self.stage is Stage.TRAINING and not self.waits_at_commit
        self._agent_step(Observed(StallReport(self.thread.progress() if trains else None)))
        self._agent_step(Passed(self.step))

    def _obey(self, notice: AgentNotice) -> None:
        self.world.note("is told", self, notice)
        for watch in self.world.when_noticed.get(type(notice), ()):
            watch(self, notice)
        match notice:
            case SchedulerBack():
                self._registered_at = self.world.now
            case SchedulerAway():
                self._registered_at = None
            case Admitted():
                self._registered_at = self.world.now
                if self.stage is Stage.STARTING:
                    self.world.after(self.world.rng.uniform(0.05, self.world.mix.prepares_s), self._enter)
            case BreakGroup():
                if self.is_in_group():
                    self._break_group()
            case LeaveGently():
                self._leaves_at_commit = True
            case Depart():
                self._asked_to_leave()
            case StopAt():
                self._stop_together(notice.commits)
            case EnterAgain(place, look, committed):
                takes_s = self.world.rng.uniform(0.001, 0.5 if look else 0.02)
                self.world.after(takes_s, self._enter_again, place, look, committed, self.agent.offered)
            case Began(started):
                if self.stage is Stage.ENDING:
                    return  # its main thread is busy with something else
                self.stage = Stage.FORMING
                self.generation, self.rank = started.generation, started.rank
                self.slot, self.world_size, self._leaves_at_commit = started.slot, started.world_size, False
                self._ranks[started.generation] = started.rank
                self.commits_here, self.stops_after, self.is_stop_agreed = 0, 0, False
                self.step, self.restored = started.restore.step if started.restore else 0, started.restore
                self.bits = self.world.odd_states.restored_by(self, started.generation, started.source, self.restored)
                self._first.clear()
                if self.committed is not None and (self.restored is None or self.restored < self.committed):
                    self.committed = None
                if not self.agent._blob:
                    self.world.after(self.world.rng.uniform(0.001, 0.02), self._publish, started.generation)
            case AddressMap():
                if self.stage is Stage.FORMING and notice.generation == self.generation:
                    self.world.groups.arrive(self, notice.blobs)
            case Answered():
                self.world.keys.answered(self, notice)
            case CommittedPoint():
                self.committed = notice.point
            case Over():
                self.stage = Stage.OVER
                self.world.after(self.world.rng.uniform(0.01, 1.0), self._return)
            case MustEnd(reason, text):
                self._must_end(reason, text)

    def _asked_to_leave(self) -> None:
        """SIGTERM: leave at the next commit or, outside training, at once; a finished worker leaves anyway."""
        self.is_asked = True
        self.world.count("worker asked to leave")
        if self.stage in (Stage.STARTING, Stage.RENDEZVOUS, Stage.LEAVING_GROUP):
            self._leave(on_purpose=True, text="it was asked to")

    def _stop_together(self, agreed: int) -> None:
        """Name the next commit, or train up to the agreed one."""
        if self.stops_after == 0:
            self.stops_after = self.commits_here + 1
        if agreed and not self.is_stop_agreed:
            self.stops_after, self.is_stop_agreed = agreed, True
        self._agent_step(Observed(StopsAfter(self.stops_after, is_there=self._is_at_stop)))
        self.world.groups.look_again(self)

    @property
    def _is_at_stop(self) -> bool:
        return self.is_stop_agreed and self.waits_at_commit and self.stage is Stage.TRAINING

    def _must_end(self, reason: EndKind, text: str) -> None:
        if reason is EndKind.STUCK:  # by the control thread: the main thread is stuck
            self.world.count("worker ended for a hang")
            self._leave(on_purpose=False, text=text)
        elif reason in _JOB_ENDED:
            grace_s = 0.0 if self.thread.notices_breaks else END_GRACE_S
            self.world.after(grace_s, self._leave_if_there, text)
        else:
            self.stage = Stage.ENDING
            self.world.after(0.01, self._exit)

    def _leave_if_there(self, text: str) -> None:
        if not self._held(self._leave_if_there, text) and self.stage is not Stage.ENDING:
            self._leave(on_purpose=True, text=text)

    def _return(self) -> None:
        """``elastic.run`` has returned, the script ends with status 0."""
        if not self._held(self._return) and self.stage is Stage.OVER:
            self._leave(on_purpose=True, text="status 0")

    # ---- training

    def _enter(self) -> None:
        if self._held(self._enter) or self.stage not in (Stage.STARTING, Stage.LEAVING_GROUP):
            return
        self.stage, self._waiting_at = Stage.RENDEZVOUS, self.world.now
        if self._is_dirty:
            self.memory, self._is_dirty = None, False
        self._come(self.agent.offered_place, look=not self._remembers)

    def _enter_again(
        self, place: RankPosition | None, look: bool, committed: Point | None, offered: RoundId | None
    ) -> None:
        """The round needs another answer."""
        if self._held(self._enter_again, place, look, committed, offered) or self.stage is not Stage.RENDEZVOUS:
            return
        if offered == self.agent.offered:
            self._come(place, look=look or not self._remembers, committed=committed)

    def _come(self, place: RankPosition | None, *, look: bool, committed: Point | None = None) -> None:
        mix, slot = self.world.mix, self.agent.slot
        full = None if slot is None else RankPosition(slot, slot, mix.world_size)
        place = place if self._knows_place else None
        made_for = place or full
        blob = blob_of(self.session, made_for) if self._addresses_early and made_for is not None else b""
        disk = self.world.checkpoints_of(self.agent.job, self.node)
        if look:
            self._flush()  # otherwise a save that ends now would remove points that are offered here
            self._agent_step(Observed(SavedPoints.of(disk.tellable(self.committed))))
        points = disk.held() if look else ()
        if committed in points and not mix.has_own_parts and mix.sharding is None:
            points = tuple(point for point in points if point >= committed)  # older ones are not even read
        live = self.memory if self._remembers else None
        copies = self.world.copies.kept_on(self.agent.job, self.process.host) if look else ()
        kept = self.world.copies.commits_of(self.agent.job, self.process.host, slot)
        holdings = Holdings(points, mix.has_own_parts, NUMERICS, blob, place, live, look, copies=copies, kept=kept)
        self._agent_step(Entered(replace(holdings, sharding=mix.sharding)))

    def _leave_group(self, *, at_commit: bool = False) -> None:
        """Leave the collective; saves in progress finish before this process's disk is examined."""
        if self.stage is Stage.TRAINING and not at_commit and self.world.mix.p_dirty:
            self._is_dirty = self.world.rng.random() < self.world.mix.p_dirty
        self.stage, self._leaves_at_commit = Stage.LEAVING_GROUP, False
        self.thread.let_go()  # it was in a collective, if in anything
        self.world.groups.left(self)
        self.world.after(self.world.rng.uniform(0.01, 0.5), self._enter)

    def _break_group(self) -> None:
        if self.thread.notices_breaks:
            self._leave_group()
        else:
            self.thread.must_break = True

    def collective_failed(self, generation: int) -> None:
        """A neighbour is gone."""
        if self._held(self.collective_failed, generation) or generation != self.generation or not self.is_in_group():
            return
        if not self.thread.notices_breaks:
            self.thread.has_failed = True
            return
        self._leave_group()
        self._agent_step(Failed())

    def _publish(self, generation: int) -> None:
        if self._held(self._publish, generation) or not self.is_forming_in(generation):
            return
        assert self.slot is not None
        self._agent_step(
            Addressed(generation, blob_of(self.session, RankPosition(self.slot, self.rank, self.world_size)))
        )

    def group_stands(self, generation: int) -> None:
        """Connected to every member, and restored."""
        if self._held(self.group_stands, generation) or not self.is_forming_in(generation):
            return
        self.stage, self.memory = Stage.TRAINING, self.restored
        if self.restored is not None:
            self.world.copies.keep(self, self.restored, begins=True)
        self.thread.begin()
        if self.step >= self.world.mix.target_step:
            self._save()
            self._compare(is_save=True)
        self._agent_step(Trains(generation))
        self.world.groups.look_again(self)

    def completes_step(self) -> None:
        """Complete one optimizer step, with a commit if it is due."""
        mix = self.world.mix
        self.step += 1
        self.thread.steps_on()
        is_commit = self.step >= mix.target_step or self.step % mix.save_every == 0
        if is_commit:
            self._save()
        if is_commit or self.step % mix.commit_every == 0:
            self.memory, self.commits = Point(self.step, self.generation), self.commits + 1
            self.commits_here += 1
            self.world.copies.keep(self, self.memory)
            self._compare(is_save=is_commit)
            if self.stage is not Stage.TRAINING:
                return
            if self.is_asked:
                self._hand_over()
            elif self._leaves_at_commit:
                self._leave_group(at_commit=True)
            elif self._is_at_stop:
                self._agent_step(Observed(StopsAfter(self.stops_after, is_there=True)))

    @property
    def _remembers(self) -> bool:
        """Whether it remembers its last commit; with a sharded state, every process does."""
        return self.world.mix.has_memory or self.world.mix.sharding is not None

    def _hand_over(self) -> None:
        """Save the last commit, and leave once its buddy has a copy, or after a while."""
        self._handing_over = point = Point(self.step, self.generation)
        is_alone = self.world.mix.sharding is not None or self.world.mix.has_own_parts  # no other rank has all of it
        if is_alone and self.stage is Stage.TRAINING:
            if point not in self._in_hand:
                self._in_hand.append(point)
            self._flush()
            if self.world.copies.is_sent(self, point):
                self.world.after(HAND_OVER_S, self.handed_over, point)
                return
        self.handed_over(point)

    def handed_over(self, point: Point) -> None:
        """Its buddy has this point, or does not answer."""
        if self._held(self.handed_over, point) or self.stage is not Stage.TRAINING:
            return
        if point == self._handing_over:
            self._leave(on_purpose=True, text="it was asked to")

    def _compare(self, *, is_save: bool) -> None:
        """Report the state's digest if commits of this kind are compared."""
        point = Point(self.step, self.generation)
        self.world.odd_states.committed(self, point)
        digest = Digest(point, 1, self.bits)
        if is_save:
            self._saves = [*self._saves, digest][-LAST_SAVES:]
        if len(self._first) < FIRST_COMMITS:
            self._first.append(digest)
        elif not is_save:
            return
        self._report()

    def _report(self, *last: Digest) -> None:
        by_point = {(one.point, one.commits): one for one in (*self._saves, *self._first, *last)}
        self._agent_step(Observed(Digests.of(tuple(by_point.values()))))

    def _save(self) -> None:
        if self.step >= self.world.mix.target_step:
            self.stage = Stage.SAVING
        point = Point(self.step, self.generation)
        self._in_hand.append(point)
        self.world.after(self.world.rng.uniform(0.001, self.world.mix.saves_s), self._saved, point)

    def _flush(self) -> None:
        """Wait until all saves in progress are durable."""
        for point in [*self._in_hand]:
            self._saved(point)

    def _saved(self, point: Point) -> None:
        if point not in self._in_hand or self._held(self._saved, point):
            return
        self._in_hand.remove(point)
        disk = self.world.checkpoints_of(self.agent.job, self.node)
        if not disk.take(self):
            self.world.note("not saved", self, point, "an earlier process of this node has the folder")
            if self.stage is Stage.SAVING and point == Point(self.step, self.generation):
                self._save()  # the last one is waited for
            return
        disk.save(point, self.committed)
        self.world.note("saved", self, point)
        self.world.copies.send(self, point)
        self._agent_step(Observed(SavedPoints.of(disk.tellable(self.committed))))
        for watch in self.world.watch_saved:
            watch(self.node)
        if self.stage is Stage.SAVING and point == Point(self.step, self.generation):
            self.stage = Stage.DONE
            self._report(Digest(point, FINAL, self.bits))
            self._agent_step(Completed(self.generation, self.step))
