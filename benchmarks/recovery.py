"""From kill -9 of one of four workers to all four training on, phase by phase, beside torchrun.

``python -m benchmarks.recovery [--quick]``. Each trial starts a job of four ranks (the MLP of ``workers.mlp`` under
DDP, a checkpoint every ten steps, REGISTER_COOLDOWN=0), kills one rank at a random moment, starts it again at once and
waits until every rank has finished a step that no rank had finished before: the total holds the steps that are done
twice. Trials of SameBits and of torchrun alternate. ``ours.above_start_s`` is the total less the restarted process's
own start, from its spawning until it asks for its seat: what recovery costs beyond what Python and torch cost to load.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from benchmarks.recovery_trials import (
    RECOVERED_WITHIN_S,
    TORCHRUN,
    WORLD_SIZE,
    Restart,
    Timeline,
    has_torchrun,
    recover_ours,
    recover_torchrun,
    start_alone_s,
)
from benchmarks.report import MISSING, Progress, Report, median, rounded, spread, table

KILLS = 5
KILLS_QUICK = 2
NEVER_AFTER_S = 30.0
TORCHRUN_DEFAULT = "torchrun_default"
_OWN_RDZV_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

PHASES: Sequence[tuple[str, str, str | None, str]] = (
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
"""Title, key, and the points of the timeline between which a phase lies (from the kill, where the first is None)."""
BESIDE = {"notice_ms", "break_ms"}


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trials:
    """Everything that was measured."""

    ours: list[Timeline] = field(default_factory=list)
    torchrun: dict[str, list[Restart | None]] = field(default_factory=dict)
    """by variant; None where a trial did not recover in time; no variants where torchrun is not installed"""
    step_ms: list[float] = field(default_factory=list)
    start_alone_s: list[float] = field(default_factory=list)


def measure(kills: int, *, seed: int, quick: bool) -> Trials:
    progress, rng, trials = Progress(), random.Random(seed), Trials()
    with_torchrun = has_torchrun()
    for trial in range(kills):
        victim, shown = trial % WORLD_SIZE, f"kill {trial + 1} of {kills}, rank {trial % WORLD_SIZE}"
        trials.start_alone_s.append(start_alone_s())
        timeline, step_ms = recover_ours(victim, rng)
        trials.ours.append(timeline)
        trials.step_ms.append(step_ms)
        progress.say(
            f"{shown}: ours {timeline.total_s:.2f} s, of which its own start {timeline.own_start_s:.2f} s, "
            f"{timeline.redone_steps} steps redone"
        )
        if with_torchrun:
            restart = recover_torchrun(victim, rng, _OWN_RDZV_STORE, RECOVERED_WITHIN_S)
            trials.torchrun.setdefault(TORCHRUN, []).append(restart)
            progress.say(f"{shown}: torchrun {_shown(restart, RECOVERED_WITHIN_S)}")
    if with_torchrun and not quick:
        restart = recover_torchrun(1, rng, {}, NEVER_AFTER_S)
        trials.torchrun[TORCHRUN_DEFAULT] = [restart]
        progress.say(f"torchrun with its default store, once: {_shown(restart, NEVER_AFTER_S)}")
    return trials


def _shown(restart: Restart | None, within_s: float) -> str:
    if restart is None:
        return f"not within {within_s:g} s"
    return f"{restart.total_s:.2f} s, {restart.redone_steps} steps redone"


def report(trials: Trials) -> Report:
    ours = trials.ours
    total_s = median([one.total_s for one in ours])
    figures = {key: median([_duration_ms(one, begin, end) for one in ours]) for _, key, begin, end in PHASES}
    torchrun_s = _median_of(trials.torchrun.get(TORCHRUN, []), "total_s")
    return Report(
        benchmark="recovery",
        floor={"start_alone_s": median(trials.start_alone_s), "step_ms": median(trials.step_ms)},
        peers={name: _peer(restarts) for name, restarts in trials.torchrun.items()} or {TORCHRUN: MISSING},
        ours={
            "total_s": total_s,
            "above_start_s": median([one.above_start_s for one in ours]),
            "above_start_worst_s": rounded(max(one.above_start_s for one in ours)),
            "own_start_s": median([one.own_start_s for one in ours]),
            "to_first_step_s": median([one.stepped_s for one in ours]),
            "redone_steps": median([one.redone_steps for one in ours]),
            "phases": figures,
        },
        ratios={
            "total_vs_torchrun": None if torchrun_s is None else rounded(total_s / torchrun_s),
            "total_vs_start_alone": rounded(total_s / median(trials.start_alone_s)),
        },
    )


def _duration_ms(timeline: Timeline, begin: str | None, end: str) -> float:
    began_s = 0.0 if begin is None else float(getattr(timeline, begin))
    return (float(getattr(timeline, end)) - began_s) * 1e3


def _peer(restarts: Sequence[Restart | None]) -> dict[str, float | None]:
    return {one.name: _median_of(restarts, one.name) for one in fields(Restart)}


def _median_of(restarts: Sequence[Restart | None], name: str) -> float | None:
    """None if not every trial recovered."""
    if not restarts or None in restarts:
        return None
    return median([float(getattr(restart, name)) for restart in restarts])


def people(trials: Trials) -> str:
    ours = trials.ours
    total_ms = median([one.total_s for one in ours]) * 1e3
    rows: list[list[object]] = []
    for title, key, begin, end in PHASES:
        sample = spread([_duration_ms(one, begin, end) for one in ours])
        rows.append([title, sample, "" if key in BESIDE else f"{100 * sample.median / total_ms:.1f} %"])
    rows.append(["total", spread([one.total_s * 1e3 for one in ours]), ""])
    rows.append(["total less the process start", spread([one.above_start_s * 1e3 for one in ours]), ""])
    phases = table(["phase, ms: median (lowest–highest)", f"{len(ours)} kills", "of total"], rows)
    beside: list[list[object]] = [_row("SameBits", [one.total_s for one in ours], [one.redone_steps for one in ours])]
    for name, restarts in trials.torchrun.items():
        done = [one for one in restarts if one is not None]
        if len(done) == len(restarts):
            beside.append(_row(name, [one.total_s for one in done], [one.redone_steps for one in done]))
        else:
            beside.append([name, f"{len(restarts) - len(done)} of {len(restarts)} never", ""])
    if not trials.torchrun:
        beside.append([TORCHRUN, MISSING, ""])
    beside.append(["a worker's imports, alone", spread(trials.start_alone_s), ""])
    return phases + "\n\n" + table(["kill -9 to a new step on all four", "s", "steps redone"], beside)


def _row(title: str, totals_s: Sequence[float], redone: Sequence[int]) -> list[object]:
    return [title, spread(totals_s), spread(redone)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"{KILLS_QUICK} kills, for a look")
    parser.add_argument("--kills", type=int, default=None, help=f"kills of each contestant (default: {KILLS})")
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which is killed")
    arguments = parser.parse_args()
    kills = arguments.kills or (KILLS_QUICK if arguments.quick else KILLS)
    trials = measure(kills, seed=arguments.seed, quick=arguments.quick)
    report(trials).print(people(trials))


if __name__ == "__main__":
    main()
