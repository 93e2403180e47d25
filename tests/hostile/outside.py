"""Observations of a job's processes from outside: memory, CPU, ports, speed, and a bystander for signals."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from samebits.store.process_identity import ProcessIdentity
from tests.system.job import Job


@contextmanager
def witness() -> Iterator[ProcessIdentity]:
    """Start an unrelated process whose pid the attackers claim; it blocks every signal it can."""
    process = subprocess.Popen(
        ["sleep", "100000"], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    )
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None
    try:
        yield identity
    finally:
        process.kill()
        process.wait()


def assert_unsignalled(bystander: ProcessIdentity) -> None:
    """Check that it lives and that no signal is pending (proc(5), ShdPnd and SigPnd)."""
    assert bystander.is_alive(), "a process that is not the job's was killed"
    status = Path(f"/proc/{bystander.pid}/status").read_text()
    pending = [line for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    assert len(pending) == 2
    assert all(int(line.split()[1], 16) == 0 for line in pending), f"it was signalled: {pending}"


def steps_between(job: Job, begin_s: float, end_s: float) -> tuple[int, float]:
    """Return rank 0's number of steps printed within this time, and how long they took."""
    at = [step.at_s for step in job.steps(0) if begin_s <= step.at_s <= end_s]
    return (len(at) - 1, at[-1] - at[0]) if len(at) > 1 else (0, end_s - begin_s)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far (proc(5), stat: utime and stime)."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    """Return a process's resident memory (proc(5), statm); 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * resource.getpagesize() / (1 << 20)


def ports_of(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on; fail if one is not bound to loopback."""
    found = []
    for one in psutil.Process(pid).net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN:
            address, port = one.laddr
            assert address in ("127.0.0.1", "::1"), f"port {port} of pid {pid} is bound to {address}"
            found.append(port)
    return found
