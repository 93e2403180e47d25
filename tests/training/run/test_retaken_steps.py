"""Steps repeated from one commit reveal exactly the state that a script keeps outside ``state``."""

from __future__ import annotations

import copy
import hashlib
import linecache
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samebits.core.point import Point
from samebits.errors import HiddenStateError
from samebits.store.retaken_report import RetakenReport
from samebits.training import elastic
from samebits.training.process import context
from samebits.training.run.retaken_steps import Extent, Ranks, Restart, RetakenSteps
from samebits.training.state.base_state import State
from samebits.training.state.object_state import ObjectState
from samebits.training.state.script.after_commit import runs_more_after_loops
from samebits.training.state.script.hidden_state import HiddenChange, HiddenStateLook
from tests.training.commits import Commits, small_state, train_one_step
from tests.training.state.hidden_scripts import HARMLESS, SILENT, script

ALONE = Ranks(0, lambda number: [number], lambda text, _: text)

ONLY_BY_PASSES = {"batch number of enumerate"}
"""The analysis has nothing to name: it is the loop's own variable."""
BREAK_AT_A_LOSS = {
    "meter that is reset each epoch": ZeroDivisionError,
    "average in the state": UnboundLocalError,
    "predictions gathered for a report": ValueError,
    "average for evaluation only": UnboundLocalError,
    "accumulation by the batch": HiddenStateError,
    "cached constants": HiddenStateError,
    "memo": HiddenStateError,
}
"""Without hidden state, but still wrong: they use a batch number, or need a batch after a complete epoch."""


class Passes(Commits):
    """A session that repeats steps, as the running one does."""

    def __init__(self, state: State, retaken: RetakenSteps) -> None:
        self._retaken = retaken
        self.saved: Any = None
        super().__init__(state)

    def save(self) -> None:
        self._retaken.compare(self.count + 1, ALONE)
        self._state.takes_again(False)
        self._retaken.committed(self.count + 1, ALONE)
        super().save()
        if isinstance(self._state, ObjectState) and self._retaken.has_own_saves and self._retaken.saves(self.count):
            self.saved = self._state.completed_steps, copy.deepcopy(self._state.contents())

    def go_back(self) -> None:
        point = self._state.recall()
        assert point == Point(self._state.completed_steps, 1)
        self._state.begin(point)
        self._state.takes_again(True)


class Ended(BaseException):
    """Ends a run where a check ends its process."""


