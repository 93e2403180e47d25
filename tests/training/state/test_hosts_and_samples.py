"""Two hundred jobs whose hosts come, go and fail at random: each epoch takes every sample once, wherever ranks are.

The driver's judgement and the sampler are the real ones. The world between them is a few lines: whoever is started
joins at a commit, or its host has just failed; whoever is to leave does so at a commit, a little later.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from runtime.core.hosts import Host, Resting
from runtime.core.placement import Placement
from runtime.training.process import context
from runtime.training.state.sampler import ElasticSampler

SAMPLES, BATCH, MOST, LEAST = 211, 3, 8, 1
NAMES = "abcdef"


@dataclass
class Job:
    """What a driver and a scheduler hold of it: members in the order they came, and each one's copy of the sampler."""

    draw: random.Random
    placement: Placement = field(default_factory=lambda: Placement(MOST, Resting(5, 40)))
    now: float = 0.0
    running: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    samplers: dict[str, ElasticSampler] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    took: Counter[int] = field(default_factory=Counter)
    repeats: int = 0
    sizes: set[int] = field(default_factory=set)

    def script_answers(self) -> None:
        if not self.there or self.draw.random() < 0.3:
            self.there = {name: self.draw.randint(0, 3) for name in NAMES if self.draw.random() < 0.6} or {"a": 1}
        shown = list(self.there)
        self.draw.shuffle(shown)  # a script owes nobody an order
        self.placement.seen(Host(name, self.there[name]) for name in shown)

    def drive(self) -> None:
        wish = self.draw.choice((None, None, None, self.draw.randint(1, MOST)))
        orders = self.placement.next(self.running, self.leaving, self.now, wish=wish)
        for node in orders.drain:
            self.leaving[node] = self.running.pop(node)
        for number, host in orders.start:
            assert number not in self.running and number not in self.leaving, "two would have one seat"
            self.running[number] = host
            self.arriving.append(number)
        assert len(self.running) + len(self.leaving) <= MOST
        for host, count in Counter(self.running.values()).items():
            assert count <= self.there.get(host, 0), "more than its slots"
        assert {node for reason in orders.reasons for node in reason.drain} == set(orders.drain), "each with its reason"

    def die(self) -> None:
        """A process ends by what comes from outside: before it has joined, or in the middle."""
        for node in list(self.running):
            has_joined = node not in self.arriving
            if self.draw.random() >= (0.02 if has_joined else 0.15):
                continue
            reason = self.placement.died(node, self.running[node], self.now, has_joined=has_joined)
            if reason is not None:
                del self.running[node]
            self._is_gone(node)
            if reason is None:
                self.arriving.append(node)  # the supervisor starts it again where it was

    def regroup(self) -> None:
        """At a commit: whoever is to leave leaves, whoever has come joins behind; each has the state then."""
        for node in [node for node in self.leaving if self.draw.random() < 0.7]:
            del self.leaving[node]
            self._is_gone(node)
        before = [node for node in self.members if node in self.running or node in self.leaving]
        joined = [node for node in self.arriving if node in self.running and self.draw.random() < 0.8]
        self.members = before + joined
        self.arriving = [node for node in self.arriving if node not in joined]
        if not self.members:
            return
        position = (self.samplers[before[0]] if before else self.last).state_dict()
        for node in self.members:
            self.samplers[node] = ElasticSampler(range(SAMPLES), seed=3)
            self.samplers[node].load_state_dict(position)

    def _is_gone(self, node: str) -> None:
        if node in self.members:
            self.members.remove(node)
            self.last = self.samplers.pop(node)  # a durable point outlives everybody
        if node in self.arriving:
            self.arriving.remove(node)

    def train(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """A few steps of the present world; whether the epoch is through. All ranks stand at one place then."""
        size = len(self.members)
        if not size:
            return False
        self.sizes.add(size)
        monkeypatch.setattr(context, "get_world_size", lambda: size)
        shares = []
        for rank, node in enumerate(self.members):
            monkeypatch.setattr(context, "get_rank", lambda rank=rank: rank)
            shares.append(list(self.samplers[node]))
        assert len({len(share) for share in shares}) == 1
        batches = -(-len(shares[0]) // BATCH)
        steps = self.draw.randint(0, batches)
        for node, share in zip(self.members, shares, strict=True):
            for step in range(steps):
                batch = share[step * BATCH : (step + 1) * BATCH]
                self.took.update(batch)
                self.samplers[node].record_batch(step, BATCH)
        if steps == batches:
            self.repeats += size - 1
        assert len({str(self.samplers[node].state_dict()) for node in self.members}) == 1, "the ranks differ"
        self.last = self.samplers[self.members[0]]
        return self.last.consumed == SAMPLES

    def __post_init__(self) -> None:
        self.last = ElasticSampler(range(SAMPLES), seed=3)


@pytest.mark.parametrize("seed", range(200))
def test_no_sample_is_repeated_or_lost_and_old_members_keep_their_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(random.Random(seed))
    epochs = 0
    for _ in range(60):
        job.now += job.draw.uniform(0, 8)
        job.script_answers()
        job.drive()
        job.die()
        before = list(job.members)
        job.regroup()
        stayed = [node for node in before if node in job.members]
        assert job.members[: len(stayed)] == stayed, "an old member's place went to a newcomer"
        if job.train(monkeypatch):
            assert set(job.took) == set(range(SAMPLES)), "a sample was left out"
            assert job.took.total() - SAMPLES <= job.repeats, "a sample was repeated beyond what fills up a last round"
            epochs += 1
            for sampler in (*job.samplers.values(), job.last):
                sampler.set_epoch(epochs)
            job.took.clear()
            job.repeats = 0
    assert epochs > 0 and len(job.sizes) > 1, "a story in which nothing happens proves nothing"
