"""The step log of a state: what is logged before each step, comparisons of repeated steps, and messages."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samebits.core.messages import GenerationStarted
from samebits.core.point import Point
from samebits.errors import DivergenceError, ForeignFolderError, UsageError
from samebits.service.log import LOGGER
from samebits.store.lock import DirectoryLock
from samebits.store.step_log import STEPS_FOLDER, read_step_log
from samebits.store.step_record import LogHeader, StepRecord
from samebits.training.checkpoint.replay import Replay, weights_digest
from samebits.training.process import context
from samebits.training.state.checkpoint_config import CheckpointConfig, StepLog
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.object_state import ObjectState
from samebits.training.state.torch_state import TorchState
from tests.store.disk_faults import NO_SPACE, Disk, interposed
from tests.training.commits import Commits, small_state, train_one_step

HEADER = LogHeader("job-1", 0, "worker-0")
BATCH = 4
ALL_DEFAULTS = StepLog()


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Collect the messages to the user; this process is rank 0 of 2."""
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 2)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # tests/store covers durability
    monkeypatch.setattr(LOGGER, "propagate", True)
    caplog.set_level(logging.INFO, LOGGER.name)
    return lambda: [one.getMessage() for one in caplog.records]


class LoggedRun(Commits):
    """A state with a step log from its first generation on; a new one is a restarted process."""

    def __init__(
        self, directory: Path, asked: StepLog = ALL_DEFAULTS, *, header: LogHeader = HEADER, **more: Any
    ) -> None:
        self.state = small_state(epoch=0, rng="per_step", **more)
        self.sampler: ElasticSampler = self.state.sampler
        self.replay: Replay | None = None
        super().__init__(self.state)
        self.replay = Replay(asked, self.state, directory, header)

    def begin(self, step: int, *, generation: int = 1, world_size: int = 2) -> None:
        """Start a generation at that step, which the state has reached in some other way."""
        self.state._committed_steps = step
        self.state.begin(Point(step, generation))
        assert self.replay is not None
        self.replay.begin(place(generation, world_size), step)

    def before_step(self) -> None:
        if self.replay is not None:
            self.replay.before_step()

    def save(self) -> None:
        super().save()
        if self.replay is not None:
            self.replay.committed(self.state.completed_steps)

    def train(self, steps: int, *, after: bool = False, lr: float = 0.001, shift: int = 0) -> None:
        """Train this many steps, each with the samples that follow from its number."""
        for _ in range(steps):
            number = self.state.completed_steps
            samples = [(number * BATCH + one + shift) % 32 for one in range(BATCH)]
            for group in self.state.optimizer.param_groups:
                group["lr"] = lr
            if not after:
                self.sampler.record_indices(samples)
            train_one_step(self.state, number)
            if after:
                self.sampler.record_indices(samples)
            self.state.commit()

    def finish(self) -> None:
        assert self.replay is not None
        self.replay.finished()
        self.replay.close()

    def kill(self) -> None:
        """End the process: only the disk's content stays, and the kernel releases the lock."""
        assert self.replay is not None
        self.replay._writer = None
        self.replay._lock.release()


def place(generation: int, world_size: int) -> GenerationStarted:
    fields: dict[str, Any] = dict.fromkeys(GenerationStarted.__struct_fields__)
    told = {"generation": generation, "rank": 0, "slot": 0, "world_size": world_size, "text": "because"}
    return GenerationStarted(**{**fields, **told})


def logged(directory: Path) -> list[StepRecord]:
    found = read_step_log(directory)
    return [] if found is None else found.history.records


def killed_at(directory: Path, steps: int, asked: StepLog = ALL_DEFAULTS, **train: Any) -> None:
    """Return a first process that was killed after this many steps."""
    first = LoggedRun(directory, asked)
    first.begin(0)
    first.train(steps, **train)
    first.kill()


def resumed(directory: Path, step: int, asked: StepLog = ALL_DEFAULTS, generation: int = 2, **more: Any) -> LoggedRun:
    """Return a second process at the point of ``step``, reached by the same steps, unlogged."""
    run = LoggedRun(directory, asked, **more)
    replay, run.replay = run.replay, None
    for number in range(step):
        train_one_step(run.state, number)
        run.state.commit()
    run.replay = replay
    run.begin(step, generation=generation)
    return run


# ---- what is logged


