"""``python -m tests.system --repeat 20 [--case NAME]``: run the kill list many times and print a table.

``--cycles 100``: run one job that loses a rank to its spare this often, and report what its survivor holds.

``--matrix``: run every combination of the kill matrix, or only the given ``--cell``s.

``--soak 50 [--seed 1]``: run this many jobs whose processes are killed, stopped and asked to leave at random times.

Each case runs with real processes. It must end with the undisturbed run's sha256 and without replacing a process that
was not killed. Progress is printed to standard error, one line per run. The table and, with ``--keep``, the folders of
failed runs are kept. The exit status is 0 only if every run passed.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.system import cycles, matrix, soak
from tests.system.job import Job
from tests.system.kill_list import CASES, Case
from tests.system.matrix import Cell
from tests.system.processes import ColdStarter, Starter, WarmStarter


@dataclass(slots=True)
class Outcome:
    """The results of a case's runs."""

    runs: int = 0
    same_sha: int = 0
    survivors_replaced: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def is_perfect(self) -> bool:
        return self.runs == self.same_sha == len(self.seconds) and self.survivors_replaced == 0


class Repeater:
    """Runs cases in folders below ``root`` and caches the sha256 of undisturbed runs."""

    def __init__(self, starter: Starter, root: Path, *, keep: bool) -> None:
        self._starter = starter
        self._root = root
        self._keep = keep
        self._expected: dict[tuple[str, ...], str] = {}
        self._jobs: list[Job] = []

    def close(self) -> None:
        """End processes of an interrupted run, and remove the folders unless they are to be kept."""
        for job in self._jobs[-1:]:
            job.end()
        if not self._keep:
            shutil.rmtree(self._root)

    def expected(self, trained: tuple[str, ...]) -> str:
        """Return the sha256 of an undisturbed run with these arguments."""
        if trained not in self._expected:
            job = self.new_job((*trained, "--pause-ms", "0"))
            job.start()
            self._expected[trained] = job.wait_finished()
        return self._expected[trained]

    def run(self, case: Case, outcome: Outcome) -> str:
        """Run a case once; return the failure, or an empty string."""
        expected = self.expected(case.trained)
        job = self.new_job(case.arguments)
        outcome.runs += 1
        began = time.monotonic()
        problem, failed = "", {}
        try:
            case.disturb(job)
            failed = {name: status for name, status in job.wait_ended().items() if status}
            outcome.seconds.append(time.monotonic() - began)
            if failed:
                problem = f"exit statuses {failed}\n{job.tails()}"
            elif (sha256 := job.sha256()) == expected:
                outcome.same_sha += 1
            else:
                problem = f"sha256 {sha256}, expected {expected}\n{job.tails()}"
        except AssertionError as error:
            problem = str(error)
        replaced = [
            rank for rank in job.ranks if rank not in job.restarted and (rank in failed or job.seatings(rank) > 1)
        ]
        outcome.survivors_replaced += len(replaced)
        left = job.end()
        if replaced:
            problem += f"\nsurvivors that had to be replaced: {replaced}"
        if left:
            problem += f"\nleft behind: {left}"
        if problem and self._keep:
            problem += f"\nits folder: {job.folder}"
        return problem.strip()

    def new_job(self, arguments: tuple[str, ...], settings: Mapping[str, str] | None = None) -> Job:
        """Return a job in its own folder that has not been started."""
        folder = self._root / f"job{len(self._jobs)}"
        folder.mkdir()
        self._jobs.append(Job(folder, self._starter, args=arguments, settings=settings))
        return self._jobs[-1]


