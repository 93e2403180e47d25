"""CPU-seconds of tests: the cost of each (``pytest --cpu-times FILE``), and the limit that ``timeout`` sets.

Wall time says little if tests share two cores and mostly wait: a busy machine makes a test longer, not dearer. The wall
clock ends only a test that waits forever. The cost includes every process that a test starts: the process that runs
tests inherits orphans (``PR_SET_CHILD_SUBREAPER``, prctl(2)) and leaves them unreaped, so that the total of it and its
descendants only grows, and a test costs the increase. Session fixtures that close are counted nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout

COMPUTES = "computes"
"""The marker of tests that start no process: ``timeout`` limits their own CPU-seconds exactly."""
COMPUTING_ROOMS = ("core", "fuzz", "simulation")
"""Folders in which every test gets this marker."""
WALL_PER_CPU = 10
"""Factor between a test's limit and its wall-clock limit: enough for a busy machine, and an end for a test that hangs.
"""
_LOOK_AGAIN_S = 0.2  # at the earliest
_PR_SET_CHILD_SUBREAPER = 36
_PROPERTY = "cpu_times"


def spent_s() -> float:
    """Return the CPU-seconds of this process, of all its descendants, and of those that these have waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 - four times as fast as Path, and called after every test
        if not entry.isdigit():
            continue
        try:
            stat = Path(f"/proc/{entry}/stat").read_bytes()
        except OSError:
            continue  # gone
        fields = stat[stat.rindex(b")") + 2 :].split()
        parents[int(entry)] = int(fields[1])
        ticks[int(entry)] = sum(map(int, fields[11:15]))  # proc(5): utime, stime, cutime, cstime
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    total, family = 0, [os.getpid()]
    for pid in family:
        total += ticks[pid]
        family += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def inherit_orphans() -> None:
    """Adopt all orphans below this process from now on, so that none is missed."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Limit:
    """In each process that runs tests: enforce a test's limit in CPU-seconds."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = Path(__file__).parent
        rooms = [tests / room for room in COMPUTING_ROOMS]
        for item in items:
            if any(item.path.is_relative_to(room) for room in rooms):
                item.add_marker(COMPUTES)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: pytest_timeout.Settings) -> bool | None:
        """Set the timers; True makes pytest-timeout set none itself."""
        if item.get_closest_marker(COMPUTES) is None:
            self._limit_with_children(item, settings)
            return True

        def end(*_: object) -> None:
            __tracebackhide__ = True
            pytest.fail(f"the test used more than {settings.timeout:g} CPU-seconds")

        signal.signal(signal.SIGPROF, end)
        signal.setitimer(signal.ITIMER_PROF, settings.timeout)
        pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=settings.timeout * WALL_PER_CPU))
        return True

    @staticmethod
    def _limit_with_children(item: pytest.Item, settings: pytest_timeout.Settings) -> None:
        """Check the usage of the test and its processes only when it could exceed the limit.

        No test that ends within its limit by the wall clock is interrupted by a signal.
        """
        began_s, until_s = spent_s(), time.monotonic() + settings.timeout * WALL_PER_CPU
        cores = len(os.sched_getaffinity(0))

        def look(*_: object) -> None:
            __tracebackhide__ = True
            left_s, left_by_clock_s = settings.timeout - (spent_s() - began_s), until_s - time.monotonic()
            if left_s <= 0:
                pytest.fail(f"the test and its processes used more than {settings.timeout:g} CPU-seconds")
            if left_by_clock_s <= 0:
                waited = settings._replace(timeout=settings.timeout * WALL_PER_CPU)
                pytest_timeout.timeout_sigalrm(item, waited)
            next_s = min(max(left_s / cores, _LOOK_AGAIN_S), max(left_by_clock_s, _LOOK_AGAIN_S))
            signal.setitimer(signal.ITIMER_REAL, next_s)

        def cancel() -> None:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

        item.cancel_timeout = cancel  # type: ignore[attr-defined]
        signal.signal(signal.SIGALRM, look)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)

    @pytest.hookimpl(wrapper=True)
    def pytest_timeout_cancel_timer(self) -> Generator[None, Any, Any]:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return (yield)


class Floor:
    """In the process that distributes the tests: the cost of a run, the lower bound of its duration on idle cores."""

    def __init__(self) -> None:
        inherit_orphans()
        self._runners: set[int] = set()

    def pytest_configure_node(self, node: Any) -> None:
        self._runners.add(node.gateway._io.popen.pid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.reap()

    def reap(self) -> None:
        """Reap ended orphans; their cost then counts for this process (getrusage(2))."""
        children: list[str] = []
        for task in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                children += task.read_text().split()
        for pid in set(map(int, children)) - self._runners:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)

    def sentence(self) -> str:
        """Return the line for the end of a run."""
        cpu_s, cores = spent_s(), len(os.sched_getaffinity(0))
        return f"{cpu_s:.0f} CPU-seconds: {cpu_s / cores:.0f} s is the floor of a run on {cores} idle cores"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self.sentence())


class Measured:
    """In each process that runs tests."""

    def __init__(self) -> None:
        inherit_orphans()
        self._before_s = spent_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._before_s, self._began_s = spent_s(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.when == "teardown":
            used = (spent_s() - self._before_s, time.monotonic() - self._began_s)
            report.user_properties.append((_PROPERTY, used))
        return report


class Gathered:
    """In the process that reports: every test's CPU and wall seconds, and sums by folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._used: dict[str, tuple[float, float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, used in report.user_properties:
            if name == _PROPERTY:
                self._used[report.nodeid] = (float(used[0]), float(used[1]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms: dict[str, list[float]] = defaultdict(list)
        for nodeid, (cpu_s, _) in self._used.items():
            parts = nodeid.split("::")[0].split("/")
            rooms[parts[1] if len(parts) > 2 else parts[-1]].append(cpu_s)
        by_cost = sorted(self._used.items(), key=lambda item: -item[1][0])
        self._path.write_text("".join(f"{cpu_s:7.2f} {wall_s:7.2f} {nodeid}\n" for nodeid, (cpu_s, wall_s) in by_cost))
        terminalreporter.section(f"CPU-seconds (each test's: {self._path})")
        for room, costs in sorted(rooms.items(), key=lambda item: -sum(item[1])):
            terminalreporter.write_line(f"{sum(costs):7.1f}  {room} ({len(costs)} tests)")
        terminalreporter.write_line(f"{sum(cpu_s for cpu_s, _ in self._used.values()):7.1f}  in all")
