"""Common fixtures and plugins; they start no process and open no socket before they are used."""

from __future__ import annotations

import faulthandler
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import cpu_times, long_first
from tests.launcher import shell_job
from tests.system.processes import WarmStarter

# An example's duration depends on the machine.
hypothesis.settings.register_profile("samebits", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("samebits")

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStarter]:
    """Starts scripts in processes that need not import torch."""
    starter = WarmStarter()
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def warm_commands() -> Iterator[WarmStarter]:
    """Starts ``samebits`` commands, and jobs without torch, in processes that need not import anything."""
    starter = WarmStarter(shell_job.modules_of_commands(), shell_job.bare_environment())
    yield starter
    starter.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def has_failed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Return whether the test failed, for cleanup code that then shows logs."""
    return lambda: request.node.stash.get(_FAILED, True)


class FailuresAtOnce:
    """Prints each failure when it happens, so that an interrupted run has shown its failures."""

    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = crash.message if crash is not None else report.longreprtext.strip()
            first_line = why.splitlines()[0] if why else "no reason was given"
            self._reporter.ensure_newline()
            self._reporter.write_line(
                f"failed ({report.when}, {report.duration:.0f} s): {report.nodeid}: {first_line}"[:400]
            )


class CrashesExplained:
    """With several test processes: report the exit status of a crashed one, and its stacks (faulthandler).

    pytest itself prints that in the middle of other output, without the exit status.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="samebits-crashes-")
        self._last = ""

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["crashes"] = self._folder.name

    @staticmethod
    def in_worker(workerinput: dict[str, str]) -> None:
        path = Path(workerinput["crashes"]) / workerinput["workerid"]
        faulthandler.enable(path.open("w"), all_threads=True)

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            status = node.gateway._io.popen.wait(timeout=10)
            where = (Path(self._folder.name) / node.gateway.id).read_text()
            self._last = f"it ended with status {status}\n{where}"

    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        report.longrepr = f"{report.longrepr}: {self._last}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", type=Path, metavar="FILE", help="writes each test's CPU-seconds, children included")


@pytest.hookimpl(trylast=True)  # after the terminal's reporter exists
def pytest_configure(config: pytest.Config) -> None:
    # a run in the background: otherwise its processes ignore SIGINT
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(cpu_times.Limit(), "cpu_limit")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if hasattr(config, "workerinput"):  # with several processes: in one that runs tests
        CrashesExplained.in_worker(config.workerinput)
        config.pluginmanager.register(long_first)
        if config.getoption("cpu_times") is not None:
            config.pluginmanager.register(cpu_times.Measured())
        return
    distributed = config.pluginmanager.hasplugin("dsession")
    if (path := config.getoption("cpu_times")) is not None:
        config.pluginmanager.register(cpu_times.Gathered(path))
        if not distributed:
            config.pluginmanager.register(cpu_times.Measured())
    if distributed:
        config.pluginmanager.register(CrashesExplained(), "crashes_explained")
        config.pluginmanager.register(cpu_times.Floor(), "floor")
    if reporter is not None:
        config.pluginmanager.register(FailuresAtOnce(reporter), "failures_at_once")
