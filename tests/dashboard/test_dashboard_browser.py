"""The page in Debian's Chromium: an ended job, languages and sizes, and a live job that is killed."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from samebits.account.event_log import read_events
from samebits.account.events import EventKind
from samebits.config import Settings
from samebits.dashboard.report import html_of_folder
from samebits.launcher.processes import name_of
from samebits.store.process_identity import ProcessIdentity
from tests.dashboard.conftest import environment_of, told
from tests.launcher.shell_job import UNTIL_TOLD, ShellJob, free_port

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium")
WAIT_MS = 60_000.0

pytestmark = [
    pytest.mark.system,
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
]


class Served:
    """``samebits dashboard`` for a folder, as a process."""

    def __init__(self, settings: Settings, **more: str) -> None:
        self._begin(settings.log_dir.parent, more | environment_of(settings))

    def _begin(self, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "samebits", "dashboard", "--port", "0"],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found, said
        self.url = found.group()

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


class ServedLive(Served):
    """The same for a job that was started in its folder."""

    def __init__(self, job: ShellJob) -> None:
        self._begin(job.folder, {**job.bare_environment(), "PYTHONPATH": str(ROOT)})


@pytest.fixture
def serve(make_folder: Callable[..., Settings]) -> Iterator[Callable[[int], Served]]:
    """Return a factory that serves the folder of a job of this many workers."""
    opened: list[Served] = []

    def start(workers: int) -> Served:
        opened.append(Served(make_folder(workers, port=free_port())))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


class Browser:
    """A page that records its console output and its requests."""

    def __init__(self, playwright: object, url: str, **context: object) -> None:
        chromium = playwright.chromium  # type: ignore[attr-defined]
        self._browser = chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        self.page = self._browser.new_context(**context).new_page()
        self.complaints: list[str] = []
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda one: None if one.url.startswith(url) else self.complaints.append(one.url))
        self.page.goto(url)

    def close(self) -> None:
        self._browser.close()


@pytest.fixture
def browse() -> Iterator[Callable[..., Browser]]:
    from playwright.sync_api import sync_playwright

    opened: list[Browser] = []
    with sync_playwright() as playwright:

        def open_page(url: str, **context: object) -> Browser:
            opened.append(Browser(playwright, url, **context))
            return opened[-1]

        yield open_page
        for one in opened:
            one.close()


def test_ended_job_is_shown_in_both_languages_by_keyboard_without_errors(
    serve: Callable[[int], Served], browse: Callable[..., Browser]
) -> None:
    from playwright.sync_api import expect

    browser = browse(serve(2).url, locale="en-US")
    page = browser.page
    expect(page.locator("#phase")).to_have_text("no scheduler", timeout=WAIT_MS)
    expect(page.locator("#recoveries tbody tr")).to_have_count(2)
    expect(page.locator("#recoveries tbody tr").first).to_contain_text("worker 1: its <process> ended")
    expect(page.locator("#committed")).to_contain_text("2000")
    expect(page.locator("#buckets")).to_have_attribute("aria-label", re.compile("productive .* start-up"))
    page.locator(".rank").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".rank").nth(1)).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    expect(page.locator("#log")).to_contain_text("</script><script>alert(1)</script>", timeout=WAIT_MS)
    page.locator("#filter").fill("spare takes")
    expect(page.locator("#events li")).to_have_count(2)
    page.locator("#language").click()
    expect(page.locator("#h-time")).to_have_text("时间花在哪里")
    assert browser.complaints == []


def test_thousand_ranks_fit_a_dark_phones_width(serve: Callable[[int], Served], browse: Callable[..., Browser]) -> None:
    from playwright.sync_api import expect

    viewport = {"width": 360, "height": 740}
    browser = browse(serve(1000).url, viewport=viewport, color_scheme="dark", locale="zh-CN")
    expect(browser.page.locator(".rank")).to_have_count(1000, timeout=WAIT_MS)
    expect(browser.page.locator("html")).to_have_attribute("data-theme", "dark")
    expect(browser.page.locator("html")).to_have_attribute("lang", "zh-CN")
    wide = browser.page.locator("body").bounding_box()
    assert wide is not None and wide["width"] <= 360
    right = max(
        box["x"] + box["width"]
        for part in browser.page.locator("main > *:visible").all()
        if (box := part.bounding_box())
    )
    assert right <= 360
    label = "getComputedStyle(document.querySelector('#recoveries td.step'), '::before').content"
    assert browser.page.evaluate(label) == '"步 "', "without a table head each number has its label"
    expect(browser.page.locator("#recoveries td.num").first).to_have_text("50 ms")
    assert browser.complaints == []


def test_long_name_full_of_tags_is_text_within_a_phones_width(
    make_folder: Callable[..., Settings], browse: Callable[..., Browser]
) -> None:
    from playwright.sync_api import expect

    name = f"<img src=x onerror=alert(1)>{'n' * 90}"
    served = Served(make_folder(2, port=free_port(), first=name))
    try:
        browser = browse(served.url, viewport={"width": 360, "height": 740}, locale="en-US")
        browser.page.locator(".rank").first.click(timeout=WAIT_MS)
        expect(browser.page.locator("#who")).to_have_text(f"worker {name}")
        assert browser.page.evaluate("document.documentElement.scrollWidth") == 360
        assert browser.complaints == []
    finally:
        served.close()


HOSTILE = [
    "<img src=x onerror=document.title='taken'>",
    "\"><svg onload=document.title='taken'>",
    "' onfocus=document.title='taken' autofocus x='",
    "javascript:document.title='taken'",
    "</script><script>document.title='taken'</script>\u2028\u2029<!--",
    "</title></textarea></pre><iframe srcdoc='<script>top.document.title=`taken`</script>'>",
    "__proto__",
    "constructor",
    "\ud800\u202e\0\x1b[2J",
]


def test_no_text_of_a_job_becomes_markup_in_the_page_or_the_report(
    make_folder: Callable[..., Settings], browse: Callable[..., Browser], tmp_path: Path
) -> None:
    """Node, job, host, exception, event and log texts that would be markup if one of them were not escaped."""
    from playwright.sync_api import expect

    tags = "".join(HOSTILE[:5])
    settings = make_folder(
        2, port=free_port(), first=f"{HOSTILE[1]}{HOSTILE[2]}", name=tags, host=tags.replace("#", "")
    )
    told_of = [told(EventKind.LOST, 50 + n, 1, node=text, text=text, slot=0) for n, text in enumerate(HOSTILE)]
    told_of += [
        told(EventKind.ROUND, 60 + n, 1, text=text, round="1.9", missing=text, last=text)
        for n, text in enumerate(HOSTILE)
    ]
    told_of.append(told(EventKind.COMMITTED, 80, 1, point=tags, **{text: text for text in HOSTILE[:6]}))
    with (settings.recovery_path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event.plain()) + "\n" for event in told_of)
    log = settings.log_dir / f"{name_of(f'{HOSTILE[1]}{HOSTILE[2]}')}.log"
    log.write_text(f"{''.join(HOSTILE[:8])}\n")
    served = Served(settings)
    try:
        browser = browse(served.url, locale="en-US")
        page = browser.page
        dialogs: list[str] = []
        page.on("dialog", lambda one: dialogs.append(one.message))
        expect(page.locator("#events")).to_contain_text(HOSTILE[0], timeout=WAIT_MS)
        page.locator(".rank").first.click()
        expect(page.locator("#log")).to_contain_text(HOSTILE[0], timeout=WAIT_MS)
        page.locator("#filter").fill(HOSTILE[1])
        page.locator("#language").click()
        assert (
            page.evaluate("document.querySelectorAll('main img, main iframe, main svg, [onerror], [onfocus]').length")
            == 0
        )
        assert "taken" not in page.title() and dialogs == [] and browser.complaints == []
        told_policy = page.evaluate("fetch('/').then((answer) => answer.headers.get('content-security-policy'))")
        assert "default-src 'none'" in told_policy and "unsafe" not in told_policy
    finally:
        served.close()
    report = tmp_path / "report.html"
    report.write_bytes(html_of_folder(settings).encode())
    browser = browse(report.as_uri(), locale="en-US")
    expect(browser.page.locator("#events")).to_contain_text(HOSTILE[0], timeout=WAIT_MS)
    assert browser.page.evaluate("document.querySelectorAll('main img, main iframe, [onerror], [onfocus]').length") == 0
    assert "taken" not in browser.page.title() and browser.complaints == []


def test_live_job_is_followed_through_scheduler_death_kill_and_end(
    tmp_path: Path, browse: Callable[..., Browser]
) -> None:
    from playwright.sync_api import expect

    job = ShellJob(tmp_path)
    shell = job.run(*UNTIL_TOLD)
    served = None
    try:
        job.wait_training()
        served = ServedLive(job)
        browser = browse(served.url, locale="en-US")
        page = browser.page
        expect(page.locator("#link")).to_have_text("live", timeout=WAIT_MS)
        expect(page.locator(".rank.training")).to_have_count(3, timeout=WAIT_MS)
        job.kill("scheduler")
        expect(page.locator("#link")).to_have_text("no scheduler answers", timeout=WAIT_MS)
        first_back = job.recover()
        expect(page.locator("#link")).to_have_text("live", timeout=WAIT_MS)
        expect(page.locator(".rank.training")).to_have_count(3, timeout=WAIT_MS)
        job.kill("worker_1")
        expect(page.locator("#events .lost").first).to_contain_text("worker 1", timeout=WAIT_MS)
        expect(page.locator("#recoveries tbody tr").first).to_contain_text("worker 1", timeout=WAIT_MS)
        back = job.recover()
        expect(page.locator("#recoveries td.num").first).to_have_text(re.compile(r"\d+"), timeout=WAIT_MS)
        expect(page.locator(".rank.training")).to_have_count(3, timeout=WAIT_MS)
        job.let_finish()
        assert (shell.end(), first_back.end(), back.end()) == (0, 0, 0), shell.text
        expect(page.locator("#link")).to_have_text("from the record", timeout=WAIT_MS)
        expect(page.locator("#phase")).to_have_text("finished", timeout=WAIT_MS)
        assert browser.complaints == []
    finally:
        if served is not None:
            served.close()
        left = job.close()
    assert left == []


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Return the address of another server's empty page on the same host, which gets the same cookies."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def settings(make_folder: Callable[..., Settings]) -> Settings:
    return make_folder(2, port=free_port())


@pytest.fixture
def worker(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that a pid file of the job names as worker 1."""
    started = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(9)"], start_new_session=True
    )
    (settings.log_dir / "worker_1.pid").write_text(ProcessIdentity.of_child(started.pid).to_line())
    yield started
    started.kill()
    started.wait()