def main() -> int:
    arguments = parse_arguments()
    cases = [CASES[name] for name in arguments.case or CASES]
    starter: ColdStarter | WarmStarter = ColdStarter() if arguments.cold else WarmStarter()
    outcomes = {case.name: Outcome() for case in cases}
    root = Path(tempfile.mkdtemp(prefix="samebits-kill-list-"))
    repeater = Repeater(starter, root, keep=arguments.keep)
    try:
        if arguments.cycles:
            return run_cycles(arguments.cycles, starter, repeater)
        if arguments.soak:
            return run_soak(range(arguments.seed, arguments.seed + arguments.soak), repeater)
        if arguments.matrix or arguments.cell:
            return run_matrix([matrix.CELLS[name] for name in arguments.cell or matrix.CELLS], repeater)
        for number in range(1, arguments.repeat + 1):
            for case in cases:
                problem = repeater.run(case, outcomes[case.name])
                said = f"FAILED\n{problem}" if problem else f"same sha, {outcomes[case.name].seconds[-1]:.1f} s"
                print(f"{number}/{arguments.repeat} {case.name}: {said}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        repeater.close()
        if isinstance(starter, WarmStarter):
            starter.close()
    print(table(outcomes))
    return 0 if all(outcome.is_perfect for outcome in outcomes.values()) else 1


def run_cycles(number: int, starter: Starter, repeater: Repeater) -> int:
    """Run one job through this many losses; return 0 if the bits are right and nothing relevant grew."""
    arguments = cycles.arguments(number)
    expected = repeater.expected(arguments)
    job = repeater.new_job(cycles.disturbed(number), cycles.SETTINGS)
    held = cycles.Cycles(job).run(number, lambda text: print(text, file=sys.stderr, flush=True))
    failed = {name: status for name, status in job.wait_ended().items() if status}
    is_same = job.sha256() == expected
    leaks = cycles.leaks(held)
    print(cycles.table(held))
    print(f"same sha: {is_same}; exit statuses besides 0: {failed or 'none'}; leaks: {', '.join(leaks) or 'none'}")
    return 0 if is_same and not failed and not leaks else 1


def run_matrix(cells: list[Cell], repeater: Repeater) -> int:
    """Run each combination once; return 0 if all passed."""
    failed = []
    for number, cell in enumerate(cells, start=1):
        job = repeater.new_job(cell.arguments, cell.settings)
        began, problem = time.monotonic(), ""
        try:
            matrix.run(cell, job, lambda cell=cell: repeater.expected(cell.trained))
        except (AssertionError, TimeoutError) as error:
            problem = f"{error}\nits folder: {job.folder}"
        left = job.end()
        if left and not problem:
            problem = f"left behind: {left}"
        said = f"FAILED\n{problem}" if problem else f"as it must, {time.monotonic() - began:.1f} s"
        print(f"{number}/{len(cells)} {cell.name}: {said}", file=sys.stderr, flush=True)
        failed += [cell.name] * bool(problem)
    print("\n".join([f"{len(cells) - len(failed)} of {len(cells)} combinations ended as they must", *failed]))
    return 1 if failed else 0


def run_soak(seeds: range, repeater: Repeater) -> int:
    """Run a job for each seed; return 0 if all had the undisturbed run's bits and left nothing behind."""
    failed, happened = [], Counter[str]()
    for seed in seeds:
        expected = repeater.expected(soak.trained(seed))
        one = soak.Soak(repeater.new_job(soak.disturbed(seed), soak.settings_of(seed)), seed)
        began, problem = time.monotonic(), ""
        try:
            if (sha256 := one.run()) != expected:
                problem = f"sha256 {sha256}, expected {expected}"
        except (AssertionError, TimeoutError) as error:
            problem = str(error)
        left = one.job.end()
        if left and not problem:
            problem = f"left behind: {left}"
        happened += one.happened
        said = f"same sha, {sum(one.happened.values())} signals, {time.monotonic() - began:.1f} s"
        if problem:
            said = f"FAILED\n{problem}\n{one.story()}\nits folder: {one.job.folder}"
            failed.append(seed)
        print(f"seed {seed} of {seeds[0]} to {seeds[-1]}: {said}", file=sys.stderr, flush=True)
    for what, number in sorted(happened.items()):
        print(f"{number:6}  {what}")
    print(f"{len(seeds) - len(failed)} of {len(seeds)} jobs ended with the same sha; failed: {failed or 'none'}")
    return 1 if failed else 0


def table(outcomes: dict[str, Outcome]) -> str:
    """Format one row per case, and the total."""
    width = max(map(len, outcomes))
    rows = [f"{'case':{width}}  runs  same sha  survivors replaced  median s"]
    for name, outcome in outcomes.items():
        median = f"{statistics.median(outcome.seconds):8.1f}" if outcome.seconds else f"{'–':>8}"
        rows.append(
            f"{name:{width}}  {outcome.runs:4}  {outcome.same_sha:8}  {outcome.survivors_replaced:18}  {median}"
        )
    every = outcomes.values()
    runs, same = sum(one.runs for one in every), sum(one.same_sha for one in every)
    replaced = sum(one.survivors_replaced for one in every)
    rows.append(f"{'all':{width}}  {runs:4}  {same:8}  {replaced:18}")
    return "\n".join(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.system", description="Repeat the kill list.")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each case (default: 20)")
    parser.add_argument(
        "--case", action="append", choices=list(CASES), metavar="NAME", help="only this one; repeatable"
    )
    parser.add_argument("--cycles", type=int, default=0, help="losses of one job to its spare, instead of the list")
    parser.add_argument("--matrix", action="store_true", help="the kill matrix, once, instead of the list")
    parser.add_argument(
        "--cell", action="append", choices=list(matrix.CELLS), metavar="NAME", help="only this one of it; repeatable"
    )
    parser.add_argument("--soak", type=int, default=0, help="jobs with random faults, instead of the list")
    parser.add_argument("--seed", type=int, default=1, help="of the first of these jobs (default: 1)")
    parser.add_argument("--cold", action="store_true", help="start every process anew, imports and all")
    parser.add_argument("--keep", action="store_true", help="keep the folders")
    parser.add_argument("--list", action="store_true", help="print the cases' names and exit")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        parser.exit()
    return arguments


if __name__ == "__main__":
    sys.exit(main())
