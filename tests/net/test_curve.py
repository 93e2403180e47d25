"""CURVE with one secret: it admits those who know it, explains a mismatch, and is never shown."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from samebits.core.messages import StatusQuery, StopJob
from samebits.errors import SettingsError
from samebits.net.address import endpoint
from samebits.net.client import ASK_AFTER, REFUSED_AFTER, Client, Down, ShutOut, TurnedAway, Up, greet
from samebits.net.curve import ClusterKeys, KeyPair, cluster_keys, derive_keys, secret_words
from samebits.net.server import Arrived, Rejected, Rejection, Server
from tests.net.ends import PATIENCE_S, Ends, free_port, until
from tests.net.wires import Closer, Tap, Turnstile

SECRET = "correct-horse-battery-staple"
KEYS = derive_keys(SECRET.encode())
OTHER = derive_keys(b"another-secret-of-another-cluster")
SCHEDULER_SECRET = "6a2286adebd8b95c767874f95c0b5ee56836bce7533f6ef5fbc740a0350c4379"
WORKER_SECRET = "b46b6147abe5254fa014eeb04448a9254b81542e8554738d122d6f7e3ab3c5e5"
WORKER_PUBLIC = "2bf3467584116b0c9cb4059853004956d6dd68f916f9fcc2dc651eccd4f4fc4b"
MARKED = StopJob("by-this-marked-text")


@pytest.fixture
def guarded() -> Iterator[Ends]:
    ends = Ends(KEYS)
    yield ends
    ends.close()


@pytest.fixture
def open_to_all() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


# ---- the keys


def test_key_derivation_matches_its_description() -> None:
    """The public key was computed from RFC 7748's formulas. A change here locks running clusters out."""
    assert z85.decode(KEYS.scheduler.secret).hex() == SCHEDULER_SECRET
    assert z85.decode(KEYS.worker.secret).hex() == WORKER_SECRET
    assert z85.decode(KEYS.worker.public).hex() == WORKER_PUBLIC


def test_all_four_keys_differ_and_follow_from_the_secret_alone() -> None:
    keys = [KEYS.scheduler.public, KEYS.scheduler.secret, KEYS.worker.public, KEYS.worker.secret]
    assert len(set(keys)) == 4
    assert derive_keys(SECRET.encode()) == KEYS
    assert not set(keys) & {OTHER.scheduler.public, OTHER.scheduler.secret, OTHER.worker.public, OTHER.worker.secret}


def test_keys_are_in_no_repr() -> None:
    shown = f"{KEYS!r} {KEYS.scheduler!r} {KEYS.worker}"
    for key in (KEYS.scheduler.public, KEYS.scheduler.secret, KEYS.worker.public, KEYS.worker.secret):
        assert key.decode() not in shown


