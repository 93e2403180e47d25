"""Discovered hosts: parsing the script's lines, rests after failures, and what is started and drained."""

from __future__ import annotations

import math
import random

import pytest

from samebits.errors import UsageError
from samebits.hosts.host_list import Host, HostListPlan, Hosts, Resting, parse


def hosts(**slots: int) -> tuple[Host, ...]:
    return tuple(Host(name, count) for name, count in slots.items())


def test_lines_of_a_discovery_script() -> None:
    text = "a:2\n\n  b  # the new one\n[fe80::1%eth0]:4\na:3\n# nothing\nc-1.example:0\n"
    assert parse(text, 8) == (Host("a", 3), Host("b", 8), Host("fe80::1%eth0", 4), Host("c-1.example", 0))
    assert parse("") == ()


@pytest.mark.parametrize("line", ["a b", "a:", "a:x", "a:-1", "a:99999", ":3", "-a", "a;rm", "fe80::1:4", "x" * 300])
def test_invalid_line_is_named(line: str) -> None:
    with pytest.raises(UsageError, match=r"^line 2 of the discovered hosts .*Fix: "):
        parse(f"good\n{line}\n")


def test_old_hosts_keep_their_workers_and_new_ones_are_appended() -> None:
    known = Hosts()
    known.seen(hosts(a=2, b=1))
    assert known.plan(3, {}, 0) == HostListPlan(("a", "a", "b"))
    known.seen(hosts(c=2, b=1, a=2))
    running = {"0": "a", "1": "a", "2": "b"}
    assert known.plan(3, running, 0) == HostListPlan()
    assert known.plan(5, running, 0) == HostListPlan(("c", "c"))
    assert known.plan(9, running, 0) == HostListPlan(("c", "c"))


def test_workers_of_a_removed_or_smaller_host_leave() -> None:
    known = Hosts()
    known.seen(hosts(a=1, c=2))
    running = {"0": "a", "1": "a", "2": "b", "3": "c"}
    assert known.plan(4, running, 0) == HostListPlan(("c",), ("1", "2"))
    assert known.plan(1, running, 0) == HostListPlan((), ("1", "2", "3"))


def test_failing_host_rests_twice_as_long_each_time() -> None:
    known = Hosts(Resting(10, 35))
    known.seen(hosts(a=1, b=1))
    assert known.failed("a", 0) == 10
    assert known.failed("a", 5) == 10  # part of the same failure
    assert known.plan(2, {}, 5) == HostListPlan(("b",))
    assert known.next_change_s(5) == 10
    assert known.plan(2, {}, 10) == HostListPlan(("a", "b"))
    assert [known.failed("a", now) for now in (10, 30, 65)] == [30, 65, 100]
    known.worked("a", 134)
    assert known.failed("a", 134) == 134 + 35
    known.worked("a", 169 + 35)
    assert known.failed("a", 204) == 214


def test_hosts_that_never_return_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.hosts.host_list.MOST_HOSTS", 3)
    hosts = Hosts()
    hosts.failed("bad", 0.0)
    for number in range(20):
        hosts.seen([Host("stays", 1), Host(f"new-{number}", 1)])
    assert set(hosts._known) == {"stays", "bad", "new-19"}
    assert hosts.usable(1.0) == (Host("stays", 1), Host("new-19", 1))


def test_workers_on_a_resting_host_stay() -> None:
    known = Hosts()
    known.seen(hosts(a=2))
    known.failed("a", 0)
    assert known.plan(2, {"0": "a"}, 1) == HostListPlan()
    assert known.plan(2, {"0": "a"}, 10) == HostListPlan(("a",))


def test_failures_of_an_unlisted_host_and_a_thousand_failures() -> None:
    known = Hosts(Resting(1, 600))
    now = 0.0
    for _ in range(2000):
        now = known.failed("a", now)
    assert math.isfinite(now)
    assert known.usable(now) == ()  # it is not listed
    assert known.next_change_s(0) is None


@pytest.mark.parametrize("times", [(0, 1), (-1, 1), (2, 1), (math.nan, 1)])
def test_invalid_resting_times_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(UsageError, match="Fix: "):
        Resting(*times)


@pytest.mark.parametrize("seed", range(40))
def test_job_follows_hosts_that_come_and_go(seed: int) -> None:
    draw, known, running, now, number = random.Random(seed), Hosts(Resting(5, 40)), {}, 0.0, 0
    for _ in range(40):
        now += draw.uniform(0, 20)
        there = {name: draw.randint(0, 3) for name in "abcdef" if draw.random() < 0.7}
        known.seen(Host(name, slots) for name, slots in there.items())
        if draw.random() < 0.3:
            known.failed(draw.choice("abcdef"), now)
        size = draw.randint(1, 8)
        plan = known.plan(size, running, now)
        assert set(plan.drain) <= set(running)
        running = {node: host for node, host in running.items() if node not in plan.drain}
        for host in plan.start:
            running[str(number)] = host
            number += 1
        assert len(running) <= size
        assert all(list(running.values()).count(name) <= there.get(name, 0) for name in running.values())
        usable = {one.name for one in known.usable(now)}
        assert set(plan.start) <= usable
        room = sum(there[name] - list(running.values()).count(name) for name in usable)
        assert len(running) == size or room == 0
        assert known.plan(size, running, now) == HostListPlan()
