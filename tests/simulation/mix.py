"""A run's parameters: sizes, timings and probabilities, drawn from the seed, different for every run.

A run with every fault at once finds less than many runs with a few each (swarm testing: Groce et al., ISSTA 2012), so
each kind is switched off in more than half of them.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from samebits.core.messages import Sharding
from tests.simulation.quorum import QuorumFaults


class Naming(enum.Enum):
    """How the operator chooses NODE_ID."""

    SLOTS = "digits"
    NAMES = "names"
    FRESH = "a new name at every start"


# How often each kind of fault usually happens in a run that has it, in seconds.
USUALLY_EVERY_S = {
    "worker killed": 7.0,
    "several killed at once": 20.0,
    "scheduler killed": 10.0,
    "everything killed": 45.0,
    "scheduler crash-loops": 30.0,
    "power lost": 25.0,
    "second scheduler started": 20.0,
    "recovery path wiped": 40.0,
    "worker stopped": 7.0,
    "scheduler stopped": 10.0,
    "connection broken": 4.0,
    "partition": 12.0,
    "duplicate started": 15.0,
    "stranger started": 15.0,
    "message forged": 5.0,
    "exception raised": 15.0,
    "worker terminated": 20.0,
    "stop asked for": 45.0,
    "disk lost": 20.0,
    "node added": 15.0,
}

# The same for faults of only some worlds, each for its own reason (``Mix.drawn_later``).
HANGS_EVERY_S = {"main thread held": 3.0, "collective held": 20.0, "main thread pauses": 3.0}
DRAINS_EVERY_S = {"node drained": 12.0}
JOINT_STOPS_EVERY_S = {"joint stop asked for": 20.0}
AILMENTS_EVERY_S = {"host unwell": 8.0}
REPLACEMENTS_EVERY_S = {"replacement forged": 15.0}
LOST_DISKS_EVERY_S = {"every disk lost": 25.0}
RELAYS_EVERY_S = {"relay lost": 6.0}
LATER_EVERY_S = (
    HANGS_EVERY_S
    | DRAINS_EVERY_S
    | AILMENTS_EVERY_S
    | REPLACEMENTS_EVERY_S
    | LOST_DISKS_EVERY_S
    | JOINT_STOPS_EVERY_S
    | RELAYS_EVERY_S
)

P_REPLACES = 0.4
"""Share of runs in which a launcher supervises: dead processes are replaced by new nodes."""
P_ODD_RANK = 0.15
"""Share of runs in which a rank's state becomes different."""
QUIETER = 0.2
P_HANGS, P_DRAINS, P_AILMENTS, P_KEYS, P_LOST_DISKS, P_JOINT_STOPS = 0.35, 0.3, 0.3, 0.3, 0.2, 0.2
P_RELAYS = 0.2
P_SHARDED = 0.3
P_SHARD_GROUPS = 0.5
"""Share of elastic worlds that shrink by whole shard groups."""
P_QUORUM = 0.4
"""Share of runs whose journal is in an etcd."""


SIZES = {"world_size", "min_world_size", "max_world_size"}


