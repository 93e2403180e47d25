"""Measure how soon a fault is noticed, and whether the right worker is named with its cause and line.

``python -m benchmarks.detection [--times N] [--only FAULT ...] [--who NAME ...]``. A job of two ranks repeatedly loses
one of them to the same fault: kill -9, an exception, SIGSTOP, a main thread that sleeps, a deadlock, the GIL held in C,
a loader that never returns, a rank that returns while the other is in a collective, a network cut in both directions
(in its own namespaces). The notice is the first line about the fault in the scheduler's log. All settings are the
defaults except REGISTER_COOLDOWN=0.

The floor of a kill is the time until the kernel closes the connections of a process as large as a rank. The floor of a
silence is the lease (NODE_TIMEOUT), and that of a standstill the shortest timeout that is ever learned. The peers are
torchrun and, if ``--torchft`` names an interpreter that has it, torchft: kill -9 and SIGSTOP of a rank, by the first
line about it in any of their logs. Twenty of each take an hour: ``--only FAULT --who NAME --times N --into FILE``
measures a part and adds it to a file, and ``--of FILE`` makes the report of all parts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.detection_faults import FAULTS, VICTIM, Fault, first_notice, is_right
from benchmarks.detection_nets import HERE, THERE, Nets, nets_need
from benchmarks.detection_trials import FLOOR, OURS, Trial, Trials
from benchmarks.processes import Job, Stage, worker_module, worker_name
from benchmarks.recovery_peers import (
    LIGHTHOUSE,
    TORCHFT,
    TORCHRUN,
    name_torchft,
    start_torchft,
    torchft_needs,
    torchrun_command,
    torchrun_needs,
)
from benchmarks.recovery_trials import WORLD_SIZE, detection_s, wait_until_training
from benchmarks.report import MISSING, Progress, Report, median, table
from samebits.core.watch.hang_judge import LEAST_S
from samebits.service.stacks import ask
from samebits.settings_table import VARIABLES
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import place_in_dump

RANKS = 2
STEPS_BEFORE = 8  # a generation's first steps have an allowance of their own
NOTICED_WITHIN_S = 60.0
PEERS_LOOK_S = 20.0
LOOK_EVERY_S = 0.005
FLOORS = 3
WHO = (OURS, TORCHRUN, TORCHFT)
PEERS_SAY = {
    TORCHRUN: re.compile(rb"exitcode: -9|Signal 9|SIGKILL|[Tt]imed? ?out"),
    # Its lighthouse logs "due to join timeout" in every step, with the number of heartbeats it receives.
    TORCHFT: re.compile(
        rb"got exception|Detected quorum change|\[%d heartbeating\]|(?<!join )[Tt]imed? ?out" % (WORLD_SIZE - 1)
    ),
}
"""Patterns by peer, each of which matches only a line about a fault in the peer's logs."""
PEERS_FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Faulty:
    """A job of ours whose rank ``VICTIM`` fails; with ``nets`` that rank is behind a cable of its own."""

    def __init__(self, stage: Stage, nets: Nets | None = None) -> None:
        self._stage, self._nets = stage, nets
        away = {"SCHED_HOST": HERE, "CLUSTER_INSECURE": "1"} if nets is not None else {}
        self._job = Job(stage, "detection", RANKS, **away)
        self._log = stage.folder / "scheduler.log"
        self._pids: dict[int, int] = {}

    def start(self) -> None:
        if self._nets is None:
            self._job.start_scheduler()
        else:
            command = self._nets.inside(HERE, [sys.executable, "-m", "samebits", "scheduler"])
            self._stage.start("scheduler", command, {**self._job.variables, "ROLE": "scheduler"})
            self._wait(lambda: "listening on" in self._log.read_text(), "the scheduler")
        for rank in range(RANKS):
            self._start_worker(rank)

    def fail(self, fault: Fault) -> Trial:
        """Let the victim fail once, record the scheduler's message, and start a replacement."""
        victim = self._wait_until_steady()
        begins = self._log.stat().st_size
        since_s = time.monotonic()
        if fault.sent:
            os.kill(victim, fault.sent)
        elif fault.name == "partition":
            assert self._nets is not None
            self._nets.cut()
        else:
            self._stage.channel.take()
            order = self._stage.folder / f"fault-{VICTIM}.unfinished"
            order.write_text(fault.name)
            order.rename(self._stage.folder / f"fault-{VICTIM}")
            self._wait(self._has_begun, f"the fault {fault.name}")
            since_s = self._stage.channel.select("fault")[-1].at_s
        said, noticed_s = self._notice(begins, since_s)
        asked = ""
        if fault.asks and said:
            identity = ProcessIdentity.of(victim)
            asked = place_in_dump(ask(identity).text, self._stage.folder) if identity is not None else ""
            asked = asked.rpartition("/")[2]
        self._stage.end(worker_name(VICTIM))
        if self._nets is not None:
            self._nets.mend()
        self._start_worker(VICTIM)
        shown = f"{said} [asked: {asked}]" if asked else said
        return Trial(noticed_s, shown, bool(said) and is_right(fault, said, asked))

    def _start_worker(self, rank: int) -> None:
        command = worker_module("detection")
        if self._nets is not None:
            command = self._nets.inside(THERE if rank == VICTIM else HERE, command)
        process = self._stage.start(worker_name(rank), command, self._job.worker_variables(rank))
        self._pids[rank] = process.pid

    def _wait_until_steady(self) -> int:
        """Wait until all ranks have made some steps in this generation; return the victim's pid."""
        victim = self._pids[VICTIM]
        self._stage.channel.take()
        made = {pid: self._stage.channel.reached.get(pid, 0) for pid in self._pids.values()}

        def steady() -> bool:
            reached = self._stage.channel.reached
            if not made[victim]:  # it has only just arrived: earlier steps are those of an earlier generation
                made.update({pid: reached.get(pid, 0) for pid in made})
                return False
            return all(reached.get(pid, 0) >= made[pid] + STEPS_BEFORE for pid in made)

        self._stage.channel.wait_for(steady, 2 * NOTICED_WITHIN_S, "training")
        return victim

    def _has_begun(self) -> bool:
        self._stage.channel.drain()
        return bool(self._stage.channel.select("fault"))

    def _notice(self, begins: int, since_s: float) -> tuple[str, float | None]:
        said = ""

        def noticed() -> bool:
            nonlocal said
            with self._log.open("rb") as log:
                log.seek(begins)
                whole, _, _ = log.read().decode(errors="replace").rpartition("\n")
            said = first_notice(whole)
            return bool(said)

        with contextlib.suppress(TimeoutError):
            self._wait(noticed, "a notice")
            return said, time.monotonic() - since_s
        return "", None

    @staticmethod
    def _wait(found: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + NOTICED_WITHIN_S
        while not found():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} did not come within {NOTICED_WITHIN_S:g} s")
            time.sleep(LOOK_EVERY_S)


