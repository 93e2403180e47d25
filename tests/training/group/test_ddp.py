"""DDP bucket layouts in one process: reading, transferring and refusing them, and finding a script's wrappers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from samebits.errors import GenerationEndedError, LayoutError, UsageError
from samebits.training.group import ddp
from samebits.training.group.ddp import Layout, attach, capture, fingerprint
from samebits.training.group.group import Group, form_alone
from tests.training.group.ddp_ranks import BUCKET_CAP_MB, Shuffled, Sometimes, where_known

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Group]:
    one = form_alone(CPU)
    yield one
    one.drop()


def wrapper(model: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model or Shuffled(), **{"bucket_cap_mb": BUCKET_CAP_MB, **options})


def iterate(one: DistributedDataParallel, times: int = 1) -> None:
    for _ in range(times):
        one(torch.ones(4, 24)).sum().backward()


def test_layout_survives_msgpack_and_has_a_distinct_fingerprint() -> None:
    layout = Layout((("a.weight", "b"), ("c",)), rebuilt=True)
    assert Layout.from_plain(msgpack.unpackb(msgpack.packb(layout.to_plain()))) == layout
    others = [
        Layout(layout.buckets, False),
        Layout((("b", "a.weight"), ("c",)), True),
        Layout((("a.weight", "b", "c"),), True),
    ]
    assert len({fingerprint(one) for one in [layout, *others]}) == 4


def test_layout_changes_after_the_first_iteration_and_is_read_before_it_is_used(group: Group) -> None:
    one, stock = wrapper(), wrapper()
    first = capture(one)
    assert not first.rebuilt
    assert capture(one) == first
    iterate(one)
    final = capture(one)
    assert final.rebuilt
    assert len(final.buckets) > 3
    assert final.buckets != first.buckets
    iterate(stock, 2)  # the second forward pass builds what the first backward pass has shown
    assert capture(stock) == final
    iterate(one, 2)
    assert capture(one) == final


class MadeOf(TorchDispatchMode):
    """Records on which devices ``like`` tensors are created, by any caller."""

    def __init__(self) -> None:
        initialize: Any = super().__init__
        initialize()
        self.devices: set[str] = set()

    def __torch_dispatch__(
        self, make: Callable[..., Any], types: object, args: Any = (), options: dict[str, Any] | None = None
    ) -> Any:
        made = make(*args, **(options or {}))
        if make is torch.ops.aten.zeros_like.default:
            self.devices.add(made.device.type)
        return made


def test_layout_is_read_without_memory_for_all_gradients(group: Group) -> None:
    one = wrapper()
    with MadeOf() as made:
        capture(one)
    assert made.devices == {"meta"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        where_known("batched_grad_copy"),
        where_known("lazy_bucket_allocation"),
    ],
    ids=["plain", "view", "static", "batched", "lazy"],
)
def test_final_layout_is_adopted_and_kept(group: Group, options: dict[str, Any]) -> None:
    source = wrapper(**options)
    iterate(source, 3)
    layout = capture(source)
    for target in (wrapper(**options), source):
        attach(target, group, layout)
        assert capture(target) == layout
        assert all(parameter.grad is None for parameter in target.parameters())
        target.module.forward = lambda x, model=target.module: backwards(model, x)
        iterate(target, 3)  # gradients now arrive in another order, which must no longer matter
        assert capture(target) == layout
        assert all(parameter.grad is not None for parameter in target.parameters())


@pytest.mark.parametrize("cap_mb", [25, BUCKET_CAP_MB], ids=["one bucket per kind", "several"])
@pytest.mark.parametrize("kinds", [("bfloat16",), ("float64", "bfloat16"), ("bfloat16", "float16", "float64")], ids=str)
def test_final_layout_of_a_model_with_several_dtypes_is_adopted(
    group: Group, cap_mb: float, kinds: tuple[str, ...]
) -> None:
    """Torch appends the unfilled bucket of each dtype in the order of a hash table."""
    orders = itertools.permutations(("first", "second", "third", "fourth", "fifth")[: len(kinds) + 2])
    for used in itertools.islice(orders, 0, None, 5):
        source, target = (wrapper(Mixed(kinds, used), bucket_cap_mb=cap_mb) for _ in range(2))
        iterate(source, 3)
        layout = capture(source)
        for one in (target, source):
            attach(one, group, layout)
            assert capture(one) == layout


class Mixed(nn.Module):
    """Layers in several dtypes, used in a given order."""

    def __init__(self, kinds: tuple[str, ...], used: tuple[str, ...]) -> None:
        super().__init__()
        self.used = used
        dtypes = [torch.float32, torch.float32, *(getattr(torch, kind) for kind in kinds)]
        for name, dtype in zip(sorted(used), dtypes, strict=True):
            self.add_module(name, nn.Linear(24, 24, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            layer = self.get_submodule(name)
            x = layer(x.to(layer.weight.dtype))
        return x


def backwards(model: Shuffled, x: torch.Tensor) -> torch.Tensor:
    x = model.first(x)
    for layer in (model.sixth, model.fifth, model.fourth, model.third, model.second):
        x = layer(x)
    return model.last(x)


def test_wrapper_without_a_final_layout_is_like_new(group: Group) -> None:
    one = wrapper()
    first = capture(one)
    iterate(one, 3)
    final = capture(one)
    for layout in (None, first):
        attach(one, group, layout)
        assert capture(one) == first
        iterate(one)
        assert capture(one) == final


def test_unfinished_backward_pass_leaves_nothing_behind(group: Group) -> None:
    one = wrapper()
    iterate(one, 2)
    layout = capture(one)
    one(torch.ones(4, 24))  # a forward pass without its backward pass
    group.break_("a member was lost")
    with pytest.raises(GenerationEndedError, match="a member was lost"):
        one.module(torch.ones(4, 24)).sum().backward()
    group.drop()
    other = form_alone(CPU)
    attach(one, other, layout)
    iterate(one, 2)
    assert capture(one) == layout
    other.drop()


def test_reducer_replaced_in_the_middle_of_a_step_no_longer_takes_part(group: Group) -> None:
    one = wrapper()
    iterate(one, 2)
    layout = capture(one)
    one(torch.ones(4, 24))  # the reducer now expects a backward pass
    replaced = one.reducer
    before = replaced.get_backward_stats()
    attach(one, group, layout)
    iterate(one)
    assert replaced.get_backward_stats() == before


# --- refusals


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first iteration", "laid out"])
@pytest.mark.parametrize("frozen", ["when it is built", "later"])
def test_reducer_keeps_its_parameters_whatever_is_frozen_meanwhile(group: Group, steps: int, frozen: str) -> None:
    one = wrapper(find_unused_parameters=False)
    if frozen == "when it is built":
        model = Shuffled()
        next(model.parameters()).requires_grad_(False)
        one = wrapper(model)
    iterate(one, steps)
    before = capture(one)
    flags = {name: frozen == "when it is built" for name, _ in one.module.named_parameters()}
    for name, parameter in one.module.named_parameters():
        parameter.requires_grad_(flags[name])
    attach(one, group, before if before.rebuilt else None)
    assert capture(one).buckets == before.buckets
    assert {name: parameter.requires_grad for name, parameter in one.module.named_parameters()} == flags


def test_other_bucket_size_is_named(group: Group) -> None:
    source, target = wrapper(), wrapper(bucket_cap_mb=1)
    iterate(source, 2)
    with pytest.raises(LayoutError, match=r"6 buckets there, 1 here.*bucket_cap_mb"):
        attach(target, group, capture(source))


def test_other_model_is_named(group: Group) -> None:
    model = Shuffled(unused=True)
    model.last.bias.requires_grad_(False)
    source, target = wrapper(), wrapper(model)
    iterate(source, 2)
    with pytest.raises(LayoutError, match=r"missing here \['last.bias'\], new here \['idle.bias', 'idle.weight'\]"):
        attach(target, group, capture(source))


def test_wrapper_that_never_rebuilds_cannot_take_a_final_layout(group: Group) -> None:
    source, target = wrapper(), wrapper(find_unused_parameters=True)
    iterate(source, 2)
    with pytest.raises(LayoutError, match="find_unused_parameters"):
        attach(target, group, capture(source))


def test_find_unused_parameters_keeps_its_first_layout(group: Group) -> None:
    one = wrapper(Sometimes(), find_unused_parameters=True)
    layout = capture(one)
    iterate(one, 3)
    assert capture(one) == layout
    attach(one, group, layout)
    assert capture(one) == layout


def test_static_graph_has_no_point_after_its_first_iteration(group: Group) -> None:
    one = wrapper(static_graph=True)
    capture(one)
    iterate(one)
    with pytest.raises(UsageError, match="save_checkpoint_steps to 2 or more"):
        capture(one)
    iterate(one)
    assert capture(one).rebuilt


def with_hook() -> DistributedDataParallel:
    one = wrapper()
    one.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    return one


def with_delayed_parameters() -> DistributedDataParallel:
    model = Shuffled()
    delayed, hooked = [("last.bias", model.last.bias)], model.first.weight
    # Before torch 2.12 bucket sizes are in whole megabytes.
    return wrapper(model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=hooked, bucket_cap_mb=1)


def with_buffer_hook() -> DistributedDataParallel:
    one = wrapper(Shuffled(norm=True))
    one._register_buffer_comm_hook(None, lambda state, buffers: None)
    return one


def with_sparse_gradients() -> DistributedDataParallel:
    return wrapper(nn.Embedding(4, 4, sparse=True))


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (with_hook, "communication hook"),
        (with_buffer_hook, "buffer hook"),
        (with_delayed_parameters, "delay_all_reduce_named_params"),
        (with_sparse_gradients, "sparse gradients"),
    ],
)
def test_unsupported_wrapper_is_refused(group: Group, build: Callable[[], DistributedDataParallel], word: str) -> None:
    with pytest.raises(UsageError, match=rf"{word}.*ENABLE_RECOVERY=0"):
        attach(build(), group, None)


def test_wrapper_on_its_own_group_keeps_it_and_ends_with_it(group: Group) -> None:
    subgroup = dist.new_group([0])
    one = wrapper(process_group=subgroup)
    attach(one, group, None)
    assert one.process_group is subgroup
    group.drop()
    other = form_alone(CPU)
    with pytest.raises(UsageError, match=r"inside the function that elastic\.run runs"):
        attach(one, other, None)
    other.drop()


# --- finding wrappers


@pytest.fixture
def riders() -> Iterator[ddp._Riders]:
    one = ddp._Riders()
    one.install()
    one.install()
    yield one
    assert one._hook is not None
    one._hook.remove()


def plain(riders: ddp._Riders) -> dict[str, bool]:
    return {key: layout.rebuilt for key, layout in riders.capture_all().items()}


def test_wrappers_built_before_a_generation_are_carried_through_all(riders: ddp._Riders) -> None:
    alone = form_alone(CPU)
    one, other = wrapper(), wrapper()
    alone.drop()
    first = form_alone(CPU)
    riders.attach_all(first, {})
    assert one.process_group is first.pg
    assert plain(riders) == {"outside/0": False, "outside/1": False}
    iterate(one)
    layouts = riders.capture_all()
    assert plain(riders) == {"outside/0": True, "outside/1": False}
    first.drop()
    second = form_alone(CPU)
    riders.attach_all(second, layouts)
    assert riders.capture_all() == layouts
    assert (one.process_group, other.process_group) == (second.pg, second.pg)
    del other
    gc.collect()
    assert plain(riders) == {"outside/0": True, "outside/1": False}, (
        "the layout of a deleted wrapper is still the point's"
    )
    second.drop()


def test_wrapper_built_inside_gets_its_layout_at_its_first_forward(riders: ddp._Riders) -> None:
    first = form_alone(CPU)
    riders.attach_all(first, {})
    early = wrapper()
    iterate(early)
    layouts = riders.capture_all()
    assert plain(riders) == {"inside/0": True}
    first.drop()
    second = form_alone(CPU)
    riders.attach_all(second, layouts)
    late = wrapper()
    assert riders.capture_all() == layouts, "not used yet: the point's layout holds"
    assert not late._has_rebuilt_buckets
    iterate(late)
    assert late._has_rebuilt_buckets
    assert riders.capture_all() == layouts
    assert not late._forward_pre_hooks, "the steady state pays nothing"
    with pytest.raises(UsageError, match="again in each call"):
        iterate(early)
    second.drop()


def test_wrapper_built_after_a_break_belongs_to_no_generation(riders: ddp._Riders) -> None:
    group = form_alone(CPU)
    riders.attach_all(group, {})
    group.break_("a member was lost")
    with pytest.raises((GenerationEndedError, RuntimeError)):
        wrapper()
    group.drop()
