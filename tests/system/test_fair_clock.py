"""A wait's clock stands still while what is awaited gets no core."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.system import processes
from tests.system.processes import FairClock


def test_only_seconds_in_which_nothing_waited_for_a_core_count(monkeypatch: pytest.MonkeyPatch) -> None:
    queued_s = {7: 100.0, 8: 0.0}
    now_s = [5000.0]

    def read(path: Path) -> str:
        pid = int(path.parts[2])
        if pid not in queued_s:
            raise FileNotFoundError(path)
        return f"1 {int(queued_s[pid] * 1e9)} 3\n"

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(Path, "read_text", read)
    clock = FairClock(lambda: [7, 8, 9])
    now_s[0] += 10
    assert clock.passed_s() == 10, "all of them slept, or ran"
    now_s[0] += 10
    queued_s[7] += 9
    queued_s[8] += 4
    assert clock.passed_s() == pytest.approx(11), "one of them was kept from running for nine seconds"
    now_s[0] += 10
    del queued_s[7]
    queued_s[9] = 500.0
    assert clock.passed_s() == pytest.approx(21), "what it has waited before it is watched does not count"


def test_the_kernel_counts_it() -> None:
    clock = FairClock(lambda: [processes.os.getpid()])
    until_s = time.monotonic() + 0.05
    while time.monotonic() < until_s:
        pass
    assert clock.passed_s() > 0 and len(clock._queued()) == 1
