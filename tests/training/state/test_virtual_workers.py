"""Virtual workers on one rank: what a loop of micro-batches changes, and every loop that is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from samebits.errors import UsageError
from samebits.training.process import context
from samebits.training.sharding.replicas import ReplicaPlace
from samebits.training.state.data.global_batch import GlobalBatch
from samebits.training.state.data.sampler import ElasticSampler
from samebits.training.state.local_sgd import LocalSGD
from samebits.training.state.torch_state import TorchState
from samebits.training.state.virtual_workers import FirstSample, require_collective_allowed, took_batch
from tests.training.commits import Commits

MICRO, WORKERS, SAMPLES = 2, 4, 20


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # otherwise the state would set it, and change this process's threads
    settings = SimpleNamespace(audit=0, enable_recovery=True, min_worker_num=1, max_worker_num=4)
    monkeypatch.setattr(context, "_process", SimpleNamespace(generation=None, settings=settings))
    monkeypatch.setattr(context, "get_rank", lambda: 0)
    monkeypatch.setattr(context, "get_world_size", lambda: 1)


class Job:
    """A script's objects, and the turns of its loop."""

    def __init__(self, *, norm: bool = True, **attributes: Any) -> None:
        torch.manual_seed(1)
        middle = [nn.BatchNorm1d(6), nn.Dropout(0.3)] if norm else []
        self.model = nn.Sequential(nn.Linear(4, 6), *middle, nn.Linear(6, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.data = TensorDataset(torch.randn(SAMPLES, 4), torch.randint(0, 3, (SAMPLES,)))
        self.sampler = ElasticSampler(self.data, seed=3)
        self.loader = DataLoader(self.data, batch_size=MICRO, sampler=self.sampler)
        made = {name: make(self) if callable(make) else make for name, make in attributes.items()}
        sizes = {"global_batch": MICRO * WORKERS, "micro_batch": MICRO}
        self.state = TorchState(self.model, self.optimizer, sampler=self.sampler, **{**sizes, **made})
        self.number = 0

    def begin(self) -> Job:
        self.session = Commits(self.state)
        return self

    def backward(self) -> None:
        inputs, labels = self.data[self.number % 4 * MICRO : (self.number % 4 + 1) * MICRO]
        F.cross_entropy(self.model(inputs), labels).backward()

    def turn(self, before_commit: Callable[[Job], object] = lambda job: None) -> None:
        self.backward()
        self.optimizer.step()
        before_commit(self)
        self.state.commit()
        self.number += 1

    def end(self) -> None:
        self.state.bind(None, 0)


@pytest.fixture
def new_job() -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**attributes: Any) -> Job:
        made.append(Job(**attributes).begin())
        return made[-1]

    yield make
    for job in made:
        job.end()


def test_step_has_the_mean_gradient_and_statistics_of_its_micro_batches(new_job: Callable[..., Job]) -> None:
    job = new_job()
    before = copy.deepcopy(job.model)
    gradients, statistics = [], []
    for turn in range(WORKERS):
        reference = copy.deepcopy(before)
        job.state._draws_as = turn
        job.state.seed_step()  # the same dropout as in the turn below
        inputs, labels = job.data[turn * MICRO : (turn + 1) * MICRO]
        F.cross_entropy(reference(inputs), labels).backward()
        gradients.append([one.grad for one in reference.parameters()])
        statistics.append(reference[1].running_mean)
        assert job.session.count == job.state.completed_steps == 0
        job.state._draws_as = turn
        job.state.seed_step()
        job.turn()
    assert job.session.count == job.state.completed_steps == 1
    means = [torch.stack(of).mean(0) for of in zip(*gradients, strict=True)]
    for now, was, mean in zip(job.model.parameters(), before.parameters(), means, strict=True):
        assert torch.allclose(now, was - 0.1 * mean, atol=1e-6)
    assert torch.allclose(job.model[1].running_mean, torch.stack(statistics).mean(0), atol=1e-6)
    assert job.model[1].num_batches_tracked == 1, "that of one virtual worker"


def test_only_the_last_turn_changes_the_state(new_job: Callable[..., Job]) -> None:
    job = new_job(
        counted=0,
        schedule=lambda job: torch.optim.lr_scheduler.ExponentialLR(job.optimizer, 0.5),
        scaler=torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1),
    )

    def count(job: Job) -> None:
        job.state.counted += 1
        job.state.schedule.step()

    for turn in range(2 * WORKERS):
        steps = turn // WORKERS
        job.optimizer.zero_grad()
        inputs, labels = job.data[0:MICRO]
        job.state.scaler.scale(F.cross_entropy(job.model(inputs), labels)).backward()
        job.state.scaler.unscale_(job.optimizer)
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)
        job.state.scaler.step(job.optimizer)
        job.state.scaler.update()
        count(job)
        job.state.commit()
        steps += turn % WORKERS == WORKERS - 1
        assert (job.state.completed_steps, job.state.counted, job.session.count) == (steps, steps, steps)
        assert job.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**steps
        assert job.state.scaler.get_scale() == 4.0 * 2**steps


