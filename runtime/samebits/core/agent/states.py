"""The agent's knowledge as three frozen values: its connection, its seat and the round offered to it.

Facts that are only true together are stored in one value, so flags cannot contradict each other. ``agent_core``
replaces a value when it handles an event that changes it.
"""

from __future__ import annotations

import enum

import msgspec

from samebits.core.messages import Credential, RankPosition, Refusal, RoundId
from samebits.core.point import Point


class LinkState(enum.Enum):
    """State of the connection to the scheduler. Messages are sent only in the registered state."""

    CLOSED = "closed"
    OPEN = "open"
    REGISTERED = "registered"


class Link(msgspec.Struct, frozen=True):
    """The connection to the scheduler, and how long it has been of no use.

    Attributes:
        state: the connection's state.
        away_since: when the worker last heard from a scheduler whose job it belongs to, or may join.
        refused_since: when the present refusal began. None: not refused, or only for a cool-down.
        refusal: its reason.
    """

    state: LinkState
    away_since: float
    refused_since: float | None = None
    refusal: Refusal = Refusal.ALIVE

    @property
    def is_open(self) -> bool:
        """Return whether anything can be sent."""
        return self.state is not LinkState.CLOSED

    @property
    def is_registered(self) -> bool:
        """Return whether the scheduler has admitted this worker on this connection."""
        return self.state is LinkState.REGISTERED


class HeldSeat(msgspec.Struct, frozen=True):
    """The seat that this worker holds, as last announced by the scheduler.

    Attributes:
        sender: first field of all the holder's messages.
        slot: None for a spare.
        full_place: place in a world of full size, as admitted; None for a spare.
    """

    sender: Credential
    slot: int | None
    full_place: RankPosition | None


class RoundOffer(msgspec.Struct, frozen=True):
    """The newest round that the scheduler has offered to this worker.

    Attributes:
        round: its id.
        must_look: the round requires the content of the disk.
        is_gentle: the generation may continue to its next commit.
        committed: the last announced point that all members hold.
        text: why the round is open, and which nodes are missing.
        back_to: the point to return to, because newer ones are unreliable; None: the newest.
    """

    round: RoundId
    must_look: bool
    is_gentle: bool
    committed: Point | None
    text: str
    back_to: Point | None = None


class ReentryRequest(msgspec.Struct, frozen=True):
    """The last request to join a round again, and whether the process has done so."""

    round: RoundId
    place: RankPosition | None
    look: bool
    back_to: Point | None = None
    is_answered: bool = False


class AgentStage(enum.Enum):
    """Stage of an agent. TOLD_TO_END: holds its seat until the process exits. OVER: sends nothing more."""

    ACTIVE = "active"
    TOLD_TO_END = "told to end"
    OVER = "over"
