"""A stand-in for scheduler and agents: it starts rank processes and carries their messages.

The test holds a :class:`Hub`. Each rank process holds a :class:`Member`, whose thread does what the agent's does: it
delivers plans and exchanged messages, and breaks the current group on request.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samebits.errors import GenerationEndedError
from tests.system.processes import Command, Running, Starter, environment_of_tests

WAIT_S = 60.0  # generous: a machine under load must not fail a test, a hang must


def _send(connection: socket.socket, lock: threading.Lock, message: dict[str, Any]) -> None:
    with lock:
        connection.sendall(json.dumps(message).encode() + b"\n")


# --- in the rank's process --------------------------------------------------------------------------------------------


class _MemberExchange:
    def __init__(self, member: Member, generation: int) -> None:
        self._member = member
        self._generation = generation

    def publish(self, blob: bytes) -> None:
        self._member.say("blob", generation=self._generation, blob=base64.b64encode(blob).decode())

    def wait(self) -> list[bytes]:
        return self._member.wait_for_blobs(self._generation)


class Member:
    """This process's connection to the hub."""

    def __init__(self, port: int, node: int) -> None:
        self.node = node
        self.on_break: Callable[[str], object] = lambda reason: None
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._changed = threading.Condition()
        self._plan: dict[str, Any] = {"generation": -1}
        self._blobs: dict[int, list[bytes] | None] = {}
        self._told: set[str] = set()
        threading.Thread(target=self._listen, name="member", daemon=True).start()
        self.say("hello", pid=os.getpid())

    def say(self, event: str, **values: Any) -> None:
        _send(self._socket, self._lock, {"event": event, "node": self.node, **values})

    def _listen(self) -> None:
        for line in self._socket.makefile("rb"):
            message = json.loads(line)
            match message.pop("op"):
                case "plan":
                    with self._changed:
                        self._plan = message
                        for generation in range(message["generation"]):
                            self._blobs.setdefault(generation, None)
                        self._changed.notify_all()
                    self.on_break(f"generation {message['generation']} begins")
                case "blobs":
                    with self._changed:
                        blobs = [base64.b64decode(blob) for blob in message["blobs"]]
                        self._blobs.setdefault(message["generation"], blobs)
                        self._changed.notify_all()
                case "break":
                    began = time.monotonic()
                    self.on_break("told so")
                    self.say("broke", took_s=time.monotonic() - began)
                case "tell":
                    with self._changed:
                        self._told.add(message["word"])
                        self._changed.notify_all()
        os._exit(3)  # the test is gone

    def next_plan(self, after: int) -> tuple[int, int, int]:
        """Return generation, rank and world size of the first plan newer than ``after``."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._plan["generation"] > after, WAIT_S):
                raise TimeoutError(f"no plan after generation {after}")
            return self._plan["generation"], self._plan["rank"], self._plan["world_size"]

    def exchange(self, generation: int) -> _MemberExchange:
        return _MemberExchange(self, generation)

    def wait_for_blobs(self, generation: int) -> list[bytes]:
        with self._changed:
            if not self._changed.wait_for(lambda: generation in self._blobs, WAIT_S):
                raise TimeoutError(f"the exchange of generation {generation} did not come")
            blobs = self._blobs[generation]
        if blobs is None:
            raise GenerationEndedError(f"generation {generation} was cancelled")
        return blobs

    def wait_for_word(self, word: str) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: word in self._told, WAIT_S):
                raise TimeoutError(f"never told {word!r}")


# --- in the test's process --------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One started process."""

    node: int
    process: Running
    connection: socket.socket | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class Hub:
    """Starts rank processes running ``script`` and exchanges their messages."""

    def __init__(self, script: Path, log_folder: Path, starter: Starter) -> None:
        self._starter = starter
        self._script = script
        self._logs = log_folder
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ranks: dict[int, Rank] = {}
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._members: dict[int, list[int]] = {}
        self._blobs: dict[int, dict[int, str]] = {}
        self._lock = threading.Lock()
        self.hold_exchange = False
        threading.Thread(target=self._accept, daemon=True).start()

    def start(self, node: int, scenario: str, **arguments: Any) -> Rank:
        args = (str(self._listener.getsockname()[1]), str(node), scenario, json.dumps(arguments))
        environment = environment_of_tests() | {"OMP_NUM_THREADS": "1"}
        command = Command(self._script, args, environment, self._logs, self._logs / f"node_{node}.log")
        with self._lock:  # the process that says hello is known by then
            rank = self._ranks[node] = Rank(node, self._starter.start(command))
        return rank

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in connection.makefile("rb"):
                message = json.loads(line)
                if message["event"] == "hello":
                    with self._lock:
                        self._ranks[message["node"]].connection = connection
                if message["event"] == "blob":
                    self._collect(message)
                else:
                    message["at"] = time.monotonic()
                    self._events.put(message)

    def _collect(self, message: dict[str, Any]) -> None:
        generation = message["generation"]
        with self._lock:
            blobs = self._blobs.setdefault(generation, {})
            blobs[message["node"]] = message["blob"]
            complete = len(blobs) == len(self._members[generation]) and not self.hold_exchange
        if complete:
            self.deliver(generation)
        self._events.put({"event": "blob", "node": message["node"], "generation": generation, "at": time.monotonic()})

    def deliver(self, generation: int) -> None:
        """Send the union of a generation's messages to its members."""
        with self._lock:
            members, blobs = self._members[generation], self._blobs[generation]
        for node in members:
            self._send(node, op="blobs", generation=generation, blobs=[blobs[one] for one in members])

    def _send(self, node: int, **message: Any) -> None:
        rank = self._ranks[node]
        assert rank.connection is not None
        with contextlib.suppress(OSError):  # it may be dead, as these tests intend
            _send(rank.connection, rank.lock, message)

    def plan(self, generation: int, nodes: Sequence[int]) -> None:
        """Start a generation: ``nodes`` are its ranks, in order."""
        with self._lock:
            self._members[generation] = list(nodes)
        for rank, node in enumerate(nodes):
            self._send(node, op="plan", generation=generation, rank=rank, world_size=len(nodes))

    def break_(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            self._send(node, op="break")

    def tell(self, nodes: Sequence[int], word: str) -> None:
        for node in nodes:
            self._send(node, op="tell", word=word)

    def kill(self, node: int, number: signal.Signals = signal.SIGKILL) -> None:
        process = self._ranks[node].process
        process.signal(number)
        if number == signal.SIGKILL:
            process.wait(WAIT_S)  # its sockets are closed only when it is gone

    def exit_code(self, node: int) -> int:
        """Return the exit status of a process that ended by itself."""
        return self._ranks[node].process.wait(WAIT_S)

    def await_event(self, event: str, node: int, **values: Any) -> dict[str, Any]:
        """Return the next event of this kind from ``node`` whose fields are ``values``."""
        deadline = time.monotonic() + WAIT_S
        wanted = {"event": event, "node": node, **values}
        while True:
            for message in self._kept:
                if wanted.items() <= message.items():
                    self._kept.remove(message)
                    return message
            try:
                self._kept.append(self._events.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"{wanted} did not come within {WAIT_S} s\n{self.logs()}") from None
            if event != "failed":
                failures = [one for one in self._kept if one["event"] == "failed"]
                assert not failures, f"{failures}\n{self.logs()}"

    def await_events(self, event: str, nodes: Sequence[int], **values: Any) -> list[dict[str, Any]]:
        return [self.await_event(event, node, **values) for node in nodes]

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._logs.glob("*.log")))

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.process.signal(signal.SIGKILL)
        for rank in self._ranks.values():
            rank.process.wait(WAIT_S)
            if rank.connection is not None:
                rank.connection.close()
        self._listener.close()


@contextlib.contextmanager
def hub(script: Path, log_folder: Path, starter: Starter) -> Iterator[Hub]:
    one = Hub(script, log_folder, starter)
    try:
        yield one
    finally:
        one.close()