def test_gradients_of_an_earlier_step_are_not_added(new_job: Callable[..., Job]) -> None:
    def weights(clear: Callable[[Job], object]) -> list[torch.Tensor]:
        job = new_job()
        for _ in range(3 * WORKERS):
            clear(job)
            job.turn()
        job.end()
        return list(job.model.parameters())

    expected = weights(lambda job: job.optimizer.zero_grad())
    for clear in (lambda job: None, lambda job: job.optimizer.zero_grad(set_to_none=False)):
        assert all(map(torch.equal, weights(clear), expected))


def test_samples_of_the_virtual_workers_do_not_depend_on_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    by_world = []
    for size in (1, 3, 4):
        micros: dict[int, list[list[int]]] = {}
        for rank in range(size):
            monkeypatch.setattr(context, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(context, "get_world_size", lambda size=size: size)
            job = Job().begin()
            assert len(job.loader) == -(-SAMPLES // (MICRO * WORKERS)), "optimizer steps, at any size"
            low, high = job.state._virtual._block  # type: ignore[union-attr]
            for number, batch in enumerate(DataLoader(range(SAMPLES), batch_size=MICRO, sampler=job.sampler)):
                micros.setdefault(low + number % (high - low), []).append(batch.tolist())
                job.sampler.record_batch(number, MICRO)
                job.state._virtual.iterated()  # type: ignore[union-attr]
                done = (number + 1) // (high - low)
                assert job.sampler.consumed == min(done * MICRO * WORKERS, SAMPLES)
            job.end()
        by_world.append(micros)
    assert by_world[0] == by_world[1] == by_world[2]
    seen = {index for batches in by_world[0].values() for batch in batches for index in batch}
    assert seen == set(range(SAMPLES))


class Augmented:
    """Draw from every generator for each sample."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, float, float]:
        assert type(index) is int
        return index, torch.rand(1), random.random(), numpy.random.random()


def test_draws_of_a_loaders_processes_belong_to_the_virtual_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    by_world = []
    for size in (1, 3):
        drawn: list[tuple[float, ...]] = []
        for rank in range(size):
            monkeypatch.setattr(context, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(context, "get_world_size", lambda size=size: size)
            job = Job().begin()
            loader = DataLoader(Augmented(), batch_size=MICRO, sampler=job.sampler, num_workers=2)
            with torch.no_grad():  # otherwise a loader that another test's training function watches counts the batches
                drawn += [
                    tuple(sample) for batch in loader for sample in zip(*map(torch.Tensor.tolist, batch), strict=True)
                ]
            job.end()
        by_world.append(sorted((index, torn[0], *rest) for index, torn, *rest in drawn))
    assert by_world[0] == by_world[1]
    assert len({first for _, first, *_ in by_world[0]}) == len(by_world[0]), "each sample has draws of its own"


def test_first_sample_of_a_batch_keeps_its_name_in_another_process() -> None:
    index = copy.copy(FirstSample(7, "3/0/8/1"))  # as pickling does
    assert (index, index.name) == (7, "3/0/8/1")


def a_second_backward(job: Job) -> None:
    job.backward()
    job.backward()


def a_step_alone(job: Job) -> None:
    job.optimizer.step()


def a_second_step(job: Job) -> None:
    job.backward()
    job.optimizer.step()
    job.optimizer.step()


def a_commit_without_a_step(job: Job) -> None:
    job.backward()
    job.state.commit()


def a_commit_without_a_backward_pass(job: Job) -> None:
    job.turn()
    job.state.commit()


def a_closure(job: Job) -> None:
    job.backward()
    job.optimizer.step(lambda: 0.0)


def a_rate_by_turn(job: Job) -> None:
    for _ in range(2):
        job.turn(lambda job: job.optimizer.param_groups[0].update(lr=0.1 / (1 + job.number)))


def weights_by_hand(job: Job) -> None:
    def clip(job: Job) -> None:
        with torch.no_grad():
            job.model[0].weight.clamp_(-0.1, 0.1)

    job.turn(clip)


def weights_through_data(job: Job) -> None:
    job.turn(lambda job: job.model[0].weight.data.clamp_(-0.1, 0.1))


def a_change_before_the_forward_pass(job: Job) -> None:
    for _ in range(2):
        job.state.counted += 1
        job.turn()


def a_forward_pass_that_changes_buffers(job: Job) -> None:
    job.turn()
    with torch.no_grad():
        job.model(torch.randn(8, 4))
    job.turn()


def a_part_of_the_model(job: Job) -> None:
    inputs, labels = job.data[0:MICRO]
    hidden = job.model[1](job.model[0](inputs))
    F.cross_entropy(job.model[3](hidden), labels).backward()


def an_unfrozen_parameter(job: Job) -> None:
    job.turn()
    job.model[0].weight.requires_grad_(False)
    job.turn()


def a_collective(job: Job) -> None:
    require_collective_allowed(object())  # no turn is under way
    job.turn()
    require_collective_allowed(object())


def an_end_inside_a_step(job: Job) -> None:
    job.turn()
    job.state.finish()


def an_iteration_inside_a_step(job: Job) -> None:
    job.turn()
    iter(job.sampler)


def a_schedule_of_a_loss(job: Job) -> None:
    job.turn(lambda job: job.state.plateau.step(1.0))


def global_batches(job: Job) -> None:
    iter(GlobalBatch(job.sampler, job.model.parameters(), size=8, micro=2))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (a_second_backward, "a second backward pass before state.commit"),
        (a_step_alone, "called without a backward pass"),
        (a_second_step, "called a second time"),
        (a_commit_without_a_step, r"without optimizer.step\(\) in this iteration"),
        (a_commit_without_a_backward_pass, "without a backward pass in this iteration"),
        (a_closure, "computes gradients inside the step"),
        (a_rate_by_turn, "differs between two micro-batches"),
        (weights_by_hand, "weights of the state changed in micro-batch 1 of 4"),
        (weights_through_data, "weights of the state changed in micro-batch 1 of 4"),
        (a_change_before_the_forward_pass, "state.counted changed between"),
        (a_forward_pass_that_changes_buffers, "changed outside the forward passes"),
        (a_part_of_the_model, "without a call of the state's module"),
        (an_unfrozen_parameter, "frozen or unfrozen between two micro-batches"),
        (a_collective, "a collective in micro-batch 2"),
        (an_end_inside_a_step, "returned after 1 of this rank's 4 micro-batches"),
        (an_iteration_inside_a_step, "a new iteration over the sampler began after 1"),
        (a_schedule_of_a_loss, "the value of one micro-batch"),
        (global_batches, "both divide the samples"),
    ],
)
def test_loop_that_would_depend_on_the_world_size_is_refused(
    loop: Callable[[Job], None], message: str, new_job: Callable[..., Job]
) -> None:
    job = new_job(counted=0, plateau=lambda job: torch.optim.lr_scheduler.ReduceLROnPlateau(job.optimizer))
    with pytest.raises(UsageError, match=f"(?s){message}.*Fix: "):
        loop(job)


def test_collective_inside_a_replica_is_allowed_in_every_turn(new_job: Callable[..., Job]) -> None:
    job, inside = new_job(), object()
    job.turn()
    job.state._virtual._replica = ReplicaPlace(0, 1, within=(inside,))  # type: ignore[union-attr, arg-type]
    require_collective_allowed(inside)
    with pytest.raises(UsageError, match="a collective in micro-batch 2"):
        require_collective_allowed(object())


def test_batches_of_another_order_or_size_are_refused(new_job: Callable[..., Job]) -> None:
    job = new_job()
    mine = job.loader.batch_sampler
    took_batch(mine)
    with pytest.raises(UsageError, match="two batches were taken"):
        took_batch(mine)
    with pytest.raises(UsageError, match="sampler is a RandomSampler: its order would depend on the world size"):
        took_batch(DataLoader(job.data, batch_size=MICRO, sampler=RandomSampler(job.data)).batch_sampler)
    with pytest.raises(UsageError, match="batch_size=3 yields the batches, but the state's micro_batch is 2"):
        took_batch(DataLoader(job.data, batch_size=3, sampler=job.sampler).batch_sampler)
    with pytest.raises(UsageError, match="its order would depend"):
        took_batch(None)
    with torch.no_grad():
        took_batch(None)  # an evaluation


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"global_batch": 7}, "a multiple of micro_batch"),
        ({"micro_batch": 0}, "a multiple of micro_batch"),
        ({"micro_batch": None}, "expected both"),
        ({"rng": "saved"}, "belong to virtual workers"),
        ({"other": lambda job: torch.optim.SGD(job.model.parameters(), 0.1)}, "with 2 optimizers"),
        ({"other": lambda job: nn.SyncBatchNorm(3)}, "SyncBatchNorm"),
        ({"other": lambda job: StatefulLoader()}, "a StatefulLoader, whose order"),
    ],
)
def test_state_that_cannot_be_divided_is_refused(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"{message}.*Fix: "):
        Job(**attributes)


class StatefulLoader:
    """A loader with a state, like torchdata's."""

    dataset = ()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


def test_more_ranks_than_virtual_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.current("a test").settings, "max_worker_num", 5)
    with pytest.raises(UsageError, match=r"may have 5 workers .* gives 4 virtual workers, so 1 of them .*Fix: "):
        Job().begin()


def test_local_sgd_and_lbfgs_are_refused() -> None:
    job = Job(norm=False)
    with pytest.raises(UsageError, match=r"global_batch=.*Fix: "):
        LocalSGD(job.state, sync_every=2)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"LBFGS.*Fix: "):
        TorchState(model, torch.optim.LBFGS(model.parameters()), global_batch=8, micro_batch=2)
