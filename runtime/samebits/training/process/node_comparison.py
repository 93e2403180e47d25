"""Compare the nodes before the first generation: their times for equal work, and sums that pairs compute.

The nodes exchange their results through the scheduler's keys, and ``core.watch.node_check`` decides which nodes are
bad. The nodes with the lowest slots read all results. Each of them decides which nodes to pair next, and the first to
write its plan decides for all, so no single node is indispensable and all nodes follow the same plan. Each wait is
bounded, and each node deletes the keys that it wrote. A node that still waits for a deleted key finds the verdict,
which is kept.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from samebits.config import Settings
from samebits.core.agent.agent_events import KeyAsk
from samebits.core.messages import Admitted, KeyAnswer, KeyOp, KeyOutcome
from samebits.core.replacement_names import number_of, root_of
from samebits.core.watch import node_check as check
from samebits.core.watch.node_check import NodeCheckPlan, NodeReport, NodeTimings, Pair, Sum
from samebits.errors import CommunicationError, KeyValueError, KeyValueTimeoutError, PreflightError
from samebits.printable import IN_LOGS, shortened
from samebits.service import log
from samebits.service.agent import Agent
from samebits.service.scheduler_address import address_towards
from samebits.store.process_identity import machine_id
from samebits.training.group import transfer
from samebits.training.group.group import Group
from samebits.training.process import preflight

READERS = 3
"""Number of nodes that read all figures. One would suffice, but any of them may be lost."""
WAIT_S = 60.0
"""Seconds to wait for a node's figures; a node without figures by then takes no part."""
PAIR_S = 20.0
LOOK_S, MOST_LOOK_S = 1.0, 8.0
"""First and longest interval at which a node that waits for a key, which may be deleted, checks for the verdict."""
NUMBERS = 1 << 20
"""Count of numbers that a pair adds up, in float32; they are integers, so their sum is exact."""
SUMS = 8
MOST_NODES = 4096
_DIED = NodeCheckPlan(is_last=True, said=("the nodes were not compared: their scheduler died meanwhile",))
_FIX = "Fix: start this node on another host, or without preflight in HEALTH"
_Value = TypeVar("_Value")


