"""The audited micro-batch reproduces the local gradient bit for bit and changes nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from samebits.training.state.data.audited_batch import AuditedBatch, Computed, names_of

MOST = 2**20


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    torch.manual_seed(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    """Convolution, batch statistics, dropout and an embedding; a tree of outputs, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.names = nn.Embedding(5, 8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor], *, scale: float) -> dict[str, Any]:
        assert isinstance(batch, tuple)
        images, names = batch
        x = torch.relu(self.norm(self.convolution(images))).mean((2, 3)) + self.names(names)
        x = nn.functional.dropout(x, 0.3, self.training) * scale * (1 + random.random())
        return {"logits": self.last(x), "hidden": [x]}


class Again(nn.Module):
    """Its inner part is recomputed in the backward pass."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]


def kept(module: nn.Module) -> tuple[DistributedDataParallel, AuditedBatch]:
    wrapper = DistributedDataParallel(module, find_unused_parameters=True)
    return wrapper, AuditedBatch(wrapper, lambda: True)


def again(batch: AuditedBatch) -> tuple[Computed, Computed]:
    taken = batch.take(MOST)
    assert not isinstance(taken, str), taken
    packed, computed = taken
    return computed, batch.compute_again(memoryview(bytes(packed)))


def everything(module: nn.Module) -> list[bytes]:
    tensors = [*module.buffers(), torch.get_rng_state()]
    tensors += [one.grad for one in module.parameters() if one.grad is not None]
    return [*(one.numpy().tobytes() for one in tensors), repr(random.getstate()).encode()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradient_is_reproduced_and_nothing_is_changed(autocast: bool, layout: torch.memory_format) -> None:
    net = Net()
    wrapper, batch = kept(net)
    images = torch.randn(6, 3, 8, 8).contiguous(memory_format=layout)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = wrapper((images, torch.arange(6) % 5), scale=1.5)
    out["logits"].float().sum().backward()  # an expanded gradient
    images.zero_()
    torch.rand(3), random.random()
    before = everything(net)
    computed, other = again(batch)
    assert computed == other and computed.value() == other.value()
    names = names_of(net)[:-1]
    assert [bool(one) for one in computed.digests] == [*("unused" not in name for name in names), False]
    assert everything(net) == before and net.training


def test_changed_bit_gives_another_gradient_and_names_its_parameter() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapper, batch = kept(net)
    errs = [True]

    def err(gradient: torch.Tensor) -> torch.Tensor | None:
        if not errs.pop():
            return None
        wrong = gradient.clone()
        wrong.view(torch.int32)[0] ^= 1
        return wrong

    errs = [False, True]
    net[1].bias.register_hook(err)
    wrapper(torch.randn(3, 4)).sum().backward()
    computed, other = again(batch)
    assert computed.value() != other.value()
    assert names_of(net)[computed.first_other(other)] == "1.bias"


def test_gradient_that_is_not_a_number_is_compared_by_its_outputs() -> None:
    """A wrong activation has made the loss not a number, and so every gradient, wherever it is computed."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    wrapper, batch = kept(net)
    errs = [False, False, True]
    net[0].register_forward_hook(lambda _module, _inputs, output: output * (math.inf if errs.pop() else 1.0))
    wrapper(torch.randn(3, 4)).softmax(1).sum().backward()
    computed, other = again(batch)
    assert computed.value() != other.value()
    assert names_of(net)[computed.first_other(other)] == "the outputs"
    wrapper(torch.randn(3, 4) * math.inf).softmax(1).sum().backward()  # not a number on every rank
    errs.append(False)
    computed, other = again(batch)
    assert computed == other


def test_last_micro_batch_of_accumulated_gradients_is_kept() -> None:
    net = nn.Linear(4, 2)
    wrapper, batch = kept(net)
    for last in (False, False, True):
        wrapper.require_backward_grad_sync = last
        wrapper(torch.randn(3, 4)).sum().backward()
    computed, other = again(batch)
    assert computed == other


def test_checkpointed_activations_work_except_the_reentrant_kind() -> None:
    wrapper, batch = kept(Again(use_reentrant=False))
    wrapper(torch.randn(3, 4)).sum().backward()
    computed, other = again(batch)
    assert computed == other
    wrapper = DistributedDataParallel(Again(use_reentrant=True))
    batch = AuditedBatch(wrapper, lambda: True)
    wrapper(torch.randn(3, 4)).sum().backward()
    with pytest.raises(ValueError, match="use_reentrant"):
        again(batch)


