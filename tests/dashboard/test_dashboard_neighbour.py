"""The owner of a connection, and what the page shows to another user of this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from samebits.config import Settings
from samebits.dashboard import web_app
from samebits.dashboard.guard import Guard, uid_of
from samebits.dashboard.watching import JobWatch
from samebits.dashboard.web_app import Pages, app_of

CLIENT, SERVER = ("127.0.0.1", 0x1F90), ("127.0.0.1", 0x2049)
ROW = "   0: {} {} 01 00000000:00000000 00:00000000 00000000  {}        0 12345\n"


@pytest.mark.parametrize(
    ("family", "listens", "connects"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET, "127.0.0.1", "::ffff:127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
    ],
)
def test_real_connection_is_this_users(family: int, listens: str, connects: str) -> None:
    with socket.create_server((listens, 0), family=family) as listener:
        own = socket.AF_INET6 if ":" in connects else socket.AF_INET
        with socket.socket(own, socket.SOCK_STREAM) as asking:
            asking.connect((connects, listener.getsockname()[1]))
            accepted, client = listener.accept()
            with accepted:
                assert uid_of(client[:2], accepted.getsockname()[:2]) == os.getuid()
                assert uid_of(client[:2], (listens, 1)) is None


def test_row_of_another_connection_from_the_same_port_is_ignored(tmp_path: Path) -> None:
    own, other, end = "0100007F:1F90", "0100007F:0050", "0100007F:2049"
    (tmp_path / "tcp").write_text(
        f"head\n{ROW.format(own, other, 0)}{ROW.format(end, own, 7)}{ROW.format(own, end, 12)}"
    )
    assert uid_of(CLIENT, SERVER, tmp_path) == 12
    assert uid_of(SERVER, CLIENT, tmp_path) == 7
    assert uid_of(("127.0.0.1", 1), SERVER, tmp_path) is None


@pytest.mark.parametrize("text", ["", "head\nnonsense\n", "head\n0: 0100007F:1F90 0100007F:2049 01\n", "head\n\n\n"])
def test_connection_in_no_table_has_no_known_owner(text: str, tmp_path: Path) -> None:
    assert uid_of(CLIENT, SERVER, tmp_path) is None
    (tmp_path / "tcp").write_text(text)
    assert uid_of(CLIENT, SERVER, tmp_path) is None
    assert uid_of(("testclient", 1), SERVER, tmp_path) is None and uid_of(None, SERVER, tmp_path) is None


@pytest.mark.parametrize(
    ("uid", "is_shown"), [(os.geteuid(), True), (0, True), (os.geteuid() + 1, False), (None, False)]
)
def test_other_user_sees_only_the_metrics_and_everything_with_the_token(
    uid: int | None, is_shown: bool, make_folder: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_app, "uid_of", lambda *_: uid)
    guard = Guard(frozenset(), None, others_token="m4de")
    with TestClient(
        app_of(Pages(JobWatch(make_folder(), None)), guard, lambda: ""), base_url="http://127.0.0.1"
    ) as client:
        for path in ("/", "/api/everything", "/api/log?name=worker_0", "/api/health", "/report"):
            answer = client.get(path)
            assert answer.status_code == (200 if is_shown else 401), path
            assert is_shown or ("job-1" not in answer.text and "Fix: " in answer.text)
        assert client.get("/metrics").status_code == 200
        assert client.get("/?token=m4de").status_code == 200
        assert client.get("/api/everything").status_code == 200
