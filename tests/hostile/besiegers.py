"""All attacks at once against one job's ports, in a low-priority process (nice 19).

``python -m tests.hostile.besiegers '{"port": …}'`` runs until its standard input ends, and then prints one JSON object:
how often each kind of attack was made. Each kind is a thread that repeats it, so that every kind meets every phase of
the job. ``storm`` checks the consequences.
"""

from __future__ import annotations

import collections
import json
import os
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import zmq

from samebits.core import messages
from samebits.core.messages import (
    PROTOCOL,
    Activity,
    Credential,
    Heartbeat,
    Holdings,
    Join,
    Leave,
    Process,
    Publish,
    Register,
    ReportEnvelope,
    RoundId,
    StatusQuery,
)
from samebits.core.point import Point
from samebits.core.reports import LastWords, PeerGone, SavedPoints
from samebits.net.copies import SCHEMA as COPIES
from samebits.net.copies import PointOffer, StreamChunk
from samebits.net.curve import derive_keys
from samebits.service.host import this_process
from tests.hostile.attackers import dealers, say_if_open
from tests.hostile.raw import OPENINGS, drawn, say

REOPENED = 2500
"""Connections that one stranger holds and reopens in turn: more than a small job's scheduler has room for."""
HELD = 200
HELD_ELSEWHERE = 50
PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class Target:
    """The processes under attack.

    Attributes:
        port: the scheduler's.
        others: ports that the job's other processes listen on.
        job, settings: what a worker of it sends.
        pids: the pids of living processes, the job's and others', with their start times.
        turns_a_second: the maximum rate of each kind; those not named run as fast as they can.
    """

    port: int
    others: Sequence[int]
    job: str
    settings: Sequence[Sequence[str]]
    pids: Sequence[Sequence[int]]
    turns_a_second: Mapping[str, float] = field(default_factory=dict)

    def text(self) -> str:
        """Encode for the command line."""
        return json.dumps(asdict(self))


