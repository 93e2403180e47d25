"""No sequence of well-formed messages from any sender makes the scheduler's core raise.

The messages pass through the same parts as in a running scheduler: bytes, decoder, reception, core; output is packed as
for the journal and the wire. Real sockets are in ``test_hostile_service``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebits.core import messages, records
from samebits.core.keys import key_store
from samebits.core.ledger import Policy
from samebits.core.messages import PROTOCOL, Activity, Credential, Heartbeat, Holdings, Join, Process, Register, RoundId
from samebits.core.point import Point
from samebits.core.ready import Ready
from samebits.core.scheduler import Closed, SchedulerCore, SchedulerPaused, Tick
from samebits.core.state import JobState
from samebits.errors import ProtocolError
from samebits.net.server import MAX_INCOMING_BYTES, Arrived, Garbled
from samebits.service.scheduling.followers import Followers
from samebits.service.scheduling.inbound import Inbound
from samebits.service.scheduling.unknown_peers import UnknownPeers
from samebits.service.status import message_of, snapshot, view_in
from tests.hostile.drawn import FROM_ANYBODY, FROM_NOBODY, messages_of

JOB = "job-1"
SETTINGS = (("WORKER_NUM", "2"),)
SESSIONS = ("s0", "s1", "s2", "stranger")
NUMERICS = (("threads", "1"),)
KNOWN: dict[str, Sequence[Any]] = {
    "sender": tuple(Credential(JOB, node, session, 1) for node in ("0", "1") for session in ("s0", "s1")),
    "job": (JOB, ""),
    "job_name": ("digits", ""),
    "node": ("0", "1", "a"),
    "session": SESSIONS,
    "incarnation": (0, 1, 2),
    "protocol": (PROTOCOL,),
    "settings": (SETTINGS,),
    "pid": (1, 4_000_000),
    "started_at": (0, 1),
    "host": ("here", "there"),
    "device": ("cpu",),
    "term": (1,),
    "generation": (0, 1, 2),
    "round": (RoundId(1, 1), RoundId(1, 2)),
    "numerics": (NUMERICS,),
    "points": ((), (Point(5, 1),), (Point(9, 1), Point(5, 1))),
    "step": (0, 5, 9),
    "key": (b"a", b"b"),
    "number": (1, 2, 3),
    "floor": (0, 1, 2),
}
HOSTILE = st.tuples(st.sampled_from(SESSIONS), messages_of([*FROM_ANYBODY, *FROM_NOBODY], KNOWN))
PASSING = st.one_of(
    st.builds(Closed, st.sampled_from(SESSIONS), st.booleans()),
    st.builds(SchedulerPaused, st.floats(0, 100)),
    st.floats(0.01, 20.0),
)


class Line:
    """Packs outgoing messages as on the wire, addressed as ZeroMQ addresses them."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, peer: str, message: object) -> None:
        peer.encode("ascii")
        messages.SCHEMA.pack(message)
        self.sent += 1

    def address_of(self, peer: str) -> str:
        return "192.0.2.1"