def measure_ours(trials: Trials, faults: Sequence[Fault], count: int, progress: Progress) -> None:
    """Measure each fault this often, in a job of its own."""
    for fault in faults:
        if fault.name == "partition" and (needs := nets_need()):
            progress.say(f"partition takes no part: {needs}")
            continue
        a_job = 1 if fault.ends_job else count
        numbers = list(range(1, count + 1))
        for begin in range(0, count, a_job):
            _measure_job(trials, fault, numbers[begin : begin + a_job], count, progress)


def _measure_job(trials: Trials, fault: Fault, numbers: Sequence[int], count: int, progress: Progress) -> None:
    with contextlib.ExitStack() as stack:
        nets = stack.enter_context(Nets()) if fault.name == "partition" else None
        job = Faulty(stack.enter_context(Stage()), nets)
        job.start()
        for number in numbers:
            trial = job.fail(fault)
            trials.add(OURS, fault.name, trial)
            when = "not noticed" if trial.noticed_s is None else f"noticed after {trial.noticed_s:.3f} s"
            verdict = "right" if trial.right else "WRONG"
            progress.say(f"{fault.name} {number} of {count}: {when}, named {verdict}: {trial.said}")


def measure_peer(trials: Trials, peer: str, name: str, count: int, python: str, rng: random.Random) -> Iterator[str]:
    """Measure kill -9 or SIGSTOP of a rank up to the first line about it in any log of the peer; return remarks."""
    trial = {TORCHRUN: _torchrun, TORCHFT: _torchft}[peer]
    for number in range(1, count + 1):
        with Stage() as stage:
            noticed_s = trial(stage, PEERS_FAULTS[name], python, rng)
        trials.add(peer, name, Trial(noticed_s))
        when = f"nothing within {PEERS_LOOK_S:g} s" if noticed_s is None else f"after {noticed_s:.3f} s"
        yield f"{peer}, {name} {number} of {count}: {when}"


