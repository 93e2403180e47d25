"""Compare the nodes before the first generation: their times for equal work, and sums that pairs compute.

Each node publishes a report under the scheduler's keys, reads its peers' reports, and judges itself by the rules of
``core.watch.node_check``. Each wait is bounded. The keys are durable, so the death of the scheduler disturbs no
comparison. A node's report stays: a later process in its slot learns from it whether this machine was rejected, and is
not compared again.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist

from samebits.config import Settings
from samebits.core.agent.agent_events import KeyAsk
from samebits.core.messages import Admitted, KeyAnswer, KeyOp, KeyOutcome
from samebits.core.replacement_names import number_of, root_of
from samebits.core.watch import node_check as check
from samebits.core.watch.node_check import NodeReport, NodeTimings, Pair, Sum
from samebits.errors import CommunicationError, KeyValueError, PreflightError
from samebits.printable import IN_LOGS, shortened
from samebits.service import log
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards
from samebits.store.process_identity import machine_id
from samebits.training.group import transfer
from samebits.training.group.group import Group
from samebits.training.process import preflight

PAIR_S = 15.0
"""Longest time in which a pair connects, and in which it computes one sum, in seconds."""
ROUND_S = 30.0
"""Seconds for one round of sums. A pair that has not met by its end is not tested."""
LAST_LOOK_S = 1.0
"""Seconds to wait for a report even if its time is over, because it may only have to be fetched."""
NUMBERS = 1 << 20
"""Count of numbers that a pair adds up, in float32; they are integers, so their sum is exact."""
SUMS = 8
MOST_CHARS = 300


def compare(settings: Settings, agent: Agent, admitted: Admitted, device: torch.device, figures: NodeTimings) -> None:
    """Compare this node with the others before the job's first generation, and give up its seat if it is bad.

    Raises:
        PreflightError: this node is slow or computes wrong results, or is in a pair of which either node may do so.
    """
    slot = _slot_of(admitted, agent.node)
    if slot is None or admitted.world_size < 2:
        return
    part = _Check(settings, agent, slot, admitted.world_size, device)
    try:
        report = part.earlier_report(slot)
        if report is None and admitted.generation == 0 and admitted.slot is not None:
            agent.wait_for_round()
            report = part.run(figures)
    except KeyValueError as error:
        log.warn(f"this node was not compared with the others before the start: {error}")
        return
    if report is not None and report.why and report.machine == machine_id():
        why = shortened(report.why, MOST_CHARS, IN_LOGS)
        why += ". Fix: start this node on another host, or without preflight in HEALTH"
        agent.leave(on_purpose=False, text=f"the pre-flight rejected it: {why}", status=PreflightError.exit_code)
        raise PreflightError(f"the pre-flight compared {agent.node} with the other nodes: {why}")


def _slot_of(admitted: Admitted, node: str) -> int | None:
    """Return the node's slot.

    A replacement has the slot of the node that it replaces, because it runs on the same machine.
    """
    if admitted.slot is not None or not number_of(node):
        return admitted.slot
    return int(root_of(node))


class _Check:
    """One node's part of the check."""

    def __init__(self, settings: Settings, agent: Agent, slot: int, world_size: int, device: torch.device) -> None:
        self._settings, self._agent, self._slot = settings, agent, slot
        self._world_size, self._device = world_size, device

    def earlier_report(self, slot: int) -> NodeReport | None:
        """Return the report that a process in this slot has published, or None."""
        answer = self.call(f"report/{slot}", KeyOp.GET)
        return _decoded(slot, answer) if answer.outcome is KeyOutcome.DONE else None

    def run(self, figures: NodeTimings) -> NodeReport:
        """Take part, and return this node's report with its verdict."""
        began_s, sums, rounds = time.monotonic(), dict[int, Sum](), check.rounds(self._world_size)
        for number, pairs in enumerate(rounds, 1):
            if (pair := next((one for one in pairs if self._slot in one), None)) is not None:
                sums[pair[pair[0] == self._slot]] = self._sum(pair, began_s + number * ROUND_S)
        own = NodeReport(f"worker {self._agent.node}", machine_id(), figures, sums)
        self._publish(own)
        reports, versions = {self._slot: own}, dict[int, int]()
        for peer in check.peers(self._slot, self._world_size):
            with contextlib.suppress(KeyValueError):  # it is late or invalid
                answer = self.take(f"report/{peer}", began_s + (len(rounds) + 1) * ROUND_S)
                reports[peer], versions[peer] = _decoded(peer, answer), answer.version
        if slow_at := self._slow(self._slot, reports):
            again = NodeTimings(*map(min, zip(figures, self._measured(), strict=True)))
            slow_at = self._slow(self._slot, reports | {self._slot: msgspec.structs.replace(own, figures=again)})
        why, said = check.verdict(self._slot, reports, slow_at)
        own = msgspec.structs.replace(own, why=why)
        self._publish(own)
        for peer, version in versions.items():
            if reports[peer].why is None and self._slow(peer, reports):  # it measures again: stay idle
                with contextlib.suppress(KeyValueError):
                    self.take(f"report/{peer}", time.monotonic() + ROUND_S, above=version)
        if (following := (self._slot + 1) % self._world_size) not in reports:
            said.append(f"the node of slot {following} did not report in time and was not compared")
        if all(one.problem == check.UNMET for one in sums.values()):
            said.append(f"the node of slot {self._slot} found no partner for a sum in time")
        for sentence in said:
            self._agent.report_anomaly(0, f"pre-flight: {sentence}")
        return own

    def _slow(self, slot: int, reports: dict[int, NodeReport]) -> str:
        return check.slow(slot, reports, shares_all=self._device.type == "cpu")

    def _measured(self) -> NodeTimings:
        return preflight.figures(preflight.looks([self._device], self._settings.checkpoint_path))

    def _sum(self, pair: Pair, until_s: float) -> Sum:
        rank = pair.index(self._slot)
        if self.call(f"report/{pair[1 - rank]}", KeyOp.GET).outcome is KeyOutcome.DONE:  # this process came too late
            return Sum(0.0, check.UNMET)
        meeting = _Meeting(self, pair, rank, until_s)
        group = Group(
            *(self._device, rank, 2, meeting),
            name="the pre-flight",
            address=address_towards(self._settings.sched_host, self._settings.sched_port),
            timeout_s=PAIR_S,
            connect_timeout_s=PAIR_S,
            backend=self._settings.collective_backend,
        )
        try:
            group.form()
            return added_up(self._device, rank)
        except (CommunicationError, KeyValueError, RuntimeError) as error:
            why = (str(error).splitlines() or [""])[0]
            log.warn(f"pre-flight: slots {pair[0]} and {pair[1]} could not compute a sum: {why}")
            return Sum(0.0, check.SILENT if meeting.is_over else check.UNMET)
        finally:
            group.drop()
            with contextlib.suppress(KeyValueError):
                self.call(meeting.own_key, KeyOp.DELETE)

    # ---- the keys

    def _publish(self, report: NodeReport) -> None:
        self.call(f"report/{self._slot}", KeyOp.PUT, msgspec.msgpack.encode(report))

    def take(self, name: str, until_s: float, above: int = 0) -> KeyAnswer:
        """Wait for another node's value, of a version greater than ``above``."""
        return self.call(name, KeyOp.WAIT, b"", above, max(until_s - time.monotonic(), LAST_LOOK_S))

    def call(self, name: str, op: KeyOp, value: bytes = b"", version: int = 0, timeout_s: float = ROUND_S) -> KeyAnswer:
        """Call the scheduler for a key of the pre-flight."""
        ask = KeyAsk(op, f"samebits/preflight/{name}".encode(), value, version, is_durable=True)
        answer = self._agent.call_keys(ask, timeout_s, is_wait=op is KeyOp.WAIT)
        if answer.outcome is KeyOutcome.REFUSED:
            raise KeyValueError(f"the scheduler refused a key: {answer.text}")
        return answer


