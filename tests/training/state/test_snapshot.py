"""States with tensors become bytes and are restored unchanged, or are refused by their path."""

from __future__ import annotations

import enum
import math
import random
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint import IncomingPoint, Outgoing, PointHeader, sizes_of
from samebits.store.checkpoint.point_format import bytes_of
from samebits.store.checkpoint.tree import encode
from samebits.training.state import rng, snapshot
from samebits.training.state.handlers import copied_tree

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


def round_trip(state: object) -> object:
    """Send the state as a rank sends it: in a preface and pieces."""
    tree, parts = snapshot.split(state, "state")
    outgoing = Outgoing.of_state(PointHeader("job", Point(1, 1), 1, 0, 0, "node"), parts, tree, {})
    incoming = IncomingPoint(memoryview(outgoing.preface), "job", {})
    for size_bytes in sizes_of(outgoing.data_bytes):
        piece = memoryview(bytearray(size_bytes))
        outgoing.fill(piece)
        incoming.take(piece)
    found = incoming.point()
    return snapshot.join(found.tree, found.tensors)


def require_same(one: Any, other: Any) -> None:
    """Compare types, bits and layouts at any depth."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert (one.requires_grad, one.device) == (other.requires_grad, other.device)
        bits = [bytes(snapshot.bytes_of(tensor)) for tensor in (one, other)]
        assert bits[0] == bits[1]
    elif isinstance(one, np.ndarray | np.generic):
        assert (one.dtype, one.shape, one.strides) == (other.dtype, other.shape, other.strides)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, defaultdict | deque):
        make = "default_factory" if isinstance(one, defaultdict) else "maxlen"
        assert getattr(one, make) == getattr(other, make)
        require_same(
            list(one.items()) if isinstance(one, dict) else list(one),
            list(other.items()) if isinstance(other, dict) else list(other),
        )
    elif isinstance(one, dict):
        require_same(list(one.items()), list(other.items()))
    elif type(one) in (list, tuple):
        assert len(one) == len(other)
        for mine, others in zip(one, other, strict=True):
            require_same(mine, others)
    elif isinstance(one, float):
        assert one.hex() == other.hex()
    else:
        assert one == other


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any layout: permuted, with gaps, expanded, overlapping, empty."""
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    values = torch.randint(0, 255, (*shape, 16), generator=generator, dtype=torch.uint8)
    dtype = draw(st.sampled_from(DTYPES))
    tensor = (
        values[..., :1].ne(9)[..., 0]
        if dtype is torch.bool
        else values[..., : dtype.itemsize].contiguous().view(dtype)[..., 0].clone()
    )
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    how = draw(st.sampled_from(["as it is", "every other", "expanded", "windows", "parameter"]))
    if how == "every other" and tensor.dim():
        tensor = tensor[..., ::2]
    elif how == "expanded":
        tensor = tensor[None].expand(3, *tensor.shape)
    elif how == "windows" and tensor.numel() > 2:
        tensor = tensor.reshape(-1).unfold(0, 2, 1)
    elif how == "parameter" and (dtype.is_floating_point or dtype.is_complex):
        return nn.Parameter(tensor.contiguous(), draw(st.booleans()))
    return tensor


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(st.characters(codec=None), max_size=4),  # lone surrogates are what os.fsdecode gives
    st.binary(max_size=4),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([np.float64(0.1), np.float32(-0.0), np.int8(3), np.bool_(True), np.complex128(1j), np.float16(2)]),
    st.sampled_from([torch.float8_e5m2, torch.device("cuda:1"), torch.Size([2, 3]), range(1, 9, 2), bytearray(b"x")]),
    st.sampled_from([{1, 2}, frozenset({"a", (1, None)}), set()]),
)
KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(),
    st.booleans(),
    st.tuples(st.integers()),
    st.sampled_from(["$tensor", "$as", None]),
)
ARRAYS = st.builds(
    lambda dtype, shape, order: np.arange(math.prod(shape)).astype(dtype).reshape(shape, order=order),
    st.sampled_from(["f4", "f8", "i2", "u8", "?", "c16", "f2"]),
    st.sampled_from([(), (0,), (3,), (2, 3)]),
    st.sampled_from(["C", "F"]),
)
TREES = st.recursive(
    PLAIN | tensors() | ARRAYS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(deque, st.lists(inner, max_size=3), st.sampled_from([None, 4])),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.builds(
            defaultdict, st.sampled_from([None, int, list, dict, set, float]), st.dictionaries(KEYS, inner, max_size=2)
        ),
        st.dictionaries(st.text(max_size=2), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_every_value_keeps_type_bits_and_layout(tree: Any) -> None:
    try:
        sent = round_trip({"value": tree})
    except CheckpointError as error:
        assert "the name is already used" in str(error)
        return
    require_same(sent["value"], tree)  # type: ignore[index]
    require_same(copied_tree(tree), tree)
    require_same(copied_tree(tree, copied_tree(tree)), tree)


def test_order_of_a_set_does_not_distinguish_two_ranks() -> None:
    first, second = {f"worker {number}" for number in range(20)}, {f"worker {19 - number}" for number in range(20)}
    assert snapshot.take_apart(first, "s") == snapshot.take_apart(second, "s")
    assert encode(snapshot.take_apart(first, "s")[0]) == encode(snapshot.take_apart(second, "s")[0])


@pytest.mark.parametrize("strides", [(1,), (-1, 1), (1, 2, 3)])
def test_strides_that_fit_no_tensor_are_refused(strides: tuple[int, ...]) -> None:
    tree, parts = snapshot.split({"t": torch.ones(2, 2)}, "state")
    tree["t"]["strides"] = strides
    with pytest.raises(CheckpointError, match="cannot rebuild"):
        snapshot.join(tree, {part.name: part for part in parts})


@pytest.mark.parametrize(
    "tag",
    [
        {"$as": "os.system"},
        {"$as": "dtype", "name": "load"},
        {"$as": "defaultdict", "factory": "eval", "items": {}},
        {"$as": "number", "dtype": "O", "data": b"12345678"},
        {"$as": "deque"},
    ],
    ids=str,
)
def test_unknown_name_creates_nothing(tag: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        snapshot.join(tag, {})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)], ids=str)
def test_tensor_is_restored_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = round_trip({"t": tensor})
    assert isinstance(back, dict)
    require_same(back["t"], tensor)


