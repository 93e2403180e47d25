"""The fast check of generators: it sees every draw of every kind and keeps what ``rng.capture`` would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from samebits.errors import CheckpointError
from samebits.training.state import generators, rng
from samebits.training.state.generators import Generators, unpack

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python's normal": lambda: random.gauss(0, 1),
    "python's seed": lambda: random.seed(5),
    "numpy": numpy.random.rand,
    "numpy's normal": numpy.random.randn,
    "numpy's seed": lambda: numpy.random.seed(5),
    "torch": lambda: torch.rand(1),
    "torch's normal": lambda: torch.randn(1),
    "torch's dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "torch's seed": lambda: torch.manual_seed(5),
    "a whole round of words": lambda: [random.getrandbits(32) for _ in range(624)],
    "a whole round of torch's": lambda: torch.randint(2**31, (624,), dtype=torch.int32),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)


@pytest.fixture(params=["where they lie", "asked every time"])
def look(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generators:
    if request.param == "asked every time":
        monkeypatch.setattr(generators, "_look_at_python", lambda: generators._ask_python)
        monkeypatch.setattr(generators._NumpyLook, "_is_as_told", lambda _: False)
    found = Generators()
    found.look()
    return found


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    name, keys, *rest = state["numpy"]
    return state | {"torch": state["torch"].tolist(), "numpy": (name, keys.tolist(), *rest)}


def drawn() -> list[Any]:
    return [random.gauss(0, 1), random.random(), numpy.random.randn(), numpy.random.rand(), torch.randn(3).tolist()]


@pytest.mark.parametrize("first", DRAWS)
@pytest.mark.parametrize("second", DRAWS)
def test_every_draw_is_seen_and_nothing_else(look: Generators, first: str, second: str) -> None:
    assert not look.look()
    for number, draw in enumerate((DRAWS[first], DRAWS[second]), start=1):
        before = comparable(rng.capture())
        draw()
        has_drawn = comparable(rng.capture()) != before  # giving a seed twice changes nothing
        assert look.look() is has_drawn
        assert look.version <= 1 + number
        assert not look.look()
        assert comparable(unpack(look.packed())) == comparable(rng.capture())


def test_offsets_match_this_python_and_numpy() -> None:
    """If the offsets did not match, every check would take ten times as long."""
    found = Generators()
    found.look()
    assert found._python is not generators._ask_python
    assert found._numpy._place is not None


def test_packed_state_is_restored(look: Generators) -> None:
    random.gauss(0, 1)
    numpy.random.randn()
    torch.rand(3)
    assert look.look()
    packed = look.packed()
    following = drawn()
    assert drawn() != following
    rng.restore(unpack(packed))
    assert drawn() == following
    rng.restore(unpack(packed))
    look.look()
    assert look.packed() == packed


def test_other_bit_generator_of_numpy_is_seen() -> None:
    look = Generators()
    look.look()
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.MT19937(3))
        assert look.look()
        numpy.random.rand()
        assert look.look()
        assert comparable(unpack(look.packed())) == comparable(rng.capture())
    finally:
        numpy.random.set_bit_generator(before)


def test_numpy_loaded_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(generators.sys.modules, "numpy.random")
    look = Generators()
    look.look()
    assert "numpy" not in unpack(look.packed())
    monkeypatch.undo()
    assert look.look()
    assert "numpy" in unpack(look.packed())


def test_generator_of_an_accelerator_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: type("", (), {"get_rng_state": generator.get_state}))
    look = Generators()
    assert look.look()
    assert not look.look()
    torch.rand(1, generator=generator)
    assert look.look()
    assert torch.equal(unpack(look.packed())["xpu"], generator.get_state())


@pytest.mark.parametrize("content", [b"", b"\x90", b"\xc1", b"nonsense"])
def test_invalid_packed_state_is_refused(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="no generators' states"):
        unpack(content)
