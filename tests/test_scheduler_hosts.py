"""SCHED_HOST: one host, several, or a file of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.scheduler_hosts import (
    MOST_HOSTS,
    NotHostsError,
    SchedulerAddress,
    addresses_in,
    addresses_of_file,
    canonical,
    file_in,
    names_one,
    shown,
    split_relay,
    with_relay,
)

PORT = 8118


@pytest.mark.parametrize(
    ("text", "written", "named"),
    [
        ("node-0", "node-0", [("node-0", PORT)]),
        ("[::1]", "::1", [("::1", PORT)]),
        (" a , b ", "a,b", [("a", PORT), ("b", PORT)]),
        ("10.0.0.1,10.0.0.2:9000", "10.0.0.1,10.0.0.2:9000", [("10.0.0.1", PORT), ("10.0.0.2", 9000)]),
        ("[fd00::1]:9000,fd00:0::2", "[fd00::1]:9000,fd00::2", [("fd00::1", 9000), ("fd00::2", PORT)]),
        ("a,a,a:9000", "a,a:9000", [("a", PORT), ("a", 9000)]),
    ],
)
def test_hosts_are_normalised(text: str, written: str, named: list[tuple[str, int]]) -> None:
    assert canonical(text) == written == canonical(written)
    assert list(addresses_in(written, PORT)) == named
    assert names_one(written) == (len(named) == 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,", "'' is neither a host"),
        (",", "'' is neither a host"),
        ("a,b c", "'b c' is neither a host"),
        ("a,b:0", "no port from 1 to 65535"),
        ("a,b:99999", "no port from 1 to 65535"),
        ("a,b:port", "'b:port' is neither a host"),
        ("a,10.0.0.256", "'10.0.0.256' is neither a host"),
        ("a,tcp://b:1", "is neither a host"),
        ("a,file:/b", "is neither a host"),
        ("a," + "b" * 5000, "is neither a host"),
        (",".join(f"h{number}" for number in range(MOST_HOSTS + 1)), f"{MOST_HOSTS + 1} hosts are more than"),
        ("file:hosts", "expected an absolute path"),
        ("file:", "expected an absolute path"),
        ("a:9000", "the port goes into SCHED_PORT"),
        ("relay:a,b", "expected relay:host:port"),
        ("relay:a:9000", "expected relay:host:port"),
        ("relay:on", "expected relay:host:port"),
        ("relay:perhaps,b", "expected relay:host:port, relay:on or relay:off"),
        ("relay:a:9000,relay:b:9000", "expected relay:host:port"),
        ("relay:a:9000,relay:b:9000,relay:c:9000,d", "expected relay:host:port"),
        ("relay:a:9000,relay:on,c", "expected relay:host:port"),
        ("relay:a:9000,relay:b,c", "expected relay:host:port"),
        ("relay:off,relay:b:9000,c", "expected relay:host:port"),
        ("relay:a:0,b", "no port from 1 to 65535"),
    ],
)
def test_invalid_hosts_are_refused_with_the_cause(text: str, why: str) -> None:
    with pytest.raises(NotHostsError, match=why):
        canonical(text)


@pytest.mark.parametrize("rest", ["a", "a,b:9000", "file:/hosts"])
def test_relay_precedes_the_scheduler_s_hosts(rest: str) -> None:
    text = canonical(f" relay:[0::1]:9000 , {rest}")
    assert text == f"relay:[::1]:9000,{rest}"
    assert split_relay(text) == (SchedulerAddress("::1", 9000), None, None, rest)
    assert with_relay(SchedulerAddress("::1", 9000), rest) == text
    assert split_relay(rest) == (None, None, None, rest)
    assert with_relay(None, rest) == rest


@pytest.mark.parametrize(("word", "starts"), [("on", True), ("off", False)])
def test_user_decides_whether_the_launcher_starts_a_relay(word: str, starts: bool) -> None:
    assert split_relay(canonical(f"relay:{word}, a,b:9000")) == (None, starts, None, "a,b:9000")


@pytest.mark.parametrize(("first", "relay", "starts"), [("on", None, True), ("a:1", SchedulerAddress("a", 1), None)])
def test_inner_relay_follows_the_host_s_relay(first: str, relay: SchedulerAddress | None, starts: bool | None) -> None:
    text = canonical(f"relay:{first}, relay:[0::1]:9000 ,b,c:9001")
    inner = SchedulerAddress("::1", 9000)
    assert split_relay(text) == (relay, starts, inner, "b,c:9001")
    assert with_relay(SchedulerAddress("a", 1), "b,c:9001", inner) == "relay:a:1,relay:[::1]:9000,b,c:9001"


def test_file_is_named_by_its_path() -> None:
    text = canonical("file:/shared/hosts")
    assert (file_in(text), addresses_in(text, PORT), names_one(text)) == (Path("/shared/hosts"), (), False)
    assert file_in("a,b") is None


def test_file_holds_hosts_and_comments() -> None:
    content = "# where it may run\nnode-0\n\nnode-1:9000, [::1]:7000  # and here\n"
    assert addresses_of_file(content, PORT) == (("node-0", PORT), ("node-1", 9000), ("::1", 7000))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("\n# nobody\n", "names no host"),
        ("10.0.0.1\n10.0.0.1", "incomplete"),
        ("a,,b\n", "'' is neither a host"),
        ("\0\0\0\n", "is neither a host"),
    ],
)
def test_partial_file_names_no_host(content: str, why: str) -> None:
    with pytest.raises(NotHostsError, match=why):
        addresses_of_file(content, PORT)


def test_current_value_is_shown_to_users() -> None:
    assert shown("a", PORT) == "a, port 8118 (SCHED_HOST, SCHED_PORT)"
    assert shown("a,b:9000", PORT) == "a:8118 or b:9000 (SCHED_HOST)"
    assert shown("file:/hosts", PORT) == "one of the addresses in /hosts (SCHED_HOST)"
    assert str(SchedulerAddress("::1", PORT)) == "[::1]:8118"
