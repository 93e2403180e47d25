"""Run the scheduler's loop: drain the socket, decide, make durable, send, sleep until the next event.

One pass reads everything that has arrived, lets the core decide on each event, writes all records with one fsync
(losses get a separate one, first) and then sends. Deadlines are checked once the socket is drained. Consequences of all
events together, such as a round with ten thousand invitations, are decided at that point too. A pass that is late by
more than a heartbeat is reported to the core first, so that a stopped or starved scheduler loses no worker.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from samebits.account.event_log import EventWriter
from samebits.config import Settings, fixed_settings, inherited_sockets
from samebits.core import records
from samebits.core.end_kinds import EndKind
from samebits.core.ledger import Policy, Trust
from samebits.core.messages import KeyAnswer, StopJob
from samebits.core.ready import JobEnded, Ready, Severity
from samebits.core.restore import differing
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, SchedulerPaused, Seen, Tick
from samebits.core.state import JobState
from samebits.errors import (
    ClaimRemovedError,
    ForeignFolderError,
    LockedError,
    SchedulerLeftError,
    StoreError,
    SupersededError,
)
from samebits.net.address import place_of, taken_over
from samebits.net.curve import cluster_keys
from samebits.net.server import Arrived, ConnectionLost, Incoming, Server
from samebits.printable import counted
from samebits.scheduler_hosts import names_one
from samebits.service import cause_file, clock, log, process_state
from samebits.service.job_journal import gateway_of, has_finished, history_of, refresh_folder, written_term
from samebits.service.probe_beat import ProbeBeat
from samebits.service.scheduler_address import listening_place, search_s
from samebits.service.scheduling.followers import MAX_FOLLOWERS, Followers
from samebits.service.scheduling.inbound import Inbound
from samebits.service.scheduling.key_file import KeyFile
from samebits.service.scheduling.unknown_peers import UnknownPeers
from samebits.spelling import spelled
from samebits.store import private
from samebits.store.etcd.etcd_journal import TakeOver
from samebits.store.etcd.gateway import PATIENCE_S, EtcdGateway
from samebits.store.etcd.serving import ServingNotice, wait_for_turn
from samebits.store.journal import Journal
from samebits.store.lock import DirectoryLock, LockHolder
from samebits.store.owner import read_owner, read_token
from samebits.store.process_identity import ProcessIdentity, host_id
from samebits.store.term_claim import TermClaim, impossible_claims

COMPACT_BYTES = 4 << 20
COLLECT_AFTER = 50_000  # objects allocated but not freed: a few MB
CONNECTIONS_A_WORKER = 2  # the worker's own, and that of a dying process or a waiting replacement
CONNECTIONS_OTHER = 1000  # tools, and room for strangers
SAVES_AGAIN = 3  # attempts in a row, if RECOVERY_PATH is removed during writes
WAIT_TOLD_EVERY_S = 15.0  # shorter than the gateway's own interval
MOST_LOOKS = 32  # silent processes examined in one pass; each takes 1 ms
_LOG_LEVELS = {Severity.INFO: logging.INFO, Severity.WARNING: logging.WARNING}


class SchedulerService:
    """The scheduler process of a job.

    Args:
        settings: role scheduler.
        on_job: called with the job's id and name once a seat in the job is durable, before any worker is informed.
        on_ready: called once the journal is read and the socket is listening.
        is_guest: the service runs in a thread of another program, whose garbage collection is not changed.

    Attributes:
        strangers: refused connections and messages, counted by kind.

    Raises (from ``serve``):
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret, or a secret is required to listen there.
        LockedError: another scheduler is writing in RECOVERY_PATH.
        SupersededError: another scheduler has claimed a later term there; nothing written since then was sent.
        JournalDamagedError: the journal cannot be read.
        ListenError: the scheduler cannot listen on its address.
    """

    def __init__(
        self,
        settings: Settings,
        on_job: Callable[[str, str], object] | None = None,
        on_ready: Callable[[], object] = lambda: None,
        *,
        is_guest: bool = False,
    ) -> None:
        self._settings = settings
        self._on_job = on_job
        self._on_ready = on_ready
        self._is_guest = is_guest
        role = f"scheduler on port {settings.sched_port}"
        # A scheduler on another host may have replaced this one, so an idle scheduler must check its claim.
        self._doubt_s = math.inf if names_one(settings.sched_host) else settings.node_timeout_s / 2
        self._doubts_at = clock.now_s() + self._doubt_s
        self._lock = DirectoryLock(settings.recovery_path.resolve(), role, is_needed=not settings.enable_recovery)
        self._stop_by: list[str] = []
        self._abandoned = False
        self._server: Server | None = None
        self._followers = Followers()
        self.strangers = UnknownPeers()
        self._gone: dict[int, str] = {}  # pidfd → session of the process that it watches
        self._events: EventWriter | None = None
        self._gateway: EtcdGateway | None = None
        self._notice: ServingNotice | None = None
        self._thread = 0
        self._core: SchedulerCore | None = None
        self._waits_told_at = -math.inf
        self._waits = ""  # why the scheduler waits for its journal
        self._keys = KeyFile(settings.recovery_path.resolve() if settings.enable_recovery else None)

    def stop(self, by: str) -> None:
        """Request a graceful end. May be called from any thread and from a signal handler."""
        self._stop_by.append(by)
        if self._server is not None:
            self._server.wake()

    def abandon(self) -> None:
        """Stop serving at once without changing the journal. May be called from any thread."""
        self._abandoned = True
        if self._server is not None:
            self._server.wake()

    def let_go_in_child(self) -> None:
        """Close the lock in a forked child, which must not hold it after this process's death."""
        if self._lock.is_held:
            os.close(self._lock.descriptor)

    def serve(self) -> JobEnded:
        """Serve until the job is over; return how it ended."""
        settings = self._settings
        path = settings.recovery_path.resolve()
        inherited = taken_over(inherited_sockets())
        addresses, port = listening_place(settings, [place_of(one) for one in inherited])
        keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
        private.make_folder(path, "RECOVERY_PATH")
        with self._lock, contextlib.nullcontext() if self._is_guest else seldom_collected():
            claim: TermClaim | None = None
            self._gateway = gateway_of(settings, self._waits_for_etcd, PATIENCE_S)
            self._thread = threading.get_ident()
            if self._gateway is not None:
                found = self._claim_in(self._gateway, path, [(address, port) for address in addresses])
                if isinstance(found, JobEnded):
                    return found
                claim = found
            server = self._server = Server(
                addresses,
                port,
                settings.node_timeout_s,
                keys=keys,
                most_connections=most_connections(settings),
                inherited=inherited,
            )
            if self._lock.is_unknown_here:
                log.warn(
                    f"{path}: the file system has no locks, so a second scheduler that is started for this folder "
                    "takes over the job from this one"
                )
            journal: Journal | None = None
            try:
                journal, core = self._load(path, claim)
                if self._gateway is not None:
                    self._core = core
                    self._gateway.on_retry = lambda: self._followers.tell_of_wait(server, core, self._waits)
                shown = ", ".join(addresses)
                protected = "; encrypted, the secret is required" if keys is not None else ""
                log.say(f"listening on {shown}, port {port}{protected}; recovery path {path}")
                self._on_ready()
                ProbeBeat(settings.probe_file).ready()
                return self._loop(server, journal, core)
            finally:
                self._server = None
                for descriptor in self._gone:
                    os.close(descriptor)
                if self._events is not None:
                    self._events.close()
                if journal is not None:
                    journal.close()
                self._keys.close()
                server.close()
                if self._notice is not None:
                    self._notice.close()

    def _waits_for_etcd(self, text: str) -> None:
        """Report that etcd does not answer; called by each thread that waits for it."""
        now = clock.now_s()
        if now - self._waits_told_at >= WAIT_TOLD_EVERY_S:
            self._waits_told_at = now
            log.warn(text)
        if threading.get_ident() == self._thread:  # other threads have gateways of their own
            self._waits = text
            if self._core is not None:
                self._core.show(text)

    # ---- loading

    def _claim_in(self, gateway: EtcdGateway, path: Path, place: Sequence[tuple[str, int]]) -> TermClaim | JobEnded:
        """Claim the job once no other scheduler serves it.

        Returns:
            The claim, or how the job ended if it ended meanwhile.
        """
        log.say(f"the journal is in {gateway.place}; {path} holds a copy")
        lease_s = max(2, math.ceil(self._settings.node_timeout_s))
        holder = LockHolder.this_process(self._lock.role).note()
        self._notice = notice = ServingNotice(gateway.another(), holder, tuple(place), lease_s)
        waits: list[str] = []

        def wait(text: str) -> None:
            waits.append(text)
            log.say(text)

        while (turn := wait_for_turn(gateway, self._is_told_to_end, wait)) is not None:
            refresh_folder(path, gateway)
            if waits and has_finished(path):
                return JobEnded(EndKind.FINISHED, "the job finished while this scheduler stood by")
            with contextlib.suppress(LockedError):  # another standby scheduler was faster
                take_over = TakeOver(turn.condition, notice.announcement())
                claim = TermClaim.take(path, self._lock.role, lambda: written_term(path), gateway, take_over)
                notice.begin(claim)
                return claim
        raise SchedulerLeftError("this standby scheduler was told to exit; the job continues with another scheduler")

    def _is_told_to_end(self) -> bool:
        return self._abandoned or bool(self._stop_by)

    def _load(self, path: Path, claim: TermClaim | None) -> tuple[Journal | None, SchedulerCore]:
        settings = self._settings
        journal: Journal | None = None
        payloads: list[bytes] = []
        if settings.enable_recovery:
            claim = claim or TermClaim.take(path, self._lock.role, lambda: written_term(path))
            for name in impossible_claims(path):
                log.warn(
                    f"{path / name} is ignored, because its number is higher than any job can reach. Fix: remove it"
                )
            self._keys.claimed(claim)
            journal, payloads = Journal.open(path, claim)
        state = JobState.replay(history_of(path, payloads))
        if journal is not None and journal.torn_tail is not None:
            log.warn(str(journal.torn_tail))
        if state.finished:
            raise ForeignFolderError(
                f"RECOVERY_PATH={path} holds job {state.job}, which is finished: start the next job with "
                f"`{spelled('run')}` (it moves the folder aside), or set RECOVERY_PATH to an empty folder"
            )
        policy = replace(policy_of(settings), token=read_token(settings.log_dir))
        ours = dict(policy.settings)
        known = tuple((name, ours[name]) for name, _ in state.settings if name in ours)  # this version may have more
        if difference := differing(known, state.settings):
            raise ForeignFolderError(
                f"RECOVERY_PATH={path} holds job {state.job} ('there'), which was started with other settings than "
                f"this scheduler ('here'): {difference}. Fix: start it with the job's values; or for a new job, move "
                "that folder away, or set RECOVERY_PATH to another one"
            )
        # After the first seat, an empty journal means that it was lost, and the launcher's id is already used.
        has_begun = read_owner(settings.log_dir) is not None
        core = SchedulerCore(
            policy,
            state,
            now=clock.now_s(),
            boot_id=clock.boot_id(),
            new_job_id=policy.job if policy.job and not has_begun else str(uuid.uuid4()),
            claimed_term=0 if claim is None else claim.number,
        )
        return journal, core

    # ---- the loop

    def _loop(self, server: Server, journal: Journal | None, core: SchedulerCore) -> JobEnded:
        inbound = Inbound(server, self._followers, self.strangers)
        directory = None if journal is None else self._settings.recovery_path.resolve()
        gateway = None if self._gateway is None else self._gateway.another()
        self._events = EventWriter(directory, core, time.time() - clock.now_s(), log.warn, gateway)
        this_pass = Ready()
        this_pass.add(core.start())
        self._announce(core)
        for closed in self._dead_at_load(core):
            this_pass.add(core.step(closed, clock.now_s()))
        this_pass.add(core.step(Tick(), clock.now_s()))
        self._carry_out(server, journal, core, this_pass)
        wake_at, decided_at = core.wake_at(), clock.now_s()
        while True:
            pause_s = self._pause_s(wake_at, clock.now_s())
            dead = server.wait(pause_s)
            if self._abandoned:
                goes_on = f"the job continues without one. Fix: {spelled('recover')} starts it again"
                ends = "with ENABLE_RECOVERY=0 its job ends with it"
                then = goes_on if self._settings.enable_recovery else ends
                raise SchedulerLeftError(f"this scheduler was told to exit; {then}")
            now = clock.now_s()
            # Delays by a slow disk, or by a SIGSTOP during a write, count like those during the sleep.
            late_s = now - decided_at - pause_s
            events = self._take_in(server, core, inbound, now)
            events += self._seen_dead(server, dead)
            if late_s > self._settings.heartbeat_interval_s:
                events.insert(0, SchedulerPaused(late_s))
            this_pass = Ready()
            for part in closes_first(events):
                for event in part:
                    this_pass.add(self._decide(inbound, core, event, now))
                if this_pass.records:  # durable and sent before all invitations to a round are written
                    self._carry_out(server, journal, core, this_pass)
                    this_pass = Ready(ended=this_pass.ended)
            if events or wake_at is None or wake_at <= now:
                for seen in self._seen_silent(core, now):
                    this_pass.add(core.step(seen, now))
                this_pass.add(core.step(Tick(), now))
                wake_at = core.wake_at()
            this_pass.notes += self.strangers.lines(now, is_last=this_pass.ended is not None)
            self._carry_out(server, journal, core, this_pass)
            decided_at = now
            if this_pass.ended is not None:
                self._followers.tell_last(server, core)
                self._followers.see_off(server, core.waiting_sessions())
                return this_pass.ended

    def _pause_s(self, wake_at: float | None, now: float) -> float:
        pause = self._settings.heartbeat_interval_s
        if wake_at is not None:
            pause = min(pause, max(0.0, wake_at - now))
        followers_s = self._followers.pause_s(now)
        return pause if followers_s is None else min(pause, followers_s)

    def _decide(self, inbound: Inbound, core: SchedulerCore, event: SchedulerEvent, now: float) -> Ready:
        ready = core.step(event, now)
        ready.notes = inbound.worth_saying(event, ready, now)
        if self._events is not None:
            self._events.heard(event, now)
        return ready

    def _take_in(self, server: Server, core: SchedulerCore, inbound: Inbound, now: float) -> list[SchedulerEvent]:
        """Return the events that have arrived, except repeated heartbeats, which need no processing."""
        events: list[SchedulerEvent] = []
        while self._stop_by:
            events.append(StopJob(self._stop_by.pop()))
        for incoming in server.drain():
            if type(incoming) is Arrived and not events and core.repeats(incoming.peer, incoming.message, now):
                continue
            event = self._event_of(server, core, inbound, incoming)
            if event is not None:
                events.append(event)
        return events

    def _event_of(
        self, server: Server, core: SchedulerCore, inbound: Inbound, incoming: Incoming
    ) -> SchedulerEvent | None:
        match incoming:
            case ConnectionLost(peer):
                self._followers.doubt(peer)
                return Closed(peer, gone=self._is_gone(server, core, peer))
            case _:
                return inbound.event_of(incoming)

    def _carry_out(self, server: Server, journal: Journal | None, core: SchedulerCore, this_pass: Ready) -> None:
        """Save the pass's records, then send its messages."""
        if journal is not None:
            try:
                self._save(journal, core, this_pass)
            except ClaimRemovedError as error:
                self._save_all_again(journal, core, error)
        if core.state.seats and not self._keys.is_loaded:  # otherwise a rebuilt job may replace it
            self._keys.load(core)
            if self._on_job is not None:
                self._on_job(core.state.job, core.state.name)
        if not self._save_keys(journal, core, this_pass):
            this_pass.sends = [send for send in this_pass.sends if not isinstance(send.message, KeyAnswer)]
        for send in this_pass.sends:
            server.send(send.session, send.message)
        server.flush()
        if this_pass.notes:
            log.tell([(_LOG_LEVELS[note.level], note.text) for note in this_pass.notes])
        if self._events is not None:
            self._events.write(this_pass.records, this_pass.sends, this_pass.notes, clock.now_s())
        self._followers.tell(server, core, changed=bool(this_pass.records or this_pass.notes or this_pass.ended))

    def _save(self, journal: Journal, core: SchedulerCore, this_pass: Ready) -> None:
        if this_pass.records:
            journal.append([records.SCHEMA.pack(record) for record in this_pass.records])
            if journal.size_bytes > max(COMPACT_BYTES, 4 * journal.compacted_bytes):
                journal.compact([records.SCHEMA.pack(record) for record in core.state.snapshot()])
        elif this_pass.ended is not None or self._doubts_at <= clock.now_s():
            journal.require_claim()
            self._doubts_at = clock.now_s() + self._doubt_s

    def _save_keys(self, journal: Journal | None, core: SchedulerCore, this_pass: Ready) -> bool:
        try:
            return self._keys.append(this_pass.key_records, core)
        except ClaimRemovedError as error:
            assert journal is not None
            self._save_all_again(journal, core, error)
            return True

    def _save_all_again(self, journal: Journal, core: SchedulerCore, why: ClaimRemovedError) -> None:
        """Reclaim an emptied RECOVERY_PATH, and write everything from memory.

        Raises:
            SupersededError: another scheduler has started there.
            StoreError: the disk reports an error, or the folder is removed repeatedly.
        """
        path = self._settings.recovery_path.resolve()
        log.warn(f"{why}. This scheduler rewrites everything there from memory")
        for attempt in range(SAVES_AGAIN):
            try:
                private.make_folder(path, "RECOVERY_PATH")
                self._lock.renew()
                claim = TermClaim.take(
                    path, self._lock.role, lambda: max(journal.term, written_term(path)), self._gateway
                )
                journal.begin_again([records.SCHEMA.pack(record) for record in core.state.snapshot()], claim)
                self._keys.begin_again(claim, core)
                break
            except LockedError as error:
                raise SupersededError(
                    f"{path} was removed, and another scheduler was started there ({error}), so this one has "
                    "stopped. Fix: nothing to do; the job continues with the other one"
                ) from None
            except StoreError:  # the folder may be removed again during the write
                if attempt + 1 == SAVES_AGAIN:
                    raise
        if self._events is not None:
            self._events.begin_again()

    def _announce(self, core: SchedulerCore) -> None:
        state, settings = core.state, self._settings
        if state.term == 1 or not settings.enable_recovery:
            log.say(f"job {state.job} begins: {counted(core.policy.world_size, 'worker')}")
            return
        seats = len(state.by_slot)
        log.say(
            f"job {state.job} resumes, term {state.term}: {counted(seats, 'seat')} and generation "
            f"{state.generation_number} read from the journal; leases start again, and a restarted worker waits at "
            f"most {settings.register_cooldown_s:g} s (REGISTER_COOLDOWN), once"
        )

    # ---- processes on this host

    def _dead_at_load(self, core: SchedulerCore) -> list[Closed]:
        here = host_id()
        return [
            Closed(seat.session, gone=True)
            for seat in core.state.seats.values()
            if seat.process.host == here
            and seat.is_held
            and not ProcessIdentity(seat.process.pid, seat.process.started_at).is_alive()
        ]

    def _is_gone(self, server: Server, core: SchedulerCore, session: str) -> bool:
        """Return whether the session's process is dead. If it is only dying, watch it."""
        process = core.process_of_session(session)
        if process is None or process.host != host_id():
            return False
        identity = ProcessIdentity(process.pid, process.started_at)
        if not identity.is_alive():
            return True
        if session in self._gone.values():
            return False
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return not identity.is_alive()
        if not identity.is_alive():
            os.close(descriptor)
            return True
        self._gone[descriptor] = session
        server.watch(descriptor)
        return False

    def _seen_silent(self, core: SchedulerCore, now: float) -> list[Seen]:
        """Inspect the silent processes on this host that the next tick will report."""
        here, found = host_id(), []
        for seat in core.silent(now)[:MOST_LOOKS]:
            if seat.process.host == here:
                state = process_state.look(ProcessIdentity(seat.process.pid, seat.process.started_at))
                found += [Seen(seat.session, state)] if state is not None else []
        return found

    def _seen_dead(self, server: Server, descriptors: set[int]) -> list[Closed]:
        dead = []
        for descriptor in descriptors & self._gone.keys():
            server.unwatch(descriptor)
            os.close(descriptor)
            dead.append(Closed(self._gone.pop(descriptor), gone=True))
        return dead


