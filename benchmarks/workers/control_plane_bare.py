"""The limits of ZeroMQ itself: a ROUTER that only imitates a scheduler's conversation, and a PUB.

``router`` answers the first message of every peer, broadcasts when all are in and once more when all have answered,
with prepacked messages of a scheduler's size. It reads only the tag, and decodes and keeps nothing. On a line of its
standard input, it opens a round for all, one by one; ``pub`` does so with one message to all. With CLUSTER_SECRET the
router uses CURVE, as a scheduler does. The clients are those of the real scheduler, byte for byte, so every difference
is the scheduler's cost.
"""

from __future__ import annotations

import os
import sys

import zmq

from benchmarks.moments import Notebook
from samebits.core import messages
from samebits.core.messages import Admitted, GenerationStarted, RoundId, RoundOpened
from samebits.net.curve import cluster_keys

REGISTER, JOIN = 1, 3
MAX_SOCKETS = 65535
_LONG_LIST = 0xDC
JOB = "0" * 36
ROUND = RoundId(1, 1)
ADMITTED = messages.SCHEMA.pack(Admitted("0" * 32, JOB, 1, 9999, 1, 10000, None))
ROUND_OPENED = messages.SCHEMA.pack(RoundOpened(JOB, 1, 1, ROUND, "all 10000 workers are registered", ""))
NEXT_ROUND_OPENED = messages.SCHEMA.pack(
    RoundOpened(JOB, 1, 1, RoundId(1, 2), "worker 9999 (rank 9999) is lost: its process is gone", "")
)
GENERATION_STARTED = messages.SCHEMA.pack(
    GenerationStarted(
        job=JOB, term=1, incarnation=1, generation=1, round=ROUND, rank=9999, world_size=10000, local_rank=7,
        local_world_size=8, restore=None, source=9999, serves=(),
        text="no restore point yet: every rank starts from rank 0's initial state",
        slot=9999,
    )
)  # fmt: skip


def tag_of(packed: bytes) -> int:
    """Return a packed message's tag: the first item of a list, after the one or three bytes that begin it (msgpack)."""
    return packed[3] if packed[0] == _LONG_LIST else packed[1]


def listen(kind: int, port: int) -> zmq.Socket[bytes]:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    listening = context.socket(kind)
    keys = cluster_keys(os.environ.get("CLUSTER_SECRET"), None)
    if keys is not None:
        listening.curve_server = True
        listening.curve_secretkey = keys.scheduler.secret
    listening.setsockopt(zmq.BACKLOG, 4096)
    listening.setsockopt(zmq.SNDHWM, 0)
    listening.bind(f"tcp://127.0.0.1:{port}")
    return listening


def be_router(port: int, world_size: int, notebook: Notebook) -> None:
    router = listen(zmq.ROUTER, port)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    registered: set[bytes] = set()
    joined: set[bytes] = set()
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        if sys.stdin.fileno() in dict(poller.poll()):
            if not os.read(sys.stdin.fileno(), 4096):
                return
            joined.clear()
            notebook.note("publishes")
            tell(router, registered, NEXT_ROUND_OPENED)
        while True:
            try:
                peer, said = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            tag = tag_of(said)
            if tag == REGISTER:
                registered.add(peer)
                router.send_multipart([peer, ADMITTED], zmq.NOBLOCK)
                if len(registered) == world_size and not joined:
                    tell(router, registered, ROUND_OPENED)
            elif tag == JOIN:
                joined.add(peer)
                if len(joined) == world_size:
                    tell(router, joined, GENERATION_STARTED)


def tell(router: zmq.Socket[bytes], peers: set[bytes], message: bytes) -> None:
    for peer in peers:
        router.send_multipart([peer, message], zmq.NOBLOCK)


def be_publisher(port: int, world_size: int, notebook: Notebook) -> None:
    publisher = listen(zmq.XPUB, port)
    publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
    for _ in range(world_size):
        publisher.recv()
    notebook.note("subscribed")
    for _ in sys.stdin:
        notebook.note("publishes")
        publisher.send(ROUND_OPENED)


def main() -> None:
    kind, port, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    serve = be_router if kind == "router" else be_publisher
    serve(port, world_size, Notebook.from_environment())


if __name__ == "__main__":
    main()
