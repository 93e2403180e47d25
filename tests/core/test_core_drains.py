"""Automatic drains over random histories: one unhealthy member at a time, only for a warm, healthy spare.

The books are kept beside the core, from the messages it receives and sends. Broken builds show that the test can fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest

from samebits.core.messages import Activity, Depart, Process, ReportEnvelope
from samebits.core.reports import Ailment, HealthReport, Sign
from samebits.core.scheduler import SchedulerCore
from samebits.core.watch.health_judge import HostHealth
from tests.core.house import House, policy

DISK = Ailment(Sign.DISK, "/ckpt", 0.95, 0.9, drains=True)
CPU = Ailment(Sign.CPU, "", 1.0, 0.9, drains=False)
SEEDS, STEPS = 150, 40


class Books:
    """One random history and the facts known about it."""

    def __init__(self, seed: int, core_type: type[SchedulerCore]) -> None:
        self.draw = random.Random(seed)
        self.house = House(policy(3, spare_num=2, cool_down_s=0.0), core_type=core_type)
        self.wants: set[str] = set()
        self.warm: set[str] = set()
        self.leaving = ""
        self.asked = 0
        for node in "012":
            self.house.register(node, process=Process(f"host-{node}", 100 + int(node), 1, "cpu"))
        self.house.train()

    @property
    def members(self) -> list[str]:
        return [seat.node for seat in self.house.core._ledger.live_seats()]

    def run(self) -> str:
        """Return what is wrong, or an empty string."""
        for _ in range(STEPS):
            before = len(self._departs())
            getattr(self, self.draw.choice(["feel", "feel", "feel", "come", "warm_up", "go", "pass_time"]))()
            for said in self._departs()[before:]:
                if problem := self.problem_with(said):
                    return problem
        return ""

    def _departs(self) -> list[str]:
        state = self.house.core.state
        found = [
            (session, one)
            for session, messages in self.house.sent.items()
            for one in messages
            if isinstance(one, Depart)
        ]
        nodes = {seat.session: seat.node for seat in state.seats.values()}
        self._all = getattr(self, "_all", [])
        self._all += [nodes.get(session, "?") for session, _ in found]
        for messages in self.house.sent.values():
            messages[:] = [one for one in messages if not isinstance(one, Depart)]
        return self._all

    def problem_with(self, node: str) -> str:
        self.asked += 1
        if node == self.leaving and node in self.wants:
            return ""  # again
        if self.leaving:
            return f"{node} is asked while {self.leaving} is on its way out"
        if node not in self.wants:
            return f"{node} is asked, and is well"
        if not self.warm - self.wants:
            return f"{node} is asked, and no well spare is warm"
        self.leaving = node
        return ""

    # ---- possible events

    def feel(self) -> None:
        node = self.draw.choice([*self.members, *self.house.core.state.spares])
        ailments = self.draw.choice([(), (DISK,), (DISK, CPU), (CPU,)])
        (self.wants.add if DISK in ailments else self.wants.discard)(node)
        credential = self.house.credential(node)
        self.house.receive(credential.session, ReportEnvelope(credential, HealthReport(ailments)))
        self.house.tick(0.01)

    def come(self) -> None:
        if len(self.house.core.state.spares) < 2:
            node = str(3 + self.draw.randrange(1000))
            self.house.register(node, process=Process(f"host-{node}", 2000, 1, "cpu"))

    def warm_up(self) -> None:
        for node in self.house.core.state.spares:
            self.house.beat(node, Activity.WAITING)
            self.warm.add(node)
        self.house.tick(0.01)

    def go(self) -> None:
        """Let the node that was asked leave, and form the next generation if possible."""
        if not self.leaving:
            return
        self.house.leave(self.leaving, text="it was asked to (SIGTERM)")
        self.wants.discard(self.leaving)
        self.leaving = ""
        self.house.tick(0.01)
        self.warm &= set(self.house.core.state.spares)
        if len(self.members) == 3:
            self.house.train()
            self.house.tick(0.01)

    def pass_time(self) -> None:
        for node in [*self.members, *self.house.core.state.spares]:
            generation = self.house.core.state.generation_number
            activity = (
                Activity.TRAINING
                if node in self.members
                else Activity.WAITING
                if node in self.warm
                else Activity.SEATED
            )
            self.house.beat(node, activity, generation=generation if node in self.members else 0)
        self.house.tick(1.0)


def build(**changed: Callable[..., object]) -> type[SchedulerCore]:
    class Changed(SchedulerCore):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)  # type: ignore[arg-type]
            self._host_health = type("Broken", (HostHealth,), changed)(self._ledger)

    return Changed


def test_one_node_leaves_at_a_time_and_only_for_a_warm_spare() -> None:
    asked = 0
    for seed in range(SEEDS):
        books = Books(seed, SchedulerCore)
        assert books.run() == "", f"seed {seed}"
        asked += books.asked
    assert asked > SEEDS / 2, "otherwise nothing was shown"


def _two_at_once(hosts: HostHealth, slow: Mapping[str, str]) -> None:
    hosts._leaving = ""
    HostHealth.judge(hosts, slow)


def _a_cold_one_will_do(hosts: HostHealth, activity: Activity, node: str) -> bool:
    return True


def _once_unwell_always_unwell(hosts: HostHealth, node: str) -> None:
    return None


@pytest.mark.parametrize(
    "broken",
    [
        build(judge=_two_at_once),
        build(_is=_a_cold_one_will_do),
        build(_drop=_once_unwell_always_unwell),
    ],
    ids=["two at once", "a cold spare", "never well again"],
)
def test_broken_build_is_caught(broken: type[SchedulerCore]) -> None:
    assert any(Books(seed, broken).run() for seed in range(SEEDS))
