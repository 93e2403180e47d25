"""The cost of audits: steps per second with AUDIT=50 against 0.

``python -m benchmarks.audit [--quick] [--workload NAME ...]``. Two jobs of four ranks under ``elastic.run`` alternate
in windows of five steps: one audits every 50th step, the other audits none. In each interval, two windows of the
auditing job, one without an audit and the one that ends with it, are each compared with the other job's window just
before. The cost of an audit every 50 steps is computed from these. The models have 3 and 25 million parameters.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.report import Progress, Report, rounded, spread, table
from benchmarks.steady_state import WORLD_SIZE, Contestant, Window, job_of_ours
from samebits.settings_table import LEAST_AUDIT

EVERY, STEPS = LEAST_AUDIT, 5
"""Steps of an interval and of a window."""
TARGET = 0.95
INTERVALS = {"mlp": 24, "wide": 24, "transformer": 6}
USUAL, QUICK, INTERVALS_QUICK = ("wide", "transformer"), ("mlp",), 3


@dataclass(slots=True)
class Measured:
    """Windows by content, each with the preceding window of the job without audits."""

    quiet: list[tuple[Window, Window]] = field(default_factory=list)
    audited: list[tuple[Window, Window]] = field(default_factory=list)

    def quiet_ratio(self) -> float:
        """Return the ratio for the auditing job's unaudited steps: the cost of its hooks."""
        return _ratio(self.quiet)

    def audited_ratio(self) -> float:
        """Return the ratio for ``STEPS`` steps of which one is audited."""
        return _ratio(self.audited)

    def ratio(self) -> float:
        """Return the computed ratio for ``EVERY`` steps of which one is audited."""
        return 1 / (1 + (1 / self.audited_ratio() - 1) * STEPS / EVERY)

    def audit_ms(self) -> float:
        """Return the additional time of an audited step, in milliseconds."""
        return statistics.median(STEPS / one.steps_per_s - STEPS / off.steps_per_s for one, off in self.audited) * 1e3


def _ratio(pairs: Sequence[tuple[Window, Window]]) -> float:
    return statistics.median(one.steps_per_s / off.steps_per_s for one, off in pairs)


def measure(workload: str, intervals: int, progress: Progress) -> Measured:
    """Measure this many intervals after a warm-up interval."""
    measured, jobs = Measured(), list[Contestant]()
    try:
        for name, every in (("audited", str(EVERY)), ("not audited", "0")):
            jobs.append(Contestant(name, workload, job_of_ours(WORLD_SIZE, AUDIT=every, CONSISTENCY="majority:0")))
        for job in jobs:
            job.wait_until_ready()
        audits, other = jobs
        for interval in range(intervals + 1):
            audits.run("train", EVERY - 2 * STEPS)
            pairs = [(other.run("train", STEPS), audits.run("train", STEPS)) for _ in range(2)]
            if interval:
                (off, quiet), (off_again, audited) = pairs
                measured.quiet.append((quiet, off))
                measured.audited.append((audited, off_again))
                progress.say(f"{workload}: an audit takes {measured.audit_ms():.3g} ms")
    finally:
        for job in jobs:
            job.close()
    return measured


def report(measured: Mapping[str, Measured]) -> Report:
    """Report the figures; the floor is the job without audits."""
    found = Report("audit")
    for name, one in measured.items():
        found.floor[f"{name}_steps_per_s"] = rounded(statistics.median(off.steps_per_s for _, off in one.audited))
        found.ours[f"{name}_audit_ms"] = rounded(one.audit_ms())
        found.ratios[f"quiet_vs_none_{name}"] = rounded(one.quiet_ratio())
        found.ratios[f"audited_vs_none_{name}_every_{STEPS}"] = rounded(one.audited_ratio())
        found.ratios[f"worked_out_audited_vs_none_{name}_every_{EVERY}"] = rounded(one.ratio())
    return found


def people(measured: Mapping[str, Measured]) -> str:
    """Format one row per model."""
    head = ("model", "not audited, steps/s", "an audit, ms", "steps beside it", f"÷ none, every {EVERY} steps")
    rows = [
        (
            name,
            str(spread([off.steps_per_s for _, off in one.audited])),
            f"{one.audit_ms():.3g}",
            f"{one.quiet_ratio():.3f}",
            f"{one.ratio():.3f}",
        )
        for name, one in measured.items()
    ]
    return f"{table(head, rows)}\nwanted: {TARGET} or more at every {EVERY} steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="measure three intervals, with the smallest model (0.4 million parameters)"
    )
    parser.add_argument(
        "--workload", nargs="+", choices=list(INTERVALS), help=f"models to train (default: {' '.join(USUAL)})"
    )
    options = parser.parse_args()
    names = options.workload or (QUICK if options.quick else USUAL)
    progress = Progress(f"AUDIT={EVERY} of {', '.join(names)}, {WORLD_SIZE} ranks")
    measured = {name: measure(name, INTERVALS_QUICK if options.quick else INTERVALS[name], progress) for name in names}
    report(measured).print(people(measured))


if __name__ == "__main__":
    main()
