"""``python -m benchmarks.dashboard``: measure how soon the page is painted and what open pages cost the scheduler.

A crowd of simulated workers (``benchmarks.workers.control_plane_crowd``) uses a scheduler, and a dashboard serves that
job. With 256 ranks a real browser, Debian's Chromium, opens the page: measured are the time from the start of the
navigation to the first contentful paint and to the last rank's square, and from the kill -9 of a process with a quarter
of the ranks until the page shows the first one as lost. With 1,000 ranks the scheduler's CPU clock is read over windows
without a page and with ten open pages, in turn; the difference is their cost as a share of one core. The floor of a
paint is a page without content from the same server (its licence file).
"""

from __future__ import annotations

import argparse
import http.client
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.control_plane_stage import SCHEDULER, Crowds, Scene, cpu_s, descriptor_problem
from benchmarks.processes import Stage
from benchmarks.report import MISSING, Progress, Report, median, rounded, table

PAGES = 10
DASHBOARD = "dashboard"
SETTLE_S = 1.5
WITHIN_S = 60.0
_CROWDS = 2
_KILLS = 3
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
_SHOWN = """([selector, count]) => new Promise(done => {
  const look = () => document.querySelectorAll(selector).length >= count ? done(performance.now())
    : requestAnimationFrame(look);
  look();
})"""


@dataclass(slots=True)
class Measured:
    """All measurements."""

    paint_ms: list[float] = field(default_factory=list)
    ranks_ms: list[float] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    kill_ms: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    without: list[float] = field(default_factory=list)  # the scheduler's share of a core
    with_: list[float] = field(default_factory=list)


@contextmanager
def simulated(ranks: int, processes: int) -> Iterator[tuple[Stage, Scene, Crowds]]:
    """Run a training job of this many simulated ranks in this many processes."""
    with Stage() as stage:
        scene = Scene(stage, ranks)
        scene.start_scheduler()
        crowds = scene.start_crowds("crowd", ranks, processes)
        crowds.tell("begin")
        crowds.wait_for("formed")
        time.sleep(SETTLE_S)
        yield stage, scene, crowds


def serve(stage: Stage, scene: Scene) -> str:
    """Start the dashboard; return the page's address."""
    command = [sys.executable, "-P", "-m", "samebits", "dashboard", "--port", "0"]
    stage.start(DASHBOARD, command, {**scene.job.variables, "LOG_DIR": str(stage.folder)})
    log, deadline_s = stage.folder / f"{DASHBOARD}.log", time.monotonic() + WITHIN_S
    while (found := re.search(r"http://\S+", log.read_text())) is None:
        stage.require_alive()
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the dashboard did not begin within {WITHIN_S:g} s")
        time.sleep(0.05)
    return found.group()


def paint(measured: Measured, ranks: int, count: int, chromium: str, progress: Progress) -> None:
    """Open the page this often, each time in a fresh browser context."""
    from playwright.sync_api import sync_playwright

    with simulated(ranks, _KILLS + 1) as (stage, scene, crowds), sync_playwright() as playwright:
        url = serve(stage, scene)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            _open(browser, url, [], "LICENSE-uPlot")  # one-time work of the browser
            for number in range(1, count + 1):
                _, floor_ms, _ = _open(browser, url, [], "LICENSE-uPlot")
                _, paint_ms, ranks_ms = _open(browser, url, measured.complaints, "", ranks)
                measured.floor_ms.append(floor_ms)
                measured.paint_ms.append(paint_ms)
                measured.ranks_ms.append(ranks_ms)
                progress.say(f"page {number} of {count}: painted after {paint_ms:.0f} ms, {ranks} ranks {ranks_ms:.0f}")
            _kill(browser, url, measured, crowds, ranks, progress)
        finally:
            browser.close()


def _kill(browser: Any, url: str, measured: Measured, crowds: Crowds, ranks: int, progress: Progress) -> None:
    """Repeatedly kill -9 a process with its ranks, and wait until the open page shows one as lost."""
    page = browser.new_page(locale="en-US")
    page.goto(url)
    page.evaluate(_SHOWN, [".rank", ranks])
    for number in range(1, _KILLS + 1):
        lost = page.locator(".rank.lost").count()
        killed_s = crowds.kill_one()
        page.evaluate(_SHOWN, [".rank.lost", lost + 1])
        measured.kill_ms.append(1000 * (time.monotonic() - killed_s))
        progress.say(f"kill {number} of {_KILLS}: in the page after {measured.kill_ms[-1]:.0f} ms")
        time.sleep(SETTLE_S)


def _open(browser: Any, url: str, complaints: list[str], path: str, ranks: int = 0) -> tuple[str, float, float]:
    context = browser.new_context(locale="en-US")
    try:
        page = context.new_page()
        page.on("console", lambda one: complaints.append(one.text) if one.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(url) else complaints.append(one.url))
        page.goto(url + path)
        ranks_ms = float(page.evaluate(_SHOWN, [".rank", ranks])) if ranks else 0.0
        while (painted_ms := page.evaluate(_PAINTED)) is None:
            time.sleep(0.01)
        return path, float(painted_ms), ranks_ms
    finally:
        context.close()