def _torchrun(stage: Stage, sent: signal.Signals, _: str, rng: random.Random) -> float | None:
    stage.start(TORCHRUN, torchrun_command(), {}, is_parent=True)
    wait_until_training(stage, WORLD_SIZE, rng)
    victim = next(one.pid for one in stage.channel.moments if one.who == f"torchrun_{VICTIM}")
    return _noticed_s([stage.folder / f"{TORCHRUN}.log"], PEERS_SAY[TORCHRUN], victim, sent)


def _torchft(stage: Stage, sent: signal.Signals, python: str, rng: random.Random) -> float | None:
    start = start_torchft(stage, python)
    pids = [start(rank) for rank in range(WORLD_SIZE)]
    wait_until_training(stage, WORLD_SIZE, rng)
    survivors = [worker_name(rank) for rank in range(WORLD_SIZE) if rank != VICTIM]
    logs = [stage.folder / f"{name}.log" for name in (LIGHTHOUSE, *survivors)]
    return _noticed_s(logs, PEERS_SAY[TORCHFT], pids[VICTIM], sent)


def _noticed_s(logs: Sequence[Path], about: re.Pattern[bytes], victim: int, sent: signal.Signals) -> float | None:
    begins, since_s = {log: log.stat().st_size for log in logs}, time.monotonic()
    os.kill(victim, sent)
    try:
        while time.monotonic() < since_s + PEERS_LOOK_S:
            for log, at in begins.items():
                with log.open("rb") as file:
                    file.seek(at)
                    if about.search(file.read()):
                        return time.monotonic() - since_s
            time.sleep(LOOK_EVERY_S)
        return None
    finally:
        if sent == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)  # it would not receive its parent's request to end


