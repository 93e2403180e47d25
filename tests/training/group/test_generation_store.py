"""Keys kept by rank 0: what members may do with them, and how little a stranger can do at their port."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import msgpack
import pytest
import torch.distributed as dist

from samebits.errors import CommunicationError, GenerationEndedError
from samebits.training.group import generation_store
from samebits.training.group.breaker import Breaker
from samebits.training.group.generation_store import (
    MAX_QUESTION_BYTES,
    MOST_UNPROVEN,
    PASSWORD_BYTES,
    KeyServer,
    RemoteKeys,
)

SOON, LONG = timedelta(seconds=0.1), timedelta(seconds=60)


@pytest.fixture
def server() -> Iterator[KeyServer]:
    breaker = Breaker("generation 1")
    one = KeyServer("127.0.0.1", breaker)
    one.start()
    yield one
    breaker.throw("the test is over")


@pytest.fixture
def keys(server: KeyServer) -> RemoteKeys:
    return RemoteKeys.from_words(msgpack.unpackb(msgpack.packb(RemoteKeys(server.address, server.password).words)))


def said(server: KeyServer, words: bytes) -> bytes:
    """Return everything that arrives until the server closes."""
    with socket.create_connection(server.address, 60) as caller:
        found = bytearray()
        try:
            caller.sendall(words)
            while part := caller.recv(1 << 16):
                found += part
        except (ConnectionResetError, BrokenPipeError):
            pass
        return bytes(found)


def test_table_behaves_like_torchs_stores(keys: RemoteKeys) -> None:
    assert keys.ask(LONG, "check", ["a"]) is False
    keys.ask(LONG, "set", ["a"], b"\x00\xff")
    assert keys.ask(LONG, "get", ["a"]) == b"\x00\xff"
    assert keys.ask(LONG, "wait", ["a"]) is None
    assert [keys.ask(LONG, "add", ["n"], amount) for amount in (2, 3, -1)] == [2, 5, 4]
    assert keys.ask(LONG, "get", ["n"]) == b"4"
    keys.ask(LONG, "append", ["a"], b"b")
    assert keys.ask(LONG, "compare_set", ["a"], b"other", b"new") == b"\x00\xffb"
    assert keys.ask(LONG, "compare_set", ["a"], b"\x00\xffb", b"new") == b"new"
    assert keys.ask(LONG, "compare_set", ["absent"], b"other", b"new") == b"other"
    assert keys.ask(LONG, "compare_set", ["absent"], b"", b"new") == b"new"
    assert keys.ask(LONG, "num_keys", []) == 3
    assert [keys.ask(LONG, "delete_key", ["a"]) for _ in range(2)] == [True, False]
    assert keys.ask(LONG, "check", ["n", "absent"]) is True


def test_waiter_blocks_no_other_and_is_answered_by_the_last_key(keys: RemoteKeys) -> None:
    with ThreadPoolExecutor(40) as aside:
        waiting = [aside.submit(keys.ask, LONG, "wait", ["one", "two"]) for _ in range(20)]
        waiting += [aside.submit(keys.ask, LONG, "get", ["two"]) for _ in range(20)]
        keys.ask(LONG, "set", ["one"], b"1")
        keys.ask(LONG, "set", ["two"], b"2")
        assert {one.result() for one in waiting} == {None, b"2"}


def test_missing_key_raises_torchs_own_error(keys: RemoteKeys) -> None:
    with pytest.raises(dist.DistStoreError, match="no wait of never within"):
        keys.ask(SOON, "wait", ["never"])


def test_port_closes_with_the_generation(server: KeyServer, keys: RemoteKeys) -> None:
    server._breaker.throw("a member was lost")
    with pytest.raises(CommunicationError, match="rank 0, which keeps later keys, does not answer"):
        keys.ask(LONG, "get", ["a"])


def test_ended_generation_is_not_served() -> None:
    breaker = Breaker("generation 1")
    server = KeyServer("127.0.0.1", breaker)
    breaker.throw("a member was lost")
    with pytest.raises(GenerationEndedError):
        server.start()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address, 60)


def framed(*question: object) -> bytes:
    body = msgpack.packb(question)
    return struct.pack("!I", len(body)) + body


def test_client_without_the_password_can_do_nothing(server: KeyServer, keys: RemoteKeys) -> None:
    for words in (
        bytes(PASSWORD_BYTES),
        b"\xff" * PASSWORD_BYTES,
        server.password[:-1] + b"\0",
        b"GET / HTTP/1.1\r\n" * 9,
    ):
        assert said(server, words + framed("set", ["a"], b"1")) == b""
    assert keys.ask(LONG, "num_keys", []) == 0


@pytest.mark.parametrize(
    "words",
    [
        framed(),
        framed("get"),
        framed("unknown", ["a"]),
        framed("set", ["a"]),
        framed("set", ["a"], 1),
        framed("set", [1], b"1"),
        framed("wait", 5),
        framed(["get"], ["a"]),
        framed("add", ["a"], b"1"),
        struct.pack("!I", 3) + b"\xc1\xc1\xc1",
        struct.pack("!I", MAX_QUESTION_BYTES + 1),
        struct.pack("!I", 2**32 - 1) + bytes(100),
    ],
    ids=repr,
)
def test_members_nonsense_is_answered_and_the_table_survives(server: KeyServer, keys: RemoteKeys, words: bytes) -> None:
    answer = said(server, server.password + words)
    assert msgpack.unpackb(answer[4:])[0] is False
    assert keys.ask(LONG, "num_keys", []) == 0


def test_endless_question_or_half_a_password_blocks_no_other(server: KeyServer, keys: RemoteKeys) -> None:
    with ExitStack() as stack:
        for words in (server.password[:5], server.password, server.password + framed("get", ["a"])[:6]):
            stack.enter_context(socket.create_connection(server.address, 60)).sendall(words)
        keys.ask(LONG, "set", ["a"], b"1")


def test_idle_strangers_make_room_for_each_other_and_for_members(server: KeyServer, keys: RemoteKeys) -> None:
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(server.address, 60)) for _ in range(3 * MOST_UNPROVEN)
        ]
        for number in range(10):
            keys.ask(LONG, "set", [str(number)], b"1")
        assert len(server._unproven) <= MOST_UNPROVEN
        assert strangers[0].recv(1) == b"", "the oldest was not closed"


def test_full_table_refuses_and_keeps_its_content(keys: RemoteKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_store, "MAX_TABLE_BYTES", 1000)
    keys.ask(LONG, "set", ["a"], bytes(800))
    with pytest.raises(CommunicationError, match="'b' would take more than 1000 bytes"):
        keys.ask(LONG, "append", ["b"], bytes(200))
    with pytest.raises(CommunicationError, match="'a' would take more than 1000 bytes"):
        keys.ask(LONG, "append", ["a"], bytes(200))
    keys.ask(LONG, "set", ["a"], b"1")
    keys.ask(LONG, "set", ["b"], bytes(200))
    keys.ask(LONG, "delete_key", ["b"])
    assert keys.ask(LONG, "num_keys", []) == 1
