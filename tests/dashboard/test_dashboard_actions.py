"""Actions from the page: refused without the token, recorded, and limited to the page's own job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from samebits.account.event_log import merged, read_events
from samebits.account.events import EventKind, JobEvent
from samebits.account.goodput import goodput_of
from samebits.config import Settings
from samebits.dashboard import actions
from samebits.dashboard.actions import MOST_BYTES, Actions, Deed, act, order_in
from samebits.dashboard.guard import ACTION, Guard, action_token_of
from samebits.dashboard.watching import JobWatch
from samebits.dashboard.web_app import Pages, app_of
from samebits.errors import UsageError
from samebits.net.curve import derive_keys
from samebits.store import text_log
from samebits.store.process_identity import ProcessIdentity

HOST = "http://127.0.0.1:8265"
TOKEN = "t0ken"
RIGHT = {"origin": HOST, "content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
WORKER_1 = {"do": "kill", "node": "1"}


@pytest.fixture
def settings(make_folder: Callable[..., Settings]) -> Settings:
    return make_folder()


@contextmanager
def opened(settings: Settings, guard: Guard, *, acts: bool = True) -> Iterator[TestClient]:
    actions = Actions(settings) if acts else None
    app = app_of(Pages(JobWatch(settings, None)), guard, lambda: "", actions)
    with TestClient(app, base_url=HOST) as client:
        yield client


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    with opened(settings, Guard(frozenset(), None, TOKEN)) as client:
        yield client


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


def asked(settings: Settings) -> list[JobEvent]:
    return [event for event in read_events(settings.recovery_path) if event.kind is EventKind.ASKED]


# ---- permission


def test_actions_are_off_by_default(settings: Settings, worker: subprocess.Popen[bytes]) -> None:
    assert not settings.dashboard.has_actions
    assert action_token_of(None, is_on=False) is None
    with opened(settings, Guard(frozenset(), None), acts=False) as client:
        assert client.post(ACTION, json=WORKER_1, headers=RIGHT).status_code == HTTPStatus.METHOD_NOT_ALLOWED
        assert client.get("/api/health").json()["may_act"] is False
    assert worker.poll() is None and asked(settings) == []


def test_action_needs_a_secret_token_on_loopback_too() -> None:
    tokens = {action_token_of(None, is_on=True) for _ in range(10)}
    assert len(tokens) == 10 and all(token is not None and len(token) == 48 for token in tokens)
    keys = derive_keys(b"0123456789abcdef")
    assert action_token_of(keys, is_on=True) == action_token_of(keys, is_on=True)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"authorization": None}, HTTPStatus.UNAUTHORIZED),
        ({"authorization": "Bearer t0kem"}, HTTPStatus.UNAUTHORIZED),
        ({"authorization": "Basic t0ken"}, HTTPStatus.UNAUTHORIZED),
        ({"origin": None}, HTTPStatus.FORBIDDEN),
        ({"origin": "http://evil.example"}, HTTPStatus.FORBIDDEN),
        ({"origin": "null"}, HTTPStatus.FORBIDDEN),
        ({"origin": "http://127.0.0.1:8266"}, HTTPStatus.FORBIDDEN),
        ({"sec-fetch-site": "cross-site"}, HTTPStatus.FORBIDDEN),
        ({"sec-fetch-site": "same-site"}, HTTPStatus.FORBIDDEN),
        ({"host": "evil.example"}, HTTPStatus.MISDIRECTED_REQUEST),
        ({"content-type": "text/plain"}, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
        ({"content-type": "application/x-www-form-urlencoded"}, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    ],
)
def test_unauthorised_request_changes_nothing(
    client: TestClient,
    settings: Settings,
    worker: subprocess.Popen[bytes],
    changes: dict[str, str | None],
    status: HTTPStatus,
) -> None:
    headers = {name: value for name, value in {**RIGHT, **changes}.items() if value is not None}
    answer = client.post(ACTION, content=json.dumps(WORKER_1), headers=headers)
    assert answer.status_code == status, answer.text
    assert TOKEN not in answer.text
    assert worker.poll() is None and asked(settings) == []


def test_token_in_the_address_permits_no_action(client: TestClient, worker: subprocess.Popen[bytes]) -> None:
    headers = {name: value for name, value in RIGHT.items() if name != "authorization"}
    assert client.post(f"{ACTION}?token={TOKEN}", json=WORKER_1, headers=headers).status_code == HTTPStatus.UNAUTHORIZED
    assert worker.poll() is None


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_action_is_a_post(client: TestClient, worker: subprocess.Popen[bytes], method: str) -> None:
    answer = client.request(method, ACTION, headers=RIGHT)
    assert answer.status_code in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_FOUND)
    assert worker.poll() is None


@pytest.mark.parametrize("path", ["/", "/api/everything", "/metrics", "/report"])
def test_other_posts_are_refused(client: TestClient, path: str) -> None:
    assert client.post(path, headers=RIGHT).status_code == HTTPStatus.METHOD_NOT_ALLOWED


def test_reading_needs_no_token_without_a_secret_and_shows_who_may_act(client: TestClient) -> None:
    assert client.get("/api/health").json()["may_act"] is False
    assert client.get("/", params={"token": TOKEN}).status_code == HTTPStatus.OK  # and the cookie is set
    assert client.get("/api/health").json()["may_act"] is True


def test_job_with_a_secret_permits_actions_only_to_its_readers(settings: Settings) -> None:
    with opened(settings, Guard(frozenset(), TOKEN, TOKEN)) as client:
        headers = {name: value for name, value in RIGHT.items() if name != "authorization"}
        assert client.post(ACTION, json=WORKER_1, headers=headers).status_code == HTTPStatus.UNAUTHORIZED


# ---- invalid requests


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b'"kill"', b'{"do": "kill", "node": 1}', b'{"do": "stop", "node": "1"}'),
        *(b'{"do": ["kill"], "node": "1"}', b'{"do": "kill", "node": "1", "more": 1}', b"\xff\xfe", b"[" * 400),
        b'{"do": "kill", "node": "' + b"1" * 200 + b'"}',
    ],
)
def test_invalid_request_does_nothing(
    client: TestClient, settings: Settings, worker: subprocess.Popen[bytes], body: bytes
) -> None:
    answer = client.post(ACTION, content=body, headers=RIGHT)
    assert answer.status_code == HTTPStatus.BAD_REQUEST
    assert worker.poll() is None and asked(settings) == []


def test_oversized_request_is_not_read(client: TestClient) -> None:
    answer = client.post(ACTION, content=b" " * (MOST_BYTES + 1), headers=RIGHT)
    assert answer.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


@pytest.mark.parametrize("told", [WORKER_1, {"do": "drill"}, {"do": "drain", "node": "2.1"}])
def test_valid_request_is_parsed(told: dict[str, Any]) -> None:
    assert order_in(json.dumps(told).encode()) == (Deed(told["do"]), told.get("node", ""))


# ---- actions


def test_kill_is_in_the_history_with_its_origin_and_hits_the_jobs_own_process(
    client: TestClient, settings: Settings, worker: subprocess.Popen[bytes]
) -> None:
    before = goodput_of(read_events(settings.recovery_path)).wall_us()
    answer = client.post(ACTION, json=WORKER_1, headers=RIGHT)
    assert (answer.status_code, worker.wait(60)) == (HTTPStatus.OK, -signal.SIGKILL)
    assert answer.text.startswith("worker 1 (pid ")
    (event,) = asked(settings)
    assert event.node == "1" and event.more == {"deed": "kill"}
    assert event.text.startswith(f"kill -9 of worker 1 (pid {worker.pid}") and "requested by the page" in event.text
    assert goodput_of(read_events(settings.recovery_path)).wall_us() == before, "it costs no time by itself"


def test_request_is_shown_at_once_and_after_the_pages_restart(
    client: TestClient, settings: Settings, worker: subprocess.Popen[bytes]
) -> None:
    watch = JobWatch(settings, None)
    assert EventKind.ASKED not in [event.kind for event in watch.look().events]
    client.post(ACTION, json=WORKER_1, headers=RIGHT)
    assert [event.kind for event in watch.look().events] == [EventKind.ASKED]
    assert watch.look().events == []
    assert [event.kind for event in JobWatch(settings, None).look().events].count(EventKind.ASKED) == 1


@pytest.mark.parametrize("node", ["0", "7", "", "../1", "scheduler"])
def test_no_other_process_is_hit(
    client: TestClient, settings: Settings, worker: subprocess.Popen[bytes], node: str
) -> None:
    answer = client.post(ACTION, json={"do": "kill", "node": node}, headers=RIGHT)
    assert answer.status_code == HTTPStatus.CONFLICT and "does not run on this machine" in answer.text
    assert worker.poll() is None and asked(settings) == []


def test_reused_pid_is_left_alone(settings: Settings, worker: subprocess.Popen[bytes]) -> None:
    known = ProcessIdentity.of_child(worker.pid)
    (settings.log_dir / "worker_1.pid").write_text(replace(known, started_at=known.started_at - 1).to_line())
    with pytest.raises(UsageError, match="does not run on this machine"):
        act(settings, Deed.KILL, "1", "a test")
    assert worker.poll() is None


def test_action_that_cannot_be_recorded_is_not_done(
    settings: Settings, worker: subprocess.Popen[bytes], client: TestClient
) -> None:
    (settings.recovery_path / text_log.ASKED_FILE).mkdir()
    assert client.post(ACTION, json=WORKER_1, headers=RIGHT).status_code == HTTPStatus.CONFLICT
    assert worker.poll() is None


def test_actions_are_refused_with_recovery_off(settings: Settings, worker: subprocess.Popen[bytes]) -> None:
    with pytest.raises(UsageError, match="ENABLE_RECOVERY=0"):
        act(replace(settings, enable_recovery=False), Deed.KILL, "1", "a test")
    assert worker.poll() is None


@pytest.mark.parametrize("deed", [Deed.DRAIN, Deed.DRILL])
def test_action_that_needs_the_scheduler_is_refused_without_one(
    settings: Settings,
    worker: subprocess.Popen[bytes],
    deed: Deed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(settings.log_dir.parent)
    with pytest.raises(UsageError, match="no scheduler of this job answers"):
        act(settings, deed, "1", "a test")
    assert worker.poll() is None and asked(settings) == []


def test_drill_hits_one_of_the_local_ranks(
    settings: Settings, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "_ranks", lambda settings, running: list(running))
    assert act(settings, Deed.DRILL, "", "a test").startswith("worker 1 ")
    assert worker.wait(60) == -signal.SIGKILL
    assert asked(settings)[0].text.startswith("drill: kill -9 of worker 1")


# ---- the file of requests


def test_requests_are_bounded_and_the_newest_kept(tmp_path: Path) -> None:
    for number in range(text_log.MOST_LINES + 1):
        text_log.append_asked(tmp_path, f"line {number}")
    lines = text_log.read_asked(tmp_path)
    assert len(lines) == text_log.MOST_LINES // 2
    assert lines[-1] == f"line {text_log.MOST_LINES}"
    assert (tmp_path / text_log.ASKED_FILE).stat().st_mode & 0o777 == 0o600


def test_torn_line_costs_only_itself(tmp_path: Path) -> None:
    text_log.append_asked(tmp_path, "whole")
    with (tmp_path / text_log.ASKED_FILE).open("ab") as file:
        file.write(b"torn")
    text_log.append_asked(tmp_path, "more")
    assert text_log.read_asked(tmp_path) == ["whole", "torn", "more"]


def test_request_appears_where_it_was_made_and_keeps_the_schedulers_order() -> None:
    told = [JobEvent(EventKind.STEP, 5.0), JobEvent(EventKind.STEP, 3.0), JobEvent(EventKind.STEP, 9.0)]
    found = merged(told, [JobEvent(EventKind.ASKED, 7.0)])
    assert [event.at for event in found] == [5.0, 3.0, 7.0, 9.0]