def test_optimizer_that_has_stepped_is_restored() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    back = round_trip(state)
    assert isinstance(back, dict)
    assert back["param_groups"] == state["param_groups"]
    for index, moments in state["state"].items():
        assert all(torch.equal(back["state"][index][name], value) for name, value in moments.items())


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "first second")


class Tagged(torch.Tensor):
    """A subclass with more content than its bytes."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        (Colour.RED, "Colour"),
        (lambda: 0, "builtins.function"),
        (Pair(1, 2), "Pair"),
        (UserDict(a=1), "collections.UserDict"),
        (torch.ones(2).as_subclass(Tagged), "Tagged"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array([object()]), "numpy.ndarray"),
        (np.longdouble(1), "numpy.longdouble"),
        (np.str_("x"), "numpy.str_"),
        (defaultdict(lambda: 0), "lambda"),
        ({torch.ones(1)}, "a tensor as a key or in a set"),
    ],
    ids=lambda one: one if type(one) is str else type(one).__name__,
)
def test_unsavable_value_is_named_by_its_path_and_type(value: object, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"state\.deep\.1.*{kind}"):
        snapshot.split({"deep": [0, value]}, "state")


def test_sparse_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state\.s"):
        snapshot.split({"s": torch.eye(3).to_sparse()}, "state")


def test_random_numbers_continue_after_a_capture() -> None:
    import numpy as np

    rng.seed_for(1, 2, 3)
    state = round_trip(rng.capture())
    first = (random.random(), float(np.random.random()), torch.rand(3).tolist())
    rng.seed_for(9, 9, 9)
    assert isinstance(state, dict)
    rng.restore(state)
    assert (random.random(), float(np.random.random()), torch.rand(3).tolist()) == first


def test_steps_numbers_depend_only_on_seed_rank_and_step() -> None:
    def draw(seed: int, rank: int, step: int) -> list[float]:
        rng.seed_for(seed, rank, step)
        return torch.rand(4).tolist()

    reference = draw(1, 2, 3)
    torch.rand(100)
    assert draw(1, 2, 3) == reference
    assert reference not in (draw(0, 2, 3), draw(1, 0, 3), draw(1, 2, 0))


# ---- tensors that a point is read into


def test_only_tensors_with_the_stored_layout_are_read_into() -> None:
    plain, parameter = torch.rand(2, 3), nn.Parameter(torch.rand(4))
    others = {
        "transposed": torch.rand(2, 3).t(),
        "conjugate": torch.rand(2, dtype=torch.complex64).conj(),
        "elsewhere": torch.rand(2, device="meta"),
        "taken away": torch.rand(2),
    }
    others["taken away"].untyped_storage().resize_(0)
    parts = snapshot.in_place([("plain", plain), ("parameter", parameter), ("empty", torch.empty(0)), *others.items()])
    assert parts.keys() == {"plain", "parameter", "empty"}
    assert (parts["plain"].dtype, parts["plain"].shape) == ("F32", (2, 3))
    bytes_of(parts["plain"])[:] = bytes(24)
    bytes_of(parts["parameter"])[:] = bytes(16)
    assert not plain.any()
    assert not parameter.any()


def test_live_tensor_is_returned_itself() -> None:
    weight, bias = torch.rand(2), torch.rand(2)
    tree, parts = snapshot.split({"weight": weight, "rest": [bias, (weight,)]}, "state")
    joined = snapshot.join(tree, {part.name: part for part in parts}, {"state.weight": weight, "state.rest.0": bias})
    assert joined["weight"] is weight
    assert joined["rest"][0] is bias
    assert joined["rest"][1][0] is not weight
    assert torch.equal(joined["rest"][1][0], weight)
