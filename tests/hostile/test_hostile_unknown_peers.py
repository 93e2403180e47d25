"""Messages about strangers and limits on their content, with tables and a manual clock, without sockets."""

from __future__ import annotations

import pytest

from samebits.core.messages import (
    PROTOCOL,
    SCHEMA,
    Activity,
    Credential,
    Heartbeat,
    Holdings,
    Join,
    Process,
    Register,
    RoundId,
    StatusQuery,
    StopJob,
    protocol_of,
)
from samebits.core.point import Point
from samebits.core.ready import Note, Severity
from samebits.core.values import MAX_ITEMS, replace
from samebits.errors import ProtocolError
from samebits.net.server import Rejection
from samebits.service.scheduling.unknown_peers import (
    GATHER_S,
    LINE_INTERVAL_S,
    MAX_ADDRESSES,
    REFUSALS_SAID,
    UNSAID,
    Offence,
    UnknownPeers,
)
from tests.hostile.attackers import objection

REGISTER = Register(PROTOCOL, "", "digits", "0", "s" * 32, 0, Process("host#1", 7, 1, "cpu"), (("WORKER_NUM", "2"),))


def texts(strangers: UnknownPeers, now: float) -> list[str]:
    return [note.text for note in strangers.lines(now)]


def test_first_line_is_delayed_briefly_and_the_next_waits() -> None:
    strangers = UnknownPeers()
    assert texts(strangers, 0.0) == []
    for _ in range(3):
        strangers.rejected("10.0.0.7", Rejection.SECRET)
    strangers.rejected("10.0.0.8", Rejection.SECRET)
    assert texts(strangers, 1.0) == []
    (line,) = texts(strangers, 1.0 + GATHER_S)
    assert line.startswith("refused 4 connections with another secret: 3 from 10.0.0.7, 1 from 10.0.0.8; compare CLUST")
    for second in range(1, int(LINE_INTERVAL_S)):
        strangers.rejected("10.0.0.7", Rejection.SECRET)
        assert texts(strangers, 1.0 + GATHER_S + second) == []
    (line,) = texts(strangers, 2.0 + GATHER_S + LINE_INTERVAL_S)
    assert line.startswith(f"refused {int(LINE_INTERVAL_S) - 1} connections with another secret: ")
    assert strangers.totals[Offence.SECRET] == 4 + int(LINE_INTERVAL_S) - 1


def test_million_addresses_take_the_room_of_a_few() -> None:
    strangers = UnknownPeers()
    for number in range(100_000):
        strangers.rejected(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", Rejection.MECHANISM)
        strangers.garbled(f"10.1.{number >> 8 & 255}.{number & 255}", "x" * 10_000)
    tallies = strangers._tallies.values()
    assert max(len(tally.by_address) for tally in tallies) == MAX_ADDRESSES
    assert max(len(tally.example) for tally in tallies) == 200
    lines = [*texts(strangers, 0.0), *texts(strangers, 1.0)]
    assert [line.split(":")[0] for line in lines] == [
        "refused 100000 connections with a secret on one side only",
        "refused 100000 messages",
    ]
    assert all("from elsewhere" in line and len(line) < 500 for line in lines)


def test_occasional_connection_is_not_reported_and_continuous_ones_are() -> None:
    """A liveness probe connects and closes every few seconds."""
    strangers = UnknownPeers()
    for second in range(600):
        strangers.rejected("10.0.0.7", Rejection.HANDSHAKE)
        assert texts(strangers, float(second)) == []
    for _ in range(UNSAID + 1):
        strangers.rejected("10.0.0.7", Rejection.HANDSHAKE)
    assert [*texts(strangers, 600.0), *texts(strangers, 601.0)] != []


def test_counts_are_reported_before_the_end() -> None:
    strangers = UnknownPeers()
    strangers.rejected("10.0.0.7", Rejection.SECRET)
    assert len(strangers.lines(0.0, is_last=True)) == 1
    assert strangers.lines(0.0, is_last=True) == []


def test_refusals_are_reported_singly_up_to_a_hosts_worth() -> None:
    strangers = UnknownPeers()
    note = Note(Severity.WARNING, "refused pid 7 (ALIVE): …")
    said = [strangers.refused("10.0.0.7", [note], now=1.0) for _ in range(REFUSALS_SAID + 10)]
    assert said == [[note]] * REFUSALS_SAID + [[]] * 10
    assert [*texts(strangers, 1.0), *texts(strangers, 2.0)][0].startswith("refused 10 more registrations: 10 from 10.")
    assert strangers.refused("10.0.0.7", [note], now=1.0 + LINE_INTERVAL_S) == [note]


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": "j" * 65},
        {"job_name": "n" * 201},
        {"job_name": "a\nb"},
        {"node": ""},
        {"node": "x" * 129},
        {"node": "a b"},
        {"node": "a/b"},
        {"node": "0\x1b[2J"},
        {"session": "s" * 65},
        {"incarnation": -1},
        {"process": Process("h" * 321, 7, 1, "cpu")},
        {"process": Process("h\r\nrefused", 7, 1, "cpu")},
        {"process": Process("h", 0, 1, "cpu")},
        {"process": Process("h", 2**31, 1, "cpu")},
        {"process": Process("h", 7, -1, "cpu")},
        {"process": Process("h", 7, 1, "c" * 65)},
        {"settings": (("a", "b"),) * 65},
        {"settings": (("a", "b" * 201),)},
        {"settings": (("a\n", "b"),)},
    ],
    ids=repr,
)
def test_register_that_no_process_of_ours_sends_is_rejected(wrong: dict[str, object]) -> None:
    assert objection(REGISTER) is None
    problem = objection(replace(REGISTER, **wrong))
    assert problem is not None
    assert len(problem) < 200
    assert problem.isprintable()


