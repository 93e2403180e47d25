"""Horovod's calls in one process: refusals, side effects, and order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional

import samebits.horovod as hvd
from samebits.core.point import Point
from samebits.errors import CommunicationError, GenerationEndedError, UsageError
from samebits.horovod import collectives
from samebits.training.group import transfer
from samebits.training.process import context
from tests.training.commits import Commits, bits_of


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Three ranks, of which the others always contribute twice and three times what this one does."""
    told = SimpleNamespace(reduced=[], fails=False)

    def all_reduce(tensor: torch.Tensor, op: Any) -> None:
        if told.fails:
            raise GenerationEndedError("a member was lost")
        told.reduced.append((tensor.dtype, tensor.numel(), op))
        tensor.mul_(6)

    process = SimpleNamespace(
        generation=None, settings=None, admitted=SimpleNamespace(slot=0, world_size=3), device="cpu"
    )
    monkeypatch.setattr(context, "_process", process)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return told


def linear() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def backward(model: nn.Module) -> None:
    model(torch.ones(3, 2)).square().sum().backward()


def test_gradients_are_averaged_in_one_flat_tensor_just_before_the_step(peers: SimpleNamespace) -> None:
    model, optimizer = linear()
    wrapped = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    assert wrapped is optimizer
    assert isinstance(wrapped, torch.optim.SGD)
    for count in (1, 2):
        wrapped.zero_grad()
        backward(model)
        alone = [one.grad.clone() for one in model.parameters()]  # type: ignore[union-attr]
        assert len(peers.reduced) == count - 1
        wrapped.step()
        assert peers.reduced[-1] == (torch.float32, 9, dist.ReduceOp.SUM)
        for one, before in zip(model.parameters(), alone, strict=True):
            assert torch.equal(one.grad, before * 6 / 3)  # type: ignore[arg-type]


def test_sum_is_not_divided_and_sixteen_bits_are_sent_on_request(peers: SimpleNamespace) -> None:
    model, optimizer = linear()
    hvd.DistributedOptimizer(optimizer, op=hvd.Sum, compression=hvd.Compression.fp16)
    backward(model)
    before = [one.grad.half() * 6 for one in model.parameters()]  # type: ignore[union-attr]
    optimizer.step()
    assert [one[0] for one in peers.reduced] == [torch.float16]
    for one, expected in zip(model.parameters(), before, strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, expected.float())


def test_gradient_that_only_other_ranks_have_counts_as_zero_here(peers: SimpleNamespace) -> None:
    model, optimizer = linear()
    hvd.DistributedOptimizer(optimizer)
    optimizer.step()
    assert peers.reduced == [(torch.float32, 9, dist.ReduceOp.SUM)]
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


def test_peer_lost_in_the_average_leaves_the_weights_as_committed(peers: SimpleNamespace) -> None:
    """Whether the state was made before the optimizer was wrapped, or after."""
    for wrap_first in (True, False):
        model, optimizer = linear()
        if wrap_first:
            hvd.DistributedOptimizer(optimizer)
        state = hvd.elastic.TorchState(model, optimizer, rng="saved")
        if not wrap_first:
            hvd.DistributedOptimizer(optimizer)
        Commits(state)
        peers.fails = False
        backward(model)
        optimizer.step()
        state.commit()
        committed = bits_of(state)
        backward(model)
        peers.fails = True
        with pytest.raises(hvd.HorovodInternalError):
            optimizer.step()
        assert state.recall() == Point(1, 1)
        assert bits_of(state) == committed


def test_schedule_made_before_the_wrapping_does_not_hide_it(peers: SimpleNamespace) -> None:
    """Schedules replace the optimizer's step."""
    model, optimizer = linear()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hvd.DistributedOptimizer(optimizer)
    backward(model)
    optimizer.step()
    schedule.step()
    assert len(peers.reduced) == 1


def test_gradients_may_be_averaged_early_to_clip_them(peers: SimpleNamespace) -> None:
    model, optimizer = linear()
    optimizer = hvd.DistributedOptimizer(optimizer)
    backward(model)
    optimizer.synchronize()  # type: ignore[attr-defined]
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    clipped = [one.grad.clone() for one in model.parameters()]  # type: ignore[union-attr]
    with optimizer.skip_synchronize():  # type: ignore[attr-defined]
        optimizer.step()
    assert len(peers.reduced) == 1
    assert all(torch.equal(one.grad, old) for one, old in zip(model.parameters(), clipped, strict=True))  # type: ignore[arg-type]
    optimizer.step()
    assert len(peers.reduced) == 2


def test_sparse_gradients_are_refused_or_made_dense(peers: SimpleNamespace) -> None:
    for dense in (False, True):
        model = nn.Embedding(4, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(optimizer, sparse_as_dense=dense)
        model(torch.tensor([1])).sum().backward()
        if dense:
            optimizer.step()
            assert peers.reduced == [(torch.float32, 8, dist.ReduceOp.SUM)]
        else:
            with pytest.raises(UsageError, match="sparse_as_dense"):
                optimizer.step()


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"op": hvd.Max}, "hvd.Average"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"named_parameters": [("a", torch.ones(1)), ("a", torch.ones(1))]}, "twice"),
    ],
)
def test_unsupported_averages_are_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        hvd.DistributedOptimizer(linear()[1], **wrong)


