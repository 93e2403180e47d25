"""Collect the workers' health reports, and let spares replace unhealthy workers.

A health problem alone does not remove a worker. One worker at a time is asked to leave, and only if a healthy spare is
waiting and no other change is in progress. A full shared disk can therefore never empty a job. Nothing is written to
the journal, because workers repeat their reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from samebits.core.ledger import Ledger
from samebits.core.messages import Activity, Depart, ReportEnvelope
from samebits.core.ready import Severity
from samebits.core.reports import OF_A_THREAD, OF_HIDDEN_STATE, Ailment, Anomaly, HealthReport, Sign
from samebits.core.state import Seat
from samebits.core.watch.health_limits import SHOWN_AT_ONCE, place_said, said

ANOMALY_S = 30.0
"""Seconds in which only one report of an implausible number is shown, since all ranks share the loss.

In that time, verdicts are shown once per step, since each may name a different rank's device. Ended threads and hidden
state are shown once per text.
"""
MOST_ANOMALIES = 16
"""Most verdicts, and most other reports, remembered at a time.

Further verdicts, ended threads and hidden state are not shown.
"""
NAMED = 16
"""Most readings that a status lists."""


class HostHealth:
    """The health of the hosts of one job.

    Attributes:
        hidden_state: the last report of hidden state; "" if there is none.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.hidden_state = ""
        self._ledger = ledger
        self._hosts: dict[str, dict[str, tuple[Ailment, ...]]] = {}  # host → node → problems
        self._host_of: dict[str, str] = {}
        self._wanting: dict[str, Ailment] = {}  # node → why it should leave
        self._leaving = ""  # the node that was asked to leave
        self._why = ""
        self._again = 0, ""  # generation in which a step must be recomputed, and why
        self._quiet_until: dict[object, float] = {}  # subject → until when it is not shown again

    def take(self, seat: Seat, body: HealthReport, _said: ReportEnvelope) -> None:
        """Record a worker's complete health report and log what is new on that host."""
        host, before = seat.process.host, self._of_host(seat.process.host)
        self._drop(seat.node)
        if body.ailments:
            self._hosts.setdefault(host, {})[seat.node], self._host_of[seat.node] = body.ailments, host
            why = next((one for one in body.ailments if one.drains), None)
            if why is not None:
                self._wanting[seat.node] = why
        after, name = self._of_host(host), host.partition("#")[0]
        for place, one in after.items():
            if place not in before:
                text = f"host {name} (worker {seat.node}): {said(one)}"
                if one.drains or one.sign in SHOWN_AT_ONCE:
                    self._ledger.announce(text)
                else:  # shown in the status only: busy CPUs are normal in training
                    self._ledger.ready.say(text, Severity.WARNING)
        for place in before:
            if place not in after:
                self._ledger.ready.say(f"host {name} is healthy again: {place_said(*place)}", Severity.WARNING)
        if self._leaving == seat.node and seat.node in self._wanting:
            self._ask(seat, said(self._wanting[seat.node]))  # the first request may be lost

    def note(self, seat: Seat, body: Anomaly, rank: int | None) -> None:
        """Show a rank's report of an implausible number, an ended thread or hidden state."""
        if body.comes_again:
            what = "a fault" if body.is_verdict else "an implausible number"
            why = f"worker {seat.node} reported {what}: step {body.step} is repeated"
            self._again = self._ledger.state.generation_number, why
        if body.text.startswith(OF_HIDDEN_STATE):
            self.hidden_state = body.text
        now = self._ledger.now
        has_own_words = body.text.startswith((OF_A_THREAD, OF_HIDDEN_STATE))
        about: object = body.text if has_own_words else "a number"
        if body.is_verdict and not has_own_words:
            about = body.step, body.comes_again
        self._quiet_until = {one: until for one, until in self._quiet_until.items() if now < until}
        verdicts = sum(isinstance(one, tuple) for one in self._quiet_until)
        others = len(self._quiet_until) - verdicts
        is_full = (verdicts if isinstance(about, tuple) else others if has_own_words else 0) >= MOST_ANOMALIES
        if about not in self._quiet_until and not is_full:
            self._quiet_until[about] = now + ANOMALY_S
            parts = [*([] if rank is None else [f"rank {rank}"]), *([str(seat.process)] if body.is_verdict else [])]
            place = f" ({', '.join(parts)})" if parts else ""
            self._ledger.announce(f"worker {seat.node}{place}, step {body.step}: {body.text}")

    def computed_again(self) -> str:
        """Return why all ranks leave the generation to recompute a step, or "" if they do not."""
        generation, why = self._again
        return why if generation == self._ledger.state.generation_number else ""

    def forget(self, node: str) -> None:
        """Forget a node whose process is gone."""
        self._drop(node)
        if self._leaving == node:
            self._leaving = ""

    def is_to_leave(self, node: str) -> bool:
        """Return whether the node's host or device has a problem for which it should leave."""
        return node in self._wanting

    def lines(self) -> list[str]:
        """Return the current problems for a status, one sentence per host and resource."""
        found = [
            f"host {host.partition('#')[0]}: {said(one)}"
            for host in sorted(self._hosts)
            for _, one in sorted(self._of_host(host).items())
        ]
        more = len(found) - NAMED
        return [*found[:NAMED], *([f"{more} more such readings"] if more > 0 else [])]

    def remind(self, seat: Seat) -> None:
        """Ask a node again to leave, because it still trains and may not have received the request."""
        if self._leaving == seat.node:
            self._ask(seat, self._why)

    def judge(self, slow: Mapping[str, str] = MappingProxyType({})) -> None:
        """Ask the first worker that has a reason to leave to do so, if a healthy spare is waiting.

        Call this only while all members train.

        Args:
            slow: by node, why it should leave for being slow.
        """
        ledger, state = self._ledger, self._ledger.state
        if not (self._wanting or slow) or self._leaving or state.generation is None:
            return
        warm = [spare for spare in state.spares if self._is(Activity.WAITING, spare) and spare not in self._wanting]
        if not warm:
            return
        whys = {**slow, **{node: said(one) for node, one in self._wanting.items()}}
        for node in sorted(whys):
            seat = state.seats.get(node)
            if seat is not None and ledger.is_present(node) and self._is(Activity.TRAINING, node):
                self._leaving, self._why = node, (why := whys[node])
                spare = min(warm, key=lambda one: state.seats[one].process.host == seat.process.host)
                ledger.presences[node].avoids_host = True
                ledger.announce(
                    f"worker {node} is asked to leave at its next commit, and warm spare {spare} takes its place: {why}"
                )
                self._ask(seat, why)
                return

    def _ask(self, seat: Seat, why: str) -> None:
        state = self._ledger.state
        self._ledger.tell_holder(seat, Depart(state.job, state.term, seat.incarnation, why))

    def _is(self, activity: Activity, node: str) -> bool:
        presence = self._ledger.presences.get(node)
        return presence is not None and presence.activity is activity and presence.closed_at is None

    def _drop(self, node: str) -> None:
        self._wanting.pop(node, None)
        host = self._host_of.pop(node, None)
        if host is not None:
            del self._hosts[host][node]
            if not self._hosts[host]:
                del self._hosts[host]

    def _of_host(self, host: str) -> dict[tuple[Sign, str], Ailment]:
        return {(one.sign, one.where): one for all_of in self._hosts.get(host, {}).values() for one in all_of}
