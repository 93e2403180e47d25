"""Start forming the next generation's group before this rank knows its place in it.

In a world of fixed size, a rank equals its slot, and a node with a numeric ID, or its replacement, has that slot. The
slow half of forming a group (its thread, its listening socket, its address) is therefore done while the process waits
anyway. The rank's address then travels with its join message, and the complete address map arrives together with the
rank's place.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta

import torch
import torch.distributed as dist

from samebits import config
from samebits.config import Settings
from samebits.core.messages import GenerationStarted, Holdings, RankPosition
from samebits.core.replacement_names import root_of
from samebits.core.values import NodeId, Schema, Value
from samebits.errors import UsageError
from samebits.service.agent import Agent
from samebits.service.copies.buddy import CopyListener
from samebits.service.process_state import Whereabouts
from samebits.service.scheduler_address import address_towards
from samebits.training.group import device as devices
from samebits.training.group.group import Group


def likely_place(settings: Settings) -> RankPosition | None:
    """Return this process's place in the next generation if its node ID determines it, otherwise None."""
    first = root_of(settings.node_id or "")
    if not first.isdecimal() or int(first) >= settings.worker_num:
        return None
    return RankPosition(slot=int(first), rank=int(first), world_size=settings.worker_num)


class NextGroup:
    """A group that has started to connect, and the exchange in which it waits.

    Args:
        settings: this worker's settings.
        device: this process's device, which does not depend on the place.
        place: the expected place.
        info: the information that this process sends to all members.
        ahead: see :class:`Group`.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        place: RankPosition,
        info: bytes = b"",
        ahead: Sequence[tuple[int, ...]] = (),
    ) -> None:
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
            ahead=ahead,
        )
        for awaited in (self._blob, self._generation):
            self.group.breaker.watch(awaited)
        self._connecting = self.group.begin()

    def blob(self) -> bytes:
        """Wait for and return this rank's part of the address map.

        Raises:
            RuntimeError: from gloo, if the group could not begin.
        """
        if self._blob not in wait([self._blob, self._connecting], return_when=FIRST_COMPLETED).done:
            self._connecting.result()  # it failed before it had a blob
        return self._blob.result()

    def begins(self, generation: GenerationStarted, agent: Agent) -> Group:
        """Assign the group to a generation, and return the group to be formed.

        ``agent`` has the generation's address map, or will receive it.
        """
        self._agent = agent
        if self.group.breaker.release(self._generation):
            self.group.breaker.name = f"generation {generation.generation}"
            self._generation.set_result(generation.generation)
        return self.group

    def publish(self, blob: bytes) -> None:
        """Receive this rank's blob from the group."""
        if self.group.breaker.release(self._blob):
            self._blob.set_result(blob)

    def wait(self) -> Sequence[bytes]:
        """Wait until the generation is known, and return all ranks' blobs."""
        generation = self._generation.result()
        assert self._agent is not None, "begins() gives both"
        return self._agent.address_map(generation)


class NextGroups:
    """The groups that were started during one wait for a generation, one for each place that was offered.

    A place may be offered, replaced by a different one, and offered again. The other ranks may then have the address
    that was sent when the place was first offered, so the group with this address is kept until the generation begins.

    Args:
        begin: begins the group for a place.

    Attributes:
        present: the group for the place that was offered last; None if there is none.
    """

    def __init__(self, begin: Callable[[RankPosition], NextGroup]) -> None:
        self.present: NextGroup | None = None
        self._begin = begin
        self._begun: dict[RankPosition, NextGroup] = {}

    def offer(self, place: RankPosition) -> None:
        """Start the group for this place, unless it was already started."""
        if place not in self._begun:
            self._begun[place] = self._begin(place)
        self.present = self._begun[place]

    def take(self) -> NextGroup:
        """Return the group for the place that was offered last, and drop the others."""
        taken = self.present
        assert taken is not None, "a generation's member has a place"
        del self._begun[taken.place]
        self.drop()
        return taken

    def drop(self) -> None:
        """Drop all groups."""
        for one in self._begun.values():
            one.group.drop()
        self._begun.clear()
        self.present = None


_BACKLOG = 1024
_hosted: list[dist.TCPStore] = []  # keeps rank 0's store alive as long as its process


def join_plain_group(agent: Agent, settings: Settings, device: torch.device) -> GenerationStarted:
    """Wait for all workers, and set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."""
    generation = agent.enter(Holdings((), own_parts=False, numerics=()))
    if not isinstance(generation, GenerationStarted):
        raise UsageError("this job's training has finished; with ENABLE_RECOVERY=0 there is nothing to resume")
    address = _host_store(settings, generation.world_size) if generation.rank == 0 else ""
    agent.publish(generation.generation, address.encode())
    host, _, port = bytes(agent.address_map(generation.generation)[0]).decode().rpartition(":")
    local_rank = devices.local_rank(device, generation.local_rank)
    place = (generation.rank, local_rank, generation.world_size, generation.local_world_size)
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
        master_listen_fd=listener.detach(),  # by default it would listen on every address
    )
    _hosted.append(store)
    return f"{host}:{port}"


# ---- what each member sends to all others when they meet, in addition to its address


class MemberInfo(Value, frozen=True, tag=1):
    """What one process sends to the other members.

    Attributes:
        copies: where its writer receives other ranks' points, a ``net.copies.BuddyAddress`` as text; empty if it
            receives none.
        life_sign: how to detect the process's death.
        node: the node's name; earlier releases do not send it.
    """

    copies: str
    life_sign: Whereabouts | None
    node: NodeId = ""

    def pack(self) -> bytes:
        """Encode the information for the members' meeting."""
        return _SCHEMA.pack(self)

    @classmethod
    def unpack(cls, packed: bytes) -> MemberInfo:
        """Decode the result of :meth:`pack`."""
        return _SCHEMA.unpack(packed)


_SCHEMA: Schema[MemberInfo] = Schema(MemberInfo)


def own_info(agent: Agent, listener: CopyListener | None) -> bytes:
    """Return this process's information, encoded."""
    sign = agent.life_sign
    copies = "" if listener is None else str(listener.keeper)
    return MemberInfo(copies, None if sign is None else sign.whereabouts, agent.node).pack()
