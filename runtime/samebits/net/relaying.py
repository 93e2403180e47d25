"""Exchange frames between a relay and the scheduler, and track the ranks behind relays.

A relay connects under a name that begins with ``relay-`` and packs its ranks' messages into :class:`Upward` frames. The
scheduler answers with :class:`Downward` frames, in which a message to many ranks appears once. Relays only transport
messages: the ranks seal them (``net.channel``), each rank keeps its session and lease, and nothing about relays reaches
the core.

A relay may also connect to another relay, an inner one, which treats it like a rank: its frames are the messages that
the inner relay passes on, sealed with a key that only relays and the scheduler have. So an inner relay is an ordinary
relay, and only the scheduler unpacks frames inside frames, up to ``MAX_DEPTH`` levels deep. It tells relays where to
attach (``net.relay_tree``).

A relay may report that a rank's connection to it has closed, which counts as a closed connection of that rank. If the
relay's own connection closes, that says nothing about its ranks: no close is reported, and each rank's lease decides
unless the rank attaches elsewhere in time. The same holds for a relay whose connection to an inner relay closes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

from samebits.core.values import MAX_ID_CHARS, Meta, Schema, Value, line
from samebits.errors import ProtocolError
from samebits.net.channel import (
    ABOUT,
    HELLO,
    MAC_BYTES,
    MOVE,
    NONCE_BYTES,
    ForgedError,
    SchedulerEnd,
    digest_of,
    relays_key,
)
from samebits.net.relay_tree import MAX_DEPTH, RelayNote, RelayPlace, RelayTree
from samebits.scheduler_hosts import NotHostsError, SchedulerAddress, listed

RELAY_PREFIX = b"relay-"
MAX_FRAME_BYTES = 1 << 20
MAX_NESTED_BYTES = MAX_FRAME_BYTES - (1 << 12)
"""The most bytes that a relay accepts from a rank or from another relay, so that they fit into its frame."""
MAX_RELAYED_BYTES = MAX_NESTED_BYTES - (1 << 12)
"""The most bytes of a rank's message through a relay, whose frame must fit into that of an inner relay."""
MAX_BATCH = 1024
"""Most messages in a frame."""
MESSAGES_A_TURN = 16
"""Most messages in one of a peer's turns."""
MAX_RANKS = 1024
"""The most ranks, or relays, that are attached to one relay."""
DOWN_BYTES = 1 << 20
"""From this size on, messages queued for a relay are sent without waiting for more."""

_RELAY = RELAY_PREFIX.decode()
_SESSION = re.compile(r"[0-9A-Za-z._-]{1,64}")
_HELLO_BYTES = 1 + NONCE_BYTES + MAC_BYTES
_Session = Annotated[str, line(MAX_ID_CHARS, least=1)]
_Stamp = Annotated[bytes, Meta(max_length=MAX_ID_CHARS)]


class Upward(Value, frozen=True):
    """Messages from the ranks behind a relay, in order of arrival, and closed connections.

    ``closed`` are the ranks whose connection to the relay closed after these messages.
    """

    messages: Annotated[tuple[tuple[_Session, bytes], ...], Meta(max_length=MAX_BATCH)] = ()
    closed: Annotated[tuple[_Session, ...], Meta(max_length=MAX_BATCH)] = ()


class RelayedMessage(Value, frozen=True):
    """A message to these ranks, with a stamp for each; a message without stamps is a welcome."""

    sessions: tuple[_Session, ...]
    stamps: tuple[_Stamp, ...]
    body: bytes


class Downward(Value, frozen=True):
    """Messages to the ranks behind a relay, and ranks that must reattach.

    ``detached`` are ranks that sent messages without being attached there.
    """

    deliveries: tuple[RelayedMessage, ...] = ()
    detached: tuple[_Session, ...] = ()


UPWARD: Schema[Upward] = Schema(Upward)
NOTE: Schema[RelayNote] = Schema(RelayNote)
DOWNWARD: Schema[Downward] = Schema(Downward)