@pytest.mark.parametrize("after", [False, True], ids=["recorded before", "recorded after"])
def test_step_is_logged_with_all_it_depends_on(tmp_path: Path, after: bool) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    digests = []
    for _ in range(3):
        digests.append(weights_digest(run.state))
        run.train(1, after=after)
    run.finish()
    records = logged(tmp_path / "0")
    assert [one.step for one in records] == [1, 2, 3]
    assert [one.samples for one in records] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert [one.weights for one in records] == digests and len(set(digests)) == 3
    assert {(one.generation, one.world_size, one.rank, one.seed, one.learning_rates) for one in records} == {
        (1, 2, 0, 0, (0.001,))
    }


def test_record_is_on_disk_before_the_weights_change(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    seen = []
    optimizer = run.state.optimizer
    digest = weights_digest(run.state)
    optimizer.register_step_pre_hook(
        lambda *_: seen.append((logged(tmp_path / "0")[-1].step, weights_digest(run.state)))
    )
    run.train(1)
    assert seen == [(1, digest)]


def test_digest_covers_exactly_the_parameters_by_name(tmp_path: Path) -> None:
    state = small_state()
    digest = weights_digest(state)
    assert state.model is not None
    state.model.norm.running_mean += 1.0
    assert weights_digest(state) == digest
    with torch.no_grad():
        state.model.last.bias[0] += 1e-6
    assert weights_digest(state) != digest


def test_digest_of_every_third_step_only(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0", StepLog(digest_every=3))
    run.begin(0)
    run.train(7)
    assert [one.step for one in logged(tmp_path / "0") if one.weights is not None] == [3, 6]


def test_batch_is_what_the_loader_was_given(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    share = list(run.sampler)
    for batch in range(2):
        run.sampler.record_batch(batch, 3)
        train_one_step(run.state)
        run.state.commit()
    assert [list(one.samples) for one in logged(tmp_path / "0")] == [share[:3], share[3:6]]


def test_two_optimizers_of_one_step_make_one_record(tmp_path: Path) -> None:
    state_of_two = _two_optimizers()
    run = Commits(state_of_two)
    replay = Replay(StepLog(), state_of_two, tmp_path / "0", HEADER)
    replay.begin(place(1, 2), 0)
    run.before_step = replay.before_step  # type: ignore[method-assign]
    for _ in range(2):
        for name in ("one", "other"):
            state_of_two.model(torch.ones(1, 2)).sum().backward()
            getattr(state_of_two, name).step()
            state_of_two.drop_gradients()
        state_of_two.commit()
        replay.committed(state_of_two.completed_steps)
    assert [(one.step, one.learning_rates) for one in logged(tmp_path / "0")] == [(1, (0.1, 0.2)), (2, (0.1, 0.2))]


def _two_optimizers() -> TorchState:
    model = nn.Linear(2, 2)
    one = torch.optim.SGD([model.weight], lr=0.1)
    return TorchState(model, one=one, other=torch.optim.SGD([model.bias], lr=0.2))


def test_several_steps_between_commits_are_each_logged(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    for number in range(4):
        run.sampler.record_indices([number])
        train_one_step(run.state, number)
    run.state.commit()
    run.train(1)
    assert [(one.step, one.samples) for one in logged(tmp_path / "0")[:4]] == [(n + 1, (n,)) for n in range(4)]


def test_state_without_an_optimizer_is_refused(tmp_path: Path) -> None:
    for state in (ObjectState(epoch=0), TorchState(epoch=0), LocalSGD(small_state(rng="per_step"), sync_every=2)):
        with pytest.raises(UsageError, match=f"a {type(state).__name__} has no optimizer steps that all ranks"):
            Replay(StepLog(), state, tmp_path / "0", HEADER)


@pytest.mark.parametrize("wrong", [{"digest_every": 0}, {"on_divergence": "shrug"}])
def test_invalid_values_are_refused_in_a_sentence(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        StepLog(**wrong)


def test_true_means_all_defaults_and_false_none() -> None:
    assert (StepLog.of(True), StepLog.of(False)) == (StepLog(), None)
    assert StepLog.of(StepLog(digest_every=2)) == StepLog(digest_every=2)
    with pytest.raises(UsageError, match="step_log='warn': expected True, False"):
        CheckpointConfig(step_log="warn")  # type: ignore[arg-type]


# ---- comparisons


@pytest.mark.parametrize("after", [False, True], ids=["recorded before", "recorded after"])
def test_equal_steps_are_silent_until_one_line_at_the_end(
    tmp_path: Path, said: Callable[[], list[str]], after: bool
) -> None:
    killed_at(tmp_path / "0", 9, after=after)
    run = resumed(tmp_path / "0", 4)
    run.train(5, after=after)
    assert said() == []
    run.train(1, after=after)
    assert said() == ["steps 5 to 9 were replayed: same samples, same weights"]
    run.train(3, after=after)
    run.finish()
    assert len(said()) == 1
    assert [one.step for one in logged(tmp_path / "0")] == [*range(1, 10), *range(5, 14)]


def test_run_that_ends_with_the_log_says_so_at_its_end(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    killed_at(tmp_path / "0", 9)
    run = resumed(tmp_path / "0", 4)
    run.train(5)
    run.finish()
    assert said() == ["steps 5 to 9 were replayed: same samples, same weights"]


def test_only_compared_steps_are_reported_as_equal(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    killed_at(tmp_path / "0", 9, StepLog(digest_every=1000))
    run = resumed(tmp_path / "0", 4)
    run.train(6)
    assert said() == ["steps 5 to 9 were replayed: same samples"]


def test_second_kill_while_repeating_still_compares_the_whole_first_run(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    killed_at(tmp_path / "0", 9)
    second = resumed(tmp_path / "0", 4)
    second.train(2)
    second.kill()
    third = resumed(tmp_path / "0", 4, generation=3)
    third.train(6)
    assert said() == ["steps 5 to 9 were replayed: same samples, same weights"]


@pytest.mark.parametrize("after", [False, True], ids=["recorded before", "recorded after"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"lr": 0.5}, r"learning rate 0\.001 when generation 1 logged it, 0\.5 now"),
        ({"shift": 1}, r"samples 24, 25, 26, 27 \(4 in all\) when generation 1 logged it, 25, 26, 27, 28 \(4 in all\)"),
    ],
)
def test_first_differing_step_is_named(
    tmp_path: Path, said: Callable[[], list[str]], after: bool, change: dict[str, Any], expected: str
) -> None:
    killed_at(tmp_path / "0", 9, after=after)
    run = resumed(tmp_path / "0", 4)
    run.train(2, after=after)
    with pytest.raises(DivergenceError, match=rf"step 7 differs from the log, .*first.*: {expected}"):
        run.train(3, after=after, **change)
    run.replay.close()  # type: ignore[union-attr]
    assert said() == []


def test_divergence_is_raised_before_the_step_and_leaves_the_log_unchanged(tmp_path: Path) -> None:
    killed_at(tmp_path / "0", 9)
    before = logged(tmp_path / "0")
    run = resumed(tmp_path / "0", 4)
    digest = weights_digest(run.state)
    with pytest.raises(DivergenceError):
        run.train(1, lr=0.5)
    assert weights_digest(run.state) == digest
    assert logged(tmp_path / "0") == before


def test_different_weights_and_seeds_are_named(tmp_path: Path) -> None:
    killed_at(tmp_path / "0", 9)
    run = resumed(tmp_path / "0", 4)
    run.train(2)
    with torch.no_grad():
        run.state.weights()[0].add_(1e-6)
    with pytest.raises(
        DivergenceError, match=r"step 7 differs from the log, .*: weights before it [0-9a-f]{32} when .*, [0-9a-f]{32}"
    ):
        run.train(1)
    run.replay.close()  # type: ignore[union-attr]
    run = resumed(tmp_path / "0", 4, seed=9)
    with pytest.raises(
        DivergenceError, match=r"step 5 differs from the log, .*: seed 0 when generation 2 logged it, 9 now"
    ):
        run.train(1)


@pytest.mark.parametrize("after", [False, True], ids=["recorded before", "recorded after"])
def test_with_a_warning_the_run_continues_as_its_own_line(
    tmp_path: Path, said: Callable[[], list[str]], after: bool
) -> None:
    warns = StepLog(on_divergence="warn")
    killed_at(tmp_path / "0", 9)
    run = resumed(tmp_path / "0", 4, warns)
    run.train(8, shift=3, after=after)
    run.kill()
    assert len(said()) == 1 and "step 5 differs from the log" in said()[0]
    third = resumed(tmp_path / "0", 4, generation=3)  # no longer compared with the first run
    third.train(9, shift=3, after=after)
    assert said()[1:] == ["steps 5 to 12 were replayed: same samples, same weights"]


def test_another_world_starts_a_new_line(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    killed_at(tmp_path / "0", 9)
    run = LoggedRun(tmp_path / "0")
    run.begin(4, generation=2, world_size=3)
    run.train(3, lr=0.9)
    run.kill()
    assert said() == [
        "the step log of slot 0 starts over at step 5: the steps up to 9 were logged with a different world size or "
        "rank and are not compared"
    ]
    found = read_step_log(tmp_path / "0")
    assert found is not None
    assert [(step, one.world_size) for step, one in found.history.line.items() if step > 4] == [(5, 3), (6, 3), (7, 3)]


# ---- recovery from memory


def test_recovery_from_memory_compares_repeated_steps_silently(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    run = LoggedRun(tmp_path / "0", copy_commits=True)
    run.begin(0)
    run.train(3)
    run.sampler.record_indices([12, 13, 14, 15])
    train_one_step(run.state, 3)  # not committed: a peer is lost
    shutil.rmtree(tmp_path / "0" / STEPS_FOLDER)  # nothing may be read for it
    assert run.state.recall() == Point(3, 1)
    run.begin(3, generation=2)
    run.train(1)
    assert said() == []
    assert run.state.recall() == Point(4, 1)
    run.begin(4, generation=3)
    assert said() == []


def test_recovery_from_memory_finds_a_differing_step(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0", copy_commits=True)
    run.begin(0)
    run.train(3)
    run.sampler.record_indices([12, 13, 14, 15])
    train_one_step(run.state, 3)
    run.state.recall()
    run.begin(3, generation=2)
    with pytest.raises(DivergenceError, match=r"step 4 differs from the log, .*: samples"):
        run.train(1, shift=1)


def test_samples_recorded_after_a_committed_step_outlive_the_generation(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    run.train(3, after=True)
    run.begin(3, generation=2)
    run.train(1, after=True)
    assert [one.samples for one in logged(tmp_path / "0")[:3]] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


# ---- other folders and processes, failing disks


def test_log_that_starts_or_resumes_late_says_so(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    run = LoggedRun(tmp_path / "0")
    run.begin(40, generation=2)
    run.train(1)
    run.kill()
    assert said() == ["the step log of slot 0 begins at step 41: this host has no record of the steps before it"]
    run = LoggedRun(tmp_path / "0")
    run.begin(42, generation=3)  # one step behind the others when it was lost
    run.train(1)
    run.kill()
    assert len(said()) == 1
    run = LoggedRun(tmp_path / "0")
    run.begin(60, generation=4)
    assert said()[1:] == ["the step log of slot 0 continues at step 61: the steps from 44 on were taken elsewhere"]


def test_gap_in_the_log_is_counted(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    killed_at(tmp_path / "0", 3)
    late = resumed(tmp_path / "0", 5)
    late.train(3)
    late.kill()
    said_before = len(said())
    run = resumed(tmp_path / "0", 1, generation=3)
    run.train(8)
    assert said()[said_before:] == [
        "steps 2 to 8 were replayed: same samples, same weights (2 of them were not in the log)"
    ]


def test_log_of_another_job_is_refused(tmp_path: Path) -> None:
    killed_at(tmp_path / "0", 3)
    run = LoggedRun(tmp_path / "0", header=LogHeader("job-2", 0, "worker-0"))
    with pytest.raises(ForeignFolderError, match="written by job job-1, but this is job job-2"):
        run.begin(0)


def test_full_disk_is_reported_once_and_training_continues(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    run = LoggedRun(tmp_path / "0")
    with interposed(Disk(only=("write",), failure=NO_SPACE, every_one_after=True), tmp_path) as disk:
        run.begin(0)
        run.train(2)
        disk.fail_at = disk.matching
        run.train(3)
        disk.fail_at = -1
        run.train(2)
    run.kill()
    assert len(said()) == 2
    assert said()[0].startswith("step 3 could not be written to the step log (") and "ENOSPC" in said()[0]
    assert said()[1] == "steps are logged again, from step 6 on"
    assert [one.step for one in logged(tmp_path / "0")] == [1, 2, 6, 7]


def test_log_held_by_another_process_is_reported_and_used_once_released(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    holder = DirectoryLock(tmp_path / "0" / STEPS_FOLDER, "worker other")
    holder.acquire()
    run = LoggedRun(tmp_path / "0")
    run.begin(0)
    run.train(2)
    assert len(said()) == 1 and "worker other" in said()[0]
    holder.release()
    run.train(1)
    assert [one.step for one in logged(tmp_path / "0")] == [3]
