"""ENABLE_RECOVERY=0: the script makes its own process group; here it is told where.

Rank 0 hosts the store and so holds the port already when the others are told it; every rank, rank 0 too, joins it
through ``init_process_group("env://")`` as a client. It is torch's ``TCPStore``, which believes whoever reaches it, so
it listens where the peers are and on no other address.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

from samebits import config
from samebits.config import Settings
from samebits.core.agent_events import Entered
from samebits.core.messages import GenerationStarted
from samebits.errors import UsageError
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards

_BACKLOG = 1024
_hosted: list[dist.TCPStore] = []  # rank 0's store lives as long as its process


def join_plain_group(agent: Agent, settings: Settings) -> GenerationStarted:
    """Wait until all workers are here, and set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
    generation = agent.enter(Entered((), own_parts=False, numerics=()))
    if not isinstance(generation, GenerationStarted):
        raise UsageError("this job's training is finished; with ENABLE_RECOVERY=0 there is nothing to go back to")
    address = _host_store(settings, generation.world_size) if generation.rank == 0 else ""
    agent.publish(generation.generation, address.encode())
    host, _, port = bytes(agent.address_map(generation.generation)[0]).decode().rpartition(":")
    place = (generation.rank, generation.local_rank, generation.world_size, generation.local_world_size)
    config.publish(*place, host, int(port))
    agent.trains(generation.generation)
    return generation


def _host_store(settings: Settings, world_size: int) -> str:
    host = address_towards(settings.sched_host, settings.sched_port)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # by itself it would listen on every address
    )
    _hosted.append(store)
    return f"{host}:{port}"