class RelayWire:
    """The wire format of a relay's connection to the scheduler."""

    def pack(self, value: object) -> bytes:
        """Encode an :class:`Upward` frame."""
        return UPWARD.pack(value)

    def unpack(self, packed: bytes, max_bytes: int) -> Downward:
        """Decode a frame from the scheduler.

        Raises:
            samebits.errors.ProtocolError: the frame is longer than ``max_bytes`` or malformed.
        """
        return DOWNWARD.unpack(packed, max_bytes)


class Carried(NamedTuple):
    """An authentic message from a rank, and the attachment through which it arrived."""

    session: str
    body: bytes
    attachment: Attachment


@dataclass(frozen=True, slots=True)
class Dropped:
    """A refused part of a frame, with the reason."""

    problem: str


@dataclass(frozen=True, slots=True)
class Detached:
    """A rank whose connection to its relay was closed."""

    session: str


@dataclass(slots=True)
class Attachment:
    """A rank behind a relay, and the last heartbeat that it sent; or a relay behind an inner one."""

    relay: _Relay
    end: SchedulerEnd
    below: _Relay | None = None  # the attached relay itself; None for a rank
    said: bytes | None = None
    arrived: Any = None


@dataclass(slots=True, eq=False)
class _Relay:
    """One relay: its ranks, and the messages queued for them."""

    name: bytes
    descriptor: int  # of its connection, or of that of the inner relay
    place: RelayPlace
    inner: _Relay | None = None
    attached: set[str] = field(default_factory=set)
    greeted: dict[str, SchedulerEnd] = field(default_factory=dict)
    """Ranks that were welcomed and have sent nothing since; any other attachment stays valid until they do."""
    sessions: list[str] = field(default_factory=list)
    stamps: list[bytes] = field(default_factory=list)
    packed: object = None  # identifies the message to those ranks
    body: bytes = b""
    messages: int = 0  # in the last frame of its connection
    deliveries: list[RelayedMessage] = field(default_factory=list)
    waiting_bytes: int = 0
    strangers: dict[str, None] = field(default_factory=dict)  # ranks that sent messages without being attached here


