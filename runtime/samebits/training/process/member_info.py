"""What each member of a generation tells all others when they meet, besides the addresses that connections need."""

from __future__ import annotations

from samebits.core.values import Node, Schema, Value
from samebits.service.agent import Agent
from samebits.service.copies.buddy import CopyListener
from samebits.service.process_state import Whereabouts

__all__ = ["MemberInfo", "own_info"]


class MemberInfo(Value, frozen=True, tag=1):
    """Of one process.

    Attributes:
        copies: where its writer takes other ranks' points in, a ``net.copies.Keeper`` as text; empty where it does not.
        life_sign: what its death is seen by.
        node: its name; an earlier release does not tell it.
    """

    copies: str
    life_sign: Whereabouts | None
    node: Node = ""

    def pack(self) -> bytes:
        """For the meeting."""
        return _SCHEMA.pack(self)

    @classmethod
    def unpack(cls, packed: bytes) -> MemberInfo:
        """The reverse of :meth:`pack`."""
        return _SCHEMA.unpack(packed)


_SCHEMA: Schema[MemberInfo] = Schema(MemberInfo)


def own_info(agent: Agent, listener: CopyListener | None) -> bytes:
    """This process's."""
    sign = agent.life_sign
    copies = "" if listener is None else str(listener.keeper)
    return MemberInfo(copies, None if sign is None else sign.whereabouts, agent.node).pack()
