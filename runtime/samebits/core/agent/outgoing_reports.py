"""Store the newest report of each kind, and decide when to send it.

``reports.Delivery`` defines when reports of a kind are sent. Each report is complete, so only the newest one is stored,
and any of them may be lost.
"""

from __future__ import annotations

from samebits.core.point import Point
from samebits.core.reports import Body, Delivery, Digests, Report, StallReport


class Reports:
    """The outgoing reports of one process.

    Attributes:
        to_explain: point and number of the commit whose digest was requested with its parts.
    """

    def __init__(self) -> None:
        self.to_explain: tuple[Point, int] | None = None
        self._newest: dict[type[Body], Report] = {}
        self._sent: dict[type[Body], Report] = {}

    def take(self, body: Report) -> None:
        """Keep a sensor's report."""
        self._newest[type(body)] = body

    def now(self, kind: type[Body]) -> list[Report]:
        """Return the newest report of a kind to send now, if it contains news or withdraws an earlier report."""
        body = self._newest.get(kind)
        if body is None or (body.is_empty and self._sent.get(kind, body).is_empty):
            return []
        self._sent[kind] = body
        return [body.explaining(self.to_explain) if isinstance(body, Digests) else body]

    def with_heartbeat(self, *, is_member: bool) -> list[Report]:
        """Return the reports to send with a heartbeat, by whether the sender forms a group or trains in one."""
        if not is_member:
            self.end_training()
        due: list[Report] = []
        for kind, body in self._newest.items():
            is_news = kind.delivery is Delivery.NEWS and body is not self._sent.get(kind)
            if is_news or kind.delivery is Delivery.STATE:
                due += self.now(kind)
        return due

    def end_training(self) -> None:
        """Withdraw reports that apply only to the generation that has ended."""
        for kind in [kind for kind in self._newest if kind.in_training]:
            del self._newest[kind]
        if StallReport in self._sent:
            self._newest[StallReport] = StallReport()

    def begin_connection(self) -> list[Report]:
        """Return the reports to send on a new connection.

        Reports on an earlier connection may not have arrived, so the next heartbeat repeats the newest ones.
        """
        for kind in [kind for kind in self._sent if kind.delivery is Delivery.NEWS and not kind.in_training]:
            del self._sent[kind]
        kept = [kind for kind in self._newest if kind.delivery is Delivery.KEPT]
        return [body for kind in kept for body in self.now(kind)]