def orders_from(page: Any, address: str) -> list[tuple[str, int]]:
    """Post the order to kill worker 1 in every way a page can; return the server's answers."""
    answers: list[tuple[str, int]] = []  # a request that the browser itself blocks has none
    page.on("response", lambda one: answers.append((one.request.method, one.status)) if "api/act" in one.url else None)
    order = '{"do": "kill", "node": "1"}'
    for mode, kind in (("cors", "application/json"), ("no-cors", "text/plain"), ("no-cors", "application/json")):
        page.evaluate(
            """async ([url, mode, kind, body]) => { try {
                 const answer = await fetch(url, {method: "POST", mode, credentials: "include",
                   headers: {"content-type": kind}, body});
                 await answer.text();
               } catch { /* refused */ } }""",
            [f"{address}api/act", mode, kind, order],
        )
    if page.url.startswith(address):
        return answers  # its policy forbids it to send forms
    with page.expect_navigation(timeout=WAIT_MS):
        page.evaluate(
            """([url, order]) => {
                 const form = document.createElement("form"), field = document.createElement("input");
                 form.method = "post"; form.enctype = "text/plain"; form.action = url;
                 field.name = order; form.append(field); document.body.append(form); form.submit();
               }""",
            [f"{address}api/act", order],
        )
    return answers


