"""Values that a recovery would lose are named with their lines; irrelevant ones are not."""

from __future__ import annotations

import gc
import hashlib
import linecache
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from samebits.core.reports import MAX_ANOMALY_CHARS
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.state.script import hidden_state
from samebits.training.state.script.hidden_state import (
    HIDDEN_MESSAGES,
    MOST_S,
    HiddenChange,
    HiddenStateLook,
    sentence_of,
    sentences_of,
)
from samebits.training.state.script.training_slice import SourceLine
from tests.training.commits import Commits, small_state
from tests.training.state.hidden_scripts import HARMLESS, HIDDEN, script


class Told:
    """Runs a script with an analysis at its commits, without a job around it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, looks: bool = True) -> None:
        self.path = folder / "train.py"
        self.findings: list[list[HiddenChange]] = []
        self.look: HiddenStateLook | None = None
        self.calls = 1
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
            for _ in range(self.calls):
                if self.look is not None:
                    self.look.called()
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


def test_value_that_begins_to_change_late_is_named_at_a_later_look(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state, "_LATER", (10, 14))
    text = script(enter="h = 1.0", before="if state.step >= 11:\n    h = h * 0.9  # moved", loss="loss = loss * h")
    told.run(text)
    [line] = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# moved")]
    assert told.lines == [line]


def test_values_that_each_call_creates_are_not_named_if_the_function_restores_them_itself(told: Told) -> None:
    text = script(
        top="""
        norms = [1.0]
        class Mean:
            def __init__(self):
                self.value = 0.0
            def add(self, loss):
                self.value = self.value + loss.item()
                return self.value
        """,
        enter="""
        h, mean = 0.0, Mean()
        state.are_locals_restored = HAS_CHECKPOINT
        """,
        loss="""
        h = h + 0.5
        norms.append(0.5)
        loss = loss * h * len(norms) * mean.add(loss)
        """,
    )
    told.run(text.replace("HAS_CHECKPOINT", "False"))
    named = {one.name for found in told.findings for one in found}
    assert {"h", "norms"} < named and any("mean" in name.lower() for name in named), named
    told.findings.clear()
    told.run(text.replace("HAS_CHECKPOINT", "True"))
    assert [one.name for found in told.findings for one in found] == ["norms"]


def test_setting_of_torch_that_changes_is_named(told: Told) -> None:
    text = script(before="if state.step == 3:\n    torch.set_default_dtype(torch.float64)")
    try:
        told.run(text)
    finally:
        torch.set_default_dtype(torch.float32)
    [[found]] = told.findings
    assert found.name == "torch's default dtype"
    assert text.splitlines()[found.place.line] == "def train(state):", "the line before it decorates the function"


@pytest.fixture
def called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch._ends_now`` ends the first call at step 10; no later look comes before."""
    monkeypatch.setattr(hidden_state, "_LATER", (100,))
    ends = iter([10])
    ends_now = Mock(side_effect=lambda step: step == 10 and next(ends, None) is not None)  # not followed: a library's
    monkeypatch.setattr(torch, "_ends_now", ends_now, raising=False)


@pytest.mark.usefixtures("called_again")
def test_change_between_two_looks_is_named_when_the_function_is_called_again(told: Told) -> None:
    text = script(
        top="norms = [1.0]",
        enter="h = 0.0",
        before="""
        if torch._ends_now(state.step):
            return
        if state.step == 8:
            norms.append(0.5)  # moved
            h = 1.0
        """,
        loss="loss = loss * norms[-1] + h",
    )
    told.calls = 2
    told.run(text)
    [line] = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# moved")]
    assert told.lines == [line], "the local h is new in each call"


