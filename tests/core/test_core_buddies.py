"""Buddy placement: which host keeps whose copies, and which process watches which on its own host."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.core.membership.buddies import buddies, buddy_placements


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("a", (None,)),
        ("aa", (1, 0)),
        ("aaa", (1, 2, 0)),
        ("ab", (1, 0)),
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 0, 3, 2)),
        ("abc", (1, 2, 0)),
        ("aab", (2, 2, 0)),
        ("aaab", (3, 3, 3, 0)),
        ("aaabc", (3, 4, 3, 0, 1)),
        ("aabc", (2, 3, 0, 1)),
        ("baa", (1, 0, 0)),
    ],
)
def test_tables(hosts: str, expected: tuple[int | None, ...]) -> None:
    assert buddies(hosts) == expected


@given(st.text("abcd", min_size=2, max_size=24))
def test_buddies_are_on_other_hosts_and_share_the_load(hosts: str) -> None:
    keepers = buddies(hosts)
    sizes = Counter(hosts)
    load = Counter(keepers)
    for rank, keeper in enumerate(keepers):
        assert keeper is not None and keeper != rank
        assert len(sizes) == 1 or hosts[keeper] != hosts[rank]
    most = max(sizes.values())
    others = len(hosts) - most
    fair = 1 if others in (0, *range(most, len(hosts))) else -(-most // others)
    assert max(load.values()) == fair


@given(st.text("abcd", min_size=1, max_size=24))
def test_each_process_is_watched_by_one_other_on_its_host(hosts: str) -> None:
    watches = [one.watches for one in buddy_placements(hosts)]
    for rank, host in enumerate(hosts):
        beside = {other for other in range(len(hosts)) if hosts[other] == host}
        seen, at = set[int](), watches[rank]
        while at is not None and at not in seen:
            seen.add(at)
            at = watches[at]
        assert seen == (beside if len(beside) > 1 else set())