class RelayedRanks:
    """The ranks behind all relays.

    Args:
        session_key: the session key of the cluster's keys; empty without a secret.
        most: how many ranks may be attached.
        send: sends a frame to a relay, or drops it.

    Attributes:
        relays: the relays by the descriptor of their connection.
    """

    def __init__(self, session_key: bytes, most: int, send: Callable[[bytes, bytes], object]) -> None:
        self._session_key, self._most, self._send = session_key, most, send
        self._relays_key = relays_key(session_key)
        self.relays: dict[int, _Relay] = {}
        self._attachments: dict[str, Attachment] = {}
        self._unsent: dict[_Relay, None] = {}
        self._tree = RelayTree()
        self._relay_at: dict[RelayPlace, _Relay] = {}
        self._digest: tuple[object, bytes] = (None, b"")

    def __contains__(self, session: str) -> bool:
        """Return whether the rank is attached to a relay."""
        return session in self._attachments

    def descriptor_of(self, session: str) -> int | None:
        """Return the descriptor of the connection through which an attached rank sends, or None."""
        attachment = self._attachments.get(session)
        return None if attachment is None else attachment.relay.descriptor

    def turns(self, descriptor: int) -> int:
        """Return how many turns of a peer the last frame of a relay has used.

        A relay may use the turns of all its ranks, up to a limit, because a hostile one can claim many.
        """
        relay = self.relays[descriptor]
        ranks = min(len(relay.attached) + len(relay.greeted), MESSAGES_A_TURN)
        return max(1, relay.messages // max(1, ranks))

    def take(self, name: bytes, descriptor: int, packed: bytes) -> Iterator[Carried | Dropped | Detached]:
        """Yield what a relay's frame contains.

        Raises:
            samebits.errors.ProtocolError: the frame is malformed.
        """
        frame = UPWARD.unpack(packed, MAX_FRAME_BYTES)
        relay = self.relays.get(descriptor)
        if relay is None:
            relay = self.relays[descriptor] = self._entered(name.decode(), descriptor, None)
        relay.messages = 0
        yield from self._take(relay, frame, relay)

    def _take(self, relay: _Relay, frame: Upward, connected: _Relay) -> Iterator[Carried | Dropped | Detached]:
        """Yield what a frame contains that came over the connection of the relay ``connected``."""
        connected.messages += len(frame.messages)
        relay.place.is_doubted = False
        for session, sealed in frame.messages:
            if sealed[:1] == ABOUT and session == relay.place.name:
                if problem := self._take_note(relay, sealed[1:]):
                    yield Dropped(problem)
                continue
            if sealed[:1] == HELLO:
                if problem := self._greet(relay, session, sealed):
                    yield Dropped(problem)
                continue
            try:
                carried = self._open(relay, session, sealed)
            except ForgedError as error:
                yield Dropped(f"dropped a message of session {session[:8]} that came through a relay: it is {error}")
                continue
            if carried is None:
                self._ask_to_attach(relay, session)
            elif (below := carried.attachment.below) is None:
                yield carried
            else:
                try:
                    inside = UPWARD.unpack(carried.body, MAX_FRAME_BYTES)
                except ProtocolError as error:
                    yield Dropped(f"a relay's frame is {error}")
                else:
                    yield from self._take(below, inside, connected)
        for session in frame.closed:
            relay.greeted.pop(session, None)
            if session in relay.attached:
                is_rank = self._attachments[session].below is None
                self.leave(session)
                if is_rank:
                    yield Detached(session)

    def _entered(self, name: str, descriptor: int, inner: _Relay | None) -> _Relay:
        place = self._tree.attach(name, None if inner is None else inner.place)
        relay = self._relay_at[place] = _Relay(name.encode(), descriptor, place, inner)
        return relay

    def _take_note(self, relay: _Relay, packed: bytes) -> str:
        """Enter what a relay states about itself; return a problem or ""."""
        try:
            note = NOTE.unpack(packed, MAX_FRAME_BYTES)
            if note.at and address_in(note.at) is None:
                return f"dropped a relay's note: {note.at!r} is not the address of a relay"
        except ProtocolError as error:
            return f"dropped a relay's note: it is {error}"
        self._tree.note(relay.place, note)
        return ""

    def _tell_moves(self) -> None:
        for place, address in self._tree.moves():
            relay = self._relay_at[place]
            self._close_delivery(relay)
            relay.deliveries.append(RelayedMessage((place.name,), (), MOVE + address.encode()))
            self._unsent[relay] = None

    def _greet(self, relay: _Relay, session: str, hello: bytes) -> str:
        """Welcome a rank; return "", or the reason why it is not welcomed."""
        is_relay = session.startswith(_RELAY)
        is_too_deep = is_relay and relay.place.depth >= MAX_DEPTH
        if len(hello) != _HELLO_BYTES or not _SESSION.fullmatch(session) or is_too_deep:
            return "dropped a hello from a relay that no rank can have sent"
        if is_relay and any(one.name == session for one in relay.place.path()):
            return f"relay session {session[: len(_RELAY) + 8]} tried to attach below itself"
        is_new = session not in relay.greeted and session not in relay.attached
        if is_new and len(relay.greeted) + len(relay.attached) >= MAX_RANKS:
            return f"a relay brings more than {MAX_RANKS} ranks; the others have to connect to the scheduler"
        if is_new and len(self._attachments) >= self._most:
            return f"relays bring more than {self._most} ranks; the others have to connect to the scheduler"
        try:
            end = relay.greeted.get(session)
            if end is None or end.hello != hello:  # the welcome of a repeated hello must not replace the first one's
                key = self._relays_key if is_relay else self._session_key
                end = relay.greeted[session] = SchedulerEnd(key, session, hello)
        except ForgedError as error:
            return f"dropped the hello of rank session {session[:8]} that came through a relay: it is {error}"
        self._close_delivery(relay)
        relay.deliveries.append(RelayedMessage((session,), (), end.welcome))
        self._unsent[relay] = None
        return ""

    def _open(self, relay: _Relay, session: str, sealed: bytes) -> Carried | None:
        """Return the rank's message, or None if the rank is not attached to this relay.

        Raises:
            ForgedError: the message is not authentic.
        """
        present = self._attachments.get(session)
        if present is not None and present.relay is not relay:
            present = None
        greeted = relay.greeted.get(session)
        if greeted is not None:
            try:
                body = greeted.unseal(sealed)
            except ForgedError:
                if present is None:
                    raise
            else:  # the rank's first message: from now on, only this attachment is valid
                self.leave(session)
                del relay.greeted[session]
                relay.attached.add(session)
                below = self._entered(session, relay.descriptor, relay) if session.startswith(_RELAY) else None
                present = self._attachments[session] = Attachment(relay, greeted, below)
                return Carried(session, body, present)
        return None if present is None else Carried(session, present.end.unseal(sealed), present)

    def _ask_to_attach(self, relay: _Relay, session: str) -> None:
        if len(relay.strangers) < MAX_BATCH:
            relay.strangers[session] = None
            self._unsent[relay] = None

    def leave(self, session: str, *, is_back: bool = False) -> None:
        """Forget the attachment of the rank or relay, if it has one.

        Args:
            session: its session.
            is_back: whether it has connected to the scheduler, so that the relay to which it was attached may be gone.
        """
        attachment = self._attachments.pop(session, None)
        if attachment is not None:
            attachment.relay.attached.discard(session)
            if attachment.below is not None:
                attachment.relay.place.is_doubted |= is_back
                self._forget(attachment.below)

    def drop(self, descriptor: int, unless: bytes = b"") -> None:
        """Forget a relay whose connection has closed, and all ranks behind it, unless it has the name ``unless``."""
        relay = self.relays.get(descriptor)
        if relay is not None and relay.name != unless:
            del self.relays[descriptor]
            self._forget(relay)

    def _forget(self, relay: _Relay) -> None:
        self._unsent.pop(relay, None)
        del self._relay_at[relay.place]
        self._tree.detach(relay.place)
        for session in [*relay.attached]:
            self.leave(session)

    def add(self, session: str, message: object, packed: bytes) -> None:
        """Queue a message to an attached rank until :meth:`flush`.

        Args:
            session: the rank's session.
            message: identifies the message; the same object in consecutive calls means one message to many ranks.
            packed: the message's bytes.
        """
        attachment = self._attachments[session]
        relay = attachment.relay
        if self._digest[0] is not message:
            self._digest = (message, digest_of(packed))
        if relay.packed is not message:
            self._close_delivery(relay)
            relay.packed, relay.body = message, packed
            relay.waiting_bytes += len(packed)
        relay.sessions.append(session)
        relay.stamps.append(attachment.end.stamp(self._digest[1]))
        self._unsent[relay] = None
        if relay.waiting_bytes >= DOWN_BYTES:
            self._flush(relay)

    @staticmethod
    def _close_delivery(relay: _Relay) -> None:
        if relay.sessions:
            relay.deliveries.append(RelayedMessage(tuple(relay.sessions), tuple(relay.stamps), relay.body))
        relay.sessions, relay.stamps, relay.packed, relay.body = [], [], None, b""

    def flush(self) -> None:
        """Send the queued messages, in one frame to each relay; those behind an inner relay share its frame."""
        self._tell_moves()
        for depth in range(max((one.place.depth for one in self._unsent), default=0), 0, -1):
            for relay in [one for one in self._unsent if one.place.depth == depth]:
                self._flush(relay)

    def _flush(self, relay: _Relay) -> None:
        self._close_delivery(relay)
        frame = Downward(tuple(relay.deliveries), tuple(relay.strangers))
        relay.deliveries, relay.strangers, relay.waiting_bytes = [], {}, 0
        self._unsent.pop(relay, None)
        packed = DOWNWARD.pack(frame)
        if relay.inner is None:
            self._send(relay.name, packed)
        else:
            self.add(relay.name.decode(), packed, packed)


def address_in(text: str) -> SchedulerAddress | None:
    """Return the address ``host:port`` in a relay's note or in an order to it, or None if it is malformed."""
    try:
        ((host, port),) = listed(text)
    except (NotHostsError, ValueError):
        return None
    return None if port is None else SchedulerAddress(host, port)
