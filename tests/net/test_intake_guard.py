"""The guard of a server's memory while its main thread is busy."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest

from samebits.net import gate
from samebits.net.gate import IntakeGuard

WITHIN_S = 30.0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_guard_continues_when_the_process_has_run_out_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []

    def compare(self: IntakeGuard, of: Callable[[IntakeGuard], None] = IntakeGuard._compare) -> None:
        compared.append(True)
        of(self)

    monkeypatch.setattr(gate, "GROWTH_BYTES", -(1 << 40))
    monkeypatch.setattr(IntakeGuard, "_compare", compare)
    guard = IntakeGuard(1, lambda _: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        guard.has_drained = True
        until(lambda: not guard.has_drained)
        seen = len(compared)
        until(lambda: len(compared) >= seen + 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    guard.close()
