"""Golden scenarios: every story in ``scenarios/`` plays out exactly as written.

After a deliberate change, rewrite a scenario with ``python -m pytest tests/core/test_core_scenarios.py
--rewrite-scenarios``, then read the difference before keeping it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import pytest

from samebits.core.membership.leases import Leases
from tests.core.scenario_driver import Scenario, ScenarioError

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.txt"))
MOST_LINES = 80


def play(text: str) -> str:
    """Return the scenario's text with the trace that its commands produce now."""
    scenario = Scenario()
    return "\n".join(line for written in _kept(text) for line in _played(scenario, written)) + "\n"


def _kept(text: str) -> Iterator[str]:
    """Return everything but the trace, whose lines are indented."""
    return (line for line in text.splitlines() if not line.startswith(" "))


def _played(scenario: Scenario, written: str) -> list[str]:
    is_command = bool(written) and not written.startswith("#")
    return [written, *scenario.run(written)] if is_command else [written]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario(file: Path, request: pytest.FixtureRequest) -> None:
    written = file.read_text(encoding="utf-8")
    played = play(written)
    if request.config.getoption("--rewrite-scenarios", default=False):
        file.write_text(played, encoding="utf-8")
    elif played != written:
        difference = difflib.unified_diff(written.splitlines(), played.splitlines(), "written", "played", lineterm="")
        pytest.fail("\n".join(["if this is meant: --rewrite-scenarios", *difference]), pytrace=False)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario_is_short_and_begins_with_its_story(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    story = " ".join(line.removeprefix("#").strip() for line in _story(lines))
    assert story.count(".") >= 2 and story.endswith("."), "two sentences tell the story"
    assert len(lines) <= MOST_LINES


def _story(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("#"):
            return
        yield line


def test_changed_decision_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    flapping = (FOLDER / "flapping_worker.txt").read_text(encoding="utf-8")
    assert play(flapping) == flapping
    monkeypatch.setattr(Leases, "cool_down_left_s", lambda *_: 0.0)
    assert play(flapping) != flapping


def test_unknown_command_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="no such command: 'kil w0'"):
        play("kil w0\n")


def test_command_about_a_dead_process_is_an_error() -> None:
    with pytest.raises(ScenarioError, match="not all of 'w0 w1' are running"):
        play("job of 2 workers\nstart scheduler\nstart w0 w1\nkill w1\nkill w0 w1\n")