def test_irreproducible_gradient_is_explained() -> None:
    net = nn.Linear(4, 2)
    wrapper, batch = kept(net)
    assert batch.take(MOST) == "its module was not called with gradients, or only in compiled code"
    with torch.no_grad():
        wrapper(torch.randn(3, 4))
    assert "not called with gradients" in str(batch.take(MOST))
    wrapper(torch.randn(3, 4))
    assert batch.take(MOST) == "its last forward pass had no backward pass"
    (wrapper(torch.randn(3, 4)) + wrapper(torch.randn(3, 4))).sum().backward()
    assert batch.take(MOST) == "its module is called several times before a backward pass"
    wrapper, batch = kept(nn.Embedding(5, 4, sparse=True))
    wrapper(torch.arange(3)).sum().backward()
    assert batch.take(MOST) == "one of its gradients is sparse"


def test_skipped_step_keeps_nothing_and_evaluation_records_nothing() -> None:
    wants = [True]
    wrapper = DistributedDataParallel(nn.Linear(4, 2))
    batch = AuditedBatch(wrapper, lambda: wants[-1])
    wrapper(torch.randn(3, 4)).sum().backward()
    with torch.no_grad():
        wrapper(torch.randn(3, 4))
    computed, other = again(batch)
    assert computed == other
    wrapper(torch.randn(3, 4)).sum().backward()  # as when a GradScaler finds inf and the optimizer does not step
    wants.append(False)
    wrapper(torch.randn(3, 4)).sum().backward()
    assert "not called" in str(batch.take(MOST))
    assert not wrapper.module.weight._backward_hooks


def test_closing_restores_the_module() -> None:
    net = nn.Linear(4, 2)
    wrapper, batch = kept(net)
    wrapper(torch.randn(3, 4)).sum().backward()
    batch.close()
    assert not (net._forward_hooks or net._forward_pre_hooks or net.weight._backward_hooks)


def test_scaled_clipped_gradient_set_to_none_is_the_same() -> None:
    net = nn.Linear(4, 2)
    wrapper, batch = kept(net)
    (wrapper(torch.randn(3, 4)).square().sum() * 1024.0).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    net.zero_grad(set_to_none=True)
    computed, other = again(batch)
    assert computed == other and all(computed.digests[:-1])


def test_two_backward_passes_through_one_forward_pass_are_reported() -> None:
    wrapper, batch = kept(nn.Linear(4, 2))
    output = wrapper(torch.randn(3, 4))
    output.sum().backward(retain_graph=True)
    output.square().sum().backward()
    assert batch.take(MOST) == "several backward passes go through one forward pass"


def test_inputs_with_gaps_and_expanded_ones_keep_their_layout() -> None:
    whole = torch.randn(6, 16)
    for given in (whole[:, ::2], whole[:, :8], whole.t()[:8].t(), torch.randn(1, 8).expand(6, 8), whole[:, 3:11]):
        wrapper, batch = kept(nn.Linear(8, 4))
        wrapper(given.requires_grad_()).square().sum().backward()
        computed, other = again(batch)
        assert computed == other
    wrapper, batch = kept(nn.Linear(8, 4))
    wrapper(torch.randn(6, 800)[:, ::100]).sum().backward()
    taken = batch.take(MOST)
    assert not isinstance(taken, str)
    assert len(taken[0]) < 2**14  # not the tensor it is a part of


def test_oversized_batch_is_not_sent() -> None:
    wrapper, batch = kept(nn.Linear(8, 4))
    wrapper(torch.randn(6, 8)).sum().backward()
    assert batch.take(100) == "its inputs cannot be sent (288 bytes, more than 100)"


class Grows(nn.Module):
    """Its buffer becomes another tensor, of another shape, in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach()])
        return self.linear(x + self.seen.sum(0))  # type: ignore[no-any-return]


def test_replaced_buffer_is_restored() -> None:
    net = Grows()
    wrapper, batch = kept(net)
    wrapper(torch.randn(3, 4)).sum().backward()
    before = net.seen
    computed, other = again(batch)
    assert computed == other
    assert net.seen is before and net.seen.shape == (3, 4)


class OfAnObject(nn.Linear):
    def forward(self, given: Any) -> torch.Tensor:
        return super().forward(given.x)


class Given:
    def __init__(self) -> None:
        self.x = torch.ones(3, 4)


def test_unsupported_inputs_are_named() -> None:
    wrapper, batch = kept(OfAnObject(4, 2))
    wrapper(Given()).sum().backward()
    assert "its inputs cannot be sent (batch.inputs.0.0: a " in str(batch.take(MOST))


def test_invalid_batch_bytes_change_nothing() -> None:
    net = nn.BatchNorm1d(4)
    wrapper, batch = kept(net)
    wrapper(torch.randn(3, 4)).sum().backward()
    taken = batch.take(MOST)
    assert not isinstance(taken, str)
    packed, before = bytes(taken[0]), everything(net)
    liars = [b"", b"\xff" * 64, packed[:-1], packed[: len(packed) // 2], b"\0" * 8 + packed[8:]]
    for liar in liars:
        with pytest.raises(Exception):  # noqa: B017 - the caller catches any exception
            batch.compute_again(memoryview(liar))
    assert everything(net) == before
