"""A stand-in for the ``ray`` module, for tests of the command that starts and follows actors.

Its actors run nothing. A test decides what is ready: the placement group, host 0's place, and the exit status of host
0's command. Each ``ray.wait`` that finds nothing ready calls the test's next action in place of waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from samebits.hosts.ray_cluster import HostPlan


class RayError(Exception):
    """Stands for ``ray.exceptions.RayError``."""


@dataclass
class Ref:
    """The result of a call, which may not be there yet."""

    is_ready: Callable[[], bool]
    value: Callable[[], Any] = lambda: None


class FakeActor:
    """One actor, as its handle shows it.

    Attributes:
        plan: what it was constructed with.
        signals: the signals that were passed to it.
    """

    def __init__(self, ray: FakeRay, plan: HostPlan) -> None:
        self.plan, self.signals = plan, list[int]()
        answered = Ref(lambda: ray.is_placed)
        self.answer = SimpleNamespace(remote=lambda: answered)
        self.wait = SimpleNamespace(remote=lambda: Ref(lambda: ray.status is not None, lambda: ray.status))
        self.stop = SimpleNamespace(remote=self._stop)
        self._answered = answered

    def _stop(self, number: int) -> Ref:
        self.signals.append(number)
        return self._answered


@dataclass
class FakeRay:
    """The cluster, as a test sets it.

    Attributes:
        has_room: whether the placement group is ready.
        is_placed: whether host 0's actor answers calls.
        status: the exit status of host 0's command; None while it runs.
        actions: what happens next, each once, when the command waits in vain.
        actors: the named actors.
        ended: the actors that were killed, and then the group that was removed.
    """

    has_room: bool = True
    is_placed: bool = True
    status: int | None = 0
    actions: list[Callable[[], object]] = field(default_factory=list)
    actors: dict[str, FakeActor] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)

    @property
    def plans(self) -> list[HostPlan]:
        return [one.plan for one in self.actors.values()]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let ``import ray`` find this cluster."""
        ray, util = ModuleType("ray"), ModuleType("ray.util")
        strategies = ModuleType("ray.util.scheduling_strategies")
        vars(strategies)["PlacementGroupSchedulingStrategy"] = lambda *_, **options: options
        vars(util).update(
            placement_group=self._placement_group,
            get_placement_group=self._get_placement_group,
            remove_placement_group=self._remove,
        )
        vars(ray).update(
            util=util,
            exceptions=SimpleNamespace(RayError=RayError),
            init=lambda **_: None,
            nodes=lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}],
            remote=lambda _: SimpleNamespace(options=self._options),
            get_actor=self._get_actor,
            kill=self._kill,
            get=lambda ref: ref.value(),
            wait=self._wait,
        )
        for module in (ray, util, strategies):
            patch.setitem(sys.modules, module.__name__, module)

    def _options(self, name: str, **_: object) -> SimpleNamespace:
        def remote(plan: HostPlan) -> FakeActor:
            self.actors[name] = FakeActor(self, plan)
            return self.actors[name]

        return SimpleNamespace(remote=remote)

    def _get_actor(self, name: str, _namespace: str) -> FakeActor:
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        return self.actors[name]

    def _kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        assert no_restart
        self.ended.append(f"host {actor.plan.rank}")

    def _placement_group(self, bundles: Sequence[object], *, name: str, **_: object) -> SimpleNamespace:
        self.groups.add(name)
        return SimpleNamespace(name=name, ready=lambda: Ref(lambda: self.has_room))

    def _get_placement_group(self, name: str) -> SimpleNamespace:
        if name not in self.groups:
            raise ValueError(f"no group {name}")
        return SimpleNamespace(name=name)

    def _remove(self, group: SimpleNamespace) -> None:
        self.groups.remove(group.name)
        self.ended.append("the group")

    def _wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        ready = [one for one in refs if one.is_ready()]
        if not ready and timeout:
            assert self.actions, "the command waits for something that never comes"
            self.actions.pop(0)()
        return ready[:num_returns], [one for one in refs if one not in ready]
