"""Time a recovery, phase by phase, from kill -9 of one of four workers until all train, beside torchrun and torchft.

``python -m benchmarks.recovery [--quick]``. All train the MLP of ``workers.mlp`` under DDP with REGISTER_COOLDOWN=0,
lose a rank at a random time, and have recovered when every rank has finished a step that no rank had finished before.

With a spare: one job of ours loses a random rank a hundred times, each time to a warm spare; the lost node returns as
the next spare. The account of its steps and the hash of its weights (against an undisturbed run, and against stock DDP)
are part of the result, and so is a rank that is stopped (SIGSTOP) instead.

By restart: each trial starts a job, kills a rank and restarts it at once; trials of SameBits and of the peers
alternate. ``ours.above_start_s`` is the total minus the restarted process's own start, from its spawning until it
requests its seat: the cost of recovery beyond loading Python and torch. ``above_start_and_script_s`` also excludes the
objects that the script builds.
"""

from __future__ import annotations

import argparse
import random
import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass

from benchmarks.recovery_peers import (
    TORCHFT,
    TORCHRUN,
    Restart,
    name_torchft,
    recover_torchft,
    recover_torchrun,
    torchft_needs,
    torchrun_needs,
)
from benchmarks.recovery_report import Spares, Trials, people, report
from benchmarks.recovery_spares import LossyJob, account, undisturbed
from benchmarks.recovery_trials import RECOVERED_WITHIN_S, WORLD_SIZE, detection_s, recover_ours, start_alone_s
from benchmarks.report import Progress
from benchmarks.workers.paced import RNG