@dataclass(frozen=True, slots=True)
class Mix:
    """One run's world. Durations in seconds of true time."""

    world_size: int
    naming: Naming
    cool_down_s: float
    topo_timeout_s: float
    chaos_s: float
    quiet_start_s: float  # before the first fault of a process
    target_step: int
    save_every: int
    step_s: float
    saves_s: float
    prepares_s: float
    keep: int
    has_own_parts: bool
    breaks_sockets: bool  # a rank that leaves a collective tells its neighbours so
    addresses_early: float  # share of the processes that bring their address into the round
    is_ordered: bool
    has_stragglers: bool
    p_drop: float
    p_duplicate: float
    p_slow: float
    slow_s: float
    fsync_s: float
    p_torn: float  # how often a process dies at its disk or between two messages
    has_disk_errors: bool
    compact_bytes: int
    rebuilds: bool  # whether a lost journal may be rebuilt from the workers; drawn later
    p_echo: float
    scheduler_rate: float  # seconds of its clock in one true second
    clock_spread: float  # relative error of the workers' clocks
    sweep_s: float  # how often the operator checks
    rates_hz: dict[str, float]  # fault → events per second
    reset_limit: int
    min_world_size: int
    max_world_size: int
    spare_num: int
    reconnect_grace_s: float
    start_grace_s: float
    shrink_grace_s: float
    has_memory: bool  # live processes remember their last commit, and examine their disk only when asked
    commit_every: int
    p_dirty: float  # how often a failure finds a process between its step and its commit
    replaces: bool = False  # a launcher starts another node for one that died; drawn later
    launched: bool = False  # a launcher chose the job's id and names it to each process; drawn later
    has_odd_rank: bool = False  # at some time a rank's state becomes different; drawn later
    step_timeout_s: float | None = None  # the step timeout; None: learned
    ends_stuck: bool = True  # HANG=end
    sharding: Sharding | None = None  # drawn later; an elastic world has one that shrinks by shard groups
    calls_every_s: float = 0.0  # how often a process calls the scheduler's keys; 0: never
    quorum: QuorumFaults | None = None  # of the etcd that holds the journal; drawn later

    @property
    def most_nodes(self) -> int:
        """Return how many nodes the job has room for."""
        return self.max_world_size + self.spare_num

    def drawn_later(self, random_of: Callable[[str], random.Random]) -> Mix:
        """Return the same with later additions, each with its own random numbers so that no earlier draw changes."""
        rates_hz = dict(self.rates_hz)

        def has(what: str, share: float, every_s: Mapping[str, float]) -> bool:
            chance = random_of(what)
            if chance.random() >= share:
                return False
            rates_hz.update({kind: chance.choice((1.0, 0.3)) / usually_s for kind, usually_s in every_s.items()})
            return True

        has_odd_rank = random_of("odd rank").random() < P_ODD_RANK
        replaces = has("replaces", P_REPLACES, REPLACEMENTS_EVERY_S)
        if has("hangs", P_HANGS, HANGS_EVERY_S) and random_of("quiet").random() < 0.5:  # otherwise few would train
            rates_hz.update({kind: QUIETER * rate_hz for kind, rate_hz in self.rates_hz.items()})
        has("drains", P_DRAINS, DRAINS_EVERY_S)
        has("ailments", P_AILMENTS, AILMENTS_EVERY_S)
        has("lost disks", P_LOST_DISKS, LOST_DISKS_EVERY_S)
        has("joint stops", P_JOINT_STOPS, JOINT_STOPS_EVERY_S)
        has("relays", P_RELAYS, RELAYS_EVERY_S)
        watch, keys, quorum = random_of("watch"), random_of("keys"), random_of("quorum")
        return replace(
            self,
            rebuilds=random_of("rebuilds").random() < 0.5,
            has_odd_rank=has_odd_rank,
            replaces=replaces,
            launched=random_of("launched").random() < 0.5,
            step_timeout_s=watch.choice((None, 4.0, 4.0, 4.0, 8.0)),
            ends_stuck=watch.random() < 0.9,
            sharding=self._draw_sharding(random_of("sharding")),
            calls_every_s=keys.choice((2.0, 5.0)) if keys.random() < P_KEYS else 0.0,
            quorum=QuorumFaults.drawn(quorum) if quorum.random() < P_QUORUM else None,
            rates_hz=rates_hz,
        )

    def changed(self, changes: Mapping[str, Any]) -> Mix:
        """The same but for these values; a mesh that does not fit them is left out."""
        mix, is_chosen = replace(self, **changes), "sharding" in changes or not changes.keys() & SIZES
        if mix.sharding is None:
            return mix
        fits = math.prod(mix.sharding.sizes) == mix.max_world_size and is_chosen
        if mix.sharding.shrinks is not None and fits and mix.min_world_size < mix.max_world_size:
            groups = max(1, mix.min_world_size // mix.sharding.group_size)
            least = groups * mix.sharding.group_size
            return replace(mix, world_size=mix.max_world_size, min_world_size=least)
        is_fixed = mix.min_world_size == mix.max_world_size == mix.world_size and mix.sharding.shrinks is None
        return mix if is_fixed and math.prod(mix.sharding.sizes) == mix.world_size else replace(mix, sharding=None)

    def _draw_sharding(self, rng: random.Random) -> Sharding | None:
        if self.min_world_size != self.max_world_size:
            return self._draw_shard_groups(rng)
        if rng.random() >= P_SHARDED:
            return None
        replicas = rng.choice([one for one in range(1, self.world_size + 1) if self.world_size % one == 0])
        outer = Sharding((replicas, self.world_size // replicas), (True, False))
        return rng.choice((outer, Sharding(outer.sizes[::-1], (False, True))))

    def _draw_shard_groups(self, rng: random.Random) -> Sharding | None:
        most = self.max_world_size
        groups = [one for one in range(2, most + 1) if most % one == 0]
        if rng.random() >= P_SHARD_GROUPS or not groups:
            return None
        sizes = (count := rng.choice(groups), most // count)
        return rng.choice((Sharding(sizes, (True, False), 0), Sharding(sizes[::-1], (False, True), 1)))

    @classmethod
    def draw(cls, rng: random.Random) -> Mix:
        """Return a mix for this seed."""
        quiet = rng.random() < 0.4  # connections as good as TCP's, so that only processes fail
        scale = rng.choice((0.3, 1.0, 1.0, 2.0))
        chaos_s = rng.choice((10.0, 10.0, 25.0, 25.0, 25.0, 60.0, 110.0)) * rng.uniform(0.7, 1.3)
        step_s = rng.choice((0.3, 1.0))
        clock_spread = rng.choice((0.0, 0.0, 1e-4, 0.05, 0.3))
        world_size, is_elastic = rng.choice((1, 2, 2, 3, 3, 3, 4, 5, 8)), rng.random() < 0.4
        return cls(
            world_size=world_size,
            min_world_size=rng.randint(1, world_size) if is_elastic else world_size,
            max_world_size=world_size + rng.choice((0, 0, 1, 2)) if is_elastic else world_size,
            spare_num=rng.choice((0, 0, 1, 2)),
            reset_limit=rng.choice((0, 0, 0, 0, 3)),
            reconnect_grace_s=rng.choice((0.0, 0.5, 0.5, 3.0, 30.0)),
            start_grace_s=rng.choice((0.0, 3.0, 20.0)),
            shrink_grace_s=rng.choice((0.0, 2.0, 10.0)),
            has_memory=rng.random() < 0.6,
            commit_every=rng.choice((1, 1, 3)),
            p_dirty=rng.choice((0.0, 0.1, 0.5)),
            naming=rng.choice((Naming.SLOTS, Naming.SLOTS, Naming.NAMES, Naming.FRESH)),
            cool_down_s=rng.choice((0.0, 1.0, 1.0, 5.0, 30.0)),
            topo_timeout_s=rng.choice((60.0, 150.0)),
            chaos_s=chaos_s,
            quiet_start_s=rng.choice((0.0, 0.0, 8.0)),
            target_step=3 + int(chaos_s * rng.choice((0.1, 0.4, 0.7)) / step_s),
            save_every=rng.choice((1, 3, 5, 10)),
            step_s=step_s,
            saves_s=rng.choice((0.01, 0.3, 3.0)),
            prepares_s=rng.choice((0.1, 1.0, 8.0)),
            keep=rng.choice((2, 3, 100)),
            has_own_parts=rng.random() < 0.3,
            breaks_sockets=rng.random() < 0.5,
            addresses_early=rng.choice((0.0, 0.5, 1.0)),
            is_ordered=quiet or rng.random() < 0.5,
            has_stragglers=not quiet and rng.random() < 0.5,
            p_drop=0.0 if quiet else rng.choice((0.0, 0.02, 0.2)),
            p_duplicate=0.0 if quiet else rng.choice((0.0, 0.05, 0.3)),
            p_slow=0.0 if quiet else rng.choice((0.0, 0.0, 0.02, 0.1)),
            slow_s=rng.choice((2.0, 10.0, 60.0)),
            fsync_s=rng.choice((0.0, 0.0, 0.01, 0.3, 3.0)),
            p_torn=rng.choice((0.0, 0.02, 0.1)),
            has_disk_errors=rng.random() < 0.5,
            compact_bytes=rng.choice((500, 4_000, 1 << 22)),
            rebuilds=False,
            p_echo=rng.choice((0.0, 0.05)),
            scheduler_rate=1.0 + rng.uniform(-clock_spread, clock_spread),
            clock_spread=clock_spread,
            sweep_s=rng.choice((2.0, 5.0, 20.0)),
            rates_hz={
                kind: scale * rng.choice((1.0, 0.3)) / usually_every_s
                for kind, usually_every_s in USUALLY_EVERY_S.items()
                if rng.random() < 0.35
            },
        )
