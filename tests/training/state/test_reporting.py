"""``state.report``: what is written, by which rank, how often, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from samebits.errors import AnomalyError, GenerationEndedError, UsageError
from samebits.store.progress_report import ProgressReport, read_report
from samebits.training.group import transfer
from samebits.training.state.reporting import INTERVAL_S, Reporter


class Desk:
    """A reporter with a clock that the test sets."""

    def __init__(self, log_dir: Path) -> None:
        self.now = 0.0
        self.log_dir = log_dir
        self.reporter = Reporter(lambda: self.now)
        self.odd: list[tuple[int, str]] = []
        self.verdicts = 0
        self.process: Any = SimpleNamespace(
            settings=SimpleNamespace(log_dir=log_dir, loss_anomaly="tell", enable_recovery=True),
            device=torch.device("cpu"),
            agent=SimpleNamespace(node="0", report_anomaly=self.tell),
        )

    def tell(self, step: int, text: str, *, is_verdict: bool, comes_again: bool) -> None:
        assert comes_again is text.endswith("compute it again")
        self.odd.append((step, text))
        self.verdicts += is_verdict

    def reports(self, step: int, *, rank: int = 0, total_steps: Any = None, **values: Any) -> ProgressReport | None:
        self.reporter.take(self.process, rank, step, total_steps, values)
        return read_report(self.log_dir, "0")


def test_newest_values_are_written_twice_a_second_and_the_last_at_the_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.reports(1, loss=2.0, total_steps=100) == ProgressReport(1, 100, {"loss": 2.0})
    for step in range(2, 50):
        desk.now += INTERVAL_S / 100
        written = desk.reports(step, loss=1.0)
    assert written == ProgressReport(1, 100, {"loss": 2.0})
    desk.now = INTERVAL_S
    assert desk.reports(50, loss=0.5, lr=0.1) == ProgressReport(50, 100, {"loss": 0.5, "lr": 0.1})
    desk.reports(51, loss=0.25)
    desk.reporter.flush()
    assert read_report(tmp_path, "0") == ProgressReport(51, 100, {"loss": 0.25})


def test_tensor_is_read_only_when_it_is_written_and_keeps_no_graph(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 3).sum()
    assert desk.reports(1, loss=loss) == ProgressReport(1, None, {"loss": 3.0})
    desk.reports(2, loss=loss)
    assert desk.reporter._unwritten is not None
    assert not desk.reporter._unwritten[2]["loss"].requires_grad


def test_only_rank_0_writes_and_only_for_a_reader(tmp_path: Path) -> None:
    assert Desk(tmp_path).reports(1, rank=1, loss=1.0) is None
    assert Desk(tmp_path / "missing").reports(1, loss=1.0) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("total_steps", "values", "text"),
    [
        (None, {"loss": "low"}, "a value is not a number"),
        (None, {"loss": torch.ones(2)}, "a value is not a number"),
        (None, {"x" * 25: 1}, "the name 'xxx"),
        (None, {"a\x1b[2J": 1}, "the name"),
        (None, {f"v{n}": n for n in range(13)}, "13 values; expected at most 12"),
        (0, {}, "total_steps=0"),
        (2.5, {}, "total_steps=2.5"),
    ],
)
def test_unprintable_value_is_refused(total_steps: Any, values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        Desk(tmp_path).reports(1, total_steps=total_steps, **values)
    assert text in str(refused.value)


def test_nan_loss_is_reported_by_any_rank_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)
    for step, loss in enumerate([1.0, torch.tensor(float("nan"), requires_grad=True), float("nan"), 1.0], 1):
        desk.reports(step, rank=3, loss=loss)
    desk.reports(5, rank=3, grad_norm=torch.tensor(float("inf")))
    assert desk.odd == [(2, "the loss is not a number"), (5, "the gradient norm is infinite")]
    assert "rank 3, step 2: the loss is not a number" in caplog.text


def test_spike_above_the_learned_band_is_reported(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for step in range(1, 100):
        desk.reports(step, loss=1.0 + (step % 7) / 100)
    desk.reports(100, loss=40.0)
    assert desk.odd == [(100, "the loss is 40 after 1.03 ± 0.26 so far")]


def test_stop_ends_the_script_there_and_off_does_not_check(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.process.settings.loss_anomaly = "off"
    desk.reports(1, rank=1, loss=float("nan"))
    desk.process.settings.loss_anomaly = "stop"
    with pytest.raises(AnomalyError, match=r"rank 1, step 2: the loss is infinite\. Fix: "):
        desk.reports(2, rank=1, loss=float("inf"))
    assert desk.odd == []


@pytest.mark.parametrize("policy", ["tell", "stop", "recompute"])
def test_early_steps_repeated_after_a_rollback_are_no_anomaly(policy: str, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.process.settings.loss_anomaly = policy
    for step in [*range(200), *range(1, 200)]:
        falling = 2.0 + 6.0 / (1 + step)
        desk.reports(step, loss=falling, grad_norm=falling)
    assert desk.odd == []


# ---- recomputation


@pytest.fixture
def recomputing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Return a reporter after forty normal values, in a world of one."""
    monkeypatch.setattr(transfer, "gather", lambda value, _device: [value])
    desk = Desk(tmp_path)
    desk.process.settings.loss_anomaly = "recompute"
    for step in range(1, 41):
        desk.reports(step, rank=1, loss=1.0 + (step % 7) / 100)
    return desk