class Checked:
    """Runs scripts with some of their steps repeated, without a job around them."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.path = folder / "train.py"
        self.extent: Extent | None = Extent.CHECK
        self.has_room = True
        self.findings: list[HiddenChange] = []
        self.reports = [RetakenReport()]
        self.session: Passes | None = None
        self.restarts = False
        patch.setattr(elastic, "run", self._run)
        patch.setattr(context, "get_rank", lambda: 0)
        patch.setattr(context, "get_world_size", lambda: 1)

    def _run(self, function: Callable[[Any], None]) -> Callable[[Any], None]:
        def call(state: Any) -> None:
            at_length = self.extent is not None
            state.look_for_hidden(HiddenStateLook(function, state, self.findings.extend, at_length))
            if self.extent is None:
                Commits(state)
                return function(state)
            has_room, has_tail = lambda _: self.has_room, runs_more_after_loops(function.__code__)
            before = self.session.saved if self.session is not None and self.restarts else None
            restart = Restart(self.path.parent, self._saved_by_all, self._end) if self.restarts else None
            retaken = RetakenSteps(
                state,
                self.extent,
                lambda: self.findings,
                has_room,
                self.reports.append,
                has_tail=has_tail,
                restart=restart,
                report=self.report,
            )
            self.session = Passes(state, retaken)
            if before is not None:
                assert retaken.follow(0)
                assert not list(self.path.parent.glob("check_of_*")), "a further loss has nothing to compare"
                state.load(before[1], own=True)
                state.begin(Point(before[0], 1))

            def called() -> None:
                function(state)
                retaken.compare_end(ALONE)
                state.takes_again(False)

            return retaken.run(called, self.session.go_back)

        return call

    def _saved_by_all(self) -> Point:
        assert self.session is not None
        return Point(self.session.saved[0], 1)

    def _end(self) -> None:
        raise Ended

    @property
    def report(self) -> RetakenReport:
        return self.reports[-1]

    def run(self, text: str) -> dict[str, Any]:
        self.path.write_text(text)
        linecache.checkcache(str(self.path))
        return runpy.run_path(str(self.path))


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checked:
    return Checked(tmp_path, monkeypatch)


def bits(ended: dict[str, Any]) -> str:
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in ended["model"].parameters())).hexdigest()


@pytest.mark.parametrize("name", SILENT)
def test_hidden_state_is_found_by_repeating_a_step_and_named_by_analysis(name: str, checked: Checked) -> None:
    with pytest.raises(HiddenStateError, match=r"^(two runs of )?step [5-9]") as raised:
        checked.run(SILENT[name])
    assert checked.report.failure == str(raised.value)
    assert "state.model.0.weight" in checked.report.failure
    named, checked.findings = checked.findings, []
    checked.extent = None
    checked.run(SILENT[name])
    if name in ONLY_BY_PASSES:
        assert not checked.findings
        return
    assert f"hidden state: {named[0]}" in checked.report.failure
    assert {one.name for one in named} == {one.name for one in checked.findings}


def test_analysis_alone_names_at_least_18_of_20() -> None:
    assert len(SILENT) == 20
    assert len(SILENT.keys() - ONLY_BY_PASSES) >= 18


@pytest.mark.parametrize("name", sorted(HARMLESS.keys() - BREAK_AT_A_LOSS))
def test_script_that_recovers_exactly_passes(name: str, checked: Checked) -> None:
    checked.run(HARMLESS[name])
    assert checked.report.equal == (5, 6, 7, 8, 9, 10, 11, 12, 16)
    assert (checked.report.failure, checked.report.skipped) == ("", ())
    assert not checked.findings


@pytest.mark.parametrize("has_tail", [True, False])
def test_what_a_check_does_not_reach_behind_the_loop_is_reported(has_tail: bool, checked: Checked) -> None:
    text = script().replace("state.epoch < 3", "state.epoch < 8")
    checked.run(text.replace("\ntrain(state)", "    print(state.epoch)\n\ntrain(state)") if has_tail else text)
    skipped = [
        one for one in checked.report.skipped if one.startswith("what the training function does after its last")
    ]
    assert checked.report.is_over
    assert len(skipped) == has_tail, checked.report


def test_a_weight_changed_behind_the_commit_is_a_check_s_failure(checked: Checked) -> None:
    commit = "            state.commit()\n"
    with pytest.raises(HiddenStateError) as raised:
        checked.run(script().replace(commit, f"{commit}            model[0].weight.data.mul_(0.5)\n"))
    assert checked.report.failure == str(raised.value)


@pytest.mark.parametrize("name", BREAK_AT_A_LOSS)
def test_script_that_cannot_resume_within_an_epoch_is_found(name: str, checked: Checked) -> None:
    with pytest.raises(BREAK_AT_A_LOSS[name]):
        checked.run(HARMLESS[name])
    assert "train.py:" in checked.report.failure or BREAK_AT_A_LOSS[name] is HiddenStateError
    assert "Fix: " in checked.report.failure
    assert not checked.findings


def test_code_after_the_last_commit_of_a_single_epoch_runs_twice(checked: Checked) -> None:
    def of_one_epoch(**lines: str) -> str:
        return script(**lines).replace("state.epoch < 3", "state.epoch < 1")

    with pytest.raises(UnboundLocalError):
        checked.run(of_one_epoch(ended="state.best = loss.item()"))
    assert "from the commit of step 6, as after a loss there, the training function failed at train.py:" in (
        checked.report.failure
    )
    with pytest.raises(
        HiddenStateError, match=r"^three runs of the code after step 6's commit all differ in state\.best"
    ):
        checked.run(of_one_epoch(top="seen = []", ended="seen.append(1); state.best = float(len(seen))"))


@pytest.mark.parametrize("rng", ["per_step", "saved"])
def test_job_that_repeats_steps_ends_with_the_same_bits(rng: str, checked: Checked) -> None:
    text = script(before="x = x + torch.randn(()) + F.dropout(x)").replace('"per_step"', f'"{rng}"')
    checked.extent = None
    undisturbed = bits(checked.run(text))
    checked.extent = Extent.JOB
    ended = checked.run(text)
    assert checked.report.equal == (5, 6, 7, 8)
    assert checked.report.is_over
    assert bits(ended) == undisturbed
    assert checked.session is not None
    assert checked.session.count == ended["state"].completed_steps == 18
    assert not ended["state"].holds_copy
    assert ended["state"].last_copy is None, "the copy is freed"


def test_job_ends_at_hidden_state_before_it_trains_further(checked: Checked) -> None:
    checked.extent = Extent.JOB
    with pytest.raises(
        HiddenStateError, match=r"^two runs of step 5 differ .* hidden state: cfg\.seen \(train\.py:\d+\) "
    ):
        checked.run(
            SILENT["count in a dict of the module"]
            .replace("stats", "cfg.seen")
            .replace('cfg.seen = {"seen": 0}', 'cfg = types.SimpleNamespace(); cfg.seen = {"seen": 0}')
        )
    assert checked.session is not None
    assert checked.session.count == 4


def test_steps_that_differ_each_time_give_no_verdict(checked: Checked) -> None:
    text = script(top="import os", before="x = x + int.from_bytes(os.urandom(4)) / 2**32")
    with pytest.raises(HiddenStateError, match=r"three runs .* all differ .* cause is unknown"):
        checked.run(text)
    checked.extent = Extent.JOB
    with pytest.raises(HiddenStateError, match="not deterministic, or the cause is unknown"):
        checked.run(text)
    assert checked.session is not None
    assert checked.session.count == 4, "no job continues with other bits"


def test_dependence_on_the_functions_start_is_distinguished(checked: Checked) -> None:
    with pytest.raises(
        HiddenStateError, match=r"called again .* and did not differ when that was repeated: .*enumerate"
    ):
        checked.run(SILENT["batch number of enumerate"])


def test_nothing_is_repeated_without_room_for_a_copy(checked: Checked) -> None:
    checked.has_room = False
    ended = checked.run(SILENT["attribute of a class"])
    assert "no room" in checked.report.skipped[0]
    assert (checked.report.equal, ended["state"].last_copy) == ((), None)


def test_commit_without_an_optimizer_step_is_skipped(checked: Checked) -> None:
    checked.run(script(after="if state.step == 6: state.commit()"))
    assert checked.report.skipped == ("commit 8 came without an optimizer step",)
    assert checked.report.equal == (5, 6, 7, 8, 9, 10, 11, 15)


def test_analysis_finds_hidden_state_without_epochs(checked: Checked) -> None:
    checked.extent = None
    checked.run(
        script(top='stats = {"seen": 0}', loss='loss = loss / (1 + stats["seen"])', after='stats["seen"] += 1')
        .replace("sampler=sampler, schedule", "schedule")
        .replace("epoch=0, ", "")
        .replace("while state.epoch < 3:", "for _ in range(3):")
        .replace("state.epoch += 1", "pass")
        .replace("sampler.set_epoch(state.epoch)", "pass")
    )
    assert [one.name for one in checked.findings] == ["stats"]


class Own(State):
    def save(self) -> None: ...
    def restore(self) -> None: ...
    def sync(self) -> None: ...


def test_state_that_keeps_its_last_commit_itself_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[RetakenReport] = []
    retaken = RetakenSteps(Own(), Extent.CHECK, list, lambda _: True, told.append)
    for commit in range(1, 20):
        retaken.compare(commit, ALONE)
        retaken.committed(commit, ALONE)
    assert "a Own holds no copy of its last commit" in told[-1].skipped[0]
    assert told[-1].is_over


def test_values_reported_in_a_second_pass_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    state = small_state()
    Commits(state)
    monkeypatch.setattr(context, "current", lambda _: pytest.fail("it was reported"))
    state.takes_again(True)
    state.report(loss=1.0)


def test_failed_commit_is_not_counted_without_optimizers() -> None:
    class Failing(Commits):
        def save(self) -> None:
            if self.lost:
                raise RuntimeError("the group is gone")
            super().save()

    state = ObjectState(value=1)
    session = Failing(state)
    state.commit()
    session.lost = True
    state.value = 2
    with pytest.raises(RuntimeError):
        state.commit()
    assert state.recall() == Point(1, 1)
    assert (state.completed_steps, state.value) == (1, 1)


def test_held_copy_restores_what_an_optimizer_has_changed() -> None:
    state = small_state()
    Commits(state)
    state.hold_copy(on=True)
    train_one_step(state)
    state.commit()
    assert state.model is not None
    before = [one.clone() for one in state.model.parameters()]
    train_one_step(state, 1)
    assert state.recall() == Point(1, 1)
    assert all(torch.equal(one, other) for one, other in zip(before, state.model.parameters(), strict=True))


JOURNAL = """
class Journal:
    def __init__(self): self.entries = []
    def state_dict(self): return {"entries": list(self.entries)}
    def load_state_dict(self, given): self.entries = list(given["entries"])
