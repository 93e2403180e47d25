"""Run the lines of docs/how-to/monitor.md that show a job surviving a kill, with the page in a real browser.

Only the port differs. They are typed in a folder outside the checkout, whose scripts and environment they call.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity
from tests.dashboard.test_dashboard_browser import CHROMIUM, WAIT_MS, Browser, browse
from tests.launcher.shell_job import ROOT, ShellJob
from tests.system.processes import found_below, free_port, signal_process

__all__ = ["browse"]

PAGE = "DASHBOARD=8265"

pytestmark = [
    pytest.mark.system,
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
]


def lines_of(page: str) -> list[str]:
    """Return the commands of the block that starts the page."""
    (block,) = [one for one in re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if PAGE in one]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def one_line(process: ProcessIdentity) -> bytes:
    """Return the command of a process."""
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[ShellJob]:
    """Return a separate folder, since the checkout would get the job's files."""
    job = ShellJob(tmp_path)
    yield job
    left = job.close()
    assert left == []


def test_guides_lines_show_a_job_that_survives_a_kill_in_the_page(
    checkout: ShellJob, browse: Callable[..., Browser]
) -> None:
    from playwright.sync_api import expect

    guide = ROOT / "docs" / "how-to"
    run, kill, recover = lines_of((guide / "monitor.md").read_text())
    assert lines_of((guide / "monitor.zh-CN.md").read_text()) == [run, kill, recover]
    assert "http://127.0.0.1:8265/" in (guide / "monitor.md").read_text()
    port, bash = free_port(), shutil.which("bash") or "bash"
    more = {"SCHED_PORT": str(checkout.port)}
    run, recover = (line.replace(" scripts/", f" {ROOT}/scripts/") for line in (run, recover))
    first = checkout.shell(bash, "-c", f"exec {run.replace(PAGE, f'env DASHBOARD={port}')}", **more)
    first.wait_for(r"step \d+")
    browser = browse(f"http://127.0.0.1:{port}/", locale="en-US")
    page = browser.page
    expect(page.locator(".rank.training")).to_have_count(4, timeout=WAIT_MS)
    assert checkout.shell(bash, "-c", kill).end() == 0
    expect(page.locator("#events .lost").first).to_contain_text("worker 2", timeout=WAIT_MS)
    back = checkout.shell(bash, "-c", recover, **more)
    expect(page.locator("#recoveries td.num").first).to_have_text(re.compile(r"\d+"), timeout=WAIT_MS)
    expect(page.locator(".rank.training")).to_have_count(4, timeout=WAIT_MS)
    assert browser.complaints == []
    first.send(signal.SIGINT)
    assert first.end() != 0 and back.end() != 0, "the job was ended before it finished"
    expect(page.locator("#link")).to_have_text("from the record", timeout=WAIT_MS)
    (served,) = [one for one in found_below(checkout.folder) if b"dashboard" in one_line(one)]
    signal_process(served, signal.SIGTERM)  # otherwise it waits ten minutes for a reader
    assert served.wait_for_exit(60)
