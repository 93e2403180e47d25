"""What every test may use; nothing here starts a process or opens a socket."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parents[1]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if call.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def has_failed(request: pytest.FixtureRequest) -> Callable[[], bool]:
    """Whether the test failed, for what clears up after it: then its logs are worth more than what it left."""
    return lambda: request.node.stash.get(_FAILED, True)


class FailuresAtOnce:
    """Names each failure when it happens: a run that is stopped half-way has said what was wrong so far."""

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


@pytest.hookimpl(trylast=True)  # after the terminal's reporter is there
def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a run in the background: else nothing it starts hears it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):  # with several processes: in the one that prints
        config.pluginmanager.register(FailuresAtOnce(reporter), "failures_at_once")
