"""The server of a job's folder, over HTTP: pages, start of the stream, Prometheus metrics, refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from samebits.account.events import EventKind
from samebits.account.goodput import Bucket
from samebits.account.job_view import JobView
from samebits.account.recoveries import Recovery
from samebits.config import Settings
from samebits.core.messages import Process
from samebits.dashboard import command, watching, web_app
from samebits.dashboard.guard import Guard
from samebits.dashboard.incident import without_remedy
from samebits.dashboard.report import gathered, html_of_folder
from samebits.dashboard.watching import LOG_BYTES, JobWatch
from samebits.dashboard.web_app import FILES, MAX_URL, STATIC, Pages, app_of, exposition
from samebits.launcher.scheduler_link import Linked, LinkNews, SchedulerLink, Unlinked
from samebits.printable import printable
from samebits.store.process_identity import ProcessIdentity, host_id
from samebits.store.progress_report import ProgressReport, report_file, write_report
from tests.dashboard.conftest import BEGAN, told
from tests.launcher.views import view

HOST = "http://127.0.0.1:8265"
WAIT_S = 60


@pytest.fixture
def settings(make_folder: Callable[..., Settings]) -> Settings:
    return make_folder()


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    app = app_of(Pages(JobWatch(settings, None)), Guard(frozenset(), None), lambda: html_of_folder(settings))
    with TestClient(app, base_url=HOST) as opened:
        yield opened


def test_first_data_of_a_page(client: TestClient) -> None:
    all_of_it = client.get("/api/everything").json()
    state = all_of_it["state"]
    assert (state["linked"], state["job"]["id"], state["job"]["phase"]) == (False, "job-1", "no scheduler")
    assert [rank["node"] for rank in state["ranks"]] == ["0", "1"]
    assert (state["recovery_count"], state["losses"], state["committed_step"]) == (2, 2, 2000)
    assert state["recoveries"][0]["phases_ms"] == {"decide": 1, "wait_for_seats": 1, "meet": 18, "restore": 30}
    assert sum(state["buckets_s"].values()) == pytest.approx(state["wall_s"], abs=1e-5)
    assert all_of_it["losses"] == [], "a line of a log is no report of this job"
    assert len(all_of_it["events"]) == 7 + 29 + 12


def test_loss_comes_from_this_jobs_reports_only(settings: Settings) -> None:
    watch = JobWatch(settings, None)
    write_report(settings.log_dir, "0", ProgressReport(20, 100, {"loss": 0.5}))
    os.utime(report_file(settings.log_dir, "0"), (BEGAN - 1, BEGAN - 1))
    watch.look()
    assert watch.losses() == [], "the report is an earlier job's"
    for number, (step, loss) in enumerate(((21, 0.4), (22, 0.3), (21, 0.2))):
        write_report(settings.log_dir, "0", ProgressReport(step, 100, {"loss": loss}))
        os.utime(report_file(settings.log_dir, "0"), (BEGAN + number, BEGAN + number))
        watch.look()
    assert watch.losses() == [(21, 0.2)], "step 22 was rolled back"
    assert watch.state()["progress"]["values"] == {"loss": "0.2"}


def test_health_warnings_are_in_the_metrics(settings: Settings) -> None:
    ill = "host here: the disk of /logs has 3 MiB left for logs (limit 64 MiB, HEALTH=logs)"
    watch = JobWatch(settings, Gives(view(job="job-1", ailments=(ill,))))
    watch.look()
    families = {one.name: one for one in text_string_to_metric_families(exposition(watch.state()))}
    (sample,) = families["samebits_host_ailments"].samples
    assert (sample.labels, sample.value) == ({"host": "here"}, 1)


def test_dead_process_is_noticed_while_no_scheduler_answers(
    make_folder: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "JOURNAL_S", 0.0)
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        own = ProcessIdentity.of_child(child.pid)
        settings = make_folder(2, process=Process(host_id(), own.pid, own.started_at, "cpu"))
        watch = JobWatch(settings, Gives(Linked(), Unlinked()))
        watch.look()
        assert watch.state()["incident"]["kind"] == "no_scheduler"
    finally:
        child.kill()
        child.wait()
    watch.look()
    assert watch.state()["incident"]["kind"] == "all_gone"


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        ("killed (node fault; a new process takes its place)", "killed (node fault)"),
        (
            "a (x) (node fault; shrink (in GRACE)); 2 (b; y) (data fault; z)",
            "a (x) (node fault); 2 (b; y) (data fault)",
        ),
        ("killed (node; a new process takes its place)", "killed (node)"),  # the history of an earlier version
        ("oom (software fault; trying again cannot help: the job ends)", None),
        ("cut (node fault; a new", None),
    ],
)
def test_cause_promises_nothing(cause: str, shown: str | None) -> None:
    assert without_remedy(cause) == (cause if shown is None else shown)


def test_every_file_is_served_with_a_policy_and_references_nothing_external(client: TestClient) -> None:
    for name, file in FILES.items():
        answer = client.get(f"/{name}")
        assert answer.status_code == 200 and answer.content == (STATIC / file).read_bytes()
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        if file != "LICENSE-uPlot":
            elsewhere = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", answer.text)) - {"https://github.com"}
            assert elsewhere <= {"http://www.w3.org"}, (name, elsewhere)
    assert {path.name for path in STATIC.iterdir()} == set(FILES.values())


def test_prometheus_reads_the_metrics(client: TestClient) -> None:
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert len(families) >= 15
    assert all(name.startswith("samebits_") for name in families)
    spent = {sample.labels["bucket"]: sample.value for sample in families["samebits_time_seconds"].samples}
    assert spent["start_up"] == 4 and spent["productive"] > 28
    assert families["samebits_recoveries"].type == "counter"
    assert families["samebits_job_info"].samples[0].labels == {"job_id": "job-1", "name": "train.py"}
    assert families["samebits_up"].samples[0].value == 0
    assert all(family.documentation for family in families.values())


def test_log_is_read_only_by_names_of_the_job(client: TestClient, settings: Settings) -> None:
    (settings.log_dir / "secret.log").write_text("secret")
    (settings.log_dir / "worker_1.log").symlink_to(settings.log_dir / "secret.log")
    assert "loss" in client.get("/api/log", params={"name": "worker_0"}).text
    assert client.get("/api/log", params={"name": "worker_1"}).text == ""  # a link is not followed
    for name in ("secret", "worker_0/../secret", "../recovery/journal", "", "worker_9", "scheduler\0"):
        assert client.get("/api/log", params={"name": name}).status_code == 404
    (settings.log_dir / "worker_0.log").write_text("x" * 3 * LOG_BYTES)
    assert len(client.get("/api/log", params={"name": "worker_0"}).text) == LOG_BYTES


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"host": "evil.example"}, 421),
        ("/metrics", {"origin": "http://evil.example"}, 403),
        ("/api/log?name=worker_0", {"sec-fetch-site": "cross-site"}, 403),
        ("/nothing", {}, 404),
        ("/../../etc/passwd", {}, 404),
        ("/%2e%2e%2fserver.py", {}, 404),
        ("/server.py", {}, 404),
        (f"/?{'x' * MAX_URL}", {}, 414),
    ],
)
def test_refused_requests(client: TestClient, path: str, headers: dict[str, str], status: int) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == status
    assert "job-1" not in answer.text


def test_nothing_can_be_sent(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE"):
        assert client.request(method, "/api/everything").status_code == 405


def test_token_opens_the_page_and_stays_in_no_address(settings: Settings) -> None:
    app = app_of(Pages(JobWatch(settings, None)), Guard(frozenset(), "t0ken"), lambda: "")
    with TestClient(app, base_url=HOST) as client:
        for path in ("/", "/page.js", "/metrics", "/api/everything", "/api/stream", "/report"):
            assert client.get(path).status_code == 401
        assert client.get("/metrics", headers={"authorization": "Bearer t0ken"}).status_code == 200
        first = client.get("/?token=t0ken", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/")
        assert "HttpOnly" in first.headers["set-cookie"] and "SameSite=strict" in first.headers["set-cookie"]
        assert client.get("/api/everything").status_code == 200


@pytest.mark.parametrize("wrong", ["another", "%ff%fe", "%0d%0aset-cookie:%20a=b", "%ed%a0%80"])
def test_invalid_token_becomes_no_cookie(settings: Settings, wrong: str) -> None:
    """A foreign link may contain one, which must not replace the right one."""
    for guard in (Guard(frozenset(), None), Guard(frozenset(), None, "t0ken")):
        with TestClient(app_of(Pages(JobWatch(settings, None)), guard, lambda: ""), base_url=HOST) as client:
            answer = client.get(f"/?token={wrong}", follow_redirects=False)
            assert answer.status_code == 303
            assert "set-cookie" not in answer.headers


def test_lingering_page_ends_once_it_is_not_needed(settings: Settings) -> None:
    left = threading.Event()
    pages = Pages(JobWatch(settings, None), linger_s=0.0)
    pages.leave = left.set
    with TestClient(app_of(pages, Guard(frozenset(), None), lambda: ""), base_url=HOST):
        assert left.wait(60)


def test_page_that_can_no_longer_read_ends_instead_of_showing_old_data(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left, pages = threading.Event(), Pages(JobWatch(settings, None))
    pages.leave = left.set
    with TestClient(app_of(pages, Guard(frozenset(), None), lambda: ""), base_url=HOST):
        monkeypatch.setattr(pages.watch, "_take_news", lambda: 1 // 0)
        assert left.wait(WAIT_S)
    assert "ZeroDivisionError" in (said := capsys.readouterr().err) and "Fix: " in said


class Gives(SchedulerLink):
    """A link that gives these news, once."""

    def __init__(self, *news: LinkNews) -> None:
        self._told = list(news)

    def take(self) -> list[LinkNews]:
        told, self._told = self._told, []
        return told


class Rung(SchedulerLink):
    """A link that is connected from the start and returns what the test sets."""

    def __init__(self) -> None:
        self._news: deque[Linked | Unlinked] = deque()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.ring(Linked())

    def ring(self, news: Linked | Unlinked) -> None:
        self._news.append(news)
        os.write(self._writable, b"t")

    def fileno(self) -> int:
        return self._readable

    def take(self) -> list[Linked | Unlinked | JobView]:
        with suppress(BlockingIOError):
            os.read(self._readable, 64)
        told = list(self._news)
        self._news.clear()
        return list(told)


def test_schedulers_news_is_in_the_page_without_waiting_for_the_next_poll(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_app, "LOOK_S", 3600.0)
    link = Rung()
    pages = Pages(JobWatch(settings, link))

    async def told_of_the_death() -> bool:
        looking = asyncio.create_task(pages.run())
        async with asyncio.timeout(60):
            messages = aiter(pages.stream())
            await anext(messages)
            while not pages.watch.is_linked:
                await asyncio.sleep(0.01)
            for _ in range(3):
                await asyncio.to_thread(link.ring, Unlinked())
                while b"event: state" not in (message := await anext(messages)):
                    pass
        looking.cancel()
        return b'"linked":false' in message

    assert asyncio.run(told_of_the_death())


def test_connection_that_reads_nothing_more_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "UNREAD_MS", 500)
    with command._listen("127.0.0.1", 0) as listener, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(listener.getsockname())
        accepted, _ = listener.accept()
        accepted.settimeout(WAIT_S)
        with accepted, pytest.raises(TimeoutError) as ended:
            while True:
                accepted.sendall(bytes(1 << 16))
    assert ended.value.errno == errno.ETIMEDOUT, "not this test's own timeout"


def test_every_bucket_and_phase_has_a_colour_and_a_name_in_both_languages() -> None:
    css, words = (STATIC / "page.css").read_text(), (STATIC / "words.js").read_text()
    spent_us = dict.fromkeys(Bucket, 1000)
    phases = Recovery(1, "", [], 0.0, 0, spent_us=spent_us, decided_at=1, formed_at=3, trains_at=4).phases()
    for name in [*map(str, Bucket), *phases]:
        assert re.search(rf"\.{name}\b[^{{}}]*\{{ background: var\(--\w+\); \}}", css), name
        assert len(re.findall(rf"\b{name}: ", words)) >= 2, name


def test_watch_reads_what_is_appended(settings: Settings) -> None:
    watch = JobWatch(settings, None)
    assert watch.look().is_anew
    assert not watch.look().events
    with (settings.recovery_path / "events.jsonl").open("a") as file:
        file.write(json.dumps(told(EventKind.STEP, 40, 5000).plain()) + "\n{broken\n[]\n")
    changed = watch.look()
    assert ([event.step for event in changed.events], changed.is_anew) == ([5000], False)
    assert watch.steps()[-1][1] == 5000


def test_empty_folder_does_not_fail(settings: Settings) -> None:
    for path in [*settings.recovery_path.iterdir(), *settings.log_dir.iterdir()]:
        path.unlink()
    watch = JobWatch(settings, None)
    watch.look()
    assert (watch.state()["job"], watch.losses(), watch.log_end("scheduler")) == (None, [], "")


def test_log_of_a_replaced_worker_is_in_the_page_and_in_the_report(settings: Settings) -> None:
    (settings.log_dir / "worker_1.1.log").write_text("an error of the one before\n")
    watch = JobWatch(settings, None)
    watch.look()
    assert watch.log_end("worker_1.1") == gathered(settings)["logs"]["worker_1.1"] == "an error of the one before\n"
    assert watch.log_end("worker_1.2") is None


def test_report_is_self_contained_and_no_log_escapes_into_it(settings: Settings, tmp_path: Path) -> None:
    html = html_of_folder(settings)
    assert not re.findall(r'(?:src|href)="(?!#)(?!report")', html)
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    found = json.loads(data)
    assert found["logs"]["worker_0"].endswith("</script><script>alert(1)</script>\n")
    assert html.count("<script>") == 3
    assert found["account"]["recoveries"][1]["cause"] == "worker 1: its <process> ended"
    assert found["about"]["settings"]["WORKER_NUM"] == "2"
    assert len(html) < 300_000
    assert gathered(settings)["state"]["recovery_count"] == 2


def test_invalid_utf8_ends_neither_the_page_nor_its_stream(settings: Settings) -> None:
    with (settings.recovery_path / "events.jsonl").open("a") as file:
        file.write(
            json.dumps(told(EventKind.LOST, 40, node="\ud800", text="an error of \udcff\u2028\0").plain()) + "\n"
        )
    pages = Pages(JobWatch(settings, None))
    app = app_of(pages, Guard(frozenset(), None), lambda: html_of_folder(settings))
    with TestClient(app, base_url=HOST) as client:
        everything = client.get("/api/everything")
        assert everything.json()["events"][-1]["text"] == printable("an error of \udcff\u2028\0")
        for path in ("/report", "/metrics", "/api/health"):
            assert client.get(path).status_code == 200
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    pages._queues.add(queue)
    pages._tell("events", [told(EventKind.LOST, 40, text="\ud800").plain()])
    assert json.loads((queue.get_nowait() or b"").partition(b"data: ")[2])[0]["text"] == printable("\ud800")


def test_pages_of_two_jobs_keep_each_others_tokens(settings: Settings) -> None:
    jar: dict[str, str] = {}  # a browser's, of one address, for all of its ports
    for port in (8265, 8266):
        app = app_of(Pages(JobWatch(settings, None)), Guard(frozenset(), f"token{port}"), lambda: "")
        with TestClient(app, base_url=f"http://127.0.0.1:{port}") as client:
            first = client.get(f"/?token=token{port}", follow_redirects=False)
            name, _, value = first.headers["set-cookie"].partition(";")[0].partition("=")
            jar[name] = value
    sent = "; ".join(f"{name}={value}" for name, value in jar.items())
    for port in (8265, 8266):
        guard = Guard(frozenset(), f"token{port}")
        assert guard.judge("GET", {"host": f"127.0.0.1:{port}", "cookie": sent}, None) is None