def report(trials: Trials) -> None:
    """Return the table and the JSON object."""
    lease_s = float(next(one.default for one in VARIABLES if one.name == "NODE_TIMEOUT") or 0)
    ours: dict[str, Any] = {}
    rows = []
    for name, of_fault in trials.of.get(OURS, {}).items():
        seen = trials.seen_s(OURS, name)
        right = sum(one.right for one in of_fault)
        figures = {
            "noticed_s": median(seen) if seen else None,
            "slowest_s": max(seen) if seen else None,
            "right_count": right,
            "wrong_count": len(of_fault) - right,
        }
        ours[name] = figures
        shown = "-" if not seen else f"{statistics.median(seen):.3f}"
        rows.append((name, len(of_fault), shown, "-" if not seen else f"{max(seen):.3f}", f"{right}/{len(of_fault)}"))
    floor_s = trials.seen_s(FLOOR, "kill")
    kill_s = median(floor_s) if floor_s else None
    floor = {"kill_s": kill_s, "lease_s": lease_s, "step_timeout_s": LEAST_S}
    peers: dict[str, Any] = {TORCHRUN: MISSING, TORCHFT: MISSING}
    measured = [peer for peer in peers if peer in trials.of]
    for peer in measured:
        peers[peer] = {"looked_s": PEERS_LOOK_S}
        for name, of_fault in trials.of[peer].items():
            known = trials.seen_s(peer, name)
            peers[peer][f"{name}_s"] = median(known) if known else None
            peers[peer][f"{name}_count"] = len(of_fault)
            shown = f"{statistics.median(known):.3f}" if known else f"> {PEERS_LOOK_S:g}"
            rows.append((f"{peer}: {name}", len(of_fault), shown, "", "" if known else "nothing said"))
    ratios = {
        "kill_to_floor": _ratio(ours, "kill", kill_s),
        "stop_to_lease": _ratio(ours, "stop", lease_s),
        "sleep_to_timeout": _ratio(ours, "sleep", LEAST_S),
        **{
            f"{name}_to_{peer}": _ratio(ours, name, peers[peer].get(f"{name}_s"))
            for peer in measured
            for name in PEERS_FAULTS
        },
    }
    people = table(("fault", "trials", "noticed (s)", "slowest (s)", "named right"), rows)
    floors = f"floors: kill {kill_s} s, lease {lease_s:g} s, learned step timeout {LEAST_S:g} s"
    Report("detection", floor, peers, ours, ratios).print(f"{people}\n\n{floors}; ratios: {ratios}")


def _ratio(ours: dict[str, Any], name: str, other: float | None) -> float | None:
    found = ours.get(name, {}).get("noticed_s")
    return round(found / other, 3) if found is not None and other else None


def main(arguments: Sequence[str] | None = None) -> int:
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument(
        "--times", type=int, default=5, metavar="N", help="inject each fault this many times (default: 5)"
    )
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="FAULT", help=f"faults to inject: {', '.join(names)}"
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="append each trial to this file, as a line of JSON")
    parser.add_argument("--of", type=Path, metavar="FILE", help="measure nothing; report the results in this file")
    parser.add_argument("--quick", action="store_true", help="inject each fault once, also under torchrun")
    parser.add_argument(
        "--who", nargs="+", choices=WHO, default=WHO, metavar="NAME", help=f"systems to measure: {', '.join(WHO)}"
    )
    name_torchft(parser)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    count = 1 if options.quick else options.times
    if count < 1:
        parser.error("--times: expected 1 or more")
    try:
        trials = Trials.read(options.of) if options.of is not None else Trials(into=options.into)
    except (OSError, ValueError) as error:
        parser.error(f"--of: {error}")
    if options.of is None:
        measure(trials, count, options)
    report(trials)
    return 0 if all(one.right for of_fault in trials.of.get(OURS, {}).values() for one in of_fault) else 1


def measure(trials: Trials, count: int, options: argparse.Namespace) -> None:
    """Measure the selected faults this often."""
    needs = {TORCHRUN: torchrun_needs(), TORCHFT: torchft_needs(options.torchft)}
    missing = {peer: what for peer, what in needs.items() if what and peer in options.who}
    progress = Progress(f"{count} of each of {len(options.only)} faults, of {', '.join(options.who)}", missing)
    if "kill" in options.only:
        for _ in range(min(count, FLOORS)):
            trials.add(FLOOR, "kill", Trial(detection_s()))
        floor_s = median(trials.seen_s(FLOOR, "kill"))
        progress.say(f"floor of a kill: {floor_s} s from kill -9 to the end of the process's connection")
    if OURS in options.who:
        measure_ours(trials, [fault for fault in FAULTS if fault.name in options.only], count, progress)
    for peer in [peer for peer in needs if peer in options.who and peer not in missing]:
        rng = random.Random(options.seed)
        for name in [name for name in PEERS_FAULTS if name in options.only]:
            for said in measure_peer(trials, peer, name, count, options.torchft, rng):
                progress.say(said)


if __name__ == "__main__":
    sys.exit(main())
