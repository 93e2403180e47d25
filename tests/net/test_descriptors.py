"""The limit of open files is raised if possible; otherwise the start is refused."""

from __future__ import annotations

import resource

import pytest

from samebits.errors import SettingsError
from samebits.net.descriptors import raise_descriptor_limit, require_descriptors


@pytest.mark.parametrize(
    ("before", "asked", "allowed"),
    [
        ((1024, 4096), [(4096, 4096)], 4096),
        ((4096, 4096), [], 4096),
        ((1024, resource.RLIM_INFINITY), [(resource.RLIM_INFINITY, resource.RLIM_INFINITY)], 1 << 20),
    ],
)
def test_limit_is_raised_to_the_users_maximum(
    before: tuple[int, int], asked: list[tuple[int, int]], allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    assert raise_descriptor_limit() == allowed
    assert made == asked


@pytest.mark.parametrize(
    ("before", "workers", "asked"),
    [((1024, 4096), 8, []), ((20, 4096), 8, [(80, 4096)]), ((resource.RLIM_INFINITY,) * 2, 8, [])],
)
def test_limit_is_raised_no_further_than_the_job_needs(
    before: tuple[int, int], workers: int, asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    require_descriptors(workers)
    assert made == asked


@pytest.mark.parametrize(("workers", "needed"), [(0, 64), (8, 80)])
def test_too_low_hard_limit_is_refused_with_the_number_needed(
    workers: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (20, needed - 1))
    said = rf"limit of open files is {needed - 1}.* needs {needed}\. Fix: raise it with `ulimit -n {max(needed, 1024)}`"
    with pytest.raises(SettingsError, match=said):
        require_descriptors(workers)