def goes_back(desk: Desk, **values: float) -> None:
    """Check that the value makes this rank request the step again, once, at the commit."""
    desk.reports(41, rank=1, **values)
    assert desk.odd[-1][1].endswith(": all ranks return to the last commit and compute it again")
    with pytest.raises(GenerationEndedError, match="rank 0 has reported an anomaly"):
        desk.reporter.vote(desk.process)
    desk.reporter.vote(desk.process)


def test_different_second_value_was_a_transient_error(recomputing: Desk) -> None:
    desk = recomputing
    goes_back(desk, loss=float("nan"))
    desk.reports(40, rank=1, loss=1.05)  # two steps lay between the commit and it
    desk.reports(41, rank=1, loss=1.06)
    desk.reports(42, rank=1, loss=1.0)
    assert len(desk.odd) == 2 and desk.verdicts == 1
    assert "was 1.06 when recomputed" in desk.odd[1][1] and "a transient error" in desk.odd[1][1]
    goes_back(desk, loss=float("inf"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_repeated_nan_ends_the_script(recomputing: Desk, value: float) -> None:
    desk = recomputing
    goes_back(desk, grad_norm=value)
    with pytest.raises(AnomalyError, match=r"rank 1, step 41: .* the model or the data is at fault.*Fix: "):
        desk.reports(41, rank=1, grad_norm=value)


def test_repeated_spike_is_reported_and_accepted(recomputing: Desk) -> None:
    desk = recomputing
    goes_back(desk, loss=50.0)
    desk.reports(41, rank=1, loss=50.0)
    desk.reports(42, rank=1, loss=50.0)
    assert [step for step, _ in desk.odd] == [41, 41] and "the model or the data is at fault" in desk.odd[1][1]


def test_different_bad_value_is_reported_and_accepted(recomputing: Desk) -> None:
    desk = recomputing
    goes_back(desk, loss=50.0)
    desk.reports(41, rank=1, loss=60.0)
    assert "was 60 when recomputed: either" in desk.odd[1][1]


def test_report_after_the_commit_is_pointed_out(recomputing: Desk) -> None:
    desk = recomputing
    goes_back(desk, loss=float("nan"))
    desk.reports(42, rank=1, loss=float("nan"))
    desk.reports(43, rank=1, loss=float("nan"))
    assert desk.verdicts == 1 and "Fix: call state.report() before state.commit()" in desk.odd[1][1]


def test_step_that_a_loss_has_repeated_already_is_not_requested_again(recomputing: Desk) -> None:
    desk = recomputing
    desk.reports(41, rank=1, loss=float("nan"))
    desk.reporter.begin()  # a peer was lost before the commit
    desk.reports(41, rank=1, loss=1.06)
    desk.reporter.vote(desk.process)
    assert desk.verdicts == 1 and "a transient error" in desk.odd[1][1]


def test_two_repeated_spikes_between_commits_end_after_one_repetition_each(recomputing: Desk) -> None:
    desk, repetitions = recomputing, 0
    while repetitions < 9:
        for step, loss in enumerate([1.0, 50.0, 1.0, 60.0, 1.0], 41):  # one commit
            desk.reports(step, rank=1, loss=loss)
        try:
            desk.reporter.vote(desk.process)
        except GenerationEndedError:
            repetitions += 1
            desk.reporter.begin()
        else:
            break
    assert repetitions == 2


def test_without_recovery_it_is_only_reported(recomputing: Desk) -> None:
    desk = recomputing
    desk.process.settings.enable_recovery = False
    desk.reports(41, rank=1, loss=float("nan"))
    assert desk.odd == [(41, "the loss is not a number")]