def closes_first(events: list[SchedulerEvent]) -> list[list[SchedulerEvent]]:
    """Split events so that losses do not wait for hundreds of heartbeats that arrived with them.

    Earlier messages of a closed session stay before its loss; messages of different connections have no order.
    """
    closed = {event.session for event in events if isinstance(event, Closed)}
    if not closed:
        return [events]
    first: list[SchedulerEvent] = []
    others: list[SchedulerEvent] = []
    for event in events:
        is_others = isinstance(event, Received) and event.session not in closed
        (others if is_others else first).append(event)
    return [first, others]


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Context manager in which garbage is collected less often.

    Ten thousand registrations create many objects without cycles. With Python's thresholds, collections took a sixth of
    the time needed to form a job.
    """
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def most_connections(settings: Settings) -> int:
    """Return the limit for open connections of all kinds."""
    workers = settings.max_worker_num + settings.spare_num
    return CONNECTIONS_A_WORKER * workers + MAX_FOLLOWERS + CONNECTIONS_OTHER


def policy_of(settings: Settings) -> Policy:
    """Return the settings on which the core's decisions depend."""
    return Policy(
        world_size=settings.worker_num,
        job_name=settings.job_name,
        job=settings.job_id or "",
        settings=fixed_settings(settings),
        recovery=settings.enable_recovery,
        cool_down_s=settings.register_cooldown_s,
        node_timeout_s=settings.node_timeout_s,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        reconnect_grace_s=settings.grace.reconnect_s,
        search_s=search_s(settings.sched_host, settings.sched_port),
        topo_timeout_s=settings.topo_timeout_s,
        rebuild=settings.rebuild,
        min_world_size=settings.min_worker_num,
        max_world_size=settings.max_worker_num,
        spare_num=settings.spare_num,
        start_grace_s=settings.grace.start_s,
        shrink_grace_s=settings.grace.shrink_s,
        reset_limit=settings.reset_limit,
        watches=settings.hang.policy != "off",
        step_timeout_s=settings.hang.step_timeout_s,
        ends_stuck=settings.hang.policy == "end",
        trust=Trust(settings.consistency.trust) if settings.consistency.every else Trust.STOP,
        straggler_factor=None if settings.straggler.policy == "off" else settings.straggler.factor,
        swaps_stragglers=settings.straggler.policy == "swap",
        causes=cause_file.table_of(settings),
        restarts=settings.max_restarts > 0,
    )