def test_file_and_value_give_the_same_keys(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    for text in (SECRET, f"{SECRET}\n", f"{SECRET}\r\n"):
        file.write_bytes(text.encode())
        assert secret_words(None, file) == secret_words(text, None) == SECRET.encode()
    assert cluster_keys(None, file) == KEYS
    assert cluster_keys(None, None) is None


@pytest.mark.parametrize("content", ["", "\n", "hunter2", "x" * 15 + "\n", "y" * 4097, "z" * 100_000])
def test_invalid_secret_is_an_error_that_does_not_show_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "secret"
    file.write_text(content)
    for value, path, name in ((content, None, "CLUSTER_SECRET=(hidden)"), (None, file, f"CLUSTER_SECRET_FILE={file}")):
        with pytest.raises(SettingsError) as caught:
            cluster_keys(value, path)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{name}: too ")
        assert "Fix: make one with" in problem
        assert len(content.strip()) < 5 or content.strip() not in f"{problem} {caught.value!r}"


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(SettingsError, match=rf"^CLUSTER_SECRET_FILE={path}: cannot be read \("):
            cluster_keys(None, path)


# ---- the wire


def test_client_with_the_secret_is_answered(guarded: Ends) -> None:
    client = guarded.connected("session-a", KEYS)
    client.send(StatusQuery(follow=False))
    assert Arrived("session-a", StatusQuery(follow=False)) in until(
        guarded.heard, lambda item: isinstance(item, Arrived)
    )


@pytest.mark.parametrize(
    ("server", "client", "said", "counted"),
    [
        (KEYS, OTHER, "refuses this process's secret. Fix: compare CLUSTER_SECRET", Rejection.SECRET),
        (KEYS, None, "asks for a secret, and this process has none. Fix: export CLUSTER_SECRET", Rejection.MECHANISM),
        (None, KEYS, "was started without a secret, and this process has one", Rejection.MECHANISM),
    ],
    ids=["another secret", "none at the worker", "none at the scheduler"],
)
def test_mismatch_is_reported_at_both_ends(
    server: ClusterKeys | None, client: ClusterKeys | None, said: str, counted: Rejection
) -> None:
    ends = Ends(server)
    try:
        stranger = ends.client("stranger", client)
        step = ends.got(stranger)
        seen = until(step, lambda item: isinstance(item, ShutOut))
        (told,) = [item for item in seen if isinstance(item, ShutOut)]
        assert said in told.text
        assert f"127.0.0.1, port {ends.port}" in told.text
        assert Up() not in seen
        # A connection that ends before the server reads it has no address; the client retries.
        until(lambda: [*step(), *ends.aside], lambda item: item == Rejected("127.0.0.1", counted))
        assert not [item for item in ends.aside if isinstance(item, Arrived)]
    finally:
        ends.close()


def test_public_key_of_the_scheduler_alone_opens_nothing(guarded: Ends) -> None:
    """The client's key pair is checked as well, so a process that learned only the server's public key stays out."""
    half = ClusterKeys(scheduler=KEYS.scheduler, worker=OTHER.worker)
    stranger = guarded.client("stranger", half)
    step = guarded.got(stranger)
    until(step, lambda item: isinstance(item, ShutOut))
    until(lambda: [*step(), *guarded.aside], lambda item: item == Rejected("127.0.0.1", Rejection.SECRET))
    assert not [item for item in guarded.aside if isinstance(item, Arrived)]


def test_nothing_is_readable_on_the_wire() -> None:
    """A wiretap sees neither identity nor message. Without a secret it sees both."""
    for keys, visible in ((None, True), (KEYS, False)):
        ends = Ends(keys)
        tap = Tap(ends.port)
        client = Client("127.0.0.1", tap.port, "session-a", silence_s=5.0, keys=keys)
        try:
            until(ends.got(client), lambda item: isinstance(item, Up))
            client.send(MARKED)
            until(ends.heard, lambda item: item == Arrived("session-a", MARKED))
            assert (b"session-a" in tap.seen) is visible
            assert (b"by-this-marked-text" in tap.seen) is visible
        finally:
            client.close()
            ends.close()
            tap.close()


def test_corrected_scheduler_is_found_again() -> None:
    """ZeroMQ gives a connection up after a mismatch. The client reconnects, and reports this once."""
    ends = Ends(None)
    client = ends.client("session-a", KEYS)
    until(ends.got(client), lambda item: isinstance(item, ShutOut))
    ends.server.close()
    ends.server = Server(["127.0.0.1"], ends.port, 5.0, keys=KEYS)
    try:
        seen = until(ends.got(client), lambda item: isinstance(item, Up))
        assert not [item for item in seen if isinstance(item, ShutOut)]
        client.send(StatusQuery(follow=True))
        until(ends.heard, lambda item: item == Arrived("session-a", StatusQuery(follow=True)))
    finally:
        ends.close()


def test_verdict_on_the_secret_starts_over_after_each_success(guarded: Ends) -> None:
    client = guarded.connected("session-a", KEYS)
    guarded.server.close()
    guarded.server = Server(["127.0.0.1"], guarded.port, 5.0, keys=OTHER)
    seen = until(guarded.got(client), lambda item: isinstance(item, ShutOut))
    assert Down() in seen


def test_port_without_a_speaker_does_not_count_as_a_mismatch() -> None:
    """A proxy accepts and closes while its scheduler is not there yet, which is worth waiting for."""
    with Closer() as closer:
        client = Client("127.0.0.1", closer.port, "session-a", silence_s=5.0, keys=KEYS)
        try:
            seen: list[object] = []
            while closer.closed < 8:
                client.wait(0.2)
                seen += client.drain()
            assert [type(item) for item in seen if item != Down()] == [TurnedAway]
        finally:
            client.close()


def drained(client: Client, until: Callable[[list[object]], bool]) -> list[object]:
    """Collect the client's reports until ``until`` is true of it, without those on closed connections."""
    seen: list[object] = []
    deadline = time.monotonic() + 30.0
    while not until(seen):
        assert time.monotonic() < deadline, seen
        client.wait(0.05)
        seen += [item for item in client.drain() if item != Down()]
    return seen


@pytest.mark.parametrize("keys", [KEYS, None], ids=["secret", "no secret"])
def test_client_closed_together_with_all_others_has_no_verdict(keys: ClusterKeys | None) -> None:
    """A flooded scheduler greets and closes every connection, which once counted as a wrong secret."""
    with Turnstile(KEYS if keys else None, closes_silent=True) as turnstile:
        client = Client("127.0.0.1", turnstile.port, "session-a", silence_s=5.0, keys=keys)
        try:
            most = 6 * (ASK_AFTER + REFUSED_AFTER)
            seen = drained(client, lambda _: turnstile.closed >= most)
            assert [type(item) for item in seen] == [TurnedAway]
        finally:
            client.close()


def test_client_closed_beside_a_silent_connection_is_refused() -> None:
    with Turnstile(KEYS, closes_silent=False) as turnstile:
        client = Client("127.0.0.1", turnstile.port, "session-a", silence_s=5.0, keys=KEYS)
        try:
            (told,) = drained(client, bool)
            assert isinstance(told, ShutOut)
            assert "refuses this process's secret" in told.text
            assert turnstile.closed >= ASK_AFTER + REFUSED_AFTER
        finally:
            client.close()


@pytest.mark.parametrize("is_after_witness", [True, False])
def test_only_connections_younger_than_the_witness_count(guarded: Ends, is_after_witness: bool) -> None:
    """Older ones may have been closed by a scheduler that was killed, or together with all others."""
    client = Client("127.0.0.1", free_port(), "session-a", silence_s=5.0, keys=KEYS)
    try:
        client._witness = greet("127.0.0.1", guarded.port, "CURVE", 5.0)
        told: list[object] = []
        for _ in range(2 * REFUSED_AFTER):
            told += client._take(zmq.EVENT_CONNECTED, 0, is_after_witness=is_after_witness)
            told += client._take(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0, is_after_witness=is_after_witness)
        assert [type(one) for one in told] == [ShutOut] * is_after_witness
    finally:
        client.close()


@pytest.mark.parametrize(
    ("event", "value"),
    [
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400),
        (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC),
    ],
)
def test_key_errors_reported_by_zeromq_need_no_probe(event: int, value: int) -> None:
    client = Client("127.0.0.1", free_port(), "session-a", silence_s=5.0, keys=KEYS)
    try:
        (told,) = client._take(event, value, is_after_witness=False)
        assert isinstance(told, ShutOut) and "refuses this process's secret" in told.text
    finally:
        client.close()


