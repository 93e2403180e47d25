"""Simulated relays of hosts below inner relays, and the ranks behind them, many in one process.

Each host is one real connection to an inner relay, with the frames and the authentication of ``service.relay``; its
ranks have the conversation of ``control_plane_crowd``, and their own authentication with the scheduler. Messages that
are ready in the same pass share a frame, and heartbeats wait for each other, as in a relay. The wait is as long as
there in proportion to the interval of the heartbeats. A host that is told that the scheduler is reachable again
attaches again, and so do its ranks. On "lose", ranks end and their host reports it; on "return", each starts again as
another process with the same name.
"""

from __future__ import annotations

import collections
import heapq
import select
import sys
import time
import uuid
from dataclasses import dataclass, field

import zmq

from benchmarks.moments import Notebook
from benchmarks.workers.control_plane_crowd import IN_FLIGHT, Crowd, Plan, Worker
from samebits.config import Settings
from samebits.core import messages
from samebits.core.messages import Credential
from samebits.net.address import endpoint
from samebits.net.channel import ATTACH_AGAIN, DATA, UNREACHABLE, WELCOME, RankEnd, relays_key
from samebits.net.relaying import DOWNWARD, RELAY_PREFIX, RelayWire
from samebits.service.relay import HOLD_S, frames_of

_NOW, _READABLE, _WRITABLE = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLOUT)
MAX_FRAME_BYTES = 256 << 20
WIRE = RelayWire()


@dataclass(slots=True, eq=False)
class Host:
    """A simulated relay of a host, and its ranks."""

    name: str
    socket: zmq.Socket[bytes]
    end: RankEnd
    ranks: dict[str, Worker] = field(default_factory=dict)
    ready: list[tuple[str, bytes]] = field(default_factory=list)  # for the next frame
    closed: list[str] = field(default_factory=list)
    is_up: bool = False
    is_urgent: bool = False  # whether any message in ``ready`` may not wait
    is_due: bool = False  # whether it is among the hosts that will send heartbeats