def test_wrapping_twice_and_closures_are_refused(peers: SimpleNamespace) -> None:
    optimizer = hvd.DistributedOptimizer(linear()[1])
    with pytest.raises(UsageError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: 1.0)


def test_before_elastic_run_the_seat_gives_the_place_and_state_broadcasts_do_nothing(peers: SimpleNamespace) -> None:
    model, optimizer = linear()
    before = [one.clone() for one in model.parameters()]
    assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.is_initialized()) == (0, 3, 3, True)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_parameters(model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert all(torch.equal(one, old) for one, old in zip(model.parameters(), before, strict=True))
    with pytest.raises(UsageError, match=r"hvd\.broadcast_object"):
        hvd.broadcast_parameters({"weight": torch.ones(1), "epoch": 3})


def test_plain_objects_are_sent_and_pickled_ones_are_refused() -> None:
    value = {"a": (1, [2.5, None, True]), 7: b"\0", "t": torch.arange(3), "n": -(2**70), "empty": torch.empty(0, 2)}
    got = collectives.unpack(collectives.pack(value, "hvd.broadcast_object"))
    assert torch.equal(got.pop("t"), value.pop("t"))  # type: ignore[arg-type]
    assert got.pop("empty").shape == value.pop("empty").shape  # type: ignore[attr-defined]
    assert got == value
    with pytest.raises(UsageError, match=r"hvd\.broadcast_object sends only plain values.*object\.model"):
        collectives.pack({"model": nn.Linear(1, 1)}, "hvd.broadcast_object")


@pytest.fixture
def alike(peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three ranks have entered a generation; the root's tensor is all sevens, whichever rank it is."""

    def all_gather(gathered: list[torch.Tensor], mine: torch.Tensor) -> None:
        for one in gathered:
            one.copy_(mine)

    monkeypatch.setattr(collectives, "has_group", lambda: True)
    monkeypatch.setattr(transfer, "gather", lambda number, _: [number] * 3)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, _: tensor.fill_(7.0))


@pytest.mark.parametrize(
    ("call", "function", "answer"),
    [
        ("allreduce", "all_reduce", [2.0, 2.0]),
        ("allgather", "all_gather", [1.0] * 6),
        ("broadcast", "broadcast", [7.0, 7.0]),
    ],
)
def test_tensor_that_requires_a_gradient_is_refused_where_horovod_differentiates(
    peers: SimpleNamespace, alike: None, call: str, function: str, answer: list[float]
) -> None:
    """A loss that is computed from all ranks' results would lose part of its gradient."""

    def called(tensor: torch.Tensor) -> list[float]:
        got = getattr(hvd, call)(tensor, **({"root_rank": 1} if call == "broadcast" else {}))
        assert not got.requires_grad
        return got.tolist()  # type: ignore[no-any-return]

    features = torch.ones(2, requires_grad=True) * 1
    with pytest.raises(UsageError, match=rf"hvd\.{call} .*detach\(\).*no_grad\(\).*nn\.functional\.{function}$"):
        called(features)
    assert not peers.reduced, "no rank may start what another refuses"
    assert hasattr(functional, function)
    assert called(features.detach()) == answer
    with torch.no_grad():
        assert called(features) == answer
    assert features.tolist() == [1.0, 1.0]


def test_parameters_are_changed_in_place_with_gradients_switched_on(peers: SimpleNamespace, alike: None) -> None:
    """Horovod's in-place calls give no gradient either."""
    model, _ = linear()
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    assert all(one.requires_grad and one.eq(7.0).all() for one in model.parameters())
    for one in model.parameters():
        assert hvd.allreduce_(one) is one
        assert hvd.broadcast_(one, root_rank=0) is one
    assert len(peers.reduced) == 4


def test_root_0_is_the_newest_commits_holder_only_within_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [collectives.rank_of_root(0), collectives.rank_of_root(2)] == [0, 2]
    monkeypatch.setattr(collectives, "source_of_sync", lambda: 2)
    assert [collectives.rank_of_root(0), collectives.rank_of_root(1)] == [2, 1]


def test_scripts_seed_is_the_states(peers: SimpleNamespace) -> None:
    torch.manual_seed(1234)
    assert hvd.elastic.TorchState(epoch=0).seed == 1234
    assert hvd.elastic.TorchState(epoch=0, seed=5).seed == 5
    assert not hvd.elastic.TorchState(epoch=0).has_own_parts


def test_exactly_these_names_exist() -> None:
    assert hvd.HorovodInternalError is CommunicationError
    assert {"allreduce", "DistributedOptimizer", "elastic", "rank"} <= set(dir(hvd))
    with pytest.raises(AttributeError, match=r"samebits\.horovod.*mpi_built"):
        _ = hvd.mpi_built
    from samebits.horovod import size

    assert size is hvd.size


def test_collective_before_elastic_run_is_refused_with_its_file_and_line(tmp_path: Path) -> None:
    program = (
        "import torch; import samebits.horovod as hvd\n"
        "from samebits.training.group import group; from samebits.training.process import context\n"
        "group.form_alone(torch.device('cpu'), alone=context.side_of_training)\n"
        "try: hvd.allreduce(torch.ones(1))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert done.stdout.startswith("UsageError script.py:4: a collective before samebits.elastic.run"), done.stdout
