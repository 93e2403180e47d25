"""Time a recovery with a spare, from kill -9 of a rank until all ranks train again: HSDP and FSDP2 beside DDP.

``python -m benchmarks.mesh_recovery [--quick] [--ranks N] [--kills N]``. Three jobs train the MLP of ``workers.mlp``,
lose a random rank in turn and pause in between, so that each is measured while the others are idle. The hash of the
weights of all ranks is compared after every loss, and finally with an undisturbed run's. A copy of every commit is left
in shared memory (SHARD_COPY_EVERY=1), so that FSDP2 repeats at most one step.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
from collections.abc import Mapping, Sequence

from benchmarks.recovery_report import percentile_95
from benchmarks.recovery_spares import LossyJob, account, undisturbed
from benchmarks.report import Progress, Report, median, rounded, table
from benchmarks.workers.paced import MESH

DDP, HSDP, FSDP2 = CONTESTANTS = ("ddp", "hsdp", "fsdp2")
TARGET = 1.5


def variables_of(contestant: str, ranks: int) -> dict[str, str]:
    """Return the environment variables of a contestant's processes."""
    sizes = {HSDP: f"2,{ranks // 2}", FSDP2: str(ranks)}
    return {} if contestant == DDP else {MESH: sizes[contestant], "SHARD_COPY_EVERY": "1"}


def report(totals_s: Mapping[str, Sequence[float]], lost: Mapping[str, int], equal: Mapping[str, bool]) -> Report:
    """Return the report.

    Args:
        totals_s: the duration of each recovery, by contestant.
        lost: steps that were repeated or never done, by contestant.
        equal: whether the weights were those of an undisturbed run, by contestant.
    """
    floor_s = median(totals_s[DDP])
    return Report(
        benchmark="mesh_recovery",
        floor={"ddp_s": floor_s, "ddp_p95_s": percentile_95(totals_s[DDP])},
        peers={},
        ours={
            **{f"{name}_s": median(totals_s[name]) for name in (HSDP, FSDP2)},
            **{f"{name}_p95_s": percentile_95(totals_s[name]) for name in (HSDP, FSDP2)},
            **{f"{name}_losses_count": len(totals_s[name]) for name in CONTESTANTS},
            **{f"steps_lost_{name}": lost[name] for name in CONTESTANTS},
        },
        ratios={
            **{f"{name}_vs_ddp": rounded(median(totals_s[name]) / floor_s) for name in (HSDP, FSDP2)},
            **{f"{name}_weights_vs_undisturbed": float(equal[name]) for name in CONTESTANTS},
        },
    )


def people(found: Report) -> str:
    """Return the report's table."""
    rows = [["DDP", found.floor["ddp_s"], 1, ""]]
    for name in (HSDP, FSDP2):
        rows.append([name.upper(), found.ours[f"{name}_s"], found.ratios[f"{name}_vs_ddp"], f"≤ {TARGET:g}"])
    return table(["recovery with a spare", "s", "÷ DDP", "wanted"], rows)


def measure(ranks: int, kills: int, seed: int) -> Report:
    progress = Progress(f"three jobs of {ranks} ranks and a spare start; {kills} losses of each follow")
    rng = random.Random(seed)
    totals_s: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    lost, ends = dict.fromkeys(CONTESTANTS, 0), dict[str, tuple[int, str]]()
    with contextlib.ExitStack() as stack:
        jobs = {name: stack.enter_context(LossyJob(ranks, **variables_of(name, ranks))) for name in CONTESTANTS}
        for number in range(1, kills + 1):
            for name in rng.sample(CONTESTANTS, len(CONTESTANTS)):
                loss = jobs[name].lose(signal.SIGKILL, rng)
                totals_s[name].append(loss.total_s)
                lost[name] += loss.lost_steps
                lost_steps = f"{loss.lost_steps} steps lost"
                progress.say(f"loss {number} of {kills}: {name} {loss.total_s * 1e3:.0f} ms, {lost_steps}")
        for name, job in jobs.items():
            lost[name] += account(job.moments).skipped_steps
            ends[name] = max(job.digests.items())
    equal = {
        name: undisturbed(ranks, step, **variables_of(name, ranks)) == digest for name, (step, digest) in ends.items()
    }
    return report(totals_s, lost, equal)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mesh_recovery", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="kill only two ranks in each job")
    parser.add_argument("--ranks", type=int, default=4, choices=(4, 8), help="number of ranks in each job (default: 4)")
    parser.add_argument("--kills", type=int, help="number of ranks to kill in each job (default: 30)")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed that selects the killed ranks and the times (default: 1)"
    )
    arguments = parser.parse_args()
    found = measure(arguments.ranks, arguments.kills or (2 if arguments.quick else 30), arguments.seed)
    found.print(people(found))


if __name__ == "__main__":
    main()