class Besiegers:
    """The threads.

    Args:
        target: what they attack.
    """

    def __init__(self, target: Target) -> None:
        self.came: Counter[str] = Counter()
        self._target = target
        self._over = threading.Event()
        self._began_s = time.monotonic()
        kinds: list[Callable[[random.Random], None]] = [
            self._speak_something_else,
            self._reopen,
            self._hold,
            self._forge,
            self._flood_with_words,
            self._come_with_another_secret,
            *([self._go_for_the_others, self._offer_copies] if target.others else []),
        ]
        self._threads = [
            threading.Thread(target=kind, args=(random.Random(number),)) for number, kind in enumerate(kinds)
        ]

    def run(self) -> None:
        """Run until standard input ends."""
        for thread in self._threads:
            thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        self._over.set()
        for thread in self._threads:
            thread.join()
        print(json.dumps(self.came), flush=True)

    def _comes(self, kind: str) -> bool:
        """Return whether to continue; count, and wait for the next turn."""
        self.came[kind] += 1
        rate = self._target.turns_a_second.get(kind)
        pause_s = PAUSE_S if rate is None else self._began_s + self.came[kind] / rate - time.monotonic()
        return not self._over.wait(max(0.0, pause_s))

    # ---- without knowledge of the protocol

    def _speak_something_else(self, chance: random.Random) -> None:
        while self._comes("another protocol"):
            words = chance.choice([*OPENINGS.values(), drawn(chance.randrange(1 << 30))])
            with suppress(OSError):
                say(self._target.port, words, half=chance.random() < 0.2)

    def _reopen(self, chance: random.Random) -> None:
        connections: collections.deque[socket.socket] = collections.deque()
        try:
            while self._comes("connections opened again, by the twenty"):
                for _ in range(20):
                    connections.append(_connecting(self._target.port))
                while len(connections) > REOPENED:
                    connections.popleft().close()
        finally:
            for connection in connections:
                connection.close()

    def _hold(self, chance: random.Random) -> None:
        while self._comes("connections held"):
            connections = [_connecting(self._target.port) for _ in range(HELD)]
            self._over.wait(chance.uniform(0.0, 3.0))
            for connection in connections:
                connection.close()

    # ---- with knowledge of the protocol

    def _forge(self, chance: random.Random) -> None:
        while self._comes("forged words, by the connection"):
            name = b"%032x" % chance.getrandbits(128)
            with dealers(self._target.port, [name]) as (liar,):
                for _ in range(20):
                    say_if_open(liar, messages.SCHEMA.pack(self._lie(chance, name.decode())))
                time.sleep(0.05)

    def _lie(self, chance: random.Random, session: str) -> object:
        node = str(chance.randrange(5))
        pid, started_at = chance.choice(self._target.pids)
        process = this_process("cpu")._replace(pid=pid, started_at=started_at)
        sender = Credential(self._target.job, node, session, chance.randrange(4))
        pairs = tuple((name, value) for name, value in self._target.settings)
        lies: list[object] = [
            Register(PROTOCOL, "", "", node, session, 0, process, pairs),
            Register(PROTOCOL, self._target.job, "", node, session, chance.randrange(9), process, pairs),
            Register(PROTOCOL, "", "", node, session, 0, Process("elsewhere", 1, 1, "cpu"), pairs),
            Heartbeat(sender, 1, chance.choice(list(Activity)), chance.randrange(4), RoundId(1, 1), 10**6),
            Join(sender, RoundId(1, chance.randrange(3)), Holdings((Point(10**9, 1),), True, (("threads", "9"),))),
            Publish(sender, 1, b"somewhere else"),
            ReportEnvelope(sender, SavedPoints((Point(10**9, 9),))),
            ReportEnvelope(sender, LastWords("nothing of the kind"), step=1),
            Leave(sender, True, "status 0"),
            ReportEnvelope(sender, PeerGone(session)),
        ]
        return chance.choice(lies)

    def _flood_with_words(self, chance: random.Random) -> None:
        flood = [messages.SCHEMA.pack(StatusQuery(follow=True)), bytes(1 << 19), b"\x91" * 5000]
        while self._comes("words, by the two hundred"):
            with dealers(self._target.port, [b"flood-%d" % chance.randrange(9)]) as (flooder,):
                packed = chance.choice(flood)
                for _ in range(200 if len(packed) < 1000 else 5):
                    say_if_open(flooder, packed)
                time.sleep(0.02)

    def _come_with_another_secret(self, chance: random.Random) -> None:
        other = derive_keys(b"another-secret-of-another-cluster")
        while self._comes("another secret"):
            with zmq.Context() as context:
                wrong = context.socket(zmq.DEALER)
                wrong.linger = 0
                wrong.curve_serverkey = other.scheduler.public
                wrong.curve_publickey, wrong.curve_secretkey = other.worker.public, other.worker.secret
                wrong.connect(f"tcp://127.0.0.1:{self._target.port}")
                time.sleep(0.05)
                wrong.close(linger=0)

    # ---- the other ports

    def _go_for_the_others(self, chance: random.Random) -> None:
        while self._comes("another protocol, elsewhere"):
            port = chance.choice(self._target.others)
            connections = [_connecting(port) for _ in range(chance.choice((0, 0, 0, HELD_ELSEWHERE)))]
            with suppress(OSError):
                _say_and_go(port, chance.choice([*OPENINGS.values(), drawn(chance.randrange(1 << 30))]))
            for connection in connections:
                connection.close()

    def _offer_copies(self, chance: random.Random) -> None:
        while self._comes("copies offered"):
            with dealers(chance.choice(self._target.others), [None]) as (liar,):
                for slot in range(4):
                    offer = PointOffer(b"t" * 16, 1, self._target.job, slot, Point(1, 2**40), b"d" * 16, 100, 1000)
                    say_if_open(liar, COPIES.pack(offer))
                    with suppress(zmq.Again):
                        liar.send_multipart([COPIES.pack(StreamChunk(1, 0)), bytes(100)], zmq.NOBLOCK)
                time.sleep(0.05)


def _connecting(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    return connection


def _say_and_go(port: int, words: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), 5.0) as connection:
        connection.settimeout(0.1)
        connection.sendall(words)
        with suppress(OSError):
            connection.recv(4096)


if __name__ == "__main__":
    os.nice(19)
    Besiegers(Target(**json.loads(sys.argv[1]))).run()
