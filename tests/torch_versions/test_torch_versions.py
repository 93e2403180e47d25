"""Torch versions: their requirements, the parsing of reports, and the documented table."""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from samebits.training.torch_private import TRIED, not_tried
from tests.system.processes import REPOSITORY
from tests.torch_versions.__main__ import version
from tests.torch_versions.checks import Outcome, Row, outcome_in
from tests.torch_versions.environment import constraints_for, reason_in, requirements
from tests.torch_versions.table import HEAD, table

SAME = {"undisturbed": "aa", "kill_with_a_spare": "aa", "kill_with_a_restart": "aa"}
REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.room.test_one" name="test_a"/><testcase classname="tests.room.test_one" name="test_b"/>
<testcase classname="tests.room.test_one" name="test_c"><failure message="AttributeError: _x&#10;more">.</failure>
</testcase>
<testcase classname="tests.room.test_one" name="test_d"><skipped message="not here"/></testcase>
<testcase classname="" name="tests.room.test_two"><error message="collection failure"/></testcase>
</testsuite></testsuites>"""


def row(**changes: object) -> Row:
    fine = {"torch": "2.12.1+cu130", "probes": Outcome(17), "tests": Outcome(300), "sha256": dict(SAME)}
    return Row("2.12.1", **(fine | changes))  # type: ignore[arg-type]


# --- the range --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [*TRIED, f"{TRIED[0]}+cu128", f"{TRIED[-1]}0a0+git0123456", torch.__version__])
def test_version_inside_the_range_is_not_mentioned(installed: str) -> None:
    assert not_tried(str(installed)) == ""


@pytest.mark.parametrize("installed", ["1.13.1", "2.9.1", "2.99.0.dev20270101+cu140", "3.0.0", "main"])
def test_other_version_is_named_with_the_range_and_the_fix(installed: str) -> None:
    oldest, newest = (".".join(one.split(".")[:2]) for one in (TRIED[0], TRIED[-1]))
    said = not_tried(installed)
    assert said.startswith(f"torch {installed} was not tested: {oldest} to {newest} were. Fix: ")
    assert f"tests.torch_versions {installed.split('+')[0]}`" in said and "\n" not in said


def test_versions_are_in_order_and_the_oldest_is_the_packages_minimum() -> None:
    numbers = [tuple(map(int, one.split("."))) for one in TRIED]
    assert numbers == sorted(set(numbers))
    parser = configparser.ConfigParser()
    parser.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    assert f"torch>={numbers[0][0]}.{numbers[0][1]}" in parser["options"]["install_requires"].split("\n")


@pytest.mark.parametrize("page", ["support-matrix.md", "support-matrix.zh-CN.md"])
def test_support_matrix_has_a_row_for_exactly_the_tried_versions(page: str) -> None:
    lines = (REPOSITORY / "docs" / "reference" / page).read_text(encoding="utf-8").splitlines()
    rows = [found[1] for line in lines if (found := re.match(r"\| (\d+\.\d+\.\d+)(?:\+\w+)? \|", line))]
    assert rows == list(TRIED)


# --- what is installed ------------------------------------------------------------------------------------------------


def test_everything_is_pinned_except_what_torch_decides() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = constraints_for(lines)
    assert {line.partition("==")[0] for line in set(lines) - set(kept)} == {"torch", "setuptools"}
    pinned = {line.partition("==")[0].lower() for line in kept}
    needed = requirements((REPOSITORY / "setup.cfg").read_text(encoding="utf-8"))
    names = [re.split(r"[>=;]", one)[0].lower() for one in needed]
    assert "torch" not in names and {"pyzmq", "msgspec", "pytest"} <= set(names) <= pinned


def test_pips_errors_are_the_reason_or_else_its_last_line() -> None:
    assert reason_in("Looking\nERROR: No such thing\nERROR: None found\n\n") == "No such thing None found"
    assert reason_in("Collecting torch\nKilled\n") == "Killed"
    assert reason_in("") == "pip said nothing"


# --- what came out ----------------------------------------------------------------------------------------------------


def test_report_is_counted_and_each_failure_named_with_its_first_line() -> None:
    tests = outcome_in(REPORT)
    assert tests.passed == 2 and str(tests) == "2 of 5" and not tests.are_fine
    assert tests.failed[0] == "tests.room.test_one.test_c: AttributeError: _x"
    assert [one.partition(":")[0] for one in tests.failed[1:]] == ["tests.room.test_one.test_d", ".tests.room.test_two"]


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": "no such version"},
        {"probes": Outcome(16, ("test_x",))},
        {"tests": Outcome()},
        {"tests": Outcome(problem="pytest left with 4")},
        {"sha256": {**SAME, "kill_with_a_spare": "bb"}},
        {"sha256": {name: "aa" for name in SAME if name != "kill_with_a_restart"}},
        {"sha256": {name: "aa" for name in SAME if name != "undisturbed"}},
    ],
)
def test_version_is_fine_only_if_everything_is(changes: dict[str, object]) -> None:
    assert row().is_fine
    assert not row(**changes).is_fine


def test_table_shows_each_versions_results() -> None:
    other = row(sha256={**SAME, "kill_with_a_restart": "bb"})
    lost = row(sha256={"undisturbed": "aa", "kill_with_a_restart": "aa"}, tests=Outcome(2, ("x",)))
    lines = table([row(), other, lost, Row("9.9", reason="none found")]).splitlines()
    assert [line.count("|") for line in lines] == [len(HEAD) + 1] * 6
    assert lines[2] == "| 2.12.1+cu130 | 17 | 300 | went on | went on | the same |"
    assert lines[3].endswith("| went on | went on | differ |")
    assert lines[4] == "| 2.12.1+cu130 | 17 | 2 of 3 | failed | went on | the same |"
    assert lines[5].startswith("| 9.9 | not tried: none found |")


@pytest.mark.system
def test_version_that_cannot_be_installed_is_a_row_with_pips_reason(tmp_path: Path) -> None:
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "tests.torch_versions", "2.0.99", "--folder", tmp_path / "here"],
        cwd=REPOSITORY,
        env=os.environ | nothing,
        capture_output=True,
        text=True,
        timeout=240,
    )
    *_, line, last = done.stdout.splitlines()
    (told,) = json.loads(last)["versions"]
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch==2.0.99" in told["reason"] and not told["is_fine"]
    assert line.startswith("| 2.0.99 | not tried: ") and told["reason"] in line
    assert done.stdout.startswith("[   0.0 s] 2.0.99: makes an environment\n")
    assert list((tmp_path / "here").iterdir()) == [], "its environment still exists"


@pytest.mark.parametrize("word", ["../2.12", "torch", "2.12;x", "2.12/../..", "-2.12", ""])
def test_invalid_version_is_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no version. Fix: give one such as 2\.12\.1"):
        version(word)


@pytest.mark.parametrize("word", [*TRIED, "2.13.0+cpu", "2.16.0.dev20261101"])
def test_version_that_pip_accepts_is_accepted(word: str) -> None:
    assert version(word) == word
