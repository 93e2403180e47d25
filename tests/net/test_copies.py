"""The two sockets that copies travel over drop everything that is not a message of ours."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from samebits.core.point import Point
from samebits.errors import ProtocolError
from samebits.net import copies
from samebits.net.copies import (
    MAX_WORDS_BYTES,
    PIECE_BYTES,
    SCHEMA,
    TICKET_BYTES,
    BuddyAddress,
    BytesReceived,
    CopyMessage,
    Declined,
    KeeperSocket,
    PointOffer,
    SenderSocket,
    StreamChunk,
    Whole,
)

WAIT_MS = 10_000
OFFER = PointOffer(b"t" * 16, 1, "job", 0, Point(1, 1), b"d" * 16, 100, 1000)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def listening() -> tuple[int, str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    listener.setblocking(False)
    port = listener.getsockname()[1]
    return listener.detach(), f"tcp://127.0.0.1:{port}"


def next_of(keeper: KeeperSocket) -> CopyMessage:
    while keeper.socket.poll(WAIT_MS):
        for said in keeper.drain(1):
            return said
    raise AssertionError("nothing came")


def test_both_ends_understand_each_other(context: zmq.Context[Any], listening: tuple[int, str]) -> None:
    keeper, sender = KeeperSocket(context, listening[0], None), SenderSocket(context, listening[1], None)
    sender.send(OFFER)
    assert next_of(keeper).message == OFFER
    sender.send_piece(StreamChunk(1, 0), b"x" * PIECE_BYTES)
    said = next_of(keeper)
    assert (said.message, bytes(said.data)) == (StreamChunk(1, 0), b"x" * PIECE_BYTES)
    answers = [BytesReceived(1, 5), Whole(1), Declined(1, "no", again=True)]
    heard = []
    for answer in answers:
        keeper.send(said.sender, answer)
        assert sender.socket.poll(WAIT_MS)
        heard += list(sender.drain())
    assert heard == answers


def test_invalid_message_is_dropped(context: zmq.Context[Any], listening: tuple[int, str]) -> None:
    keeper, stranger = KeeperSocket(context, listening[0], None), context.socket(zmq.DEALER)
    stranger.connect(listening[1])
    offer = SCHEMA.pack(OFFER)
    for frames in (
        [b""],
        [b"\xc1"],
        [offer, b"a frame too many"],
        [SCHEMA.pack(StreamChunk(1, 0))],
        [SCHEMA.pack(StreamChunk(1, 0)), b"", b""],
        [SCHEMA.pack(Whole(1))],
        [msgpack.packb([1, "not a number", "job", 0, [1, 1], b"", 1, 1])],
        [msgpack.packb([1] + [[[]]] * 7)],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\xc4" * (MAX_WORDS_BYTES + 1)],
        [b""] * 50,
    ):
        stranger.send_multipart(frames)
    stranger.send(offer)
    assert next_of(keeper).message == OFFER, "and nothing before it"


def test_oversized_piece_ends_its_connection(context: zmq.Context[Any], listening: tuple[int, str]) -> None:
    keeper, stranger = KeeperSocket(context, listening[0], None), context.socket(zmq.DEALER)
    monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    stranger.connect(listening[1])
    stranger.send_multipart([SCHEMA.pack(StreamChunk(1, 0)), b"x" * (2 * PIECE_BYTES)])
    assert monitor.poll(WAIT_MS)
    assert not keeper.socket.poll(0)
    stranger.disable_monitor()


def test_strangers_cost_a_keeper_neither_descriptors_nor_its_sender(
    context: zmq.Context[Any], listening: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More silent connections arrive than it keeps. The sender that has shown the ticket stays."""
    monkeypatch.setattr(copies, "MOST_CONNECTIONS", 8)
    keeper, sender = KeeperSocket(context, listening[0], None), SenderSocket(context, listening[1], None)
    sender.send(OFFER)
    keeper.settle(next_of(keeper))
    port = int(listening[1].rpartition(":")[2])
    with contextlib.ExitStack() as held:
        strangers = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
        for stranger in strangers:
            stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3")  # the beginning of a greeting
        for stranger in strangers[:32]:
            turned_away_by(keeper, stranger)
        sender.send(OFFER)
        assert next_of(keeper).message == OFFER, "and it did not have to reconnect"
    keeper.close()


def test_endless_message_costs_a_keeper_no_memory(context: zmq.Context[Any], listening: tuple[int, str]) -> None:
    keeper = KeeperSocket(context, listening[0], None)
    with socket.create_connection(("127.0.0.1", int(listening[1].rpartition(":")[2]))) as stranger:
        stranger.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL".ljust(64, b"\0"))
        stranger.sendall(b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER")
        frame = b"\3" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
        thread = threading.Thread(target=lambda: send_for_ever(stranger, frame), daemon=True)
        thread.start()
        has_asked = False
        while thread.is_alive():
            has_asked = has_asked or keeper.look_within_s is not None
            for source in keeper.sources:
                source.poll(100)
            assert not list(keeper.drain())
        assert has_asked, "to be examined although nothing is readable"
    keeper.close()


def send_for_ever(stranger: socket.socket, frame: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            stranger.sendall(frame)


def turned_away_by(keeper: KeeperSocket, stranger: socket.socket) -> None:
    """Let the keeper poll until it has closed that connection."""
    stranger.settimeout(0.05)
    for _ in range(WAIT_MS // 50):
        assert not list(keeper.drain())
        try:
            while stranger.recv(64):
                pass
        except TimeoutError:
            continue
        except ConnectionResetError:
            return
        return
    raise AssertionError("it stays")


def test_keeper_sends_nothing_to_a_closed_connection(context: zmq.Context[Any], listening: tuple[int, str]) -> None:
    keeper = KeeperSocket(context, listening[0], None)
    for _ in range(1000):
        keeper.send(b"nobody", Whole(1))


def test_keepers_address_is_read_as_it_was_written() -> None:
    keeper = BuddyAddress("tcp://127.0.0.1:1", b"t" * TICKET_BYTES)
    assert BuddyAddress.of(str(keeper)) == keeper
    for text in ("", "tcp://127.0.0.1:1", "tcp://127.0.0.1:1/zz", f"{keeper}00", f"udp://127.0.0.1:1/{'0' * 32}"):
        with pytest.raises(ProtocolError, match="is not a keeper's address"):
            BuddyAddress.of(text)
