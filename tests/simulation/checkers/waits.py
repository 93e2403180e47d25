"""S3, the other half: a refusal says exactly how long, and asking never makes the wait longer."""

from __future__ import annotations

from runtime.core.messages import FromScheduler, Refusal, Refused
from runtime.core.ready import Ready
from runtime.core.scheduler import Event
from tests.simulation.checkers.base import EPSILON_S, Checker

SHORTEST_S = 0.05


class Waits(Checker):
    """Computes from its own books how long each refused process has to wait."""

    def watch(self) -> None:
        self.world.watch_decided.append(self._decided)

    def _decided(self, event: Event | None, ready: Ready) -> None:
        for send in ready.sends:
            self._judge(send.session, send.message)

    def _judge(self, session: str, message: FromScheduler) -> None:
        if not isinstance(message, Refused) or message.refusal not in (Refusal.ALIVE, Refusal.COOLING_DOWN):
            return
        witness, policy, now = self.world.witness, self.world.policy, self.world.now
        node = session.split("#")[0]
        holder = witness.holders.get(node)
        if holder is None or holder.slot is None:
            return  # a stranger waits for somebody's seat: whose, is for the core to choose
        cool_down = max(0.0, witness.quiet_known_since(holder) + policy.cool_down_s - now)
        renewed = max(holder.accepted_at, witness.loaded_at, witness.stalled_at)
        lease = 0.0 if holder.is_lost else max(0.0, renewed + policy.node_timeout_s - now)
        longest = max(cool_down, lease, SHORTEST_S)
        if message.retry_after_s > longest + EPSILON_S:
            self.violated("S3", f"{session} is told {message.retry_after_s:.3f} s, it is {longest:.3f} s: {message}")
        if message.retry_after_s < cool_down - EPSILON_S:
            self.violated("S3", f"{session} is told {message.retry_after_s:.3f} s, it is {cool_down:.3f} s: {message}")