# ---- the greeting


def test_greeting_names_the_mechanism(guarded: Ends, open_to_all: Ends) -> None:
    for ends, ours, theirs in ((guarded, "NULL", "CURVE"), (open_to_all, "CURVE", "NULL")):
        greeted = greet("127.0.0.1", ends.port, ours, 5.0)
        assert greeted is not None
        assert greeted.mechanism == theirs
        greeted.close()
    assert greet("127.0.0.1", free_port(), "NULL", 5.0) is None


@contextlib.contextmanager
def saying(words: bytes) -> Iterator[int]:
    """Return the port of a server that sends this to its first client."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.sendall(words)
                connection.recv(1 << 10)

        speaker = threading.Thread(target=answer)
        speaker.start()
        yield listening.getsockname()[1]
        speaker.join()


@pytest.mark.parametrize(("at", "wrong"), [(None, 0), (0, 0x7F), (9, 0xFF), (10, 2)])
def test_peer_that_does_not_speak_zmtp_3_has_no_greeting(at: int | None, wrong: int) -> None:
    words = bytearray(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
    if at is not None:
        words[at] = wrong
    with saying(bytes(words)) as port:
        greeted = greet("127.0.0.1", port, "NULL", PATIENCE_S)
        assert (greeted is None) is (at is not None)
        if greeted is not None:
            greeted.close()


def test_silent_peer_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert greet("127.0.0.1", listening.getsockname()[1], "NULL", 0.1) is None


def test_witness_lasts_until_the_other_end_closes(guarded: Ends) -> None:
    greeted = greet("127.0.0.1", guarded.port, "CURVE", 5.0)
    assert greeted is not None
    assert greeted.stands()
    guarded.server.close()
    deadline = time.monotonic() + 30.0
    while greeted.stands():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    guarded.server = Server(["127.0.0.1"], guarded.port, 5.0, keys=KEYS)
    greeted.close()


def test_without_zap_no_client_is_admitted() -> None:
    """ZAP_ENFORCE_DOMAIN refuses all clients if no ZAP handler answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as alone, context.socket(zmq.DEALER) as client:
        port = free_port()
        alone.linger = client.linger = 0
        alone.curve_server, alone.curve_secretkey, alone.zap_domain = True, KEYS.scheduler.secret, b"samebits"
        alone.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        monitor = alone.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        alone.bind(endpoint("127.0.0.1", port))
        client.curve_serverkey = KEYS.scheduler.public
        client.curve_publickey, client.curve_secretkey = dataclasses.astuple(KEYS.worker)
        client.connect(endpoint("127.0.0.1", port))
        assert monitor.poll(10_000)
        assert int.from_bytes(monitor.recv_multipart()[0][:2], "little") == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        alone.disable_monitor()
        monitor.close(linger=0)


def test_key_pair_is_valid() -> None:
    assert KeyPair(zmq.curve_public(KEYS.worker.secret), KEYS.worker.secret) == KEYS.worker


def test_peer_that_greets_one_byte_at_a_time_is_not_waited_for() -> None:
    """A scheduler's greeting arrives at once, and a worker asks in the thread that keeps its seat."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    sent = 0
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            nonlocal sent
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                for byte in greeting:
                    connection.sendall(bytes([byte]))
                    sent += 1
                    time.sleep(0.05)

        trickling = threading.Thread(target=trickle)
        trickling.start()
        assert greet("127.0.0.1", listening.getsockname()[1], "NULL", 0.5) is None
        trickling.join()
        assert sent < len(greeting), "it would have had to wait for all of it"
