"""What each member of a generation sends to all others when they meet, in addition to addresses."""

from __future__ import annotations

from samebits.core.values import NodeId, Schema, Value
from samebits.service.agent import Agent
from samebits.service.copies.buddy import CopyListener
from samebits.service.process_state import Whereabouts


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