class Recording(samebits.elastic.StateHandler):
    records = RECORDS
samebits.elastic.register_handler(Journal, Recording)
journal = Journal()
more = {"journal": journal}
"""


def test_records_of_a_handler_may_differ(checked: Checked) -> None:
    text = script(top=JOURNAL).replace("state.commit()", "state.commit(); journal.entries.append(state.step)")
    with pytest.raises(HiddenStateError, match=r"^train\.py:\d+: state\.journal changed after "):
        checked.run(text.replace("RECORDS", "()"))
    checked.run(text.replace("RECORDS", "('entries',)"))
    assert checked.report.equal == (5, 6, 7, 8, 9, 10, 11, 12, 16)


FIRST = """
import queue
first = queue.Queue()  # not followed
"""


def test_script_that_recovers_exactly_passes_in_new_processes(checked: Checked) -> None:
    checked.restarts = True
    text = script(before="x = x + torch.randn(()) + F.dropout(x)")
    with pytest.raises(Ended):
        checked.run(text)
    assert not checked.report.is_over
    checked.run(text)
    report = checked.report
    assert (report.equal, report.restarted) == ((5, 6, 7, 8, 9, 10, 11, 12, 16), (17, 18))
    assert (report.failure, report.steps, report.has_returned) == ("", 18, True)


def test_value_that_only_the_first_step_sets_is_found_in_new_processes(checked: Checked) -> None:
    checked.restarts = True
    text = script(top=FIRST, before="if first.empty():\n    first.put(x.mean())\nx = x - first.queue[0]")
    with pytest.raises(Ended):
        checked.run(text)
    with pytest.raises(HiddenStateError, match=r"^step 17 differed in state\.model.* when new processes"):
        checked.run(text)
    assert checked.report.is_over


def test_error_that_only_a_new_process_raises_is_found(checked: Checked) -> None:
    checked.restarts = True
    text = script(top=FIRST, before="if state.step == 0:\n    first.put(1)\nassert not first.empty()")
    with pytest.raises(Ended):
        checked.run(text)
    with pytest.raises(AssertionError):
        checked.run(text)
    assert checked.report.failure.startswith(
        "called in a new process from the commit of step 16, as after a loss there"
    )


def test_training_that_ends_earlier_in_new_processes_is_found(checked: Checked) -> None:
    checked.restarts = True
    text = script(top=FIRST, before="if state.step == 0: first.put(1)\nif first.empty(): return")
    with pytest.raises(Ended):
        checked.run(text)
    with pytest.raises(HiddenStateError, match=r"^training ended at step 16, before step 17, when new processes"):
        checked.run(text)


def test_script_too_short_for_new_processes_is_reported(checked: Checked) -> None:
    checked.restarts = True
    checked.run(script().replace("state.epoch < 3", "state.epoch < 1"))
    assert checked.report.skipped == ("steps in new processes: the script ended before its 7th commit",)
