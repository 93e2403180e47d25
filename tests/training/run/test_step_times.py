"""Step times in windows of twenty, split by part; the wait for a loader's batch is one of the parts."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, dataloader

from samebits.core.reports import StepTiming
from samebits.training import torch_private
from samebits.training.main_thread_time import MainThreadTime
from samebits.training.run.step_times import FIRST_STEPS, StepTimes


class Job:
    """A main thread with a clock that the test sets."""

    def __init__(self, least_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.waited = MainThreadTime()
        self.waited.data_s, self.waited.communication_s = 7.0, 8.0  # of earlier generations
        self.step = 40
        self.times = StepTimes(least_s, self.waited, lambda: self.now_s)
        self.times.begin(self.step, 2)

    def take(
        self, data: float, compute: float, communication: float, commit: float, *, steps: int = 1
    ) -> StepTiming | None:
        """Make some steps and their commit, which includes a wait for the others; in milliseconds."""
        self.waited.data_s += data / 1000
        self.waited.communication_s += communication / 1000
        self.now_s += (data + compute + communication) / 1000
        before = self.times.pace
        self.times.commit_begins()
        self.waited.communication_s += 0.001
        self.now_s += commit / 1000 + 0.001
        self.step += steps
        pace = self.times.commit_ends(self.step)
        return pace if pace is not before else None


def near(pace: StepTiming | None, *parts_ms: float) -> bool:
    return pace is not None and all(abs(one - 1000 * ms) <= 2 for one, ms in zip(pace.time, parts_ms, strict=True))


def test_window_has_twenty_steps_without_the_first_two() -> None:
    job = Job()
    assert [job.take(500, 500, 500, 500) for _ in range(FIRST_STEPS)] == [None, None]
    told = [job.take(10, 40, 30, 5) for _ in range(60)]
    assert [at for at, pace in enumerate(told, 1) if pace is not None] == [20, 40, 60]
    for pace in (told[19], told[39], told[59]):
        assert pace is not None and pace.steps == 20 and near(pace, 10, 40, 31, 5)


def test_fast_steps_are_reported_together() -> None:
    job = Job(least_s=0.99)
    told = [pace for pace in (job.take(1, 4, 3, 1) for _ in range(300)) if pace is not None]
    assert [pace.steps for pace in told] == [100, 100] and near(told[0], 1, 4, 4, 1)


def test_commit_after_several_steps_is_shared_among_them() -> None:
    job = Job()
    told = [pace for pace in (job.take(40, 80, 39, 20, steps=4) for _ in range(8)) if pace is not None]
    assert [pace.steps for pace in told] == [20] and near(told[0], 10, 20, 10, 5)


def test_window_needs_a_step_and_a_stopped_clock_is_not_an_error() -> None:
    job = Job()
    assert [job.take(1, 1, 1, 1, steps=0) for _ in range(50)] == [None] * 50
    held = StepTimes(0.0, job.waited, lambda: 5.0)
    held.begin(0, 2)
    for step in range(1, 23):
        held.commit_begins()
        held.commit_ends(step)
    assert held.pace is None


@pytest.mark.parametrize("why", ["off", "alone"])
def test_nothing_is_measured_without_a_comparison(why: str) -> None:
    job = Job()
    job.times = StepTimes(None if why == "off" else 0.0, job.waited, lambda: job.now_s)
    job.times.begin(job.step, 1 if why == "alone" else 2)
    assert [job.take(10, 10, 10, 10) for _ in range(50)] == [None] * 50


def test_thousands_of_ranks_report_less_often() -> None:
    job = Job()
    job.times.begin(job.step, 10_000)
    told = [pace.steps for pace in (job.take(10, 20, 20, 60) for _ in range(205)) if pace is not None]
    assert told == [100, 100], "ten seconds of them"


class _Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor(index)


def test_batches_of_a_loader_are_timed_once_however_often_it_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator: Any = dataloader._BaseDataLoaderIter
    next_batch = iterator.__next__
    monkeypatch.setattr(iterator, "__next__", getattr(next_batch, "__wrapped__", next_batch))
    waited = MainThreadTime()
    for _ in range(2):
        torch_private.follow_batches(lambda began_s, _: waited.waited_for_data(began_s))
    loader: DataLoader[torch.Tensor] = DataLoader(_Slow(), batch_size=2)
    began_s = time.perf_counter()
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    passed_s = time.perf_counter() - began_s
    assert 0.08 <= waited.data_s <= passed_s
    other = threading.Thread(target=lambda: waited.waited_for_data(0.0))
    before_s = waited.data_s
    other.start()
    other.join()
    assert waited.data_s == before_s, "another thread's wait is not the main thread's"
