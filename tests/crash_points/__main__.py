"""``python -m tests.crash_points [--strace] [--scenario NAME]``: run every point of every scenario, print violations.

With ``--strace`` the kernel's calls are failed and killed (minutes); without it, those of the interposed layer (under a
minute).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tests.crash_points import points, strace
from tests.crash_points.points import Nursery, Runner, Violation
from tests.crash_points.scenarios import SCENARIOS

REPOSITORY = Path(__file__).resolve().parents[2]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash_points", description=__doc__)
    parser.add_argument("--strace", action="store_true", help="inject with strace(1) instead of interposing on os")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one (may be repeated)")
    arguments = parser.parse_args(words)
    if arguments.strace and (why := strace.refusal()) is not None:
        print(why, file=sys.stderr)
        return 2
    found, runs, began_s = 0, 0, time.monotonic()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-points-"))) / "point"
        nursery = None if arguments.strace else stack.enter_context(Nursery(REPOSITORY))
        for name in arguments.scenario or SCENARIOS:
            runner: Runner | strace.Tracer
            runner = Runner(nursery, place, name) if nursery else strace.Tracer(REPOSITORY, place, name)
            bad = 0
            for violation in _all_violations(runner):
                print(violation, flush=True)
                bad += 1
            print(f"{name}: {len(runner.points())} calls, {runner.runs} runs, {bad} violations", flush=True)
            found, runs = found + bad, runs + runner.runs
    print(f"{runs} runs in {time.monotonic() - began_s:.0f} s, {found} violations")
    return 1 if found else 0


def _all_violations(runner: Runner | strace.Tracer) -> Iterator[Violation]:
    for fault in strace.FAULTS if isinstance(runner, strace.Tracer) else points.FAULTS:
        yield from runner.violations(fault)
    if isinstance(runner, Runner):
        yield from runner.refusals()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
