"""A crowd of simulated workers in one process: a DEALER each, with the messages of a worker's agent.

``crowd`` takes part in a job (or in the same conversation with a bare ROUTER), ``echo`` sends one message and is done
with the answer, ``subscribers`` listen to a bare PUB, ``victims`` are crowds of one, with a process for each worker.
The module has the sockets, the conversation, and the times when the last worker of a crowd reached each point.

It sends the messages of ``core.agent.agent_core`` in the same order (Register; Heartbeat when waiting and every second;
Join; Heartbeat when a generation starts), with the product's messages, socket options and keys. While the clock runs,
only the tag of incoming messages is read, and all messages that can be packed in advance are: a machine that simulates
ten thousand workers must not spend its cores on being ten thousand agents. The last message of each worker is decoded
on request ("check").
"""

from __future__ import annotations

import collections
import heapq
import os
import select
import sys
import time
import uuid
from dataclasses import dataclass

import zmq

from benchmarks.moments import Notebook
from benchmarks.workers.control_plane_bare import tag_of
from samebits.config import Settings, fixed_settings
from samebits.core import messages
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    Admitted,
    Credential,
    GenerationStarted,
    Heartbeat,
    Holdings,
    Join,
    MemberRecord,
    Process,
    Register,
    RoundId,
)
from samebits.net.address import endpoint
from samebits.net.channel import RankEnd
from samebits.net.client import MAX_INCOMING_BYTES, RECONNECT_MS
from samebits.net.curve import cluster_keys
from samebits.service.agent import share_of
from samebits.service.host import this_process

SCHEMA = messages.SCHEMA
BEAT_S = 1.0
IN_FLIGHT = 1000  # the maximum number of connections of one crowd in progress
RANKS_A_HOST = 8
_NOW, _READABLE, _WRITABLE = int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.POLLOUT)  # zmq's flags are slow to compare
ADMITTED, ROUND_OPENED, GENERATION_STARTED, ADDRESS_MAP = 20, 24, 25, 26


@dataclass(frozen=True, slots=True)
class Plan:
    """The crowd's description, passed as its one argument in JSON."""

    kind: str  # crowd, echo, subscribers, victims, tree
    first: int
    count: int
    stride: int = 1  # distance from one of its slots to the next
    blob_bytes: int = 0  # size of a worker's part of the address map, sent with every Join
    relays: tuple[int, ...] = ()  # ports of relays on loopback, among which the workers or their hosts are dealt out
    ranks_a_host: int = 64  # of a tree
    beat_s: float = BEAT_S

    @property
    def slots(self) -> range:
        return range(self.first, self.first + self.count * self.stride, self.stride)


@dataclass(slots=True)
class Worker:
    """One simulated worker."""

    slot: int
    session: str
    register: bytes
    socket: zmq.Socket[bytes]
    end: RankEnd | None = None  # of its attachment through a relay
    is_up: bool = False  # its connection is established
    is_known: bool = False  # it was established once
    is_admitted: bool = False
    joined: RoundId | None = None
    beat: bytes = b""
    admitted: bytes = b""
    place: bytes = b""


