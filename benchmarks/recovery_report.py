"""Evaluate the trials of ``benchmarks.recovery``: the figures of its last line, and tables.

A figure that has a target is printed beside it. Nothing is asserted, since only the machine's owner knows how quiet it
was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from benchmarks.recovery_peers import TORCHFT, TORCHRUN, Restart
from benchmarks.recovery_spares import Loss
from benchmarks.recovery_trials import Timeline
from benchmarks.report import MISSING, Report, median, rounded, spread, table

SPARE_TARGET_S, SPARE_P95_TARGET_S, SPARE_WORST_TARGET_S = 0.045, 0.1, 1.0
SPARE_8_TARGET_S = 0.08
STEPS_OF_A_SLOWER_MACHINE = 2.5  # median ≤ detection + this many steps
STOPPED_TARGET_S = 0.2  # above the lease
ABOVE_START_TARGET_S = 0.1

RESTART_PHASES: Sequence[tuple[str, str, str | None, str]] = (
    ("notice (beside the process start)", "notice_ms", None, "told_s"),
    ("break (beside the process start)", "break_ms", "told_s", "waits_s"),
    ("kill and reap", "reap_ms", None, "spawned_s"),
    ("process start, imports", "process_start_ms", "spawned_s", "asks_s"),
    ("seat", "seat_ms", "asks_s", "seated_s"),
    ("model, DDP, optimizer", "build_ms", "seated_s", "enters_s"),
    ("re-form: rendezvous", "rendezvous_ms", "enters_s", "placed_s"),
    ("re-form: process group", "group_ms", "placed_s", "formed_s"),
    ("load", "load_ms", "formed_s", "trains_s"),
    ("first step", "first_step_ms", "trains_s", "stepped_s"),
    ("replay, to a new step", "replay_ms", "stepped_s", "total_s"),
)
"""Title, key, and the points of the timeline that bound a phase (from the kill if the first is None)."""
BESIDE = {"notice_ms", "break_ms"}

SPARE_PHASES: Mapping[str, str] = {
    "noticed_s": "noticed by the first",
    "told_s": "known to all",
    "out_s": "all out of the collective",
    "dropped_s": "old group dropped",
    "joined_s": "all joined, with their addresses",
    "placed_s": "placed in the new generation",
    "formed_s": "group formed",
    "obtained_s": "state at the newcomer, DDP attached",
    "trains_s": "compared; the function runs again",
    "total_s": "a new step on every rank",
}
"""The points of a loss, in order, and their titles."""


@dataclass(slots=True)
class Spares:
    """The losses of one job with a spare, and its steps."""

    losses: list[Loss] = field(default_factory=list)
    step_ms: float = math.nan
    repeated_steps: int = 0
    skipped_steps: int = 0
    never: int = 0
    """losses that the job did not recover from"""
    last_step: int = 0
    digest: str = ""
    """of the weights after the last step"""
    is_as_undisturbed: bool | None = None
    is_as_plain: bool | None = None

    @property
    def lost_steps(self) -> int:
        """Return how many steps were finished and then lost, or were never finished."""
        return sum(loss.lost_steps for loss in self.losses) + self.skipped_steps

    @property
    def hangs(self) -> int:
        return self.never + sum(loss.is_hang for loss in self.losses)

    def totals_s(self) -> list[float]:
        return [loss.total_s for loss in self.losses]


@dataclass(slots=True)
class Trials:
    """All measurements."""

    restarts: list[Timeline] = field(default_factory=list)
    peers: dict[str, list[Restart | None]] = field(default_factory=dict)
    """trials by installed peer; None for a trial that did not recover in time"""
    step_ms: list[float] = field(default_factory=list)
    start_alone_s: list[float] = field(default_factory=list)
    detection_s: list[float] = field(default_factory=list)
    spares: Spares = field(default_factory=Spares)
    spares_8: Spares = field(default_factory=Spares)
    spares_saved: Spares = field(default_factory=Spares)
    stopped: list[Loss] = field(default_factory=list)
    lease_s: float = math.nan

    def floor_s(self, spares: Spares) -> float | None:
        """Return a recovery's minimum time on this machine: the kernel's notice and a little more than two steps."""
        if not spares.losses:
            return None
        return rounded(median(self.detection_s) + STEPS_OF_A_SLOWER_MACHINE * spares.step_ms / 1e3)


def percentile_95(values: Sequence[float]) -> float:
    """Return the smallest value that 95 % of all do not exceed."""
    return rounded(sorted(values)[math.ceil(0.95 * len(values)) - 1])


# --- figures ----------------------------------------------------------------------------------------------------------


def report(trials: Trials) -> Report:
    restarts, spares = trials.restarts, trials.spares
    restart_s, spare_s = median([one.total_s for one in restarts]), _median_s(spares)
    ratios: dict[str, float | None] = {"total_vs_start_alone": rounded(restart_s / median(trials.start_alone_s))}
    for name in (TORCHRUN, TORCHFT):
        peer_s = median_of(trials.peers.get(name, []), "total_s")
        ratios[f"total_vs_{name}"] = None if peer_s is None else rounded(restart_s / peer_s)
        ratios[f"spare_vs_{name}"] = None if peer_s is None or spare_s is None else rounded(spare_s / peer_s)
    for name, some in (("spare_vs_floor", spares), ("spare_8_vs_floor", trials.spares_8)):
        some_s, floor_s = _median_s(some), trials.floor_s(some)
        ratios[name] = None if some_s is None or floor_s is None else rounded(some_s / floor_s)
    ratios["spare_weights_vs_undisturbed"] = _as_number(spares.is_as_undisturbed)
    ratios["spare_weights_vs_stock_ddp"] = _as_number(spares.is_as_plain)
    return Report(
        benchmark="recovery",
        floor={
            "start_alone_s": median(trials.start_alone_s),
            "step_ms": median(trials.step_ms),
            "detection_s": median(trials.detection_s),
            "spare_step_ms": None if math.isnan(spares.step_ms) else rounded(spares.step_ms),
            "spare_s": trials.floor_s(spares),
            "spare_8_step_ms": None if math.isnan(trials.spares_8.step_ms) else rounded(trials.spares_8.step_ms),
            "spare_8_s": trials.floor_s(trials.spares_8),
        },
        peers={
            TORCHRUN: MISSING,
            TORCHFT: MISSING,
            **{name: {one.name: median_of(done, one.name) for one in fields(Restart)}
               for name, done in trials.peers.items()},
        },
        ours={**_of_spares(trials), **_of_restarts(restarts)},
        ratios=ratios,
    )  # fmt: skip


def _of_spares(trials: Trials) -> dict[str, Any]:
    spares, eight, stopped = trials.spares, trials.spares_8, trials.stopped
    stopped_s = median([one.total_s for one in stopped]) if stopped else None
    return {
        "spare_median_s": _median_s(spares),
        "spare_p95_s": percentile_95(spares.totals_s()) if spares.losses else None,
        "spare_worst_s": rounded(max(spares.totals_s())) if spares.losses else None,
        "spare_losses_count": len(spares.losses),
        "steps_lost": spares.lost_steps + eight.lost_steps,
        "steps_lost_saved": trials.spares_saved.lost_steps,
        "steps_repeated": spares.repeated_steps + eight.repeated_steps,
        "victims_own_steps": sum(one.victims_steps for one in spares.losses + eight.losses),
        "hangs": spares.hangs + eight.hangs,
        "spare_median_8_s": _median_s(eight),
        "sigstop_s": stopped_s,
        "sigstop_above_lease_s": None if stopped_s is None else rounded(stopped_s - trials.lease_s),
        "phases": {
            f"{name.removesuffix('_s')}_ms": median([getattr(one, name) * 1e3 for one in spares.losses])
            for name in SPARE_PHASES
            if spares.losses
        },
    }


def _of_restarts(restarts: Sequence[Timeline]) -> dict[str, Any]:
    return {
        "total_s": median([one.total_s for one in restarts]),
        "above_start_s": median([one.above_start_s for one in restarts]),
        "above_start_and_script_s": median([one.above_start_and_script_s for one in restarts]),
        "above_start_worst_s": rounded(max(one.above_start_s for one in restarts)),
        "own_start_s": median([one.own_start_s for one in restarts]),
        "to_first_step_s": median([one.stepped_s for one in restarts]),
        "redone_steps": median([one.redone_steps for one in restarts]),
        "restart_phases": {
            key: median([_duration_ms(one, begin, end) for one in restarts]) for _, key, begin, end in RESTART_PHASES
        },
    }


def _median_s(spares: Spares) -> float | None:
    return median(spares.totals_s()) if spares.losses else None


def _as_number(is_equal: bool | None) -> float | None:
    """Return 1 if the hashes are equal, 0 if they differ, None if they were not compared."""
    return None if is_equal is None else float(is_equal)


def _duration_ms(timeline: Timeline, begin: str | None, end: str) -> float:
    began_s = 0.0 if begin is None else float(getattr(timeline, begin))
    return (float(getattr(timeline, end)) - began_s) * 1e3


def median_of(restarts: Sequence[Restart | None], name: str) -> float | None:
    """Return the median, or None if not every trial recovered."""
    if not restarts or None in restarts:
        return None
    return median([float(getattr(restart, name)) for restart in restarts])


# --- tables -----------------------------------------------------------------------------------------------------------


def people(trials: Trials) -> str:
    return "\n\n".join(
        text for text in (_spare_phases(trials), _targets(trials), _restart_phases(trials), _beside(trials)) if text
    )


def _spare_phases(trials: Trials) -> str:
    losses = trials.spares.losses
    if not losses:
        return ""
    rows: list[list[object]] = []
    before_ms = 0.0
    for name, title in SPARE_PHASES.items():
        sample = spread([getattr(one, name) * 1e3 for one in losses])
        rows.append([title, sample, f"{sample.median - before_ms:.1f}"])
        before_ms = sample.median
    rows.append(["one step alone", f"{trials.spares.step_ms:.1f}", ""])
    rows.append(["floor: detection alone", spread([one * 1e3 for one in trials.detection_s]), ""])
    return table([f"ms since kill -9, {len(losses)} losses to a spare: median (lowest–highest)", "by then", "+"], rows)


def _targets(trials: Trials) -> str:
    figures, spares = _of_spares(trials), trials.spares
    rows: list[list[object]] = [
        ["with a spare, median s", figures["spare_median_s"],
         f"≤ {max(SPARE_TARGET_S, trials.floor_s(spares) or 0):.3g}"],
        ["95th percentile s", figures["spare_p95_s"], f"≤ {SPARE_P95_TARGET_S:g}"],
        ["worst s", figures["spare_worst_s"], f"≤ {SPARE_WORST_TARGET_S:g}"],
        ["8 ranks, median s", figures["spare_median_8_s"], f"≤ {SPARE_8_TARGET_S:g}"],
        [f"8 ranks: detection alone and {STEPS_OF_A_SLOWER_MACHINE:g} of their steps, s",
         trials.floor_s(trials.spares_8), ""],
        ["steps lost / repeated", f"{figures['steps_lost']} / {figures['steps_repeated']}", "0 / 0"],
        ["hangs", figures["hangs"], "0"],
        [f"weights after step {spares.last_step}: as undisturbed", spares.is_as_undisturbed, True],
        ["as stock DDP", spares.is_as_plain, True],
        ["a rank stopped (SIGSTOP), s above the lease", figures["sigstop_above_lease_s"], f"≤ {STOPPED_TARGET_S:g}"],
        ["by restart, s above the process's own start", median([one.above_start_s for one in trials.restarts]),
         f"≤ {ABOVE_START_TARGET_S:g}"],
        ["above that and what its script builds (model, samples, DDP, optimizer)",
         median([one.above_start_and_script_s for one in trials.restarts]), ""],
    ]  # fmt: skip
    return table(["target", "measured", "wanted"], rows)


def _restart_phases(trials: Trials) -> str:
    restarts = trials.restarts
    total_ms = median([one.total_s for one in restarts]) * 1e3
    rows: list[list[object]] = []
    for title, key, begin, end in RESTART_PHASES:
        sample = spread([_duration_ms(one, begin, end) for one in restarts])
        rows.append([title, sample, "" if key in BESIDE else f"{100 * sample.median / total_ms:.1f} %"])
    rows.append(["total", spread([one.total_s * 1e3 for one in restarts]), ""])
    rows.append(["total less the process start", spread([one.above_start_s * 1e3 for one in restarts]), ""])
    return table(["by restart, phase, ms: median (lowest–highest)", f"{len(restarts)} kills", "of total"], rows)


def _beside(trials: Trials) -> str:
    restarts, losses = trials.restarts, trials.spares.losses
    rows: list[list[object]] = []
    if losses:
        rows.append(_row("SameBits, a spare", trials.spares.totals_s(), [one.lost_steps for one in losses]))
    rows.append(_row("SameBits, restart", [one.total_s for one in restarts], [one.redone_steps for one in restarts]))
    for name, trial in trials.peers.items():
        done = [one for one in trial if one is not None]
        if len(done) == len(trial):
            rows.append(_row(name, [one.total_s for one in done], [one.redone_steps for one in done]))
        else:
            rows.append([name, f"{len(trial) - len(done)} of {len(trial)} never", ""])
    rows += [[name, MISSING, ""] for name in (TORCHRUN, TORCHFT) if name not in trials.peers]
    rows.append(["a worker's imports, alone", spread(trials.start_alone_s), ""])
    return table(["kill -9 to a new step on all four", "s", "steps redone"], rows)


def _row(title: str, totals_s: Sequence[float], redone: Sequence[int]) -> list[object]:
    return [title, spread(totals_s), spread(redone)]
