"""S18 and rule "a lease ends": nobody is declared lost without a reason that the design allows.

Time in which the scheduler itself stood still, as far as it knew, counts for nobody.
"""

from __future__ import annotations

from runtime.core.messages import Activity, Heartbeat, Leave
from runtime.core.ready import Ready
from runtime.core.records import SeatLost
from runtime.core.scheduler import Closed, Event, Received, SchedulerCore, Stalled
from tests.simulation.checkers.base import EPSILON_S, Checker


class Leases(Checker):
    """Judges every SeatLost by the silence and the closes that came before it."""

    def watch(self) -> None:
        self._stalls: list[tuple[float, float]] = []  # (from, to)
        self._lost_before: set[tuple[str, int]] = set()
        self.world.watch_event.append(self._before)
        self.world.watch_loaded.append(self._loaded)
        self.world.watch_decided.append(self._decided)

    def _loaded(self, core: SchedulerCore) -> None:
        self._stalls.clear()

    def _before(self, event: Event) -> None:
        if isinstance(event, Stalled):
            self._stalls.append((self.world.now - event.gap_s, self.world.now))
        self._lost_before = {
            (holder.node, holder.incarnation) for holder in self.world.witness.holders.values() if holder.is_lost
        }

    def _awake_s(self, since: float) -> float:
        """How long the scheduler has been listening since then."""
        now = self.world.now
        return now - since - sum(max(0.0, end - max(begin, since)) for begin, end in self._stalls if end > since)

    def _decided(self, event: Event | None, ready: Ready) -> None:
        for record in ready.records:
            if isinstance(record, SeatLost) and (record.node, record.incarnation) not in self._lost_before:
                self._judge(event, record)

    def _judge(self, event: Event | None, record: SeatLost) -> None:
        witness, policy = self.world.witness, self.world.policy
        holder = witness.holders[record.node]
        if witness.is_ending:
            return  # everybody is told to leave: nothing depends on who is believed alive
        if isinstance(event, Received) and isinstance(event.message, Leave) and event.session == holder.session:
            return
        if isinstance(event, Closed) and event.gone and event.session == holder.session:
            return
        if self._awake_s(max(holder.accepted_at, witness.loaded_at)) >= policy.node_timeout_s - EPSILON_S:
            return
        if holder.closed_at is not None:
            if self._awake_s(holder.closed_at) >= policy.reconnect_grace_s - EPSILON_S:
                return
            if isinstance(event, Closed):
                return  # a round is open: somebody has noticed a loss
            message = event.message if isinstance(event, Received) else None
            if isinstance(message, Heartbeat) and message.activity is Activity.WAITING:
                return  # a member's collective failed
        self.violated(
            "S18", f"{record} at {event}: heard {self._awake_s(holder.accepted_at):.3f} s of listening before; {holder}"
        )
