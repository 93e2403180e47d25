"""What a worker's agent knows, as three values: its connection, its seat, and the round that it was offered.

Each is frozen: what an event changes is a new value, made where the event is decided (``agent``). Never here: a
decision. The one idea: flags that are true only together are one state, so that there is no combination of them that
nobody has thought of.
"""

from __future__ import annotations

import enum

import msgspec

from samebits.core.messages import Credential, Place, Refusal, RoundId
from samebits.core.point import Point


class LinkState(enum.Enum):
    """How far the connection to the scheduler is. Whoever is not registered on it is not spoken to."""

    CLOSED = "closed"
    OPEN = "open"
    REGISTERED = "registered"


class Link(msgspec.Struct, frozen=True):
    """The connection to the scheduler, and how long it has been no help.

    Attributes:
        state: how far it is.
        away_since: when a scheduler was last heard that this worker is a member of, or may become one of.
        refused_since: when it was first refused for the present reason; None where it was not, or is only cooling down.
        refusal: why, since then.
    """

    state: LinkState
    away_since: float
    refused_since: float | None = None
    refusal: Refusal = Refusal.ALIVE

    @property
    def is_open(self) -> bool:
        """Whether anything can be sent."""
        return self.state is not LinkState.CLOSED

    @property
    def is_registered(self) -> bool:
        """Whether the scheduler has admitted this worker on this connection."""
        return self.state is LinkState.REGISTERED


class HeldSeat(msgspec.Struct, frozen=True):
    """The seat as the scheduler has said it last.

    Attributes:
        sender: what every message of its holder begins with.
        slot: None: a spare's.
        full_place: in a world of full size, as admitted; None: a spare's.
    """

    sender: Credential
    slot: int | None
    full_place: Place | None


class Offer(msgspec.Struct, frozen=True):
    """The newest round that the scheduler has offered.

    Attributes:
        round: its id.
        must_look: it wants to know what the disk holds.
        is_gentle: it lets the generation go on to its next commit.
        committed: the point that everybody has, as it was told.
        text: why it is open, and whom it waits for.
        back_to: what is newer is not to be relied on.
    """

    round: RoundId
    must_look: bool
    is_gentle: bool
    committed: Point | None
    text: str
    back_to: Point | None = None


class Request(msgspec.Struct, frozen=True):
    """What the process was asked last to enter again for, and whether it has."""

    round: RoundId
    place: Place | None
    look: bool
    back_to: Point | None = None
    is_answered: bool = False


class Stage(enum.Enum):
    """Of an agent: told to end, it still holds its seat until its process has really left; over, it says nothing."""

    GOES_ON = "goes on"
    TOLD_TO_END = "told to end"
    OVER = "over"
