"""A target without SameBits: bare sockets that accept everything and do nothing with it.

``python -m tests.hostile.bare_target 3`` prints, as one JSON list, the ports of a ROUTER and of that many others, and
runs until its standard input ends; with a secret on its standard input's first line all use CURVE. A stranger's bytes
and connections cost the machine something wherever they arrive. This is the minimum that a ZeroMQ socket needs for
them; anything beyond it is the cost of our code.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import zmq

from samebits.net.curve import derive_keys
from samebits.net.descriptors import raise_descriptor_limit
from samebits.net.server import MAX_INCOMING_BYTES

_NOW = int(zmq.NOBLOCK)


def _bound(context: zmq.Context[Any], secret: bytes) -> tuple[zmq.Socket[Any], int]:
    """Return a ROUTER with the bounds of the scheduler's, and its port."""
    router = context.socket(zmq.ROUTER)
    for option, value in {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: MAX_INCOMING_BYTES,
        zmq.RCVHWM: 0,
        zmq.BACKLOG: 4096,
    }.items():
        router.setsockopt(option, value)
    if secret:
        router.curve_server = True
        router.curve_secretkey = derive_keys(secret).scheduler.secret
    return router, router.bind_to_random_port("tcp://127.0.0.1")


def _take_in(routers: list[zmq.Socket[Any]]) -> None:
    poller = zmq.Poller()
    for router in routers:
        poller.register(router, zmq.POLLIN)
    while True:
        for router, _ in poller.poll():
            try:
                while True:
                    router.recv(_NOW, copy=False)
            except zmq.Again:
                continue


def main() -> None:
    """Run the command."""
    raise_descriptor_limit()
    secret = sys.stdin.readline().strip().encode()
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65535)
    bound = [_bound(context, secret) for _ in range(1 + int(sys.argv[1]))]
    print(json.dumps([port for _, port in bound]), flush=True)
    threading.Thread(target=_take_in, args=([router for router, _ in bound],), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