def test_other_messages_are_bounded_too() -> None:
    def heartbeat(node: str) -> Heartbeat:
        return Heartbeat(Credential("job", node, "session", 1), 1, Activity.TRAINING, 1, None, 5)

    assert objection(heartbeat("节点7")) is None
    assert objection(heartbeat("x" * 129)) is not None
    assert objection(heartbeat("\n")) is not None
    assert objection(StopJob("Ctrl-C")) is None
    assert objection(StopJob("\x1b[31m")) is not None
    assert objection(StopJob("x" * 601)) is not None
    assert objection(StatusQuery(follow=True)) is None


def test_no_list_is_longer_than_a_message_allows() -> None:
    def join(points: int) -> bytes:
        sender = Credential("job", "1", "session", 1)
        return SCHEMA.pack(Join(sender, RoundId(1, 1), Holdings((Point(1, 1),) * points, False, ())))

    assert len(SCHEMA.unpack(join(MAX_ITEMS)).holdings.points) == MAX_ITEMS  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match=r"length <= 4096 - at `\$\[3\]\[0\]`"):
        SCHEMA.unpack(join(MAX_ITEMS + 1))
    with pytest.raises(ProtocolError, match="at most 10 are accepted"):
        SCHEMA.unpack(bytes(11), 10)


@pytest.mark.parametrize(
    ("packed", "version"),
    [
        (b"\x92\x01\x63", 99),
        (b"\x93\x01\x00\xc0", 0),
        (b"\x92\x01\x02", 2),
        (b"\x92\x01\xf9", -7),
        (b"\x92\x01\xce\x7f\xff\xff\xff", 2**31 - 1),
        (b"\x93\x01\x03\xa1\xff", 3),
        (b"\x93\x01\x03\x82\x01\x02\x01\x02", 3),
        (b"\x92\x01\xce\x80\x00\x00\x00", None),
        (b"\x91\x01", None),
        (b"\x92\x01\xc3", None),
        (b"\x92\x01\xc0", None),
        (b"\x92\x01\xa12", None),
        (b"\x92\x01\xcb\x40\x00\x00\x00\x00\x00\x00\x00", None),
        (b"\x92\x01\x91\x02", None),
        (b"\x92\xc3\x63", None),
        (b"\x92\x02\x63", None),
        (b"\x93\x01\x03" + b"\x91" * 100_000, None),
        (b"\x93\x01\x03\xdd\xff\xff\xff\xff", None),
        (b"\x92\x01\x03\x03", None),
        (b"", None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_register_states_its_version_whatever_follows(packed: bytes, version: int | None) -> None:
    assert protocol_of(packed) == version