class _Reader(threading.Thread):
    """Looks like an open page to the server: reads the complete stream."""

    def __init__(self, host: str) -> None:
        super().__init__(daemon=True)
        self._host = host
        self.told = 0
        self._connection = http.client.HTTPConnection(host, timeout=WITHIN_S)

    def run(self) -> None:
        self._connection.request("GET", "/api/everything")
        self._connection.getresponse().read()
        self._connection.request("GET", "/api/stream")
        answer = self._connection.getresponse()
        while line := answer.readline():
            self.told += line.startswith(b"event: state")


def cost(measured: Measured, ranks: int, windows: int, for_s: float, progress: Progress) -> None:
    """Measure the scheduler's CPU time without a dashboard and with one that has ten open pages, in turn."""
    with simulated(ranks, _CROWDS) as (stage, scene, _):
        pid = stage.pids()[SCHEDULER]
        for number in range(1, windows + 1):
            measured.without.append(_share(pid, for_s))
            host = serve(stage, scene).removeprefix("http://").rstrip("/")
            readers = [_Reader(host) for _ in range(PAGES)]
            for reader in readers:
                reader.start()
            deadline_s = time.monotonic() + WITHIN_S
            while any(reader.told < 2 for reader in readers):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{PAGES} pages were not told twice within {WITHIN_S:g} s")
                time.sleep(0.05)
            measured.with_.append(_share(pid, for_s))
            stage.end(DASHBOARD)
            (stage.folder / f"{DASHBOARD}.log").unlink()
            without, with_ = measured.without[-1], measured.with_[-1]
            progress.say(f"window {number} of {windows}: {without:.1%} of a core without, {with_:.1%} with {PAGES}")
            time.sleep(SETTLE_S)


def _share(pid: int, for_s: float) -> float:
    used_s, began_s = cpu_s(pid), time.monotonic()
    time.sleep(for_s)
    return (cpu_s(pid) - used_s) / (time.monotonic() - began_s)


def report(measured: Measured, ranks: tuple[int, int]) -> None:
    """Return the table and the JSON object."""
    extra = median([with_ - without for with_, without in zip(measured.with_, measured.without, strict=True)])
    ours: dict[str, Any] = {
        "scheduler_without_ms_per_s": median([1000 * one for one in measured.without]),
        "scheduler_with_ms_per_s": median([1000 * one for one in measured.with_]),
        "complaints_count": len(measured.complaints),
    }
    rows = [("the scheduler's extra share of a core", f"{extra:.2%}", f"{PAGES} pages, {ranks[1]} ranks")]
    floor: dict[str, Any] = {}
    ratios: dict[str, Any] = {"scheduler_extra_share_of_a_core": rounded(extra)}
    if measured.paint_ms:
        ours["first_paint_ms"], ours["ranks_shown_ms"] = median(measured.paint_ms), median(measured.ranks_ms)
        ours["kill_shown_ms"], ours["slowest_kill_shown_ms"] = median(measured.kill_ms), rounded(max(measured.kill_ms))
        ours["slowest_first_paint_ms"] = rounded(max(measured.paint_ms))
        floor["first_paint_ms"] = median(measured.floor_ms)
        ratios["first_paint_to_floor"] = rounded(ours["first_paint_ms"] / floor["first_paint_ms"])
        rows.append(("first paint, ms", f"{ours['first_paint_ms']:.0f}", f"{ranks[0]} ranks"))
        rows.append(("a kill shown, ms", f"{ours['kill_shown_ms']:.0f}", f"{ranks[0]} ranks"))
        rows.append(("all ranks shown, ms", f"{ours['ranks_shown_ms']:.0f}", f"{ranks[0]} ranks"))
    people = table(("", "", "of"), rows)
    complaints = "".join(f"\nthe page complained: {one}" for one in measured.complaints)
    Report("dashboard", floor, {"browser": MISSING} if not measured.paint_ms else {}, ours, ratios).print(
        people + complaints
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboard", description=__doc__)
    parser.add_argument("--painted-ranks", type=int, default=256)
    parser.add_argument(
        "--ranks",
        type=int,
        default=1000,
        help="number of ranks while the scheduler's CPU time is measured (default: 1000)",
    )
    parser.add_argument("--count", type=int, default=10, help="number of pages to open (default: 10)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a measurement in seconds (default: 20)")
    parser.add_argument("--quick", action="store_true", help="measure 32 and 64 ranks, two pages, and once for 3 s")
    options = parser.parse_args()
    painted, ranks, count, windows, for_s = options.painted_ranks, options.ranks, options.count, 5, options.seconds
    if options.quick:
        painted, ranks, count, windows, for_s = 32, 64, 2, 1, 3.0
    chromium = shutil.which("chromium")
    missing = {} if chromium else {"browser": "chromium, which `apt-get install chromium` installs"}
    if problem := descriptor_problem(ranks, _CROWDS):
        parser.error(problem)
    progress = Progress(f"{painted} ranks painted, {ranks} ranks with {PAGES} pages open", missing)
    measured = Measured()
    if chromium:
        paint(measured, painted, count, chromium, progress)
    cost(measured, ranks, windows, for_s, progress)
    report(measured, (painted, ranks))
    return 1 if measured.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