class HostRelays(Crowd):
    """The hosts of one process.

    Args:
        plan: its description.
        settings: the job's settings.
        notebook: as of a crowd.
    """

    def __init__(self, plan: Plan, settings: Settings, notebook: Notebook) -> None:
        super().__init__(plan, settings, notebook)
        self._hosts: list[Host] = []
        self._host_at: dict[int, Host] = {}
        self._host_of: dict[str, Host] = {}  # by session
        self._dirty: dict[Host, None] = {}
        self._lost: list[Worker] = []
        self._incarnations: dict[str, int] = {}  # of ranks that have returned, by session
        self._waiting = 0  # connections in progress
        self._due: collections.deque[tuple[float, Host]] = collections.deque()  # when held heartbeats are sent
        self._session_key = b"" if self._keys is None else self._keys.session_key
        if self._keys is not None:
            self._keys = self._keys.above_relay()

    def serve(self) -> None:
        """Run until standard input is closed."""
        stdin = sys.stdin.fileno()
        while True:
            next_s = min([one[0][0] for one in (self._beats, self._due) if one], default=None)
            timeout = -1 if next_s is None else max(0.0, next_s - time.monotonic())
            for descriptor, _ in self._epoll.poll(timeout):
                if descriptor == stdin:
                    if not self._obey():
                        return
                else:
                    self._receive(self._host_at[descriptor])
            if self._hosts:
                self._connect_more()
            self._beat()
            while self._dirty:
                dirty, self._dirty = self._dirty, {}
                for host in dirty:
                    self._flush(host)
                    self._receive(host)

    def _connect_more(self) -> None:
        size = self._plan.ranks_a_host
        while self._waiting < IN_FLIGHT and len(self._workers) < len(self._registers):
            number, first = len(self._hosts), len(self._workers)
            name = f"{RELAY_PREFIX.decode()}{uuid.uuid4().hex}"
            host = Host(name, self._socket(zmq.DEALER, name), RankEnd(relays_key(self._session_key), name))
            self._hosts.append(host)
            for index in range(first, min(first + size, len(self._registers))):
                slot, session = self._plan.slots[index], self._sessions[index]
                self._add(host, Worker(slot, session, self._registers[index], host.socket))
            descriptor = int(host.socket.getsockopt(zmq.FD))
            self._host_at[descriptor] = host
            self._epoll.register(descriptor, select.EPOLLIN)
            ports = self._plan.relays
            host.socket.connect(endpoint("127.0.0.1", ports[number % len(ports)]))
            self._waiting += 1
            self._receive(host)

    def _add(self, host: Host, worker: Worker) -> None:
        self._workers.append(worker)
        host.ranks[worker.session] = worker
        self._host_of[worker.session] = host

    # ---- the connection to the inner relay

    def _receive(self, host: Host) -> None:
        """Read until there is nothing to do; see ``Crowd._look_at``."""
        while True:
            events = int(host.socket.getsockopt(zmq.EVENTS))
            if events & _WRITABLE and not host.is_up:
                host.is_up = True
                self._waiting -= 1
                host.socket.send(host.end.hello, _NOW)
                continue
            if not events & _READABLE:
                return
            try:
                while True:
                    self._take(host, host.socket.recv_multipart(_NOW))
            except zmq.Again:
                continue

    def _take(self, host: Host, frames: list[bytes]) -> None:
        kind = frames[0][:1]
        if kind == DATA:
            frame = DOWNWARD.unpack(frames[1], MAX_FRAME_BYTES)
            for delivery in frame.deliveries:
                for session in delivery.sessions:
                    worker = host.ranks.get(session)
                    if worker is None:
                        continue  # its process has ended
                    if delivery.stamps:
                        self._hear(worker, delivery.body)
                    elif worker.end is not None and worker.end.welcome(delivery.body):
                        worker.is_up = True
                        self._send(worker, worker.register)
            for session in frame.detached:
                if session in host.ranks:
                    self._attach(host, host.ranks[session])
        elif kind == WELCOME:
            if host.end.welcome(frames[0]):
                for worker in host.ranks.values():
                    self._attach(host, worker)
        elif kind == UNREACHABLE:
            self._note_away(host)
        elif kind == ATTACH_AGAIN:
            self._note_away(host)
            host.socket.send(host.end.hello, _NOW)

    def _attach(self, host: Host, worker: Worker) -> None:
        worker.end, worker.is_up = RankEnd(self._session_key, worker.session), False
        self._queue(host, worker.session, worker.end.hello)

    def _queue(self, host: Host, session: str, sealed: bytes) -> None:
        host.ready.append((session, sealed))
        host.is_urgent = True
        self._dirty[host] = None

    def _send(self, worker: Worker, packed: bytes) -> None:
        host = self._host_of[worker.session]
        if worker.end is not None and worker.end.is_open and host.end.is_open:
            self._queue(host, worker.session, worker.end.seal(packed))

    def _flush(self, host: Host) -> None:
        ready, closed, may_wait = host.ready, host.closed, not host.is_urgent
        host.ready, host.closed, host.is_urgent = [], [], False
        if host.end.is_open:
            for frame in frames_of(ready, closed):
                host.socket.send(host.end.seal(WIRE.pack(frame), may_wait=may_wait), _NOW)

    def _beat(self) -> None:
        now, every_s = time.monotonic(), self._plan.beat_s
        while self._beats and self._beats[0][0] <= now:
            due, slot, worker = heapq.heappop(self._beats)
            if worker.is_up and worker.end is not None:
                host = self._host_of[worker.session]
                host.ready.append((worker.session, worker.end.seal(worker.beat, may_wait=True)))
                self._sent_beats += 1
                if not host.is_due:
                    host.is_due = True
                    self._due.append((now + HOLD_S * every_s, host))
                heapq.heappush(self._beats, (max(due + every_s, now), slot, worker))
        while self._due and self._due[0][0] <= now:
            _, host = self._due.popleft()
            host.is_due = False
            self._dirty[host] = None
        self._unread.clear()

    # ---- losses

    def _do(self, word: str) -> None:
        match word.split(":"):
            case ["lose", count]:
                self._lose(int(count))
            case ["return"]:
                self._return()
            case _:
                super()._do(word)

    def _lose(self, count: int) -> None:
        """End the last ``count`` ranks of this process, which have consecutive places in as few hosts as possible."""
        self._lost = self._workers[-count:]
        left = {worker.slot for worker in self._lost}
        self._beats = [one for one in self._beats if one[1] not in left]
        heapq.heapify(self._beats)
        for worker in self._lost:
            host = self._host_of.pop(worker.session)
            del host.ranks[worker.session]
            host.closed.append(worker.session)
            worker.is_up = False
            self._dirty[host] = None
        self._notebook.note("lost", count)

    def _return(self) -> None:
        for number, worker in enumerate(reversed(self._lost)):
            worker.session = uuid.uuid4().hex
            worker.is_admitted, worker.joined, worker.place = False, None, b""
            worker.register = self._register(worker.slot, worker.session, is_new=True)
            host = self._hosts[-1 - number // self._plan.ranks_a_host]
            self._incarnations[worker.session] = 0
            self._host_of[worker.session] = host
            host.ranks[worker.session] = worker
            self._attach(host, worker)

    def _admitted(self, worker: Worker, frame: bytes) -> None:
        if worker.session in self._incarnations:
            self._incarnations[worker.session] = messages.SCHEMA.unpack(frame).incarnation
        super()._admitted(worker, frame)

    def _credential(self, worker: Worker) -> Credential:
        incarnation = self._incarnations.get(worker.session, self._incarnation)
        return Credential(self._job, str(worker.slot), worker.session, incarnation)

    # ---- another scheduler

    def _note_away(self, host: Host) -> None:
        host.end = RankEnd(relays_key(self._session_key), host.name)
        for worker in host.ranks.values():
            worker.is_up = False

    def _wait_until_away(self) -> None:
        """Wait until every host has been told that the scheduler is unreachable."""
        self._term = 0
        self._beats.clear()
        for host in self._hosts:
            while host.end.is_open:
                self._receive(host)
                time.sleep(0.001)
        for worker in self._workers:
            worker.register = self._register(worker.slot, worker.session)
        self._notebook.note("away")
