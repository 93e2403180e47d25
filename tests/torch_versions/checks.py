"""The checks of a torch version and their results: probes, part of the tests, and three jobs.

Bits are compared with those of the same version's own undisturbed run, since another version may round differently.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.system.processes import environment_of_tests
from tests.torch_versions.environment import Environment, Say, follow
from tests.torch_versions.jobs import JOBS

PROBES = ("tests/training/test_torch_private.py", "tests/training/test_fsdp2_private.py")
TESTS = ("tests/training/group", "tests/training/sharding", "tests/training/state")
TESTS_S, JOBS_S = 1800.0, 1200.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one pytest run: how many passed, which did not, and the reason if there are none."""

    passed: int = 0
    failed: Sequence[str] = ()
    problem: str = ""

    @property
    def are_fine(self) -> bool:
        return self.passed > 0 and not self.failed and not self.problem

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        return f"{self.passed}" if not self.failed else f"{self.passed} of {self.passed + len(self.failed)}"


@dataclass(slots=True)
class Row:
    """The results of one version.

    Attributes:
        version: as requested.
        torch: the installed one's own version.
        reason: why it could not be installed or imported; empty if it could.
        sha256: the hash of each finished job's weights, by name.
        problems: the problems of each unfinished job.
    """

    version: str
    torch: str = ""
    reason: str = ""
    probes: Outcome = field(default_factory=Outcome)
    tests: Outcome = field(default_factory=Outcome)
    sha256: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def has_same_bits(self, job: str) -> bool:
        """Return whether this job ended as the undisturbed one did."""
        return job in self.sha256 and self.sha256[job] == self.sha256.get("undisturbed")

    @property
    def is_fine(self) -> bool:
        return (
            not self.reason
            and self.probes.are_fine
            and self.tests.are_fine
            and all(self.has_same_bits(run.__name__) for run in JOBS)
        )


def check(environment: Environment, row: Row, say: Say) -> None:
    """Run everything and fill in the row; jobs and reports are in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as name:
        folder = Path(name).resolve()
        clean = environment_of_tests() | {"OMP_NUM_THREADS": "1"}
        clean.pop("VIRTUAL_ENV", None)
        imported = follow(
            [environment.python, "-c", "import torch; print(torch.__version__)"],
            folder / "import.log",
            clean,
            say,
            timeout_s=300,
        )
        last = imported.output.strip().rpartition("\n")[2]
        if imported.status:
            row.reason = f"it does not import: {last}"
            return
        row.torch = last
        say(f"torch {row.torch}: probes")
        row.probes = _pytest(environment, PROBES, folder / "probes.xml", clean, say)
        say(f"probes: {row.probes}; tests of groups, DDP, sharding and state")
        row.tests = _pytest(environment, TESTS, folder / "tests.xml", clean, say)
        say(f"tests: {row.tests}; jobs")
        _run_jobs(environment, row, folder, clean, say)


def _pytest(environment: Environment, paths: Sequence[str], report: Path, clean: dict[str, str], say: Say) -> Outcome:
    command = [environment.python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = follow(
        [*command, f"--basetemp={report.with_suffix('')}", f"--junitxml={report}", *paths],
        report.with_suffix(".log"),
        clean,
        say,
        timeout_s=TESTS_S,
    )
    if not report.exists():
        return Outcome(problem=f"pytest left with {done.status}: {done.output.strip().rpartition(chr(10))[2]}")
    tests = outcome_in(report.read_text(encoding="utf-8"))
    for name in tests.failed:
        say(f"failed: {name}")
    return tests


def outcome_in(junit: str) -> Outcome:
    """Parse a pytest report; a skipped test has not passed."""
    passed, failed = 0, []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        found = next((case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None)
        if found is None:
            passed += 1
        else:
            why = (found.get("message") or "").strip().partition("\n")[0]
            failed.append(f"{case.get('classname')}.{case.get('name')}: {why}"[:300])
    return Outcome(passed, tuple(failed))


def _run_jobs(environment: Environment, row: Row, folder: Path, clean: dict[str, str], say: Say) -> None:
    done = follow(
        [environment.python, "-m", "tests.torch_versions.jobs", folder / "jobs"],
        folder / "jobs.log",
        clean,
        say,
        timeout_s=JOBS_S,
    )
    for line in done.output.splitlines():
        if line.startswith('{"job"'):
            told = json.loads(line)
            if "sha256" in told:
                row.sha256[told["job"]] = told["sha256"]
            else:
                row.problems[told["job"]] = told["problem"]
                say(f"{told['job']}: {told['problem']}")
    missing = [run.__name__ for run in JOBS if run.__name__ not in {*row.sha256, *row.problems}]
    for name in missing:
        row.problems[name] = f"the jobs' program left with {done.status}: {done.output.strip().rpartition(chr(10))[2]}"
        say(f"{name}: {row.problems[name]}")
    shutil.rmtree(folder / "jobs", ignore_errors=True)