NEVER_AFTER_S = 30.0
NONE: Mapping[str, str] = {}
TORCHRUN_DEFAULT = "torchrun_default"
_OWN_RDZV_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LEASE_S = 2.0  # of the jobs whose ranks are stopped
_LEASE = {"HEARTBEAT_INTERVAL": "0.5", "NODE_TIMEOUT": f"{LEASE_S:g}"}


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured."""

    kills: int = 100
    kills_8: int = 20
    kills_saved: int = 20
    """with the default ``rng="saved"``, and dropout"""
    stops: int = 5
    restarts: int = 5
    """of each contestant; as many processes are also killed to measure how soon the kernel reports their death"""


QUICK = Amounts(kills=10, kills_8=3, kills_saved=3, stops=1, restarts=2)


def measure(amounts: Amounts, *, seed: int, torchft: str, quick: bool) -> Trials:
    needs = {TORCHRUN: torchrun_needs(), TORCHFT: torchft_needs(torchft)}
    begins = f"a job of {WORLD_SIZE} ranks and a spare starts; {amounts.kills} losses follow"
    progress = Progress(begins, {peer: needed for peer, needed in needs.items() if needed})
    rng, trials = random.Random(seed), Trials(lease_s=LEASE_S)
    measure_spares(trials.spares, WORLD_SIZE, amounts.kills, rng, progress)
    compare_weights(trials.spares, WORLD_SIZE, progress)
    measure_spares(trials.spares_8, 2 * WORLD_SIZE, amounts.kills_8, rng, progress)
    measure_spares(trials.spares_saved, WORLD_SIZE, amounts.kills_saved, rng, progress, {RNG: "saved"})
    compare_weights(trials.spares_saved, WORLD_SIZE, progress, {RNG: "saved"})
    measure_stops(trials, amounts.stops, rng, progress)
    take_part = frozenset(peer for peer, needed in needs.items() if not needed)
    measure_restarts(trials, amounts.restarts, rng, progress, take_part, torchft=torchft)
    if TORCHRUN in trials.peers and not quick:
        restart = recover_torchrun(1, rng, {}, NEVER_AFTER_S)
        trials.peers[TORCHRUN_DEFAULT] = [restart]
        progress.say(f"torchrun with its default store, once: {_shown(restart, NEVER_AFTER_S)}")
    return trials


def measure_spares(
    spares: Spares,
    world_size: int,
    kills: int,
    rng: random.Random,
    progress: Progress,
    variables: Mapping[str, str] = NONE,
) -> None:
    """Lose this many ranks of one job, one after the other; ``variables`` are added for its processes."""
    with LossyJob(world_size, **variables) as job:
        for number in range(1, kills + 1):
            try:
                loss = job.lose(signal.SIGKILL, rng)
            except TimeoutError as error:
                spares.never += 1
                progress.say(f"{world_size} ranks, loss {number} of {kills}: {error}\n{job.logs()}")
                break
            spares.losses.append(loss)
            if loss.is_hang or loss.lost_steps:
                progress.say(f"{world_size} ranks, loss {number}: {loss}\n{job.logs()}")
            elif number == kills or number % 10 == 0:
                progress.say(f"{world_size} ranks, loss {number} of {kills} to a spare: {loss.total_s * 1e3:.0f} ms")
        of_all = account(job.moments)
        spares.repeated_steps, spares.skipped_steps = of_all.repeated_steps, of_all.skipped_steps
        spares.step_ms = job.step_ms()
        spares.last_step = max(job.digests)
        spares.digest = job.digests[spares.last_step]


def compare_weights(spares: Spares, world_size: int, progress: Progress, variables: Mapping[str, str] = NONE) -> None:
    """Compare the weights of the job that lost ranks with those of jobs that lost none."""
    spares.is_as_undisturbed = spares.digest == undisturbed(world_size, spares.last_step, **variables)
    said = f"weights after step {spares.last_step} as those of an undisturbed run: {spares.is_as_undisturbed}"
    if variables:  # which stock DDP does not support
        progress.say(f'with rng="saved" and dropout: {spares.lost_steps} steps lost; {said}')
        return
    spares.is_as_plain = spares.digest == undisturbed(world_size, spares.last_step, plain=True)
    progress.say(f"{said}, of stock DDP: {spares.is_as_plain}")


def measure_stops(trials: Trials, stops: int, rng: random.Random, progress: Progress) -> None:
    """Stop this many ranks of one job, one after the other."""
    with LossyJob(WORLD_SIZE, **_LEASE) as job:
        for number in range(1, stops + 1):
            try:
                trials.stopped.append(job.lose(signal.SIGSTOP, rng))
            except TimeoutError as error:
                trials.spares.never += 1
                progress.say(f"stop {number} of {stops}: {error}\n{job.logs()}")
                return
            progress.say(f"stop {number} of {stops}: {trials.stopped[-1].total_s:.2f} s, the lease is {LEASE_S:g} s")


def measure_restarts(
    trials: Trials, kills: int, rng: random.Random, progress: Progress, peers: Set[str], *, torchft: str
) -> None:
    """Kill one rank of each contestant and restart it, this many times."""
    for trial in range(kills):
        victim, shown = trial % WORLD_SIZE, f"kill {trial + 1} of {kills}, rank {trial % WORLD_SIZE}"
        trials.start_alone_s.append(start_alone_s())
        trials.detection_s.append(detection_s())
        timeline, step_ms = recover_ours(victim, rng)
        trials.restarts.append(timeline)
        trials.step_ms.append(step_ms)
        progress.say(
            f"{shown}: ours by restart {timeline.total_s:.2f} s, of which its own start {timeline.own_start_s:.2f} s, "
            f"{timeline.redone_steps} steps redone"
        )
        if TORCHRUN in peers:
            restart = recover_torchrun(victim, rng, _OWN_RDZV_STORE, RECOVERED_WITHIN_S)
            trials.peers.setdefault(TORCHRUN, []).append(restart)
            progress.say(f"{shown}: torchrun {_shown(restart, RECOVERED_WITHIN_S)}")
        if TORCHFT in peers:
            restart = recover_torchft(victim, rng, torchft, RECOVERED_WITHIN_S)
            trials.peers.setdefault(TORCHFT, []).append(restart)
            progress.say(f"{shown}: torchft {_shown(restart, RECOVERED_WITHIN_S)}")


def _shown(restart: Restart | None, within_s: float) -> str:
    if restart is None:
        return f"not within {within_s:g} s"
    return f"{restart.total_s:.2f} s, {restart.redone_steps} steps redone"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="measure only a few losses of each kind")
    for name, what in (
        ("kills", "losses to a spare at 4 ranks"),
        ("kills-8", "losses to a spare at 8 ranks"),
        ("kills-saved", "losses to a spare at 4 ranks with rng=saved"),
        ("stops", "ranks stopped"),
        ("restarts", "kills of each contestant that restarts"),
    ):
        parser.add_argument(f"--{name}", type=_at_least_one, help=f"{what} (default: {_default(name)})")
    name_torchft(parser)
    parser.add_argument(
        "--seed", type=int, default=1, help="seed that selects the killed ranks and the times (default: 1)"
    )
    arguments = parser.parse_args()
    standard = QUICK if arguments.quick else Amounts()
    given = {name: getattr(arguments, name) for name in ("kills", "kills_8", "kills_saved", "stops", "restarts")}
    amounts = Amounts(**{name: getattr(standard, name) if value is None else value for name, value in given.items()})
    trials = measure(amounts, seed=arguments.seed, torchft=arguments.torchft, quick=arguments.quick)
    report(trials).print(people(trials))


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("1 or more: the report compares all of them")
    return number


def _default(name: str) -> int:
    return int(getattr(Amounts(), name.replace("-", "_")))


if __name__ == "__main__":
    main()
