"""S18: a pause of the scheduler alone never loses a node, and every loss has a permitted reason.

Time in which the scheduler itself was paused, as far as it knew, does not count. The close of an earlier connection
costs no worker its seat: a worker that is connected again answers the scheduler's question.
"""

from __future__ import annotations

from samebits.core.messages import Activity, Heartbeat, Join, Leave, ReportEnvelope
from samebits.core.records import SeatLost
from samebits.core.reports import PeerGone
from samebits.core.scheduler import Closed, Received, SchedulerCore, SchedulerEvent, SchedulerPaused
from tests.simulation.checkers.base import EPSILON_S, Checker

USUAL_S = 0.1  # the time of a question and its answer, with a wide margin


class OwnPauses(Checker):
    """Judges every first SeatLost by the silence and the closes before it."""

    name = "S18"

    def begin_job(self) -> None:
        self._stalls: list[tuple[float, float]] = []  # (from, to), by the scheduler's clock

    def watch(self) -> None:
        self.world.when_event[SchedulerPaused].append(self._stalled)
        self.world.watch_loaded.append(self._loaded)
        self.world.when_recorded[SeatLost].append(self._lost)

    def _loaded(self, core: SchedulerCore) -> None:
        self._stalls.clear()

    def _stalled(self, event: SchedulerPaused) -> None:
        now = self.world.host.clock
        self._stalls.append((now - event.gap_s, now))

    def _awake_s(self, since: float) -> float:
        """Return how long the scheduler has been listening since then."""
        now = self.world.host.clock
        return now - since - sum(max(0.0, end - max(begin, since)) for begin, end in self._stalls if end > since)

    def _stands(self, session: str) -> bool:
        """Return whether its process has been listening for a while over an undisturbed connection."""
        mix, now = self.world.mix, self.world.now
        is_swift = mix.is_ordered and not (mix.p_drop or mix.p_slow) and mix.fsync_s <= USUAL_S
        worker = next((worker for worker in self.world.workers if worker.session == session), None)
        if worker is None or worker.is_paused or not is_swift or "partition" in mix.rates_hz:
            return False
        connection = worker.connection
        return (
            connection is not None
            and connection.is_open
            and now - max(connection.opened_at, worker.resumed_at) > USUAL_S
        )

    def _lives(self, session: str) -> bool:
        return any(worker.session == session for worker in self.world.workers)

    def _lost(self, event: SchedulerEvent | None, record: SeatLost) -> None:
        witness, policy = self.world.witness, self.world.policy
        if not any(record is lost for lost in witness.lost) or witness.is_ending:
            return  # a second close of a lost worker, or the job is ending: the seat is gone anyway
        holder = witness.holders[record.node]
        if isinstance(event, Received) and isinstance(event.message, Leave) and event.session == holder.session:
            return
        if isinstance(event, Closed) and event.gone and event.session == holder.session:
            return
        if (
            isinstance(event, Received)
            and isinstance(event.message, ReportEnvelope)
            and isinstance(event.message.body, PeerGone)
        ):
            if event.message.body.session != holder.session or self._lives(holder.session):
                self.violated(f"{record} at {event}, whose words are about another process, or untrue; {holder}")
            return
        if self._awake_s(max(holder.accepted_at, witness.loaded_at)) >= policy.node_timeout_s - EPSILON_S:
            return
        if holder.away_since is not None:
            if self._awake_s(holder.away_since) >= policy.reconnect_grace_s - EPSILON_S:
                if policy.reconnect_grace_s >= USUAL_S and self._stands(holder.session):
                    self.violated(f"{record} at {event}: it would have answered; {holder}")
                return
            if isinstance(event, Closed):
                return  # a round is open: a worker has noticed a loss
            message = event.message if isinstance(event, Received) else None
            if isinstance(message, Join) or (isinstance(message, Heartbeat) and message.activity is Activity.WAITING):
                return  # a member's collective failed
        self.violated(
            f"{record} at {event}: heard {self._awake_s(holder.accepted_at):.3f} s of listening before; {holder}"
        )