class _Meeting:
    """The exchange of addresses between the two nodes of a pair. Implements :class:`.Exchange`."""

    def __init__(self, part: _Check, pair: Pair, rank: int, until_s: float) -> None:
        self.is_over, self._part, self._until_s = False, part, until_s
        self._keys = [f"meet/{pair[0]}/{pair[1]}/{slot}" for slot in pair]
        self.own_key = self._keys[rank]

    def publish(self, blob: bytes) -> None:
        """Publish this node's address."""
        if self._part.call(self.own_key, KeyOp.COMPARE_AND_SET, blob).outcome is not KeyOutcome.DONE:
            raise KeyValueError("an earlier process in this slot has published its address")

    def wait(self) -> Sequence[bytes]:
        """Return both addresses."""
        blobs = [self._part.take(key, self._until_s).value for key in self._keys]
        self.is_over = True
        return blobs


def added_up(device: torch.device, rank: int) -> Sum:
    """Compute a sum with a known result in the default group of two ranks."""
    numbers = torch.arange(NUMBERS, dtype=torch.int64) % 1021
    own, expected = (numbers + rank).to(device, torch.float32), 2 * numbers + 1
    fastest_s = math.inf
    for _ in range(SUMS):
        value = own.clone()
        began_s = time.monotonic()
        dist.all_reduce(value)
        on_host = transfer.on_host(value)  # raises if the pair was broken, which does not make the sum wrong
        fastest_s = min(fastest_s, time.monotonic() - began_s)
        if not torch.equal(on_host.to(torch.int64), expected):
            return Sum(fastest_s, check.WRONG)
    return Sum(fastest_s)


def _decoded(slot: int, answer: KeyAnswer) -> NodeReport:
    try:
        return msgspec.msgpack.decode(answer.value, type=NodeReport)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise KeyValueError(f"the report of slot {slot} is invalid: {error}") from None