def test_change_between_two_looks_is_named_before_a_checkpoint_holds_its_effect(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_state, "_LATER", (100,))
    remember = Commits.save
    saved_at: list[int] = []

    def save(session: Commits) -> None:
        remember(session)
        if session.count in (10, 15):
            session._state.look_before_save()
            saved_at.append(len(told.findings))

    monkeypatch.setattr(Commits, "save", save)
    text = script(
        top="norms = [1.0]",
        before="if state.step == 12:\n    norms.append(0.5)  # moved",
        loss="loss = loss * norms[-1]",
    )
    told.run(text)
    [line] = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# moved")]
    assert told.lines == [line]
    assert saved_at == [0, 1], "no look is due at commit 15"


def test_looks_pause_once_they_have_taken_too_long(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state, "MOST_S", 0.0)
    monkeypatch.setattr(hidden_state, "_SHARE", 0.0)
    told.run(HIDDEN["global counter"])
    assert told.findings == []
    assert told.look is not None and 0.0 < told.look.spent_s < MOST_S, "one look, which ends early"


@pytest.mark.parametrize("name", HARMLESS)
def test_value_that_no_later_step_depends_on_is_not_named(
    name: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_state, "_LATER", (10, 14))
    told.run(HARMLESS[name])
    assert told.findings == []
    assert told.look is not None and told.look.spent_s < MOST_S


