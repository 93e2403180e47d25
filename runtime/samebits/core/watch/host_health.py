"""What the workers have said of their hosts, and who leaves for a spare because of it. The scheduler's side of health.

Here lives who was said to be unwell, once a host, and the asking of one worker at a time to leave; what an ailment is
stands in ``core.watch.health``, who is slow in ``core.watch.stragglers``. The one idea: a worker that says its host is
full asks for nothing yet. Only where a spare is warm and well, nothing else is under way, and nobody else is on the way
out does one leave, so a disk that all share never empties a job. Nothing of it is written down: a worker says it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from samebits.core.ledger import Ledger
from samebits.core.messages import Activity, Depart, Said
from samebits.core.ready import Level
from samebits.core.reports import OF_A_THREAD, OF_HIDDEN_STATE, Ailment, Anomaly, HealthReport, Sign
from samebits.core.state import Seat
from samebits.core.watch.health import place_said, said

ANOMALY_S = 30.0
"""Only one report of odd numbers is shown in this time, because all ranks have the same loss. Of the ends of threads
and of hidden state, one in the same words."""
MOST_ANOMALIES = 16
"""From this many on, no further end of a thread and no hidden state is shown in that time."""
NAMED = 16
"""Readings that a status lists."""


class UnwellHosts:
    """Of one job."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._hosts: dict[str, dict[str, tuple[Ailment, ...]]] = {}  # by host and node; of those who have any
        self._host_of: dict[str, str] = {}
        self._wanting: dict[str, Ailment] = {}  # who is to leave, and why
        self._leaving = ""  # who was asked to
        self._why = ""
        self._again = 0, ""  # in which generation a step has to be computed again, and why
        self._quiet_until: dict[object, float] = {}  # about odd numbers; about what was at fault; about a thread's end

    def take(self, seat: Seat, body: HealthReport, _said: Said) -> None:
        """Take all that is wrong with a worker's host now, and log what is new of that host."""
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
                if one.drains:
                    self._ledger.announce(text)
                else:  # a status lists it; busy CPUs, for one, are what training is for
                    self._ledger.ready.say(text, Level.WARNING)
        for place in before:
            if place not in after:
                self._ledger.ready.say(f"host {name} is well again: {place_said(*place)}", Level.WARNING)
        if self._leaving == seat.node and seat.node in self._wanting:
            self._ask(seat, said(self._wanting[seat.node]))  # the first word may be lost

    def note(self, seat: Seat, body: Anomaly, rank: int | None) -> None:
        """Show the first rank's report of an odd number, of a thread that an error ended, or of hidden state."""
        if body.comes_again:
            why = f"worker {seat.node} reported what training cannot have: step {body.step} is computed again"
            self._again = self._ledger.state.generation_number, why
        now = self._ledger.now
        has_own_words = body.text.startswith((OF_A_THREAD, OF_HIDDEN_STATE))
        about = body.text if has_own_words else body.is_verdict
        self._quiet_until = {one: until for one, until in self._quiet_until.items() if now < until}
        if about not in self._quiet_until and not (has_own_words and len(self._quiet_until) >= MOST_ANOMALIES):
            self._quiet_until[about] = now + ANOMALY_S
            parts = [*([] if rank is None else [f"rank {rank}"]), *([str(seat.process)] if body.is_verdict else [])]
            place = f" ({', '.join(parts)})" if parts else ""
            self._ledger.announce(f"worker {seat.node}{place}, step {body.step}: {body.text}")

    def computed_again(self) -> str:
        """Why all leave the present generation, where a number that was reported is the reason."""
        generation, why = self._again
        return why if generation == self._ledger.state.generation_number else ""

    def forget(self, node: str) -> None:
        """The node's process is gone: what it said is over."""
        self._drop(node)
        if self._leaving == node:
            self._leaving = ""

    def is_to_leave(self, node: str) -> bool:
        """Whether it, or a spare as it is, is to leave for what its host or device has."""
        return node in self._wanting

    def lines(self) -> list[str]:
        """What is wrong now, one sentence a host and place, for a status."""
        found = [
            f"host {host.partition('#')[0]}: {said(one)}"
            for host in sorted(self._hosts)
            for _, one in sorted(self._of_host(host).items())
        ]
        more = len(found) - NAMED
        return [*found[:NAMED], *([f"{more} more such readings"] if more > 0 else [])]

    def remind(self, seat: Seat) -> None:
        """It still trains: the word that asked it to leave may be lost."""
        if self._leaving == seat.node:
            self._ask(seat, self._why)

    def judge(self, slow: Mapping[str, str] = MappingProxyType({})) -> None:
        """While all train: ask the first member that is to leave, where a spare is warm whose own host is well.

        Args:
            slow: who is to leave besides, by node, and why: it holds the others up.
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
                ledger.announce(f"worker {node} is asked to leave at its next commit, and spare {spare} is warm: {why}")
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