@pytest.mark.parametrize("acts", ["actions", ""])
def test_kill_needs_the_own_page_the_token_and_enabled_actions(
    acts: str, settings: Settings, worker: subprocess.Popen[bytes], elsewhere: str, browse: Callable[..., Browser]
) -> None:
    served = Served(settings, DASHBOARD=acts)
    address = served.url.partition("?")[0]
    try:
        own = browse(served.url)
        own.page.wait_for_selector(".rank")
        stranger = own.page.context.new_page()
        stranger.goto(elsewhere)
        plain = browse(address).page
        plain.wait_for_selector(".rank")
        told = {"with the cookie": orders_from(stranger, address), "with no token": orders_from(plain, address)}
        for who, answers in told.items():
            posted = [status for method, status in answers if method == "POST"]
            assert posted and all(status in (401, 403, 405, 415) for status in posted), (who, answers)
        assert acts == "actions" or own.page.is_hidden("#kill")
        assert worker.poll() is None
        assert [event for event in read_events(settings.recovery_path) if event.kind is EventKind.ASKED] == []
    finally:
        served.close()


def test_worker_is_killed_from_the_page_only_with_the_token(
    settings: Settings, worker: subprocess.Popen[bytes], browse: Callable[..., Browser]
) -> None:
    served = Served(settings, DASHBOARD="actions")
    try:
        address = served.url.partition("?")[0]
        plain = browse(address)
        plain.page.wait_for_selector(".rank")
        plain.page.click('.rank[data-node="1"]')
        plain.page.wait_for_selector("#detail:not([hidden])")
        assert plain.page.is_hidden("#kill") and plain.page.is_hidden("#drill")

        own = browse(served.url)
        own.page.on("dialog", lambda dialog: dialog.accept())
        own.page.wait_for_selector("#drill:not([hidden])", timeout=WAIT_MS)
        assert "token" not in own.page.url
        own.page.click('.rank[data-node="1"]')
        own.page.click("#kill")
        own.page.wait_for_selector("#done:not([hidden])", timeout=WAIT_MS)
        assert "was killed" in own.page.inner_text("#done")
        assert worker.wait(60) == -signal.SIGKILL
        own.page.wait_for_selector("#events >> text=requested by the page at 127.0.0.1", timeout=WAIT_MS)
        assert plain.complaints == []
        assert [one for one in own.complaints if not one.startswith(address)] == []
    finally:
        served.close()
