"""The scheduler's process: a loop around the real core that drains, makes durable, and only then sends.

One drain of the queue is one group commit. The process may die in any call to its disk (while it loads, appends or
compacts), be refused by it, die during an fsync, after it (before anything is sent) or between two sends. When it was
paused for longer than HEARTBEAT_INTERVAL it tells the core so before it judges any deadline, as the real shell does:
before or after the queue, both are drawn. Its clock runs at its own rate.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from samebits.core.end_kinds import EndKind
from samebits.core.hangs import Doing, ProcessState
from samebits.core.keys.key_store import KeyRecord
from samebits.core.messages import FromScheduler, FromWorker, OperatorDecision, StopJob
from samebits.core.ready import JobEnded, Ready, Send
from samebits.core.records import Record
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, SchedulerPaused, Seen, Tick
from samebits.core.state import JobState
from samebits.errors import StoreError, SupersededError
from tests.simulation.disk import Killed
from tests.simulation.network import Connection
from tests.simulation.recovery_path import RecoveryPath

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

HEARTBEAT_INTERVAL_S = 1.0
HERE = "host-0"  # the scheduler's own host: only there can it see that a process is dead
P_MIXED_UP = 0.3  # how often the close of an older connection is taken for that of the newest
P_LOOKS = 0.7
P_CUT_SHORT = 0.3  # how often a drain with several events leaves some for the next
CLOCK_STEP_S = 1e-6  # a timer fires a little after its deadline, never before it

Queue: TypeAlias = deque[tuple[Connection | None, SchedulerEvent]]


@dataclass(slots=True)
class Batch:
    """What one drain of the queue decided and has not carried out."""

    records: list[Record] = field(default_factory=list)
    key_records: list[KeyRecord] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    ended: JobEnded | None = None


class SchedulerHost:
    """The scheduler's machine: its journal, its boot clock, and its current process, if any."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sights = world.random_of("sights")
        self.path = RecoveryPath(
            world.random_of("disk"), world.mix.compact_bytes, world.mix.quorum, world.random_of("etcd"), world.count
        )
        self.rate = world.mix.scheduler_rate
        self.core: SchedulerCore | None = None
        self.life = 0  # counts the starts
        self.boots = 1
        self.booted_at = 0.0  # by ``clock``
        self.is_paused = False
        self.ended: EndKind | None = None
        self._are_keys_loaded = False
        self._queue = Queue()
        self._batch: Batch | None = None  # its fsync is in progress
        self._idle_since = 0.0
        self._wake_at: float | None = None
        self._tick_at: float | None = None
        self._connections: dict[str, Connection] = {}  # session → the newest connection it was heard on

    @property
    def clock(self) -> float:
        """Return seconds since the start of the run by this machine's clock."""
        return self.world.now * self.rate

    @property
    def now(self) -> float:
        """Return the host's boot clock."""
        return self.world.now * self.rate - self.booted_at

    @property
    def is_writing(self) -> bool:
        """Return whether an fsync is in progress."""
        return self._batch is not None

    @property
    def boot_id(self) -> str:
        """Return which boot the clock belongs to."""
        return f"boot-{self.boots}"

    # ---- the process

    def start(self) -> None:
        """Start a scheduler process: it locks the path, reads the journal and begins a term."""
        world = self.world
        self.life += 1
        if not self.path.take_lock(self.life):
            world.note("scheduler", f"life {self.life} finds the path locked by life {self.path.lock_holder}")
            world.count("second scheduler refused")
            self.life -= 1
            return
        self.ended, self.is_paused, self._batch = None, False, None
        self._queue.clear()
        self._connections = {}
        self._idle_since, self._wake_at, self._tick_at = self.clock, None, None
        state = self._load()
        if state is None:
            return
        world.note("scheduler", f"starts, life {self.life}, {self.boot_id}, {self.path.size_bytes} bytes of journal")
        self.core = self._new_core(state)
        self._are_keys_loaded = False
        for watch in world.watch_loaded:
            watch(self.core)
        batch = Batch()
        self._take(self.core.start(), batch, None)
        for worker in world.started:
            if worker.process.host == HERE and not worker.is_alive and self._is_seated(worker):
                self._step(Closed(worker.session, gone=True), batch)
        self._step(Tick(), batch)
        self._wake_at = self.core.wake_at()
        self._commit(batch)

    def _load(self) -> JobState | None:
        """Return the journal's state; None if the process dies while it reads."""
        self.path.disk.begin_process()
        self._light_fuse(most_calls=8)
        try:
            records, survived = self.path.open(self.life)
        except (Killed, StoreError, SupersededError) as error:
            self._dies_at_disk(error)
            return None
        if survived:
            self.world.became_durable(survived)  # the dead one never learned that they were
        return JobState.replay(records)

    def _new_core(self, state: JobState) -> SchedulerCore:
        """Return the core of this start. An empty journal begins a new job unless an older one's workers rebuild it."""
        world = self.world
        policy = replace(world.policy, job=world.launched_job)
        is_first = not world.witness.job and not world.witness.lost_journals  # no id is ever used again
        job = policy.job if policy.job and is_first else f"job-{self.life}-{world.wipes}"
        term = 0 if self.path.quorum is None else self.path.quorum.term
        return world.core_type(policy, state, now=self.now, boot_id=self.boot_id, new_job_id=job, claimed_term=term)

    def _is_seated(self, worker: Worker) -> bool:
        assert self.core is not None
        seat = self.core.state.seats.get(worker.node)
        return seat is not None and seat.session == worker.session and seat.is_held

    def die(self, *, reboots: bool = False) -> None:
        """kill -9; with ``reboots`` the machine restarts too."""
        if self.core is not None:
            self.world.note("scheduler", "dies")
            if self._batch is not None:
                self._die_in_append(self._batch)
            self._vanish()
        if reboots:
            self.world.note("scheduler", "its machine loses power")
            self.path.disk.lose_power()
            self.boots += 1
            self.booted_at = self.clock - self.world.rng.uniform(0.5, 5.0)

    def _die_in_append(self, batch: Batch) -> None:
        """The append never returned, wherever it was."""
        records, core = batch.records, self.core
        self.path.disk.light_fuse(self.world.rng.randint(0, 2))
        try:
            self.path.append(self.life, records)
        except Killed:
            return
        except (StoreError, SupersededError) as error:  # it had failed before
            self.world.note("scheduler", error)
            return
        self.world.became_durable(records)
        if core is not None and batch.key_records:
            self.world.keys.append_in_part(core.state.job, batch.key_records)

    def _vanish(self) -> None:
        self.core = None
        self.is_paused = False
        self._batch = None
        self._queue.clear()
        self.path.process_died(self.life)
        self.world.network.scheduler_died()

    def is_taken_over(self, rng: random.Random) -> bool:
        """Let a scheduler that stood by take over, if the journal is in an etcd; return whether it did.

        The present one is paused, or has not renewed its lease. It resumes later and tries to write what it decided.
        """
        quorum, world = self.path.quorum, self.world
        if quorum is None or self.core is None or (not self.is_paused and rng.random() < 0.5):
            return False
        world.note("scheduler", "is superseded")
        self.path.supersede(self._batch.records if self._batch is not None else [], has_folder=rng.random() < 0.5)
        self._vanish()
        world.after(rng.choice((0.0, 1.0, 20.0)), quorum.resume_superseded)
        self.start()
        return True

    def pause(self) -> None:
        """SIGSTOP, or a suspended machine."""
        if self.core is not None and not self.is_paused:
            self.world.note("scheduler", "stands still")
            self.is_paused, self._idle_since = True, self.clock

    def resume(self) -> None:
        """SIGCONT."""
        if self.core is None or not self.is_paused:
            return
        self.is_paused = False
        self.world.note("scheduler", f"goes on, {len(self._queue)} events queued")
        if self._batch is None:
            self._wake(self.clock - self._idle_since)

    # ---- events

    def receive(self, connection: Connection, message: FromWorker) -> None:
        """A message arrives, possibly over a connection to an earlier start."""
        if self.core is not None:
            self._push(connection, Received(connection.worker.session, message))

    def connection_closed(self, connection: Connection) -> None:
        """The monitor reports that a connection closed; a process of this host may be known to be dead already."""
        if self.core is not None and connection.life == self.life:
            worker = connection.worker
            gone = worker.process.host == HERE and not worker.is_alive and self.world.rng.random() < 0.5
            self._push(connection, Closed(worker.session, gone))

    def process_died(self, worker: Worker) -> None:
        """A process of this host is watched until it is dead, possibly long after its connection closed."""
        if worker.process.host == HERE:
            self.world.after(self.world.rng.uniform(0.001, 2.0), self._seen_dead, worker, self.life)

    def _seen_dead(self, worker: Worker, life: int) -> None:
        if self.core is not None and life == self.life and worker.session in self._connections:
            self._push(None, Closed(worker.session, gone=True))

    def ask_to_stop(self, by: str, *, at_commit: bool = False) -> None:
        """Ctrl-C, or ``samebits stop``, with ``at_commit`` after a commit that all members make."""
        if self.core is not None:
            self._push(None, StopJob(by, at_commit=at_commit))

    def drain(self, nodes: tuple[str, ...]) -> None:
        """An operator drains these nodes."""
        if self.core is not None:
            self._push(None, OperatorDecision("", nodes))

    def forge(self, session: str, message: FromWorker) -> None:
        """A foreign process sends over its own connection."""
        if self.core is not None:
            self._push(None, Received(session, message))

    def _push(self, connection: Connection | None, event: SchedulerEvent) -> None:
        self._queue.append((connection, event))
        if not self.is_paused and self._batch is None:
            self._drain()

    def _tick(self, life: int, at: float) -> None:
        if life == self.life and at == self._tick_at:
            self._tick_at = None
            if self.core is not None and not self.is_paused and self._batch is None:
                self._drain()

    def _wake(self, gap_s: float) -> None:
        """Run the loop again after a pause."""
        if gap_s <= HEARTBEAT_INTERVAL_S:
            self._drain()
        elif self.world.rng.random() < 0.5:
            self._queue.appendleft((None, SchedulerPaused(gap_s)))
            self._drain()
        else:
            self._queue.append((None, SchedulerPaused(gap_s)))
            self._drain()

    # ---- the loop

    def _drain(self) -> None:
        """Process the queue, then the deadlines, then disk, then network."""
        batch, core = Batch(), self.core
        assert core is not None
        taken, self._queue = self._turns()
        for connection, event in taken:
            if isinstance(event, Received):
                self._hear(connection, event, batch)
            elif connection is None or not isinstance(event, Closed) or self._is_told(connection, event.session):
                self._step(event, batch)
        self._wake_at = core.wake_at()
        if self._queue or (self._wake_at is not None and self._wake_at <= self.now):
            self._look_at_silent(core, batch)
            self._step(Tick(), batch)
            self._wake_at = core.wake_at()
        if self._queue:
            self.world.after(CLOCK_STEP_S, self._go_on, self.life)
        self._commit(batch)

    def _look_at_silent(self, core: SchedulerCore, batch: Batch) -> None:
        """Examine silent processes of this host, or not; the result may be anything."""
        rng = self._sights
        for seat in core.silent(self.now):
            if seat.process.host == HERE and rng.random() < P_LOOKS:
                process_state = ProcessState(rng.choice([*Doing]), rng.choice((None, 0.0, 60.0)))
                self._step(Seen(seat.session, process_state), batch)

    def _turns(self) -> tuple[Queue, Queue]:
        """Return what this drain takes, all or, by a server's bounds, less, and what it leaves.

        A pause is known at once, and at least one message is taken from every connection: a peer that has sent
        something is not silent.
        """
        queue, rng = self._queue, self.world.rng
        if len(queue) < 2 or rng.random() >= P_CUT_SHORT:
            return queue, deque()
        told = [index for index, (_, event) in enumerate(queue, 1) if isinstance(event, SchedulerPaused)]
        count = rng.randint(max([1, *told]), len(queue))
        taken, left, heard = Queue(), Queue(), set[int]()
        for index, (connection, event) in enumerate(queue):
            is_first = isinstance(event, Received) and connection is not None and connection.number not in heard
            if is_first and connection is not None:
                heard.add(connection.number)
            (taken if is_first or index < count else left).append((connection, event))
        return taken, left

    def _go_on(self, life: int) -> None:
        """The next drain takes what the last one left."""
        if life == self.life and self.core is not None and self._queue and not self.is_paused and self._batch is None:
            self._drain()

    def _hear(self, connection: Connection | None, event: Received, batch: Batch) -> None:
        if connection is not None and connection.life == self.life:  # otherwise a straggler's or a stranger's
            known = self._connections.get(event.session)
            if known is None or known.number < connection.number:
                self._connections[event.session] = connection
        self._step(event, batch)
        world, p_echo = self.world, self.world.mix.p_echo
        if p_echo and not world.is_calm and world.rng.random() < p_echo:
            world.count("message echoed")
            self._step(event, batch, is_echo=True)

    def _is_told(self, connection: Connection, session: str) -> bool:
        """Return whether this close is of the session's current connection, or is taken for it.

        A server identifies connections by their descriptors' numbers: one that closes and returns under its old number
        is heard before its close is read.
        """
        newest = self._connections.get(session)
        return newest is connection or (newest is not None and self.world.rng.random() < P_MIXED_UP)

    def _step(self, event: SchedulerEvent, batch: Batch, *, is_echo: bool = False) -> None:
        assert self.core is not None
        world = self.world
        world.happens(event)
        ready = self.core.step(event, self.now)
        if is_echo:
            for watch_echo in world.watch_echo:
                watch_echo(event, ready)
        self._take(ready, batch, event)

    def _take(self, ready: Ready, batch: Batch, event: SchedulerEvent | None) -> None:
        if not ready.is_empty:
            batch.records += ready.records
            batch.key_records += ready.key_records
            batch.sends += ready.sends
            batch.ended = ready.ended or batch.ended
            for note in ready.notes:
                self.world.note("says", note.text)
        self.world.decided(event, ready)

    def _commit(self, batch: Batch) -> None:
        if not (batch.records or batch.key_records):
            if batch.sends or batch.ended is not None:
                self._speak(batch)
            else:
                self._arm()
            return
        self._light_fuse(most_calls=2)
        world, mix = self.world, self.world.mix
        fsync_s = 0.0 if world.is_calm or not mix.fsync_s else world.rng.uniform(0.0, mix.fsync_s)
        if fsync_s > 0.0:
            self._batch = batch
            world.after(fsync_s, self._fsync_returned, self.life, batch, self.clock)
        elif self._persist(batch):
            self._speak(batch)

    def _light_fuse(self, most_calls: int) -> None:
        """Sometimes make one of the next disk calls this process's last, or let the device refuse it."""
        world, mix = self.world, self.world.mix
        if world.is_calm or not mix.p_torn or world.rng.random() >= mix.p_torn:
            return
        refusal = world.rng.choice((0, 0, 0, errno.ENOSPC, errno.EIO)) if mix.has_disk_errors else 0
        self.path.disk.light_fuse(world.rng.randint(0, most_calls), refusal)

    def _persist(self, batch: Batch) -> bool:
        """Append, and compact if the journal has grown; return False if the process did not survive."""
        core = self.core
        assert core is not None
        try:
            if batch.records:
                self.path.append(self.life, batch.records)
                self.world.became_durable(batch.records)
            if self.path.is_large():
                self.path.compact(list(core.state.snapshot()))
        except (Killed, StoreError, SupersededError) as error:
            self._dies_at_disk(error)
            return False
        if core.state.seats and not self._are_keys_loaded:  # before that it may still become another job's, rebuilt
            self._load_keys(core)
        if batch.key_records and not self.world.keys.append(core.state.job, batch.key_records, core):
            self._dies_at_disk(Killed())
            return False
        return True

    def _load_keys(self, core: SchedulerCore) -> None:
        self._are_keys_loaded = True
        self.world.keys.load(core)

    def _dies_at_disk(self, error: BaseException) -> None:
        world = self.world
        world.note("scheduler", f"dies at its disk: {type(error).__name__} {error}")
        world.count("scheduler dies in a disk call" if isinstance(error, Killed) else "scheduler's disk refuses")
        self._vanish()
        world.operator.start_scheduler_later()

    def _fsync_returned(self, life: int, batch: Batch, began: float) -> None:
        if life != self.life or self._batch is not batch:
            return
        if self.is_paused:
            self.world.after(0.05, self._fsync_returned, life, batch, began)
            return
        self._batch = None
        if self._persist(batch):
            self._speak(batch)
        if self.core is not None:
            self._wake(self.clock - began)

    def _speak(self, batch: Batch) -> None:
        world, p_torn = self.world, self.world.mix.p_torn
        dies = (batch.records or batch.key_records) and p_torn and not world.is_calm and world.rng.random() < p_torn
        spoken = world.rng.randint(0, len(batch.sends)) if dies else len(batch.sends)
        for send in batch.sends[:spoken]:
            self._send(send.session, send.message)
        if dies:
            world.count("scheduler dies while it speaks")
            self.die()
            world.operator.start_scheduler_later()
        elif batch.ended is not None:
            self._end(batch.ended)
        else:
            self._arm()

    def _send(self, session: str, message: FromScheduler) -> None:
        for watch in self.world.when_said.get(type(message), ()):
            watch(session, message)
        connection = self._connections.get(session)
        if connection is not None and connection.is_open:
            self.world.network.down(connection, message)

    def _end(self, ended: JobEnded) -> None:
        self.world.note("scheduler", f"leaves: {ended.kind.name}, {ended.text}")
        self.ended = ended.kind
        self.world.after(0.1, self._leave, self.life)  # sent messages are delivered first

    def _leave(self, life: int) -> None:
        if life == self.life and self.core is not None:
            self._vanish()
            self.world.scheduler_left()

    def _arm(self) -> None:
        """Set one timer, at the earliest time the core asked for."""
        if self._wake_at is None:
            return
        at = max((self._wake_at + self.booted_at) / self.rate, self.world.now) + CLOCK_STEP_S
        if self._tick_at is None or at < self._tick_at:
            self._tick_at = at
            self.world.at(at, self._tick, self.life, at)