def compare(settings: Settings, agent: Agent, admitted: Admitted, device: torch.device, figures: NodeTimings) -> None:
    """Compare this node with the others before the job's first generation, and give up its seat if it is bad.

    Raises:
        PreflightError: this node is slow or computes wrong results, or is in a pair of which either node may do so.
    """
    slot = _slot_of(admitted, agent.node)
    if slot is None or admitted.world_size < 2:
        return
    if admitted.world_size > MOST_NODES:
        log.say(f"pre-flight: with more than {MOST_NODES} nodes, each checks only itself")
        return
    part = _Check(settings, agent, slot, admitted.world_size, device)
    try:
        last = part.verdict()
        if last is None and admitted.generation == 0 and admitted.slot is not None:
            if admitted.incarnation > 1:
                log.say("pre-flight: not compared with the other nodes, because this node was restarted meanwhile")
                return
            agent.wait_for_round()
            last = part.run(figures)
    except KeyValueError as error:
        log.warn(f"the nodes were not compared before the start: {error}")
        return
    if last is not None and last.bad.get(slot) == machine_id():
        why = last.why.get(slot, f"it is slow or wrong, one of {len(last.bad)} such nodes")
        why = f"{shortened(why, check.MOST_CHARS, IN_LOGS)}. {_FIX}"
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
        self._written: set[str] = set()
        self._term: int | None = None  # of the scheduler that stores the keys; None: any scheduler may answer

    def verdict(self) -> NodeCheckPlan | None:
        """Return the verdict of an earlier process or of the other nodes, or None."""
        answer = self._call("last", KeyOp.GET)
        return self._plan("last", answer) if answer.outcome is KeyOutcome.DONE else None

    def run(self, figures: NodeTimings) -> NodeCheckPlan:
        """Take part until there is a verdict, return it, and delete this node's other keys."""
        self._term = self._call("last", KeyOp.GET).term
        try:
            try:
                last = self._last_plan(figures)
            except _OverError as over:
                last = over.plan
            self._term = None
            if self.put("last", last, KeyOp.COMPARE_AND_SET) is KeyOutcome.DONE and last.said:
                self._agent.report_anomaly(0, f"pre-flight: {'; '.join(last.said)}")
            return self.verdict() or last
        finally:
            self._term = None
            with contextlib.suppress(KeyValueError):
                for name in sorted(self._written):
                    self._call(name, KeyOp.DELETE)

    def _last_plan(self, figures: NodeTimings) -> NodeCheckPlan:
        self.put(f"alone/{self._slot}", NodeReport(f"worker {self._agent.node}", machine_id(), figures))
        judge = None
        if self._slot < READERS:
            slots = range(self._world_size)
            judge = check.Judge(self._reports("alone", slots), slots, shares_all=self._device.type == "cpu")
        for number in range(check.MOST_PLANS):
            if judge is not None:
                self.put(f"plan{number}", judge.plan(), KeyOp.COMPARE_AND_SET)
            plan = self._plan(f"plan{number}", self._wait(f"plan{number}", time.monotonic() + 3 * WAIT_S))
            if plan.is_last:
                return plan
            pair = next((one for one in plan.pairs if self._slot in one), None)
            found = Sum(0.0) if pair is None else self._sum(pair, number)
            measured = self._measured() if self._slot in plan.again else NodeTimings(0, 0, 0)
            if self._slot in plan.asked:
                self.put(f"round{number}/{self._slot}", NodeReport(figures=measured, sum=found))
            if judge is not None:
                judge.take(plan, self._reports(f"round{number}", plan.asked))
        raise KeyValueError(f"{check.MOST_PLANS} rounds led to no verdict")

    def _reports(self, part: str, slots: Iterable[int]) -> dict[int, NodeReport]:
        """Return these nodes' reports, except those that are late or invalid."""
        found, until_s = {}, time.monotonic() + WAIT_S
        for slot in slots:
            with contextlib.suppress(KeyValueError):
                found[slot] = self.take(f"{part}/{slot}", NodeReport, until_s)
        return found

    def _measured(self) -> NodeTimings:
        return preflight.figures(preflight.looks([self._device], self._settings.checkpoint_path))

    def _sum(self, pair: Pair, number: int) -> Sum:
        rank, meeting = pair.index(self._slot), _Meeting(self, f"meet{number}", pair, self._slot)
        address = address_towards(self._settings.sched_host, self._settings.sched_port)
        group = Group(
            *(self._device, rank, 2, meeting),
            name="the pre-flight",
            address=address,
            timeout_s=PAIR_S,
            connect_timeout_s=PAIR_S,
            backend=self._settings.collective_backend,
        )
        try:
            group.form()
            return added_up(self._device, rank)
        except (CommunicationError, KeyValueTimeoutError, RuntimeError) as error:
            why = (str(error).splitlines() or [""])[0]
            log.warn(f"pre-flight: slots {pair[0]} and {pair[1]} could not compute a sum: {why}")
            return Sum(0.0, check.SILENT if meeting.is_over else check.UNMET)
        finally:
            group.drop()

    # ---- the keys

    def put(self, name: str, value: NodeCheckPlan | NodeReport | bytes, op: KeyOp = KeyOp.PUT) -> KeyOutcome:
        """Write a value; with COMPARE_AND_SET, only if no other node has written one."""
        if name != "last":
            self._written.add(name)
        return self._call(name, op, msgspec.msgpack.encode(value), is_durable=name == "last").outcome

    def take(self, name: str, kind: type[_Value], until_s: float) -> _Value:
        """Wait for and return another node's value."""
        return _decoded(name, self._wait(name, until_s), kind)

    def _plan(self, name: str, answer: KeyAnswer) -> NodeCheckPlan:
        plan = _decoded(name, answer, NodeCheckPlan)
        if not plan.is_sound(self._world_size):
            raise KeyValueError(f"the value that another node wrote under {name} names nodes that do not exist")
        return plan

    def _wait(self, name: str, until_s: float) -> KeyAnswer:
        look_s = LOOK_S
        while (left_s := until_s - time.monotonic()) > 0:
            with contextlib.suppress(KeyValueTimeoutError):
                return self._call(name, KeyOp.WAIT, timeout_s=min(left_s, look_s))
            look_s = min(2 * look_s, MOST_LOOK_S)
            if (last := self.verdict()) is not None:
                raise _OverError(last)
        answer = self._call(name, KeyOp.GET)
        if answer.outcome is not KeyOutcome.DONE:
            raise KeyValueTimeoutError(f"no other node has written {name} in time")
        return answer

    def _call(
        self, name: str, op: KeyOp, value: bytes = b"", *, timeout_s: float = WAIT_S, is_durable: bool = False
    ) -> KeyAnswer:
        ask = KeyAsk(op, f"samebits/preflight/{name}".encode(), value, is_durable=is_durable)
        answer = self._agent.call_keys(ask, timeout_s, is_wait=op is KeyOp.WAIT)
        if self._term not in (None, answer.term):  # keys are lost with a term, so a missing report proves nothing
            raise _OverError(_DIED)
        if answer.outcome is KeyOutcome.REFUSED:
            raise KeyValueError(f"the scheduler refused a key: {answer.text}")
        return answer


class _OverError(Exception):
    """While this node waited for a key, the verdict was written, or the scheduler died with the keys."""

    def __init__(self, plan: NodeCheckPlan) -> None:
        super().__init__()
        self.plan = plan


class _Meeting:
    """The exchange of addresses between the two nodes of a pair. Implements :class:`.Exchange`."""

    def __init__(self, part: _Check, name: str, pair: Pair, slot: int) -> None:
        self.is_over = False
        self._part, self._name, self._pair, self._slot = part, name, pair, slot

    def publish(self, blob: bytes) -> None:
        """Publish this node's address."""
        self._part.put(f"{self._name}/{self._slot}", blob)

    def wait(self) -> Sequence[bytes]:
        """Return both addresses."""
        until_s = time.monotonic() + PAIR_S
        blobs = [self._part.take(f"{self._name}/{slot}", bytes, until_s) for slot in self._pair]
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


def _decoded(name: str, answer: KeyAnswer, kind: type[_Value]) -> _Value:
    try:
        return msgspec.msgpack.decode(answer.value, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise KeyValueError(f"another node wrote something else under {name}: {error}") from None
