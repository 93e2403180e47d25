"""As many descriptors as the user may have, and not a call more than it takes."""

from __future__ import annotations

import resource

import pytest

from samebits.net.descriptors import raise_descriptor_limit


@pytest.mark.parametrize(
    ("before", "asked", "allowed"),
    [
        ((1024, 4096), [(4096, 4096)], 4096),
        ((4096, 4096), [], 4096),
        ((1024, resource.RLIM_INFINITY), [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)], 1 << 20),
    ],
)
def test_the_limit_is_raised_to_what_the_user_may_have(
    before: tuple[int, int], asked: list[tuple[int, int]], allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    assert raise_descriptor_limit() == allowed
    assert made == asked
