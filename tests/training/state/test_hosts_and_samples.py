"""Two hundred jobs whose hosts come, go and fail at random: each epoch uses every sample once.

The driver's decisions, the reader of the script's lines and the sampler are real. The world between them is simulated:
a started process joins at a commit, or its host has just failed; one that is asked to leave does so at a later commit.
The script fails, prints nonsense, names a host that does not exist, and sometimes omits one; hosts are drained and
readmitted. Independent books record which hosts rest and in which order they were seen.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from samebits.errors import UsageError
from samebits.hosts.host_list import Host, Hosts, Resting, parse
from samebits.hosts.placement import Placement
from samebits.training.process import context
from samebits.training.state.data.sampler import ElasticSampler

SAMPLES, BATCH, MOST, LEAST = 211, 3, 8, 1
NAMES = "abcdef"
GHOST, FLAPS = "ghost", "f"
FIRST_REST_S, MOST_REST_S = 5.0, 40.0


@dataclass
class Rest:
    """The failures of a host, recorded independently of the driver."""

    failures: int = 0
    until: float = 0.0

    def failed(self, now: float) -> None:
        if now >= self.until:
            self.failures += 1
            self.until = now + min(MOST_REST_S, FIRST_REST_S * 2 ** (self.failures - 1))

    def worked(self, now: float) -> None:
        if now >= self.until + MOST_REST_S:
            self.failures = 0


@dataclass
class Job:
    """The members in order of arrival, each with its copy of the sampler."""

    draw: random.Random
    placement: Placement = field(default_factory=lambda: Placement(MOST, Resting(FIRST_REST_S, MOST_REST_S)))
    now: float = 0.0
    running: dict[str, str] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    arriving: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    samplers: dict[str, ElasticSampler] = field(default_factory=dict)
    there: dict[str, int] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    rests: dict[str, Rest] = field(default_factory=lambda: defaultdict(Rest))
    seen: list[str] = field(default_factory=list)  # hosts in the order in which they were first named
    answers: Counter[str] = field(default_factory=Counter)
    took: Counter[int] = field(default_factory=Counter)
    repeats: int = 0
    sizes: set[int] = field(default_factory=set)

    def script_answers(self) -> None:
        """Process the script's output; if it failed or printed nonsense, keep the previous hosts."""
        kind = self.draw.choice(("new", "same", "same", "fails", "nonsense", "lies", "flaps"))
        if not self.there:
            kind = "new"
        self.answers[kind] += 1
        if kind == "fails":
            return
        there = dict(self.there)
        if kind == "new":
            there = {name: self.draw.randint(0, 3) for name in NAMES if self.draw.random() < 0.6} or {"a": 1}
        elif kind == "lies":
            there[GHOST] = 2
        elif kind == "flaps" and there.pop(FLAPS, None) is None:
            there[FLAPS] = 2
        shown = list(there)
        self.draw.shuffle(shown)  # a script may list hosts in any order
        text = "\n".join(f"{name}:{there[name]}" for name in shown)
        try:
            found = parse(text + ("\nConnection refused" if kind == "nonsense" else ""))
        except UsageError:
            return
        self.drained = frozenset(name for name in there if self.draw.random() < 0.1)
        self.there = {host.name: host.slots for host in found if host.name not in self.drained}
        self.seen += [host.name for host in found if host.name not in {*self.seen, *self.drained}]
        self.placement.seen(found, self.drained)

    def drive(self) -> None:
        wish = self.draw.choice((None, None, None, self.draw.randint(1, MOST)))
        for host in set(self.running.values()):
            self.rests[host].worked(self.now)
        orders = self.placement.next(self.running, self.leaving, self.now, wish=wish)
        for _, host in orders.start:
            assert self.now >= self.rests[host].until, f"{host} rests"
            assert host in self.there, f"{host} does not exist, or is drained"
        places = [self.seen.index(host) for _, host in orders.start]
        assert places == sorted(places), "the host seen first is filled first"
        for node in orders.drain:
            self.leaving[node] = self.running.pop(node)
        for number, host in orders.start:
            assert number not in self.running and number not in self.leaving, "two would share a seat"
            self.running[number] = host
            self.arriving.append(number)
        assert len(self.running) + len(self.leaving) <= MOST
        for host, count in Counter(self.running.values()).items():
            assert count <= self.there.get(host, 0), "more than its slots"
        assert {node for reason in orders.reasons for node in reason.drain} == set(orders.drain), "each with its reason"

    def die(self) -> None:
        """End a process by an external cause: before it has joined, or midway."""
        for node in list(self.running):
            has_joined = node not in self.arriving
            if self.running[node] != GHOST and self.draw.random() >= (0.02 if has_joined else 0.15):
                continue
            reason = self.placement.died(node, self.running[node], self.now, has_joined=has_joined)
            if reason is not None:
                self.rests[self.running.pop(node)].failed(self.now)
            self._is_gone(node)
            if reason is None:
                self.arriving.append(node)  # the supervisor restarts it on the same host

    def regroup(self) -> None:
        """Regroup at a commit: leaving members leave, newcomers join at the end, and all get the state."""
        for node in [node for node in self.leaving if self.draw.random() < 0.7]:
            del self.leaving[node]
            self._is_gone(node)
        before = [node for node in self.members if node in self.running or node in self.leaving]
        able = [node for node in self.arriving if self.running.get(node, GHOST) != GHOST]
        joined = [node for node in able if self.draw.random() < 0.8]
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
            self.last = self.samplers.pop(node)  # a durable point outlives all processes
        if node in self.arriving:
            self.arriving.remove(node)

    def train(self, monkeypatch: pytest.MonkeyPatch) -> bool:
        """Train a few steps in the current world; return whether the epoch is complete. All ranks agree then."""
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


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play one job's events; raise :class:`AssertionError` if a promise is broken."""
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
            assert set(job.took) == set(range(SAMPLES)), "a sample was skipped"
            assert job.took.total() - SAMPLES <= job.repeats, "a sample was repeated beyond the padding of a last round"
            epochs += 1
            for sampler in (*job.samplers.values(), job.last):
                sampler.set_epoch(epochs)
            job.took.clear()
            job.repeats = 0
    assert epochs > 0 and len(job.sizes) > 1 and len(job.answers) == 6, "a story without events proves nothing"


@pytest.mark.parametrize("seed", range(200))
def test_no_sample_is_repeated_or_lost_and_old_members_keep_their_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(seed, monkeypatch)


def _never_rests(hosts: Hosts, now_s: float) -> tuple[Host, ...]:
    return tuple(one.host for one in hosts._known.values() if one.is_there)


def _last_first(hosts: Hosts, now_s: float) -> tuple[Host, ...]:
    found = (one.host for one in reversed(hosts._known.values()) if one.is_there and now_s >= one.rests_until)
    return tuple(found)


@pytest.mark.parametrize(("usable", "broken"), [(_never_rests, " rests"), (_last_first, "is filled first")])
def test_broken_driver_is_caught(usable: Callable[..., object], broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hosts, "usable", usable)
    with pytest.raises(AssertionError, match=broken):
        for seed in range(10):
            play(seed, monkeypatch)