class Scheduler:
    """A core with its reception, without disk, socket or clock."""

    def __init__(self, *, recovery: bool) -> None:
        policy = Policy(2, "digits", SETTINGS, recovery=recovery, cool_down_s=5.0, topo_timeout_s=60.0)
        self.now = 100.0
        self.core = SchedulerCore(policy, JobState(), now=self.now, boot_id="boot", new_job_id=JOB)
        self.line = Line()
        self.strangers = UnknownPeers()
        self._reception = Inbound(self.line, Followers(), self.strangers)
        self._journal: list[bytes] = []
        self._carry_out(self.core.start())

    def says(self, peer: str, message: object) -> None:
        """Deliver the message as bytes over the connection of ``peer``."""
        incoming: Arrived | Garbled
        try:
            incoming = Arrived(peer, messages.SCHEMA.unpack(messages.SCHEMA.pack(message), MAX_INCOMING_BYTES))
        except ProtocolError as error:
            incoming = Garbled(peer, str(error), "192.0.2.1")
        event = self._reception.event_of(incoming)
        if event is not None:
            ready = self.core.step(event, self.now)
            ready.notes = self._reception.worth_saying(event, ready, self.now)
            self._carry_out(ready)
            self._carry_out(self.core.step(Tick(), self.now))

    def passes(self, what: Closed | SchedulerPaused | float) -> None:
        if isinstance(what, float):
            self.now += what
        else:
            self._carry_out(self.core.step(what, self.now))
        self._carry_out(self.core.step(Tick(), self.now))

    def _carry_out(self, ready: Ready) -> None:
        self._journal += [records.SCHEMA.pack(record) for record in ready.records]
        for record in ready.key_records:
            assert key_store.SCHEMA.unpack(key_store.SCHEMA.pack(record)) == record
        for send in ready.sends:
            self.line.send(send.session, send.message)
        for note in (*ready.notes, *self.strangers.lines(self.now)):
            assert len(note.text) < 20_000
        assert view_in(message_of(snapshot(self.core, whole=True))) == snapshot(self.core, whole=True)

    def replayed(self) -> JobState:
        return JobState.replay(records.SCHEMA.unpack(payload) for payload in self._journal)

    def begin(self) -> None:
        """Let two honest workers train in generation 1."""
        for node, session in (("0", "s0"), ("1", "s1")):
            process = Process("here", 10 + int(node), 1, "cpu")
            self.says(session, Register(PROTOCOL, "", "digits", node, session, 0, process, SETTINGS))
        for node, session in (("0", "s0"), ("1", "s1")):
            sender = Credential(JOB, node, session, 1)
            self.says(session, Join(sender, RoundId(1, 1), Holdings((), False, NUMERICS, b"here")))
        for node, session in (("0", "s0"), ("1", "s1")):
            sender = Credential(JOB, node, session, 1)
            self.says(session, Heartbeat(sender, 1, Activity.TRAINING, 1, RoundId(1, 1), 5))
        assert self.core.phase() == "training"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    recovery=st.booleans(),
    in_progress=st.booleans(),
    story=st.lists(HOSTILE | PASSING, max_size=25),
)
def test_no_sequence_of_messages_makes_the_core_raise(
    recovery: bool, in_progress: bool, story: list[tuple[str, object] | Closed | SchedulerPaused | float]
) -> None:
    scheduler = Scheduler(recovery=recovery)
    if in_progress:
        scheduler.begin()
    for event in story:
        if isinstance(event, tuple):
            scheduler.says(*event)
        else:
            scheduler.passes(event)
    assert scheduler.replayed() == scheduler.core.state


STRANGERS = messages_of(FROM_ANYBODY[:-1], KNOWN | {"session": ("stranger", "s0", "s1")})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(story=st.lists(STRANGERS, max_size=25))
def test_strangers_with_stolen_names_do_not_affect_a_running_job(story: list[object]) -> None:
    """Over their own connections, whatever node, session or incarnation they claim: no round, no loss, no lease."""
    scheduler = Scheduler(recovery=True)
    scheduler.begin()
    before = repr(scheduler.core.state)
    presences = {node: repr(scheduler.core.presence(node)) for node in ("0", "1")}
    for message in story:
        scheduler.says("stranger", message)
    assert repr(scheduler.core.state) == before
    assert {node: repr(scheduler.core.presence(node)) for node in ("0", "1")} == presences
    assert scheduler.core.phase() == "training"


def test_remains_of_strangers_are_bounded() -> None:
    """Thousands register, wait and leave, and the tables of waiting processes do not grow with them."""
    scheduler = Scheduler(recovery=True)
    admission = scheduler.core._admission
    for number in range(5000):
        session = f"session-{number}"
        process = Process("there", 7, 1, "cpu")
        node = ("1", "named")[number % 2] + str(number)
        scheduler.says(session, Register(PROTOCOL, "", "digits", node, session, 0, process, SETTINGS))
        scheduler.passes(Closed(session, gone=False))
    assert len(admission.pending) == len(admission._pending_session) == len(admission.refused) == 0
    scheduler.begin()
    for number in range(5000):
        session = f"again-{number}"
        process = Process("there", 7, 1, "cpu")
        scheduler.says(session, Register(PROTOCOL, "", "digits", "0", session, 0, process, SETTINGS))
    assert len(admission.refused) == 1000 + 2 * 2
    assert len(scheduler.core._fenced) <= 1000