def test_analysis_changes_no_bit(told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = HIDDEN["numpy generator of the module"]

    def bits(ended: dict[str, Any]) -> str:
        return hashlib.sha256(
            b"".join(one.detach().numpy().tobytes() for one in ended["model"].parameters())
        ).hexdigest()

    looked_at = bits(told.run(text))
    assert told.findings
    assert bits(Told(tmp_path, monkeypatch, looks=False).run(text)) == looked_at


def test_analysis_keeps_no_batch_alive(told: Told) -> None:
    alive: list[int] = []
    references: list[weakref.ref[torch.Tensor]] = []

    def keep(x: torch.Tensor) -> None:
        gc.collect()
        alive.append(sum(one() is not None for one in references))
        references.append(weakref.ref(x))

    torch._kept_by_test = keep  # type: ignore[attr-defined]
    try:
        told.run(script(enter="h = 0.0", before="torch._kept_by_test(x); h = h + 1.0; x = x * h"))
    finally:
        del torch._kept_by_test  # type: ignore[attr-defined]
    assert told.findings
    assert max(alive) <= 1, alive


def test_script_without_its_source_is_skipped(told: Told) -> None:
    gone = "import linecache, pathlib; pathlib.Path(__file__).unlink(); linecache.clearcache()"
    told.run(script(top=gone, enter="h = torch.zeros(1, 8)", before="h = h + x.mean(); x = x + h"))
    assert told.findings == []


def test_message_names_five_and_counts_the_rest() -> None:
    findings = [HiddenChange(f"name{number}", "", SourceLine("/x/train.py", number)) for number in range(7)]
    text = sentence_of(findings)
    assert text.startswith("hidden state: name0 (train.py:0), name1 (train.py:1), ")
    assert "name4 (train.py:4) and 2 more, listed in rank 0's log, changed outside the state" in text
    assert len(text) <= MAX_ANOMALY_CHARS


def test_all_findings_are_named_in_messages_of_five() -> None:
    findings = [HiddenChange(f"name{number}", "", SourceLine("/x/train.py", number)) for number in range(7)]
    texts = sentences_of(findings)
    assert [text.count("train.py") for text in texts] == [5, 2]
    assert not any("more" in text for text in texts)


def test_message_explains_that_each_call_copies_the_weights(told: Told) -> None:
    told.run(HIDDEN["copy of the weights at the start"])
    [[found]] = told.findings
    assert sentence_of([found]).startswith(f"hidden state: {found} is taken from the weights in each call of the ")
    assert sentence_of([found, found]).count("are taken from the weights") == 1
    other = HiddenChange("seen", "", SourceLine("/x/train.py", 3))
    assert "changed outside the state" in sentence_of([found, other])


def test_message_explains_that_each_call_takes_a_value_from_the_optimizer(told: Told) -> None:
    told.run(HIDDEN["rate of a group in a variable"])
    [[found]] = told.findings
    assert str(found).startswith("lr (train.py:"), "weight_decay does not change"
    assert sentence_of([found]) == (
        f"hidden state: {found} is taken from the optimizer in each call of the training function: a recovery takes "
        "later values, and may give other bits. Fix: take it before the training function is called, or keep it in "
        "TorchState(…)"
    )
    other = HiddenChange("seen", "", SourceLine("/x/train.py", 3))
    own, taken = sentences_of([found, other])
    assert own == sentence_of([other])
    assert taken == sentence_of([found])


def test_message_names_a_file_without_its_folder(told: Told) -> None:
    told.run(HIDDEN["checkpoint of the script itself"])
    [[found]] = told.findings
    assert str(found).startswith("last.pt (train.py:")
    assert str(found).endswith(", a file)")
    assert sentence_of([found]).endswith("Fix: keep the values that are read from it in TorchState(…)")


@pytest.mark.usefixtures("called_again")
def test_rate_that_changes_between_two_looks_is_named_when_the_function_takes_it_again(told: Told) -> None:
    text = script(
        top="schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)",
        enter="base_lr = optimizer.param_groups[0]['lr']  # moved",
        before="""
        if torch._ends_now(state.step):
            return
        if state.step == 8:
            optimizer.param_groups[0]["lr"] = 0.01
        """,
        loss="loss = loss * base_lr",
    )
    told.calls = 2
    told.run(text)
    [line] = [number for number, one in enumerate(text.splitlines(), 1) if one.endswith("# moved")]
    assert told.lines == [line]


def test_environment_variable_is_named_as_scripts_spell_it(told: Told) -> None:
    told.run(HIDDEN["environment variable that counts"])
    assert [one.name for [one] in told.findings] == ["os.environ['SCRIPT_CALLS']"]


def test_variables_that_a_recovery_sets_are_not_followed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    told.run(
        script(
            top="import os",
            loss="loss = loss / int(os.environ['WORLD_SIZE'])",
            after="os.environ['WORLD_SIZE'] = str(state.step + 2)",
        )
    )
    assert told.findings == []


def test_message_explains_how_a_module_keeps_its_values(told: Told) -> None:
    text = script(
        top="""
        class Scaled(nn.Linear):
            def forward(self, x):
                return super().forward(x) / (1 + len(self.kept)) / (1 + len(more_kept))
        model = Scaled(8, 4)
        model.kept, more_kept = [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
        """,
        after="model.kept.append(1)\nmore_kept.append(1)",
    )
    told.run(text)
    [findings] = told.findings
    of_module, other = sorted(findings, key=lambda one: one.name == "more_kept")
    assert sentence_of([of_module]).endswith(
        "Fix: keep it in the module: register_buffer() for a tensor, otherwise get_extra_state()"
    )
    assert sentence_of([other]).endswith("Fix: keep it in TorchState(…)")
    assert sentence_of(findings).endswith(
        "Fix: keep them in TorchState(…), and those of a module in register_buffer() or get_extra_state()"
    )


def test_message_names_the_world_size_if_the_state_is_free_of_it() -> None:
    finding = HiddenChange("seen", "", SourceLine("/x/train.py", 3))
    assert "so a recovery or another world size may give other bits" in sentence_of([finding], any_world_size=True)
    assert "world size" not in sentence_of([finding])


def test_points_hold_the_messages_for_processes_that_have_not_seen_the_change() -> None:
    before, after = small_state(), small_state()
    assert HIDDEN_MESSAGES not in before.contents()["shared"]
    before.hidden_messages.add("hidden state: cfg.mode …")
    point = before.contents()
    after.load(point, own=False)
    assert after.hidden_messages.take_lost() == ["hidden state: cfg.mode …"]
    assert after.hidden_messages.take_lost() == []
    assert after.contents()["shared"][HIDDEN_MESSAGES] == point["shared"][HIDDEN_MESSAGES], "also for the next recovery"
    before.load(point, own=True)
    assert before.hidden_messages.take_lost() == [], "this process has seen the change"
