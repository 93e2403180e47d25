"""S3: no process is seated before the cool-down is over, and a refusal gives the exact time and lengthens no wait.

A replacement has no cool-down (rule 1b): during training it is admitted as a spare and given the lost slot, and after
training it is seated in the lost slot of its own line. Only a session that proves its launcher counts as one.
"""

from __future__ import annotations

from samebits.core.membership.replacement_proofs import proof_of
from samebits.core.messages import Refusal, Refused, Register
from samebits.core.records import SeatGranted, SpareAdmitted
from samebits.core.replacement_names import replaces
from samebits.core.scheduler import Received, SchedulerEvent
from tests.simulation.checkers.base import EPSILON_S, Checker
from tests.simulation.checkers.witness import Holder

SHORTEST_S = 0.05


class CoolDown(Checker):
    """Computes from its own books how long each seat, and each refused process, has to wait."""

    name = "S3"

    def watch(self) -> None:
        self.world.when_recorded[SeatGranted].append(self._granted)
        self.world.when_recorded[SpareAdmitted].append(self._granted)
        self.world.when_answered[Refused].append(self._refused)

    def _granted(self, event: SchedulerEvent | None, record: SeatGranted | SpareAdmitted) -> None:
        """A process takes its node's seat again or, if that seat was taken away, another node's."""
        witness = self.world.witness
        if record.session in self.world.forged:
            self.violated(f"{record}: no launcher has started that session")
        before = [old for old, granted in witness.granted if granted is record and old is not None]
        before += [old for old in witness.retired if isinstance(record, SeatGranted) and old.slot == record.slot]
        for old in before:
            if not old.session and witness.is_late(event, record):
                continue  # the seat was kept for this process
            if not (replaces(record.node, old.node) and not old.is_held and self._is_proven(event, record)):
                self._must_be_free(old, record)

    def _is_proven(self, event: SchedulerEvent | None, record: SeatGranted | SpareAdmitted) -> bool:
        """Return whether the session showed its launcher's proof for this job."""
        said = event.message if isinstance(event, Received) else None
        if not isinstance(said, Register) or said.session != record.session:
            return False
        token = self.world.policy.token
        return bool(token) and said.proof == proof_of(token, self.world.witness.job, record.node, record.session)

    def _must_be_free(self, old: Holder, record: SeatGranted | SpareAdmitted) -> None:
        quiet_s = self.world.host.clock - old.quiet_since
        if not old.has_left and quiet_s < self.world.policy.cool_down_s - EPSILON_S:
            self.violated(f"{record}, {quiet_s:.3f} s after {old} was last heard")

    def _refused(self, session: str, message: Refused) -> None:
        if message.refusal not in (Refusal.ALIVE, Refusal.COOLING_DOWN):
            return
        witness, policy, now = self.world.witness, self.world.policy, self.world.host.clock
        holder = witness.holders.get(session.split("#")[0])
        if holder is None or holder.is_retired:
            return  # a stranger waits for any seat, which the core chooses
        free_at = now if holder.has_left else witness.quiet_known_since(holder) + policy.cool_down_s
        cool_down = max(0.0, free_at - now)
        if holder.is_spare and (holder.is_lost or holder.has_left) and cool_down == 0.0:
            return  # its place as a spare may be another's by now: it waits like a stranger
        renewed = max(holder.accepted_at, witness.loaded_at, witness.stalled_at)
        lease = 0.0 if holder.is_lost else max(0.0, renewed + policy.node_timeout_s - now)
        longest = max(cool_down, lease, SHORTEST_S)
        if not cool_down - EPSILON_S <= message.retry_after_s <= longest + EPSILON_S:
            self.violated(
                f"{session} got {message.retry_after_s:.3f} s, correct is {cool_down:.3f} to {longest:.3f} s: {message}"
            )
