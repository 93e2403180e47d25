"""The newest report of each kind that a worker's agent keeps, and when it is to be sent.

Each class says when its bodies are sent (``reports.Delivery``). Because each body is the whole truth of its kind, only
the newest is kept, and any of them may be lost.
"""

from __future__ import annotations

from samebits.core.point import Point
from samebits.core.reports import Body, Delivery, Digests, Report, StallReport


class Reports:
    """The reports of one process.

    Attributes:
        to_explain: the point and the number of the commit whose digest is wanted with its parts.
    """

    def __init__(self) -> None:
        self.to_explain: tuple[Point, int] | None = None
        self._newest: dict[type[Body], Report] = {}
        self._sent: dict[type[Body], Report] = {}

    def take(self, body: Report) -> None:
        """Keep what a sensor has made."""
        self._newest[type(body)] = body

    def now(self, kind: type[Body]) -> list[Report]:
        """Return the newest body of a kind, to be sent now; nothing if there is nothing to say, or to take back."""
        body = self._newest.get(kind)
        if body is None or (body.is_empty and self._sent.get(kind, body).is_empty):
            return []
        self._sent[kind] = body
        return [body.explaining(self.to_explain) if isinstance(body, Digests) else body]

    def with_heartbeat(self, *, is_training: bool) -> list[Report]:
        """Return what goes with a heartbeat."""
        if not is_training:
            self.end_training()
        due: list[Report] = []
        for kind, body in self._newest.items():
            is_news = kind.delivery is Delivery.NEWS and body is not self._sent.get(kind)
            if is_news or kind.delivery is Delivery.STATE:
                due += self.now(kind)
        return due

    def end_training(self) -> None:
        """Take back what is of use only in the generation that was trained in."""
        for kind in [kind for kind in self._newest if kind.in_training]:
            del self._newest[kind]
        if StallReport in self._sent:
            self._newest[StallReport] = StallReport()

    def begin_connection(self) -> None:
        """Forget what was sent over an earlier connection: it may not have arrived."""
        for kind in [kind for kind in self._sent if kind.delivery is Delivery.NEWS and not kind.in_training]:
            del self._sent[kind]