class Crowd:
    """The workers of one process.

    Args:
        plan: its description.
        settings: the job's settings.
        notebook: where "admitted", "opened", "formed", "resumed" and others are recorded, when all have reached that
            point.
    """

    def __init__(self, plan: Plan, settings: Settings, notebook: Notebook) -> None:
        self._plan, self._settings, self._notebook = plan, settings, notebook
        self._keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, plan.count + 16)
        self._epoll = select.epoll()
        if plan.kind != "victims":
            self._epoll.register(sys.stdin.fileno(), select.EPOLLIN)
        self._workers: list[Worker] = []
        self._by_descriptor: dict[int, Worker] = {}
        self._beats: list[tuple[float, int, Worker]] = []  # a heap: when each worker's next heartbeat is due
        # sending consumes the signal that a message arrived
        self._unread: collections.deque[Worker] = collections.deque()
        self._sent_beats = self._in_flight = 0
        self._job, self._incarnation, self._term, self._generation = "", 0, 0, 0
        self._round: RoundId | None = None
        self._round_placed: RoundId | None = None  # the one whose generation is known
        self._round_frame = b""
        self._sessions = [uuid.uuid4().hex for _ in plan.slots]
        self._registers = [self._register(*each) for each in zip(plan.slots, self._sessions, strict=True)]
        self._blob = os.urandom(plan.blob_bytes)
        self._heard = 0
        self._is_training = self._is_resuming = False
        self._so_far: collections.Counter[str] = collections.Counter()

    # ---- the loop

    def serve(self) -> None:
        """Run until standard input is closed; a victim, until it is killed."""
        while True:
            timeout = max(0.0, self._beats[0][0] - time.monotonic()) if self._beats else -1
            for descriptor, _ in self._epoll.poll(timeout):
                if descriptor == sys.stdin.fileno():
                    if not self._obey():
                        return
                else:
                    self._look_at(self._by_descriptor[descriptor])
            if self._workers:
                self._connect_more()
            self._beat()
            while self._unread:
                self._look_at(self._unread.popleft())

    def _obey(self) -> bool:
        words = os.read(sys.stdin.fileno(), 4096).decode().split()
        for word in words:
            self._do(word)
        return bool(words)

    def _do(self, word: str) -> None:
        match word:
            case "begin":
                self.begin()
            case "away":
                self._wait_until_away()
            case "count":
                self._notebook.note("counted", self._sent_beats)
            case "heard":
                self._notebook.note("heard", self._heard)
            case "check":
                self._check()

    def begin(self) -> None:
        self._notebook.note("begins")
        self._connect_more()

    def _connect_more(self) -> None:
        """Connect at most ``IN_FLIGHT`` at a time: Linux drops connections beyond a backlog for a second."""
        kind = zmq.SUB if self._plan.kind == "subscribers" else zmq.DEALER
        where = endpoint(self._settings.sched_host, self._settings.sched_port)
        while self._in_flight < IN_FLIGHT and len(self._workers) < len(self._registers):
            index = len(self._workers)
            session = self._sessions[index]
            worker = Worker(self._plan.slots[index], session, self._registers[index], self._socket(kind, session))
            if relays := self._plan.relays:
                where = endpoint("127.0.0.1", relays[self._plan.slots[index] % len(relays)])
                worker.end = RankEnd(b"" if self._keys is None else self._keys.session_key, session)
            self._workers.append(worker)
            descriptor = int(worker.socket.getsockopt(zmq.FD))
            self._by_descriptor[descriptor] = worker
            self._epoll.register(descriptor, select.EPOLLIN)
            worker.socket.connect(where)
            self._in_flight += kind == zmq.DEALER
            self._look_at(worker)

    def _socket(self, kind: int, session: str) -> zmq.Socket[bytes]:
        connection = self._context.socket(kind)
        silence_s = self._settings.node_timeout_s
        options = {  # as in net.client
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.IMMEDIATE: 1,
            zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
            zmq.RECONNECT_IVL: RECONNECT_MS,
            zmq.HANDSHAKE_IVL: int(max(1.0, silence_s) * 1000),
            zmq.HEARTBEAT_IVL: max(1, int(silence_s * 1000 / 3)),
            zmq.HEARTBEAT_TIMEOUT: int(silence_s * 1000),
        }
        for option, value in options.items():
            connection.setsockopt(option, value)
        if kind == zmq.SUB:
            connection.setsockopt(zmq.SUBSCRIBE, b"")
        else:
            connection.setsockopt(zmq.ROUTING_ID, session.encode("ascii"))
        if self._keys is not None:
            relays = self._keys.relay if self._plan.relays else None
            connection.curve_serverkey = (relays or self._keys.scheduler).public
            connection.curve_publickey = self._keys.worker.public
            connection.curve_secretkey = self._keys.worker.secret
        return connection

    def _look_at(self, worker: Worker) -> None:
        """Check a socket until it has nothing to do.

        ZeroMQ's descriptor signals once, and a check, a send and a receive all consume the signal. So the last check
        must find nothing to do (zmq_getsockopt(3), ZMQ_FD). Otherwise a connection established while there was nothing
        to receive is never noticed, and its worker waits forever.
        """
        while True:
            events = int(worker.socket.getsockopt(zmq.EVENTS))
            if self._plan.kind != "subscribers" and self._notice(worker, is_up=bool(events & _WRITABLE)):
                continue
            if not events & _READABLE:
                return
            try:
                while True:
                    frames = worker.socket.recv_multipart(_NOW)
                    # The stamp before a relayed message is not checked: that would cost only the simulated workers.
                    if worker.end is None or len(frames) == 2:
                        self._hear(worker, frames[-1])
                    elif worker.end.welcome(frames[0]):
                        self._send(worker, worker.register)
            except zmq.Again:
                continue

    def _notice(self, worker: Worker, *, is_up: bool) -> bool:
        """Send the worker's first message if its connection was just established; return whether it was."""
        has_come, worker.is_up = is_up and not worker.is_up, is_up
        if has_come:
            worker.socket.send(worker.register if worker.end is None else worker.end.hello, _NOW)
            self._in_flight -= not worker.is_known
            worker.is_known = True
        return has_come

    # ---- the conversation

    def _hear(self, worker: Worker, frame: bytes) -> None:
        tag = tag_of(frame)
        if tag == ADMITTED:
            self._admitted(worker, frame)
        elif tag == ROUND_OPENED:
            self._round_opened(worker, frame)
        elif tag == GENERATION_STARTED:
            if frame != worker.place:  # sent again if a heartbeat had crossed the first
                worker.place = frame
                if self._round_placed != self._round:
                    self._round_placed, self._generation = self._round, SCHEMA.unpack(frame).generation
                self._say(worker, Activity.FORMING)
                self._count("formed")
        elif tag == ADDRESS_MAP:
            self._heard += len(frame)
            self._count("mapped")
        else:
            raise ValueError(f"worker {worker.slot} got {SCHEMA.unpack(frame)}, which this benchmark never asks for")

    def _admitted(self, worker: Worker, frame: bytes) -> None:
        if self._plan.kind == "echo":
            self._count("admitted")
            return
        if not self._job:
            admitted = SCHEMA.unpack(frame)
            self._job, self._incarnation = admitted.job, admitted.incarnation
        self._term = self._term or SCHEMA.unpack(frame).term
        is_first, worker.is_admitted, worker.admitted = not worker.is_admitted, True, frame
        if is_first:
            self._say(worker, Activity.WAITING)
            self._count("admitted")
        else:
            self._say(worker, Activity.TRAINING)
            self._count("resumed")
        first_s = time.monotonic() + self._plan.beat_s * share_of(worker.session)
        heapq.heappush(self._beats, (first_s, worker.slot, worker))

    def _round_opened(self, worker: Worker, frame: bytes) -> None:
        if self._plan.kind == "subscribers":
            self._count("opened")
            return
        if frame != self._round_frame:  # the same bytes for all of one incarnation
            self._round_frame = frame
            opened = SCHEMA.unpack(frame).round
            if opened != self._round:
                self._notebook.note("round", opened.number)
            self._round = opened
        if worker.joined == self._round:
            if not worker.place:  # invited again: its Join was lost, or a heartbeat had crossed the first
                self._join(worker)
            return
        worker.joined = self._round
        if not self._is_training:
            self._join(worker)
        if self._count("opened") and self._is_training:
            for each in self._workers:  # they have left their collective
                self._say(each, Activity.WAITING)
                self._join(each)
            self._unread.extend(self._workers)

    def _join(self, worker: Worker) -> None:
        assert worker.joined is not None
        join = Join(
            self._credential(worker), worker.joined, Holdings((), own_parts=False, numerics=NUMERICS, blob=self._blob)
        )
        self._send(worker, SCHEMA.pack(join))

    def _say(self, worker: Worker, activity: Activity) -> None:
        worker.beat = self._heartbeat(worker, activity)
        self._send(worker, worker.beat)

    def _send(self, worker: Worker, packed: bytes) -> None:
        """Send, or drop if the connection is down (as in net.client): everything is sent again when it is back."""
        try:
            worker.socket.send(packed if worker.end is None else worker.end.seal(packed), zmq.NOBLOCK)
        except zmq.Again:
            worker.is_up = False

    def _beat(self) -> None:
        now = time.monotonic()
        while self._beats and self._beats[0][0] <= now:
            due, slot, worker = heapq.heappop(self._beats)
            if worker.is_up:
                self._send(worker, worker.beat)
                self._unread.append(worker)
                self._sent_beats += 1
                heapq.heappush(self._beats, (max(due + BEAT_S, now), slot, worker))

    def _count(self, name: str) -> bool:
        """Count one more worker at this point; record it and return True if it was the last."""
        self._so_far[name] += 1
        if self._so_far[name] < len(self._registers):
            return False
        self._so_far[name] = 0
        self._notebook.note(name)
        if name == "formed":
            self._is_training = True
            for worker in self._workers:  # its message every second from now on
                worker.beat = self._heartbeat(worker, Activity.TRAINING)
        self._is_resuming = self._is_resuming and name != "resumed"
        return True

    def _wait_until_away(self) -> None:
        """Wait until the killed scheduler's connections are all closed, then reconnect."""
        self._is_resuming, self._term = True, 0
        self._beats.clear()
        for worker in self._workers:
            while int(worker.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                time.sleep(0.001)
            worker.is_up = False
            if self._job:
                worker.register = self._register(worker.slot, worker.session)
        self._notebook.note("away")

    # ---- messages

    def _register(self, slot: int, session: str, *, is_new: bool = False) -> bytes:
        process = Process(f"simulated-{slot // RANKS_A_HOST}#{'0' * 16}", 1 + slot % RANKS_A_HOST, 1, "cpu")
        if self._plan.kind == "victims":
            process = this_process("cpu")
        standing = None
        if self._round is not None and not is_new:
            size = self._settings.worker_num
            standing = MemberRecord(1, self._generation, self._round, slot, size, restore=None, final=None, rank=slot)
        return SCHEMA.pack(
            Register(
                protocol=PROTOCOL,
                job="" if is_new else self._job,
                job_name=self._settings.job_name,
                node=str(slot),
                session=session,
                incarnation=0 if is_new else self._incarnation,
                process=process,
                settings=fixed_settings(self._settings),
                standing=standing,
            )
        )

    def _heartbeat(self, worker: Worker, activity: Activity) -> bytes:
        sender = self._credential(worker)
        return SCHEMA.pack(Heartbeat(sender, self._term, activity, self._generation, worker.joined, step=1))

    def _credential(self, worker: Worker) -> Credential:
        return Credential(self._job, str(worker.slot), worker.session, self._incarnation)

    def _check(self) -> None:
        """Check that every worker has the slot of its name and the matching rank; record their number."""
        right = 0
        for worker in self._workers:
            admitted, place = SCHEMA.unpack(worker.admitted), SCHEMA.unpack(worker.place)
            assert isinstance(admitted, Admitted) and isinstance(place, GenerationStarted)
            right += (admitted.session, admitted.slot, place.rank) == (worker.session, worker.slot, worker.slot)
        self._notebook.note("checked", right)


NUMERICS = (  # as many and as long as those of training.process.numerics for a CPU
    ("torch", "2.13.0+cpu"),
    ("machine", "x86_64"),
    ("device", "cpu"),
    ("threads", "1"),
    ("CPU capability", "AVX512"),
    ("denormals flushed to zero", "False"),
    ("default dtype", "torch.float32"),
    ("deterministic algorithms", "True"),
    ("mkldnn.enabled", "True"),
    ("mkldnn.deterministic", "True"),
    ("mkldnn.matmul.fp32_precision", "none"),
    ("mkldnn.conv.fp32_precision", "none"),
    ("mkldnn.rnn.fp32_precision", "none"),
)
