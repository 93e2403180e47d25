"""Stop every member of the job after the same commit, so that no step is repeated when the job resumes.

When asked, each member reports its next commit and does not train past it. Every member can still reach the latest of
these commits, so that one is written to the journal and sent to all. Once every member waits after it, the job ends.
The state machines are here and in ``core/agent``; ``service/agent`` pauses the main thread.

Each generation counts its own commits. A loss before the stop therefore only delays it: the members of the next
generation are asked again.
"""

from __future__ import annotations

from samebits.core.ledger import Ledger
from samebits.core.messages import ReportEnvelope, StopAt
from samebits.core.records import GenerationCommitted, StopPlanned
from samebits.core.reports import StopsAfter
from samebits.core.state import Seat

_UNKNOWN = "an operator"


class JointStop:
    """Agrees with the last generation's members on the commit after which all of them stop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counted: GenerationCommitted | None = None  # the generation that the values below belong to
        self._incarnations: dict[str, int] = {}  # its members' incarnations, by node
        self._commits: dict[str, int] = {}  # node → the commit after which it stops
        self._there: set[str] = set()  # nodes that wait after the agreed commit

    @property
    def is_planned(self) -> bool:
        """Return whether a stop is planned."""
        return self._ledger.state.stop is not None

    @property
    def stopped_by(self) -> str:
        """Return who requested the stop once every member waits after the agreed commit, or "" before."""
        plan, committed = self._ledger.state.stop, self._ledger.state.generation
        if plan is None or committed is None or committed is not self._counted or not plan.commits:
            return ""
        return plan.by if len(self._there) == len(committed.members) else ""

    def ask(self, by: str) -> None:
        """Ask all members at which commit they can stop. Repeated requests have no effect."""
        ledger = self._ledger
        if self.is_planned:
            return
        ledger.write(StopPlanned(by))
        ledger.ready.say(f"every worker is to stop after the same commit: {by}")
        for seat in ledger.live_seats():
            self.remind(seat)

    def remind(self, seat: Seat) -> None:
        """Send the stop message again to a member of the last generation that has not acted on it."""
        state = self._ledger.state
        plan, committed = state.stop, state.generation
        if plan is None or committed is None or not self._is_member(seat, committed):
            return
        if seat.node not in self._there if plan.commits else seat.node not in self._commits:
            self._ledger.tell(seat.node, StopAt(state.job, state.term, committed.generation, plan.commits))

    def take(self, seat: Seat, body: StopsAfter, said: ReportEnvelope) -> None:
        """Record the commit after which a member stops."""
        ledger, committed = self._ledger, self._ledger.state.generation
        if committed is None or said.generation != committed.generation or not body.commits:
            return
        if not self._is_member(seat, committed) or ledger.state.final is not None:
            return
        if not self.is_planned:  # the plan was lost with the journal, and this member waits for the others
            self.ask(_UNKNOWN)
        self._commits[seat.node] = body.commits
        if body.is_there:
            self._there.add(seat.node)
        self._agree(committed)

    def _agree(self, committed: GenerationCommitted) -> None:
        ledger, plan = self._ledger, self._ledger.state.stop
        if plan is None or plan.commits or len(self._commits) < len(committed.members):
            return
        ledger.write(StopPlanned(plan.by, max(self._commits.values())))
        for seat in ledger.live_seats():
            self.remind(seat)

    def _is_member(self, seat: Seat, committed: GenerationCommitted) -> bool:
        if committed is not self._counted:
            self._counted, self._incarnations = committed, dict(committed.members)
            self._commits.clear()
            self._there.clear()
        return self._incarnations.get(seat.node) == seat.incarnation
