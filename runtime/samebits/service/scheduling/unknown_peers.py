"""Limit and report what peers without a seat do, such as port scans, wrong secrets and floods.

Offences are counted in a table of fixed size and reported at most once per kind in ``LINE_INTERVAL_S`` seconds, so
neither memory nor the log grows with them. The module also checks fields that the schema does not limit.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from samebits.core.messages import Register
from samebits.core.ready import Note, Severity
from samebits.core.values import unprintable
from samebits.net.server import Rejection

LINE_INTERVAL_S = 30.0
LOOK_S = 0.05  # ten thousand heartbeats wake the scheduler a thousand times a second
GATHER_S = 0.5  # refused peers retry at once, so the first line waits this long to count them and their addresses
MAX_ADDRESSES = 64
"""Addresses counted separately per line. Memory is at most len(Offence) × this many short texts."""
NAMED_ADDRESSES = 3
UNSAID = 64
"""The normal number of connections that send nothing, such as port checks, in ``LINE_INTERVAL_S``."""
REFUSALS_SAID = 64
"""Refused registrations logged individually in ``LINE_INTERVAL_S``: enough for a host's waiting workers."""

MAX_PID = 1 << 22  # Linux's own limit (proc(5), pid_max)


class Offence(enum.Enum):
    """An offence of an unknown peer. The value is its description after "refused N"."""

    SECRET = "connections with another secret"
    MECHANISM = "connections with a secret on one side only"
    HANDSHAKE = "connections that ended in the handshake (not a samebits process, or no secret, or cut off)"
    SILENT = "connections that closed without a message, or sent one that is too long"
    TOO_MANY = "connections beyond the limit"
    ENDLESS = "connections with an endless message"
    FLOOD = "connections that sent more than can be read (a flood)"
    GARBLED = "messages"
    REGISTRATION = "more registrations"


_FIXES = {
    Offence.SECRET: "; compare CLUSTER_SECRET or CLUSTER_SECRET_FILE there and here",
    Offence.MECHANISM: "; compare CLUSTER_SECRET or CLUSTER_SECRET_FILE there and here",
}
_OFFENCE_OF = {
    Rejection.SECRET: Offence.SECRET,
    Rejection.MECHANISM: Offence.MECHANISM,
    Rejection.HANDSHAKE: Offence.HANDSHAKE,
    Rejection.SILENT: Offence.SILENT,
    Rejection.ENDLESS: Offence.ENDLESS,
    Rejection.FLOOD: Offence.FLOOD,
    Rejection.TOO_MANY: Offence.TOO_MANY,
}


@dataclass(slots=True)
class _Tally:
    """The offences of one kind since the last log line about it."""

    count: int = 0
    by_address: Counter[str] = field(default_factory=Counter)
    example: str = ""
    since: float | None = None  # when it was first checked
    quiet_until: float = float("-inf")


class UnknownPeers:
    """Counts the offences of unknown peers and writes the log lines about them.

    Attributes:
        totals: offences by kind since the start.
    """

    def __init__(self) -> None:
        self.totals: Counter[Offence] = Counter()
        self._tallies = {offence: _Tally() for offence in Offence}
        self._is_counting = False  # whether a counted offence may have to be logged
        self._look_at = float("-inf")
        self._refusals_said = 0
        self._refusals_from = float("-inf")

    def rejected(self, address: str, why: Rejection) -> None:
        """Count a connection that was rejected before it became a peer."""
        self._count(_OFFENCE_OF[why], address)

    def garbled(self, address: str, problem: str) -> None:
        """Count data that is not a worker's message."""
        self._count(Offence.GARBLED, address, problem)

    def refused(self, address: str, notes: Sequence[Note], now: float) -> list[Note]:
        """Return the notes on a refused registration to log; none if many were just logged."""
        if now - self._refusals_from >= LINE_INTERVAL_S:
            self._refusals_from, self._refusals_said = now, 0
        self._refusals_said += 1
        if self._refusals_said <= REFUSALS_SAID:
            return list(notes)
        self._count(Offence.REGISTRATION, address, notes[0].text if notes else "")
        return []

    def lines(self, now: float, *, is_last: bool = False) -> list[Note]:
        """Return the log lines that are due now; usually there are none.

        With ``is_last``, return all lines that have not been logged yet.
        """
        said: list[Note] = []
        if not self._is_counting or (now < self._look_at and not is_last):
            return said
        self._is_counting, self._look_at = False, now + LOOK_S
        for offence, tally in self._tallies.items():
            if tally.count and self._is_due(offence, tally, now, is_last) and (is_last or tally.quiet_until <= now):
                said.append(Note(Severity.WARNING, self._line(offence, tally, now)))
            self._is_counting = self._is_counting or self._tallies[offence].count > 0
        return said

    def _is_due(self, offence: Offence, tally: _Tally, now: float, is_last: bool) -> bool:
        tally.since = now if tally.since is None else tally.since
        if offence not in (Offence.HANDSHAKE, Offence.SILENT) or tally.count > UNSAID:
            return is_last or now - tally.since >= GATHER_S
        if now - tally.since >= LINE_INTERVAL_S:
            self._tallies[offence] = _Tally(quiet_until=tally.quiet_until)
        return False

    def _count(self, offence: Offence, address: str, example: str = "") -> None:
        self.totals[offence] += 1
        self._is_counting = True
        tally = self._tallies[offence]
        tally.count += 1
        tally.example = tally.example or example[:200]
        if address in tally.by_address or len(tally.by_address) < MAX_ADDRESSES:
            tally.by_address[address] += 1

    def _line(self, offence: Offence, tally: _Tally, now: float) -> str:
        named = tally.by_address.most_common(NAMED_ADDRESSES)
        where = ", ".join(f"{count} from {address}" for address, count in named)
        rest = tally.count - sum(count for _, count in named)
        text = f"refused {tally.count} {offence.value}: {where}{f', {rest} from elsewhere' if rest else ''}"
        text += f" (for example: {tally.example})" if tally.example else ""
        text += _FIXES.get(offence, "")
        if tally.quiet_until > float("-inf"):
            text += f"; logged at most every {LINE_INTERVAL_S:g} s"
        self._tallies[offence] = _Tally(quiet_until=now + LINE_INTERVAL_S)
        return text


def implausible(message: object) -> str | None:
    """Return why no process of a job would send this message, although it is well-formed, or None."""
    if isinstance(message, Register):
        process = message.process
        if not 0 < process.pid <= MAX_PID or process.started_at < 0:
            return f"Register.process: pid {process.pid}, started at {process.started_at}, is no process"
    field = unprintable(message)
    return None if field is None else f"{field} is not printable"
