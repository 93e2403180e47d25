"""When a worker that has not called init() is named: not while it imports."""

from __future__ import annotations

from pathlib import Path

from samebits.launcher.hang_stacks import LEAST_READ_BYTES, LONGEST_S, LOOK_S, PATIENCE_S, UnjoinedProcesses, bytes_read
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.views import process


def named_at(silence: UnjoinedProcesses, until: float) -> dict[str, float]:
    """Examine the workers whenever due; return the names, each with its time."""
    found: dict[str, float] = {}
    while (at := silence.wake_at()) is not None and at <= until:
        found |= dict.fromkeys(silence.due(at), at)
    return found


def test_importing_process_is_named_only_once_it_stops_reading() -> None:
    reads = {100: 0, 101: 0}  # by pid

    def read(identity: ProcessIdentity) -> int:
        return reads[identity.pid]

    silence = UnjoinedProcesses(read)
    for node in (0, 1):
        silence.began(f"worker_{node}", process(100 + node), 0.0)
    assert named_at(silence, PATIENCE_S - LOOK_S) == {}
    reads[101] += LEAST_READ_BYTES
    assert named_at(silence, PATIENCE_S) == {"worker_0": PATIENCE_S}
    reads[101] += LEAST_READ_BYTES
    assert named_at(silence, PATIENCE_S + LOOK_S) == {}
    assert named_at(silence, PATIENCE_S + 2 * LOOK_S) == {"worker_1": PATIENCE_S + 2 * LOOK_S}
    assert silence.wake_at() is None


def test_process_that_reads_forever_is_named_after_all() -> None:
    read = iter(range(0, 1 << 40, LEAST_READ_BYTES))
    silence = UnjoinedProcesses(lambda _: next(read))
    silence.began("worker_0", process(100), 0.0)
    assert named_at(silence, 2 * LONGEST_S) == {"worker_0": LONGEST_S}


def test_process_that_waits_for_a_cpu_has_more_time() -> None:
    waited_s = iter([9.0, 12.0, 12.0, 12.0, 12.0])  # of the first 10 s, 15 s, …
    silence = UnjoinedProcesses(lambda _: 0, lambda _: next(waited_s))
    silence.began("worker_0", process(100), 0.0)
    assert named_at(silence, LONGEST_S) == {"worker_0": 25.0}


def test_bytes_read_by_a_process_grow(tmp_path: Path) -> None:
    me = ProcessIdentity.current()
    before = bytes_read(me)
    (tmp_path / "module").write_bytes(bytes(LEAST_READ_BYTES))
    (tmp_path / "module").read_bytes()
    after = bytes_read(me)
    assert before is not None and after is not None and after - before >= LEAST_READ_BYTES
    assert bytes_read(ProcessIdentity(me.pid, me.started_at + 1)) is None, "another process by now"
