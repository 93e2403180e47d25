"""Peers of the control plane, each with a server and a crowd of clients in one process: TCPStore and gRPC.

Every client connects, sends its name, and is done when it has learned that all are in. That is the meaning of "formed",
in the peer's cheapest way. TCPStore's server is torch's, and its clients send what torch's clients send (which
themselves resolve names as they connect, so they would measure this machine's resolver). gRPC's clients have a channel
(a connection) each and wait in one call.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
import struct
import sys
from typing import Any

from benchmarks.moments import Notebook

WITHIN_S = 120.0
IN_FLIGHT = 1000  # as for ours


# TCPStore's protocol (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): a query's number, then lengths and bytes.
NUMBER = struct.Struct("=q")
ONE = NUMBER.pack(1)
VALIDATE = b"\x00" + struct.pack("=I", 0x3C85F7CE)
SET, ADD, WAIT = b"\x01", b"\x04", b"\x06"


def _text(text: str) -> bytes:
    return NUMBER.pack(len(text)) + text.encode()


def _set(key: str, value: bytes) -> bytes:
    return SET + _text(key) + NUMBER.pack(len(value)) + value


def serve_store(port: int, world_size: int, notebook: Notebook) -> None:
    from torch.distributed import TCPStore

    # An IPv4 socket: with its own IPv6 socket, TCPStore would ask the resolver for each client's name.
    listening = socket.create_server(("127.0.0.1", port), backlog=4096)
    store = TCPStore(
        "127.0.0.1",
        port,
        world_size,
        is_master=True,
        wait_for_workers=False,
        use_libuv=True,
        master_listen_fd=listening.detach(),
    )
    notebook.note("listens")
    sys.stdin.read()
    del store


def join_store(port: int, world_size: int, first: int, count: int, notebook: Notebook) -> None:
    notebook.note("ready")
    sys.stdin.readline()
    notebook.note("begins")
    clients = {}
    registering: set[int] = set()
    epoll, slots, waiting = select.epoll(), iter(range(first, first + count)), count
    while waiting:
        for slot in itertools.islice(slots, IN_FLIGHT - len(registering)):
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(VALIDATE + _set(f"worker/{slot}", b"x" * 200) + ADD + _text("registered") + ONE)
            clients[client.fileno()] = client
            registering.add(client.fileno())
            epoll.register(client, select.EPOLLIN)
        for descriptor, _ in epoll.poll():
            client = clients[descriptor]
            if descriptor not in registering:
                client.recv(1)
                waiting -= 1
                continue
            registering.discard(descriptor)
            (registered,) = NUMBER.unpack(client.recv(NUMBER.size, socket.MSG_WAITALL))
            client.sendall((_set("formed", b"1") if registered == world_size else b"") + WAIT + ONE + _text("formed"))
    notebook.note("formed")
    sys.stdin.read()


async def serve_grpc(port: int, world_size: int, notebook: Notebook) -> None:
    import grpc

    registered = 0
    formed = asyncio.Event()

    async def register(request: bytes, context: Any) -> bytes:
        nonlocal registered
        registered += 1
        if registered == world_size:
            formed.set()
        await formed.wait()
        return request

    handler = grpc.unary_unary_rpc_method_handler(register)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", {"register": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    notebook.note("listens")
    await server.wait_for_termination()


async def join_grpc(port: int, count: int, notebook: Notebook) -> None:
    import grpc

    notebook.note("ready")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    notebook.note("begins")
    options = [("grpc.use_local_subchannel_pool", 1)]  # otherwise all channels would share one connection
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(count)]
    calls = [channel.unary_unary("/peer/register") for channel in channels]
    await asyncio.gather(*(call(b"x" * 200, timeout=WITHIN_S, wait_for_ready=True) for call in calls))
    notebook.note("formed")
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    what, port, world_size, first, count = sys.argv[1], *map(int, sys.argv[2:6])
    notebook = Notebook.from_environment()
    match what:
        case "serve_tcpstore":
            serve_store(port, world_size, notebook)
        case "join_tcpstore":
            join_store(port, world_size, first, count, notebook)
        case "serve_grpc":
            asyncio.run(serve_grpc(port, world_size, notebook))
        case "join_grpc":
            asyncio.run(join_grpc(port, count, notebook))


if __name__ == "__main__":
    main()
