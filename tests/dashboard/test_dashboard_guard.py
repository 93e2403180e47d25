"""Access to the page, and attempts to get around its checks."""

from __future__ import annotations

from http import HTTPStatus

import pytest

from samebits.dashboard.guard import Guard, host_name, others_token_of, token_of
from samebits.net.curve import derive_keys

OPEN = Guard(frozenset({"trainer"}), None)
CLOSED = Guard(frozenset(), "t0ken")


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8265", "localhost", "LOCALHOST:80", "[::1]:8265", "10.1.2.3:1", "trainer:8265", "localhost."]
)
def test_own_names_are_answered(host: str) -> None:
    assert OPEN.judge("GET", {"host": host}, None) is None


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8265", "[::1", "[::1]x", "localhost:x"),
        *("localhost@evil.example", "127.0.0.1:8265:1", "trainer.evil.example", "[evil.example]"),
    ],
)
def test_other_name_is_dns_rebinding_and_is_refused(host: str) -> None:
    refused = OPEN.judge("GET", {"host": host}, None)
    assert refused is not None and refused.status is HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8265"},
        {"origin": "http://127.0.0.1:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
def test_other_site_may_not_read(headers: dict[str, str]) -> None:
    refused = OPEN.judge("GET", {"host": "127.0.0.1:8265", **headers}, None)
    assert refused is not None and refused.status is HTTPStatus.FORBIDDEN


def test_link_from_another_site_and_own_requests_are_answered() -> None:
    click = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    own = {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8265"}
    for headers in (click, own):
        assert OPEN.judge("GET", {"host": "127.0.0.1:8265", **headers}, None) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get"])
def test_page_is_read_only(method: str) -> None:
    refused = OPEN.judge(method, {"host": "localhost"}, None)
    assert refused is not None and refused.status is HTTPStatus.METHOD_NOT_ALLOWED


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, "t0ken"),
        ({"authorization": "Bearer t0ken"}, None),
        ({"authorization": "bearer  t0ken"}, None),
        ({"cookie": "a=b; samebits_token=t0ken"}, None),
    ],
)
def test_request_with_the_token_is_answered(headers: dict[str, str], token: str | None) -> None:
    assert CLOSED.judge("GET", {"host": "localhost", **headers}, token) is None


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        ({}, None),
        ({}, ""),
        ({}, "t0ke"),
        ({}, "t0ken "),
        ({}, "töken"),
        ({"authorization": "Basic t0ken"}, None),
        ({"authorization": "t0ken"}, None),
        ({"cookie": "samebits_token="}, None),
        ({"cookie": "xsamebits_token=t0ken"}, None),
    ],
)
def test_request_without_the_token_is_refused(headers: dict[str, str], token: str | None) -> None:
    refused = CLOSED.judge("GET", {"host": "localhost", **headers}, token)
    assert refused is not None and refused.status is HTTPStatus.UNAUTHORIZED


@pytest.mark.parametrize(
    ("headers", "token", "may"),
    [({}, None, False), ({}, "m4de", True), ({"cookie": "samebits_token=m4de"}, None, True), ({}, "wrong", False)],
)
def test_other_user_of_the_machine_needs_a_token_where_none_else_does(
    headers: dict[str, str], token: str | None, may: bool
) -> None:
    guard, told = Guard(frozenset(), None, None, others_token="m4de"), {"host": "127.0.0.1", **headers}
    refused = guard.judge("GET", told, token, is_anothers=True)
    assert (refused is None) is may and guard.judge("GET", told, token) is None
    assert refused is None or (refused.status is HTTPStatus.UNAUTHORIZED and "m4de" not in refused.text)
    assert guard.knows("m4de") and not guard.knows("wrong")


def test_token_for_others_is_created_at_each_start_only_if_there_is_no_other() -> None:
    assert others_token_of("t0ken", None) is None
    assert others_token_of(None, "4ct") == "4ct"
    first, second = others_token_of(None, None), others_token_of(None, None)
    assert first is not None and second is not None and first != second and len(first) == 48


def test_token_follows_from_the_secret_and_reveals_nothing_of_it() -> None:
    keys = derive_keys(b"a secret that is long enough")
    token, other = token_of(keys), token_of(derive_keys(b"a secret that is long enougH"))
    assert token is not None and other is not None
    assert len(token) == 48 and token != other and token == token_of(keys)
    assert token_of(None) is None


def test_host_header_is_parsed() -> None:
    assert [host_name(host) for host in ("A:1", "[::1]:2", "[::1]", ":", "a:b")] == ["a", "::1", "::1", None, None]
