"""Values that a recovery would lose are named with their lines, and values that do not matter are not."""

from __future__ import annotations

import linecache
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.training import elastic
from runtime.training.process import context
from runtime.training.state.hidden_state import MOST_S, Finding, HiddenStateLook, sentence_of
from tests.training.commits import Commits
from tests.training.state.hidden_scripts import HARMLESS, HIDDEN


class Told:
    """Runs a script with a look at its commits, without a job around it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, looks: bool = True) -> None:
        self.path = folder / "train.py"
        self.findings: list[list[Finding]] = []
        self.look: HiddenStateLook | None = None
        self._looks = looks
        patch.setattr(elastic, "run", self._run)
        patch.setattr(context, "get_rank", lambda: 0)
        patch.setattr(context, "get_world_size", lambda: 1)

    def _run(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(state: Any) -> None:
            Commits(state)
            if self._looks:
                self.look = HiddenStateLook(function, state, self.findings.append)
                state.look_for_hidden(self.look)
            function(state)

        return call

    def run(self, text: str) -> dict[str, Any]:
        self.path.write_text(text)
        linecache.checkcache(str(self.path))
        return runpy.run_path(str(self.path))

    @property
    def lines(self) -> list[int]:
        return [one.place.line for told in self.findings for one in told]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_state_is_named_with_the_line_that_changes_it(name: str, told: Told) -> None:
    text = HIDDEN[name]
    told.run(text)
    [line] = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# moved")]
    assert line in told.lines
    assert len(told.findings) == 1, told.findings
    assert f"(train.py:{line}" in sentence_of(told.findings[0])


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_later_step_depends_on_is_not(name: str, told: Told) -> None:
    told.run(HARMLESS[name])
    assert told.findings == []
    assert told.look is not None and told.look.spent_s < MOST_S
