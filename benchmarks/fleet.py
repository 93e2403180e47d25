"""A fleet's effective training time: failures at published rates, recoveries with SameBits' measured phase times.

``python -m benchmarks.fleet [--quick]`` simulates jobs of 1,024, 16,384 and 131,072 ranks for 30 days and checks the
simulation against real jobs: with ``--quick`` one of 4 processes, with ``--check 4 64`` also one of 64. Failures of
nodes and racks come as Poisson processes. One failure costs

    until resumed = detection + decision + per rank × ranks + communicators × ranks + half a step

Half a step is the mean part of the interrupted step that was done in vain; no completed step is redone. Survivors wait
during the recovery, and a failure during a recovery restarts it. Spare ranks take the places of lost ranks, and return
to the pool after a repair. Without a spare the job waits for the next repair. For comparison, without waits for spares,

    effective training time = 1 ÷ (1 + failures per second × half a step + (exp(failures per second × recovery) - 1))

because a recovery of length t that restarts at each failure takes (exp(λt) - 1) ÷ λ on average. A loss of the
scheduler costs nothing, since training continues without one.

Not measured here: GPUs and their communicators. ``communicators`` is zero in ``control_plane`` and, in
``with_communicators``, NCCLX's published initialisation (265 s at 96,000 ranks, made 11 times faster).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.goodput import measure, undisturbed
from benchmarks.processes import Job, Stage, worker_name
from benchmarks.report import Progress, Report, rounded, table
from benchmarks.workers.paced import INTERVAL
from samebits.account.event_log import read_events
from samebits.account.history import account
from samebits.core import records
from samebits.core.messages import RoundId
from samebits.core.records import GenerationCommitted

DAY_S = 86_400.0
SIZES = (1024, 16_384, 131_072)
DAYS = 30.0
CHECKED = (4,)
RANKS_PER_NODE, RANKS_PER_RACK = 8, 72

NODE_FAILURES_PER_NODE_DAY = 6.5e-3
"""RSC-1, nodes of 8 A100 (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
HPCA 2025). Llama 3's 419 interruptions in 54 days of 16,384 GPUs are 3.8e-3."""
RACK_FAILURES_PER_RACK_YEAR = 20 / 30
"""20 per year in a cluster of 1,800 machines with 40 to 80 in a rack (Dean, "Designs, Lessons and Advice from Building
Large Distributed Systems", LADIS 2009)."""
REPAIR_S = 3.5 * 3600.0
"""Rack failures: 1 to 6 hours (the same source). Node failures are assumed to take as long."""

DECISION_S = 0.060
"""A spare has taken over a rank of four (docs/explanation/comparison.md)."""
PER_RANK_S = 124e-6
"""The decision's CPU time (44 µs, benchmarks.core_scale), two messages to each rank (25 µs each) and one from it
(30 µs, benchmarks.control_plane): the scheduler's work is linear in the ranks."""
NODE_TIMEOUT_S = 5.0
"""A rack vanishes without closing its connections; a node's processes close theirs at once."""
HEARTBEAT_CPU_S = 30e-6
NCCLX_PER_RANK_S = 265.0 / 11 / 96_000
"""arXiv 2510.20171."""

