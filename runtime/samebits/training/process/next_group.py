"""The group of the generation to come: begun before this rank knows its place there.

Here lives the guess of that place, and the exchange in which the group waits until the place is known. Never here: what
happens once it is. The one idea: at a fixed world size a rank is its slot, and a node whose id is a number is its slot,
as is its replacement's, so the costly half of forming a group (its thread, its listening socket, what it has to tell
its peers) can be done while a process waits anyway; its part of the address map then travels with its join, and the
whole map comes together with its place.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist

from samebits import config
from samebits.config import Settings
from samebits.core.lines import root_of
from samebits.core.messages import GenerationStarted, Holdings, Place
from samebits.errors import UsageError
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards
from samebits.training.group.group import Group

__all__ = ["NextGroup", "join_plain_group", "likely_place"]


def likely_place(settings: Settings) -> Place | None:
    """The place a process will have in the next generation, where its node id, or its line's first one, says so."""
    first = root_of(settings.node_id or "")
    if not first.isdecimal() or int(first) >= settings.worker_num:
        return None
    return Place(slot=int(first), rank=int(first), world_size=settings.worker_num)


class NextGroup:
    """A group that has begun to connect, and the exchange it waits in.

    Args:
        settings: of this worker.
        device: this process's, on which its model lies whatever place it will have.
        place: the one it will have.
        info: what this process has to say to all members.
    """

    def __init__(self, settings: Settings, device: torch.device, place: Place, info: bytes = b"") -> None:
        self.place = place
        self._agent: Agent | None = None
        self._blob: Future[bytes] = Future()
        self._generation: Future[int] = Future()
        self.group = Group(
            device,
            place.rank,
            place.world_size,
            self,
            name="the next generation",
            address=address_towards(settings.sched_host, settings.sched_port),
            info=info,
            backend=settings.collective_backend,
        )
        for awaited in (self._blob, self._generation):
            self.group.breaker.watch(awaited)
        self._connecting = self.group.begin()

    def blob(self) -> bytes:
        """This rank's part of the address map, as soon as it has one.

        Raises:
            RuntimeError: gloo's, where the group could not even begin.
        """
        if self._blob not in wait([self._blob, self._connecting], return_when=FIRST_COMPLETED).done:
            self._connecting.result()  # it failed before it had anything to say
        return self._blob.result()

    def begins(self, generation: GenerationStarted, agent: Agent) -> Group:
        """The generation is known, and ``agent`` has, or will have, its address map: the group, to be formed."""
        self._agent = agent
        if self.group.breaker.release(self._generation):
            self.group.breaker.name = f"generation {generation.generation}"
            self._generation.set_result(generation.generation)
        return self.group

    def publish(self, blob: bytes) -> None:
        """The group's side of the exchange: what it has to say."""
        if self.group.breaker.release(self._blob):
            self._blob.set_result(blob)

    def wait(self) -> Sequence[bytes]:
        """The group's side of the exchange: what all have said, once there is a generation."""
        generation = self._generation.result()
        assert self._agent is not None, "begins() gives both"
        return self._agent.address_map(generation)


_BACKLOG = 1024
_hosted: list[dist.TCPStore] = []  # rank 0's store lives as long as its process


def join_plain_group(agent: Agent, settings: Settings) -> GenerationStarted:
    """Wait until all workers are here, and set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
    generation = agent.enter(Holdings((), own_parts=False, numerics=()))
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
