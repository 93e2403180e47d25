"""The page as seen from another host: nothing without the token, whatever name or site is used.

Two hosts on a switch; the dashboard listens on the address of one of them, and curl asks from the other.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.config import Settings
from tests.clusters.namespaces import Host, Switch
from tests.dashboard.conftest import environment_of, make_folder

__all__ = ["make_folder"]

ROOT = Path(__file__).resolve().parents[2]
SECRET = "a secret of the test, long enough for all checks"
PORT = 8265
PATHS = (
    "/",
    "/page.js",
    "/api/everything",
    "/api/stream",
    "/api/log?name=worker_0",
    "/api/health",
    "/metrics",
    "/report",
)
TELLS = ("job-1", "train.py", "worker", "epoch", "host-a", "samebits_", "<html")
"""Texts of which every answer about the job, or the page, would have some."""

pytestmark = [
    pytest.mark.system,
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl is installed"),
]


def started(host: Host, settings: Settings, **more: str) -> tuple[subprocess.Popen[str], str]:
    """Start a dashboard on this host's address; return its first output."""
    process = subprocess.Popen(
        [
            *("nsenter", "--target", str(host.pid), "--net", sys.executable, "-P", "-m", "samebits", "dashboard"),
            *("--host", host.address(), "--port", str(PORT)),
        ],
        cwd=settings.log_dir.parent,
        env=environment_of(settings) | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.fixture
def page(make_folder: Callable[..., Settings], new_switch: Callable[..., Switch]) -> Iterator[tuple[Host, str]]:
    """Return another host, and the address that the dashboard printed."""
    server, other = new_switch("a", "b").hosts
    process, said = started(server, make_folder(2), CLUSTER_SECRET=SECRET, DASHBOARD="actions")
    try:
        found = re.search(r"http://\S+", said)
        assert found is not None, said
        yield other, found.group()
    finally:
        process.terminate()
        process.wait(60)


def ask(host: Host, url: str, *words: str) -> tuple[int, str]:
    """Return an answer's status and at most what arrives within two seconds of its body."""
    out = host.run("curl", "--silent", "--max-time", "60", "--write-out", "\n%{http_code}", *words, url)
    body, _, status = out.rpartition("\n")
    return int(status), body


def test_nothing_is_visible_from_another_host_without_the_token(page: tuple[Host, str]) -> None:
    other, shown = page
    address, _, token = shown.partition("?token=")
    assert token and SECRET not in shown
    cookie = f"samebits_token_{address.rstrip('/').rpartition(':')[2]}"
    for path in PATHS:
        for words in ((), ("-H", "authorization: Bearer x"), ("-b", f"{cookie}={token[:-1]}"), ("-I",)):
            status, body = ask(other, address.rstrip("/") + path, *words)
            assert status == 401, (path, words)
            assert not any(word in body for word in TELLS), (path, body)
    status, body = ask(other, f"{address}api/everything", "-H", f"authorization: Bearer {token}")
    assert status == 200 and "job-1" in body


def test_token_does_not_help_another_name_or_site(page: tuple[Host, str]) -> None:
    other, shown = page
    address, _, token = shown.partition("?token=")
    everything, own = f"{address}api/everything", ("-H", f"authorization: Bearer {token}")
    for words, expected in (
        (("-H", f"Host: evil.example:{PORT}"), 421),  # a name made to lead here: DNS rebinding
        (("-H", "Origin: http://evil.example"), 403),
        (("-H", "Sec-Fetch-Site: cross-site"), 403),
        (("-X", "POST", "-H", "Origin: http://evil.example", "-d", "{}"), 403),
        (("-X", "DELETE"), 405),
    ):
        status, body = ask(other, everything, *own, *words)
        assert status == expected, (words, body)
        assert not any(word in body for word in TELLS), body
    order = ("-H", "content-type: application/json", "-d", '{"action": "kill", "node": "0"}')
    for words in (("-H", "Origin: http://evil.example", *own), ("-H", f"Origin: {address.rstrip('/')}")):
        status, _ = ask(other, f"{address}api/act", *words, *order)
        assert status in (401, 403), words


def test_without_a_secret_it_does_not_listen_beyond_loopback(
    make_folder: Callable[..., Settings], new_switch: Callable[..., Switch]
) -> None:
    (server,) = new_switch("a").hosts
    process, said = started(server, make_folder(2))
    assert process.wait(60) != 0
    assert "anyone who can reach it could read the job's logs" in said and "Fix: " in said