PUBLISHED = {
    "ft_hsdp_effective_percent": 80.0,  # 100,000 GPUs, arXiv 2602.00277
    "synchronous_effective_percent": 44.0,  # the same paper's baseline
    "byterobust_effective_percent": 97.0,  # 9,600 GPUs, three months, arXiv 2509.16293
    "hyperpod_effective_percent": 95.0,  # at most; thousands of accelerators, recovery within 2 minutes (AWS, 2025)
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """One job and the costs of its failures. Times in seconds."""

    ranks: int
    step_s: float
    spare_share: float
    communicators_per_rank_s: float = 0.0
    node_failures_per_node_day: float = NODE_FAILURES_PER_NODE_DAY
    rack_failures_per_rack_year: float = RACK_FAILURES_PER_RACK_YEAR

    @property
    def spares(self) -> int:
        """Return the spare ranks: a share of the ranks, and at least a rack."""
        return max(RANKS_PER_RACK, math.ceil(self.ranks * self.spare_share))

    @property
    def node_rate(self) -> float:
        """Return failures of nodes per second."""
        return self.ranks / RANKS_PER_NODE * self.node_failures_per_node_day / DAY_S

    @property
    def rack_rate(self) -> float:
        """Return failures of racks per second."""
        return self.ranks / RANKS_PER_RACK * self.rack_failures_per_rack_year / (365.25 * DAY_S)

    @property
    def recovery_s(self) -> float:
        """Return the time from the detection of a failure until all ranks step again."""
        return DECISION_S + (PER_RANK_S + self.communicators_per_rank_s) * self.ranks


@dataclass(frozen=True, slots=True)
class Simulated:
    """The results of one simulated job."""

    effective: float
    failures: int
    steps_lost: float
    """Sum of the lost parts of interrupted steps, in steps; completed steps are never lost."""
    waited_s: float
    """Time spent waiting for spares."""


def expected(fleet: Fleet) -> float:
    """Return the effective training time by the formula of the module's docstring, without waits for spares."""
    rate = fleet.node_rate + fleet.rack_rate
    recovery_s = fleet.recovery_s + NODE_TIMEOUT_S * fleet.rack_rate / rate
    return 1 / (1 + rate * fleet.step_s / 2 + math.expm1(rate * recovery_s))


def simulate(fleet: Fleet, seconds: float, seed: int) -> Simulated:
    """Simulate one job for this many seconds."""
    rng = random.Random(seed)
    rate = fleet.node_rate + fleet.rack_rate
    now, trained, waited, lost_steps, failures, spares = 0.0, 0.0, 0.0, 0.0, 0, fleet.spares
    repairs: list[tuple[float, int]] = []
    next_at = rng.expovariate(rate)
    while next_at < seconds:
        part_s = rng.random() * fleet.step_s
        trained += max(0.0, next_at - now - part_s)
        lost_steps += min(part_s, next_at - now) / fleet.step_s
        now, is_resumed = next_at, False
        while not is_resumed:
            failures += 1
            is_rack = rng.random() < fleet.rack_rate / rate
            spares -= RANKS_PER_RACK if is_rack else RANKS_PER_NODE
            heapq.heappush(repairs, (now + REPAIR_S, RANKS_PER_RACK if is_rack else RANKS_PER_NODE))
            began = now
            while repairs and (spares < 0 or repairs[0][0] <= now):
                at, ranks = heapq.heappop(repairs)
                now, spares = max(now, at), spares + ranks
            waited += now - began
            over = now + fleet.recovery_s + (NODE_TIMEOUT_S if is_rack else 0.0)
            next_at = now + rng.expovariate(rate)
            is_resumed = next_at >= over
            now = over if is_resumed else next_at
    trained += max(0.0, seconds - now)
    return Simulated(trained / max(seconds, now), failures, lost_steps, waited)


def generation_bytes(ranks: int) -> int:
    """Return the size of the record that a generation with this many ranks adds to the journal."""
    members = tuple((str(rank), 1) for rank in range(ranks))
    record = GenerationCommitted(2, RoundId(1, 2), members, None, (), (), tuple(range(ranks)))
    return len(records.SCHEMA.pack(record))


# ---- the check against real jobs


@dataclass(frozen=True, slots=True)
class Checked:
    """A real job under regular kills, and the formula's result for it."""

    ranks: int
    kills: int
    measured: float
    predicted: float
    recovery_s: float


def check(ranks: int, seconds: float, every_s: float, seed: int) -> Checked:
    """Run a job with a spare, kill a rank every ``every_s``, and compare its goodput with the formula's.

    The formula gets the mean recovery time from the job's own history and the step's time from undisturbed runs before
    and after, so this checks that nothing else costs time.
    """
    rng = random.Random(seed)
    before = undisturbed(ranks, seconds / 4)
    with Stage() as stage:
        job = Job(stage, "recovery", ranks, **{INTERVAL: "100", "SPARE_NUM": "1"})
        job.start_scheduler()
        for slot in range(ranks + 1):
            job.start_worker(slot)

        def lose(_: int, who: str) -> None:
            stage.end(who)
            job.start_worker(int(who.removeprefix(worker_name(0)[:-1])))

        run = measure(stage, ranks, seconds, every_s, rng, lose)
        told = account(read_events(stage.folder / "recovery"), time.time())
    after = undisturbed(ranks, seconds / 4)
    step_s = statistics.mean((before.step_s, after.step_s))
    costs = [row["total_ms"] / 1e3 for row in told["recoveries"] if row["total_ms"] is not None]
    recovery_s = statistics.mean(costs) if costs else 0.0
    predicted = max(0.0, 1 - run.kills * (recovery_s + step_s / 2) / run.wall_s)
    return Checked(ranks, run.kills, run.steps * step_s / run.wall_s, predicted, recovery_s)


# ---- the report


def fleets(step_s: float, spare_share: float, sizes: Sequence[int]) -> dict[str, list[Fleet]]:
    """Return the simulated jobs by scenario."""
    alone = [Fleet(ranks, step_s, spare_share) for ranks in sizes]
    return {
        "control_plane": alone,
        "with_communicators": [replace(one, communicators_per_rank_s=NCCLX_PER_RANK_S) for one in alone],
    }


def report(jobs: dict[str, list[Fleet]], seconds: float, seed: int, checked: Sequence[Checked]) -> Report:
    """Simulate all jobs and return the object of the last line."""
    ours: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for name, some in jobs.items():
        ours[name], ratios[name] = {}, {}
        for one in some:
            found, size = simulate(one, seconds, seed), str(one.ranks)
            ours[name][size] = {
                "recovery_s": rounded(one.recovery_s),
                "failures_count": found.failures,
                "steps_lost": rounded(found.steps_lost),
                "waited_for_spares_s": rounded(found.waited_s),
                "scheduler_heartbeats_cpu_s_per_s": rounded(one.ranks * HEARTBEAT_CPU_S),
                "scheduler_recovery_cpu_s": rounded(one.ranks * PER_RANK_S),
                "journal_per_recovery_bytes": generation_bytes(one.ranks),
            }
            ratios[name][size] = {
                "effective_percent": rounded(100 * found.effective),
                "effective_by_formula_percent": rounded(100 * expected(one)),
            }
    first = next(iter(jobs.values()))
    return Report(
        benchmark="fleet",
        floor={
            "mean_time_to_failure_s": {str(one.ranks): rounded(1 / (one.node_rate + one.rack_rate)) for one in first}
        },
        peers={"FT-HSDP": {"stall_s": 180.0}, "HyperPod": {"recovery_s": 120.0}},
        ours={
            **ours,
            "checked": {
                str(one.ranks): {"kills_count": one.kills, "recovery_s": rounded(one.recovery_s)} for one in checked
            },
        },
        ratios={
            **ratios,
            "published": PUBLISHED,
            "checked": {
                str(one.ranks): {
                    "goodput": rounded(one.measured),
                    "goodput_by_formula": rounded(one.predicted),
                    "measured_vs_formula": rounded(one.measured / one.predicted) if one.predicted else None,
                }
                for one in checked
            },
        },
    )


def people(document: Report) -> str:
    """Format a row for each simulated and each real job."""
    rows: list[list[object]] = []
    for name in ("control_plane", "with_communicators"):
        for size, figures in document.ours[name].items():
            share = document.ratios[name][size]
            mean = document.floor["mean_time_to_failure_s"][size]
            rows.append(
                [
                    *(f"{name} {size}", f"{mean / 3600:.2f} h", figures["failures_count"], figures["recovery_s"]),
                    *(share["effective_percent"], share["effective_by_formula_percent"], figures["steps_lost"]),
                    *(figures["waited_for_spares_s"], figures["scheduler_heartbeats_cpu_s_per_s"]),
                ]
            )
    head = ["ranks", "MTTF", "failures", "recovery s", "effective %", "by formula %", "steps lost", "waited s"]
    lines = [table([*head, "heartbeats, cores"], rows)]
    for size, one in document.ratios["checked"].items():
        kills = document.ours["checked"][size]["kills_count"]
        lines.append(
            f"{size} real ranks, {kills} kills: goodput {one['goodput']}, by formula {one['goodput_by_formula']}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run a shorter check with 4 real processes")
    parser.add_argument(
        "--check", type=int, nargs="*", metavar="N", help=f"also run real jobs of these sizes (default: {CHECKED})"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="duration of each real job in seconds (default: 120)"
    )
    parser.add_argument("--every", type=float, default=10.0, help="seconds between kills in a real job (default: 10)")
    parser.add_argument(
        "--days", type=float, default=DAYS, help=f"duration of each simulated job in days (default: {DAYS:g})"
    )
    parser.add_argument(
        "--step", type=float, default=10.0, metavar="S", help="duration of a simulated step in seconds (default: 10)"
    )
    parser.add_argument(
        "--spares",
        type=float,
        default=0.01,
        metavar="SHARE",
        help="share of the ranks that are spares, at least one rack (default: 0.01)",
    )
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    progress = Progress(f"{', '.join(map(str, SIZES))} simulated ranks, {options.days:g} days each")
    checked = []
    for ranks in CHECKED if options.check is None else options.check:
        checked.append(check(ranks, 24.0 if options.quick else options.seconds, options.every, options.seed))
        progress.say(f"{ranks} real ranks: {checked[-1].kills} kills")
    document = report(fleets(options.step, options.spares, SIZES), options.days * DAY_S, options.seed, checked)
    document.print(people(document))


if __name__ == "__main__":
    main()
