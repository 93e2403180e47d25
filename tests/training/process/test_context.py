"""What a process is told of its place before the first generation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import runtime
from runtime.training.process import context


def seated(monkeypatch: pytest.MonkeyPatch, *, slot: int | None, node: str = "x", devices: int = 0) -> None:
    """This process has that seat, on a host with so many accelerators."""
    admitted, agent = SimpleNamespace(slot=slot, world_size=8), SimpleNamespace(node=node)
    monkeypatch.setattr(context, "_process", SimpleNamespace(generation=None, admitted=admitted, agent=agent))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)


@pytest.mark.parametrize(("devices", "expected"), [(0, [0, 1, 5]), (1, [0, 0, 0]), (4, [0, 1, 1]), (8, [0, 1, 5])])
def test_a_seats_local_rank_is_its_slot_or_one_of_the_devices(
    monkeypatch: pytest.MonkeyPatch, devices: int, expected: list[int]
) -> None:
    found = []
    for slot in (0, 1, 5):
        seated(monkeypatch, slot=slot, devices=devices)
        found.append(runtime.get_local_rank())
    assert found == expected


def test_a_spares_local_rank_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seated(monkeypatch, slot=None, node="9")
    assert runtime.get_local_rank() == 9
    seated(monkeypatch, slot=None, node="9", devices=8)
    assert runtime.get_local_rank() == 1
    seated(monkeypatch, slot=None, node="9.2", devices=8)
    assert runtime.get_local_rank() == 1, "as the node that it replaces"


def test_after_the_first_generation_the_place_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seated(monkeypatch, slot=5, devices=4)
    monkeypatch.setattr(context.current("the test"), "generation", SimpleNamespace(local_rank=6))
    assert runtime.get_local_rank() == 6
