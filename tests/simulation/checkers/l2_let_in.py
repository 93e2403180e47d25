"""L2: every refused node that is no duplicate is in within ``retry_after_s`` + one interval of a living scheduler.

That bound is a cool-down's. A live holder's seat (ALIVE) is free only once its lease has ended, which its next message
postpones: such a refusal says when to ask again and promises no seat. A scheduler that was paused answers at once
everything in its queue, so a worker may receive several refusals after the last was decided; each counts on its own.
"""

from __future__ import annotations

from samebits.core.agent.agent_events import ToldToWait
from samebits.core.messages import Refusal, Refused
from tests.simulation.checkers.base import EPSILON_S, Checker
from tests.simulation.checkers.deadlines import HEARTBEAT_INTERVAL_S, SOME_MESSAGES_S
from tests.simulation.checkers.witness import Holder
from tests.simulation.mix import Naming
from tests.simulation.worker import Worker

Basis = tuple[str, float]  # the current or last holder of the seat, and since when it is silent


class LetIn(Checker):
    """Schedules a check for every worker refused, without faults, because of a cool-down."""

    name = "L2"

    def watch(self) -> None:
        self._answers: dict[str, tuple[Refused, Basis]] = {}  # session → its last refusal, and its basis
        self._found_full: dict[str, Refused] = {}  # session → its last refusal for lack of a place
        self.world.when_answered[Refused].append(self._refused)
        self.world.when_noticed[ToldToWait].append(self._told)

    def _refused(self, session: str, message: Refused) -> None:
        self._answers.pop(session, None)
        self._found_full.pop(session, None)
        node = session.split("#")[0]
        if self.world.is_calm and message.refusal is Refusal.COOLING_DOWN:
            self._answers[session] = message, self._holder_of(node)
        if self.world.is_calm and message.refusal in (Refusal.COOLING_DOWN, Refusal.FULL) and self._is_full(node):
            self._found_full[session] = message

    def _told(self, worker: Worker, notice: ToldToWait) -> None:
        answer, basis = self._answers.get(worker.session, (None, None))
        if answer is not None and basis is not None and _says(notice, answer):
            # The worker waits by its own clock, the seat is free by the scheduler's; it may ask too early, and again.
            slowest = max(1.0 / worker.rate, 1.0 / self.world.host.rate)
            appointment = (notice.retry_after_s + HEARTBEAT_INTERVAL_S) * slowest + SOME_MESSAGES_S
            self.world.after(appointment, self._must_be_in, worker, self.world.host.life, basis, answer)

    def _must_be_in(self, worker: Worker, life: int, basis: Basis, answer: Refused) -> None:
        core = self.world.host.core
        if not worker.is_alive or core is None or life != self.world.host.life or worker.agent.seated:
            return
        if self._holder_of(worker.node) != basis:
            return  # a rival was quicker, or the last holder was heard once more
        if self._found_full.get(worker.session, answer) is not answer:
            return  # it returned and found no place: that answer schedules another check
        if core.phase() != "ending" and not self._somebody_else_has_it(worker):
            self.violated(f"{worker} was asked to wait, has waited, and has no seat: {core.phase()}")

    def _holder_of(self, node: str) -> Basis:
        holder = self.world.witness.holders.get(node)
        return (holder.session, holder.quiet_since) if holder is not None else ("", 0.0)

    def _somebody_else_has_it(self, worker: Worker) -> bool:
        """A rival has the seat: another process of the node, or the first to ask if any may have it."""
        rivals = any(one.node == worker.node and one is not worker for one in self.world.workers)
        return rivals or self.world.mix.naming is Naming.FRESH or self._is_full(worker.node)

    def _is_full(self, node: str) -> bool:
        """Return whether its slot was reassigned meanwhile and there is no other place."""
        core, policy = self.world.host.core, self.world.policy
        assert core is not None
        if policy.spare_num == 0 and policy.min_world_size == policy.max_world_size:
            # A worker without its own slot: a rebuilt job does not know whose all of its slots were, and gives a lost
            # one to the first to come.
            own, holders = core.state.seats.get(node), self.world.witness.holders.values()
            held = sum(holder.slot is not None and not self._is_free(holder) for holder in holders)
            return (own is None or own.slot is None) and held == policy.max_world_size
        spares = [seat for seat in core.state.seats.values() if seat.is_spare and seat.is_held]
        names_spare = node.isdecimal() and int(node) >= policy.max_world_size
        is_open = core.state.final is None and core._world.has_resets_left()
        has_slot = len(core.state.by_slot) < policy.max_world_size and is_open and not names_spare
        return len(spares) >= policy.spare_num and not has_slot

    def _is_free(self, holder: Holder) -> bool:
        """Return whether its slot is free for any other node; one given to a replacement and lost has a cool-down."""
        free_at = self.world.witness.quiet_known_since(holder) + self.world.policy.cool_down_s
        return holder.has_left or (holder.is_lost and free_at <= self.world.host.clock + EPSILON_S)


def _says(notice: ToldToWait, answer: Refused) -> bool:
    """Return whether this answer is the received one and not an earlier one."""
    return (notice.text, notice.retry_after_s) == (answer.text, answer.retry_after_s)
