"""Reports on a host's workers: anomalies only, four times per lease, within a time budget."""

from __future__ import annotations

from samebits.core.hangs import Doing, ProcessState
from samebits.service.process_state import LOOKS_A_LEASE, MOST_LOOKS, ProcessObserver
from samebits.store.process_identity import ProcessIdentity

LEASE_S = 5.0
SIGHTS = {
    1: ProcessState(Doing.RUNS, 0.4),
    2: ProcessState(Doing.STOPPED, 0.4),
    3: ProcessState(Doing.RUNS, LEASE_S / 2),
    4: ProcessState(Doing.DISK, None),
    5: ProcessState(Doing.RUNS, None),
    6: None,
}


def test_healthy_or_ended_process_is_not_reported() -> None:
    here = {str(pid): ProcessIdentity(pid, 9) for pid in SIGHTS}
    found = ProcessObserver(LEASE_S, lambda identity: SIGHTS[identity.pid]).look(here, 100.0)
    assert [(one.node, one.pid, one.started_at, one.doing) for one in found] == [
        ("2", 2, 9, Doing.STOPPED),
        ("3", 3, 9, Doing.RUNS),
        ("4", 4, 9, Doing.DISK),
    ]


def test_last_check_comes_before_the_lease_ends() -> None:
    looked: list[int] = []

    def see(identity: ProcessIdentity) -> ProcessState:
        looked.append(identity.pid)
        return SIGHTS[2] or ProcessState(Doing.RUNS)

    observer, here = ProcessObserver(LEASE_S, see), {"2": ProcessIdentity(2, 9)}
    for tick in range(500):
        observer.look(here, 100.0 + tick / 100)
    assert len(looked) == LOOKS_A_LEASE
    looked.clear()
    observer.look({str(pid): ProcessIdentity(pid, 9) for pid in range(3 * MOST_LOOKS)}, 200.0)
    assert len(looked) == MOST_LOOKS
