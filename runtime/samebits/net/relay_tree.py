"""Choose each relay's place in the tree of relays: at the scheduler, or below another relay.

Pure: no I/O and no clock. The scheduler enters each relay where it attaches. A relay states its address, and the
addresses that it could not reach. If too many relays are attached to the scheduler, one of them is told to attach to
another, the nearest to the scheduler that has room. It keeps its connection until it is attached there, so an
unreachable relay costs nothing but the attempt.

A relay is never sent below itself: the path from its new parent to the scheduler contains neither the relay nor any
relay that has been told to move and has not arrived yet. The last order of a cycle would contradict this. Orders are
part of a connection, so a new scheduler starts without any.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from samebits.core.values import MAX_HOST_CHARS, Count, Meta, Value, line

FAN_OUT = 64
"""The most relays at the scheduler, or below a relay, before others are sent elsewhere.

Three levels of 64 suffice for 266,304 hosts, and the death of one relay makes at most 64 others attach again.
"""
MAX_DEPTH = 8
"""The most relays between a rank and the scheduler. Each adds some 150 bytes to a frame, which has 4 KiB for that."""
MAX_FUTILE = 4
"""How many relays for which no place is found are considered at a time."""
MAX_AVOIDED = 3
"""A relay that could not reach so many others stays at the scheduler."""
_MAX_ADDRESS_CHARS = MAX_HOST_CHARS + len("[]:65535")

_Address = Annotated[str, line(_MAX_ADDRESS_CHARS)]


class RelayNote(Value, frozen=True):
    """What a relay states about itself.

    ``at`` is the address to which other relays may attach, or "" if there is none. ``relays`` is how many have done so,
    and ``avoids`` are addresses that this relay could not reach.
    """

    at: _Address = ""
    relays: Count = 0
    avoids: Annotated[tuple[_Address, ...], Meta(max_length=MAX_AVOIDED)] = ()


@dataclass(slots=True, eq=False)
class RelayPlace:
    """One attachment of a relay. A relay that moves has two for a moment.

    Attributes:
        name: the relay's session.
        parent: the relay to which it is attached; None for the scheduler.
        depth: the number of relays from here to the scheduler, this one included.
        note: its last note; None if it has sent none, for example because it is older.
        below: the relays that are attached to it.
        expected: the places from which relays were told to come here, by name.
        goes_to: the place to which it was told to move.
        is_doubted: whether a relay has left it, and it has sent nothing since. It may be suspended.
    """

    name: str
    parent: RelayPlace | None
    depth: int
    note: RelayNote | None = None
    below: dict[RelayPlace, None] = field(default_factory=dict)
    expected: dict[str, RelayPlace] = field(default_factory=dict)
    goes_to: RelayPlace | None = None
    is_doubted: bool = False

    @property
    def has_room(self) -> bool:
        """Return whether another relay may be sent here. Those that it has reported count before they are known."""
        below = max(len(self.below), 0 if self.note is None else self.note.relays)
        return below + len(self.expected) < FAN_OUT

    @property
    def has_relays(self) -> bool:
        """Return whether relays are attached to it, or will be, perhaps unknown to this scheduler yet."""
        return bool(self.below or self.expected) or (self.note is not None and self.note.relays > 0)

    def path(self) -> Iterator[RelayPlace]:
        """Yield this place, and the others between it and the scheduler."""
        place: RelayPlace | None = self
        while place is not None:
            yield place
            place = place.parent

    def height(self) -> int:
        """Return the number of levels below, this one included."""
        return 1 + max((one.height() for one in self.below), default=int(self.has_relays))


class RelayMove(NamedTuple):
    """An order to the relay at ``place``, to attach to the relay at ``address``."""

    place: RelayPlace
    address: str


class RelayTree:
    """The places of all relays."""

    def __init__(self) -> None:
        self.direct: dict[RelayPlace, None] = {}
        """The relays at the scheduler."""
        self._movable: OrderedDict[RelayPlace, None] = OrderedDict()
        """Those among them that may be told to move, the next one last."""
        self._is_changed = False
        self._open: list[dict[RelayPlace, None]] = [{} for _ in range(MAX_DEPTH)]
        """By depth, the places to which relays can be sent, the next one first."""
        self._leaving = 0  # orders to places in ``direct``

    def attach(self, name: str, parent: RelayPlace | None) -> RelayPlace:
        """Enter a relay that has attached to the scheduler, or to another relay."""
        place = RelayPlace(name, parent, 1 if parent is None else parent.depth + 1)
        if parent is None:
            self.direct[place] = None
        else:
            parent.below[place] = None
            parent.expected.pop(name, None)  # its earlier place keeps the order until it is left
            self._list(parent)
        return place

    def detach(self, place: RelayPlace) -> None:
        """Remove a place whose relay is gone, or has moved."""
        (self.direct if place.parent is None else place.parent.below).pop(place, None)
        self._withdraw(place)
        for one in [*place.expected.values()]:
            self._withdraw(one)
        self._list(place)
        if place.parent is not None:
            self._list(place.parent)

    def note(self, place: RelayPlace, note: RelayNote) -> None:
        """Take a relay's note. If it could not reach where it was told to go, its order is withdrawn."""
        place.note = note
        target = place.goes_to
        if target is not None and target.note is not None and target.note.at in note.avoids:
            self._withdraw(place)
        self._list(place)

    def moves(self) -> Iterator[RelayMove]:
        """Yield orders until the scheduler has no more relays than it should, or none can be moved."""
        if not self._is_changed:
            return
        self._is_changed, futile = False, 0
        while len(self.direct) - self._leaving > FAN_OUT and self._movable and futile < MAX_FUTILE:
            # A relay with others below makes these attach again, too.
            moves = next((one for one in reversed(self._movable) if not one.has_relays), next(reversed(self._movable)))
            target = choose(self._open, moves)
            if target is None or target.note is None:
                self._movable.move_to_end(moves, last=False)
                futile += 1
                continue
            moves.goes_to, target.expected[moves.name] = target, moves
            self._leaving += 1
            self._list(moves)
            self._list(target)
            yield RelayMove(moves, target.note.at)

    def _withdraw(self, place: RelayPlace) -> None:
        """Withdraw the order of a place."""
        target, place.goes_to = place.goes_to, None
        if target is not None:
            self._leaving -= 1
            if target.expected.get(place.name) is place:
                del target.expected[place.name]
            self._list(target)
            self._list(place)

    def _list(self, place: RelayPlace) -> None:
        """Put a place last among those of its depth to which relays can be sent, if it is one of them."""
        level = self._open[place.depth - 1]
        level.pop(place, None)
        self._movable.pop(place, None)
        self._is_changed = True
        is_direct = place.parent is None
        is_here = place in (self.direct if place.parent is None else place.parent.below)
        if not is_here or place.note is None or place.goes_to is not None:
            return
        if place.note.at and place.has_room:
            level[place] = None
        if is_direct and len(place.note.avoids) < MAX_AVOIDED:
            self._movable[place] = None


def choose(levels: Sequence[Iterable[RelayPlace]], moves: RelayPlace) -> RelayPlace | None:
    """Return the place to which the relay at ``moves`` should be sent, or None if there is none.

    Args:
        levels: for each depth, from the scheduler on, the places with room in order of preference.
        moves: the relay's present place.
    """
    doubted = None
    for level in levels[: MAX_DEPTH - moves.height()]:
        for one in level:
            if _may_go(moves, one):
                if not one.is_doubted:
                    return one
                doubted = doubted or one
    return doubted


def _may_go(moves: RelayPlace, target: RelayPlace) -> bool:
    """Return whether a relay can be sent to the target without a cycle, and may reach it."""
    assert moves.note is not None, "only relays that have sent a note are moved"
    assert target.note is not None, "a relay without a note has no address"
    return (
        target.note.at not in moves.note.avoids
        and _is_loopback(target.note.at) == _is_loopback(moves.note.at)
        and all(one.goes_to is None and one.name != moves.name for one in target.path())
    )


def _is_loopback(address: str) -> bool:
    """Return whether only processes on the same host can reach this address."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
