"""States with tensors become bytes and come back the same, or are refused by their path."""

from __future__ import annotations

import enum
import random
from collections import OrderedDict

import pytest
import torch
from torch import nn

from runtime.errors import CheckpointError
from runtime.store.checkpoint.format.tensor_part import bytes_of
from runtime.training.state import rng, snapshot

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
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def round_trip(state: object) -> object:
    tree, parts = snapshot.split(state, "state")
    copied = {part.name: type(part)(part.name, part.dtype, part.shape, bytearray(part.data)) for part in parts}
    return snapshot.join(tree, copied)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4)], ids=str)
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = round_trip({"t": tensor})
    assert isinstance(back, dict)
    assert back["t"].dtype == dtype
    assert torch.equal(back["t"], tensor)


def test_a_transposed_tensor_is_saved_by_its_values() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    back = round_trip([tensor])
    assert isinstance(back, list)
    assert torch.equal(back[0], tensor)


def test_an_optimizer_that_has_stepped_comes_back() -> None:
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


def test_mappings_tuples_and_plain_values_keep_their_kind() -> None:
    state = OrderedDict(a=(1, 2.5, None), b=[True, "x", b"y"], c={3: "three"})
    assert round_trip(state) == {"a": (1, 2.5, None), "b": [True, "x", b"y"], "c": {3: "three"}}


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [(object(), "state.deep.1"), ({1, 2}, "state.deep.1"), (Colour.RED, "state.deep.1"), (lambda: 0, "state.deep.1")],
    ids=["object", "set", "enum", "function"],
)
def test_what_cannot_be_saved_is_named_by_its_path(value: object, path: str) -> None:
    with pytest.raises(CheckpointError, match=path):
        snapshot.split({"deep": [0, value]}, "state")


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state\.s"):
        snapshot.split({"s": torch.eye(3).to_sparse()}, "state")


def test_random_numbers_go_on_after_a_capture() -> None:
    import numpy as np

    rng.seed_for(1, 2, 3)
    state = round_trip(rng.capture())
    first = (random.random(), float(np.random.random()), torch.rand(3).tolist())
    rng.seed_for(9, 9, 9)
    assert isinstance(state, dict)
    rng.restore(state)
    assert (random.random(), float(np.random.random()), torch.rand(3).tolist()) == first


def test_a_steps_numbers_depend_on_seed_rank_and_step_and_on_nothing_else() -> None:
    def draw(seed: int, rank: int, step: int) -> list[float]:
        rng.seed_for(seed, rank, step)
        return torch.rand(4).tolist()

    reference = draw(1, 2, 3)
    torch.rand(100)
    assert draw(1, 2, 3) == reference
    assert reference not in (draw(0, 2, 3), draw(1, 0, 3), draw(1, 2, 0))


# ---- tensors that a point is read into


def test_only_what_lies_as_it_is_stored_is_read_into() -> None:
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


def test_a_live_tensor_comes_back_itself() -> None:
    weight, bias = torch.rand(2), torch.rand(2)
    tree, parts = snapshot.split({"weight": weight, "rest": [bias, (weight,)]}, "state")
    joined = snapshot.join(tree, {part.name: part for part in parts}, {"state.weight": weight, "state.rest.0": bias})
    assert joined["weight"] is weight
    assert joined["rest"][0] is bias
    assert joined["rest"][1][0] is not weight
    assert torch.equal(joined["rest"][1][0], weight)
