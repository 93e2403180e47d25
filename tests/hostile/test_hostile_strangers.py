"""The lines about strangers, and the limits of what they may say: tables, a clock held in the hand, no socket."""

from __future__ import annotations

import dataclasses

import pytest

from runtime.core.messages import PROTOCOL, Activity, Credential, Heartbeat, Process, Register, StatusQuery, StopJob
from runtime.core.ready import Level, Note
from runtime.errors import ProtocolError
from runtime.net.codec import MAX_ITEMS, OtherProtocolError, decode
from runtime.net.server import Rejection
from runtime.service.strangers import (
    GATHER_S,
    LINE_INTERVAL_S,
    MAX_ADDRESSES,
    REFUSALS_SAID,
    UNSAID,
    Offence,
    Strangers,
    implausible,
)

REGISTER = Register(PROTOCOL, "", "digits", "0", "s" * 32, 0, Process("host#1", 7, 1, "cpu"), (("WORKER_NUM", "2"),))


def texts(strangers: Strangers, now: float) -> list[str]:
    return [note.text for note in strangers.lines(now)]


def test_the_first_line_gathers_and_the_next_waits() -> None:
    strangers = Strangers()
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


def test_a_million_addresses_take_the_room_of_a_few() -> None:
    strangers = Strangers()
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


def test_knocking_at_the_port_is_no_event_and_knocking_without_end_is() -> None:
    """A liveness probe connects and closes every few seconds."""
    strangers = Strangers()
    for second in range(600):
        strangers.rejected("10.0.0.7", Rejection.HANDSHAKE)
        assert texts(strangers, float(second)) == []
    for _ in range(UNSAID + 1):
        strangers.rejected("10.0.0.7", Rejection.HANDSHAKE)
    assert [*texts(strangers, 600.0), *texts(strangers, 601.0)] != []


def test_what_was_counted_is_said_before_the_end() -> None:
    strangers = Strangers()
    strangers.rejected("10.0.0.7", Rejection.SECRET)
    assert len(strangers.lines(0.0, is_last=True)) == 1
    assert strangers.lines(0.0, is_last=True) == []


def test_refusals_are_said_one_by_one_up_to_a_hosts_worth() -> None:
    strangers = Strangers()
    note = Note(Level.WARNING, "refused pid 7 (ALIVE): …")
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
def test_a_register_that_no_process_of_ours_sends(wrong: dict[str, object]) -> None:
    assert implausible(REGISTER) is None
    problem = implausible(dataclasses.replace(REGISTER, **wrong))  # type: ignore[arg-type]
    assert problem is not None
    assert len(problem) < 200
    assert problem.isprintable()


def test_other_messages_are_bounded_too() -> None:
    def heartbeat(node: str) -> Heartbeat:
        return Heartbeat(Credential("job", node, "session", 1), 1, Activity.TRAINING, 1, None, 5)

    assert implausible(heartbeat("节点7")) is None
    assert implausible(heartbeat("x" * 129)) is not None
    assert implausible(heartbeat("\n")) is not None
    assert implausible(StopJob("Ctrl-C")) is None
    assert implausible(StopJob("\x1b[31m")) is not None
    assert implausible(StopJob("x" * 201)) is not None
    assert implausible(StatusQuery(follow=True)) is None


def test_the_decoder_reads_no_list_longer_than_a_message_has() -> None:
    claims = b"\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ITEMS + 1)
    with pytest.raises(ProtocolError, match="max_array_len"):
        decode(claims, 1 << 20)
    with pytest.raises(ProtocolError, match="at most 10 are accepted"):
        decode(bytes(11), 10)


@pytest.mark.parametrize("packed", [b"\x92\x01\x63", b"\x93\x01\x00\xc0"], ids=repr)
def test_a_register_of_another_version_is_told_apart(packed: bytes) -> None:
    with pytest.raises(OtherProtocolError, match=r"speaks protocol 3, the worker speaks (99|0)"):
        decode(packed, 100)


@pytest.mark.parametrize("packed", [b"\x91\x01", b"\x92\x01\x03", b"\x92\x01\xc3", b"\x92\xc3\x63", b"\x92\x02\x63"])
def test_what_is_no_register_has_no_version(packed: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(packed, 100)
    assert not isinstance(caught.value, OtherProtocolError)
