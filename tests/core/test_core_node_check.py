"""Node check: exactly the slow or wrong nodes reject themselves, for any number of nodes but two."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

import pytest

from samebits.core.watch.node_check import (
    FACTORS,
    SAMPLE,
    SILENT,
    UNMET,
    WRONG,
    NodeReport,
    NodeTimings,
    Pair,
    Sum,
    peers,
    rounds,
    slow,
    verdict,
)

PROBLEMS = (WRONG, SILENT, "")
EITHER = "no other pair shows which of the two is at fault"
USUAL = NodeTimings(0.010, 0.020, 0.030)


def judged(
    count: int, bad: Collection[int], problem: str, links: Collection[Pair] = (), lost: Collection[int] = ()
) -> tuple[dict[int, str], list[str]]:
    """Run the check among this many nodes, some of which have this problem ("": slow in a sum), and some are lost."""
    sums: dict[int, dict[int, Sum]] = {slot: {} for slot in range(count)}
    for pair in (pair for one in rounds(count) for pair in one):
        fails = pair in links or any(slot in bad for slot in pair)
        found = Sum(0.0 if fails and problem else 1.0 if fails else 0.01, problem if fails else "")
        if any(slot in lost for slot in pair):
            found = Sum(0.0, UNMET)
        sums[pair[0]][pair[1]] = sums[pair[1]][pair[0]] = found
    reports = {slot: NodeReport(f"worker {slot}", sums=one) for slot, one in sums.items() if slot not in lost}
    named, messages = {}, []
    for slot in reports:
        read = {slot: reports[slot]} | {one: reports[one] for one in peers(slot, count) if one in reports}
        why, said = verdict(slot, read, "")
        messages += said
        if why:
            named[slot] = why
    return named, messages


@pytest.mark.parametrize(
    ("count", "problem"),
    [(count, one) for count in (*range(3, 12), 40) for one in PROBLEMS],
)
def test_single_bad_node_of_three_or_more_is_named_alone(count: int, problem: str) -> None:
    for culprit in range(count):
        found = judged(count, {culprit}, problem)
        assert (set(found[0]), found[1]) == ({culprit}, []), (count, culprit, found)


def test_with_two_nodes_the_message_says_that_neither_can_be_singled_out() -> None:
    either = "worker 0 and worker 1: their sum is wrong, and no other pair shows which of the two is at fault"
    assert judged(2, {1}, WRONG) == ({0: either, 1: either}, [])
    assert judged(2, {1}, "") == ({}, []), "there is nothing to compare with"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_random_checks_never_name_a_healthy_node_and_find_most_bad_ones(problem: str) -> None:
    draw = random.Random(28)
    named = there = 0
    for _ in range(400):
        count = draw.randrange(4, 40)
        bad = set(draw.sample(range(count), draw.randrange(0, max(2, count // 5))))
        found = judged(count, bad, problem)
        single = {slot for slot, why in found[0].items() if EITHER not in why}
        assert single <= bad, (count, bad, found)
        if not bad:
            assert found == ({}, [])
        named, there = named + len(single), there + len(bad)
    assert named >= 0.95 * there > 100, (named, there)


@pytest.mark.parametrize("problem", (WRONG, SILENT))
def test_lost_node_makes_no_healthy_node_bad(problem: str) -> None:
    for count in range(2, 12):
        for gone in range(count):
            assert judged(count, (), problem, lost={gone}) == ({}, [])
            if count > 3:
                culprit = (gone + 1) % count
                named, _ = judged(count, {culprit}, problem, lost={gone})
                assert culprit in named and all(slot == culprit or EITHER in why for slot, why in named.items())


def test_no_node_is_singled_out_if_all_are_bad() -> None:
    named, _ = judged(6, set(range(6)), WRONG)
    assert named.keys() == set(range(6)) and all(EITHER in why for why in named.values())


def test_slow_link_is_distinguished_from_its_ends() -> None:
    assert judged(6, (), SILENT, links=[(2, 3)]) == (
        {},
        [
            "worker 2 and worker 3: they get no answer from each other, but each works well with other nodes. Check "
            "the network between the two"
        ],
    )


@pytest.mark.parametrize("per_host", [2, 3, 4, 8])
def test_broken_network_between_two_hosts_rejects_no_node(per_host: int) -> None:
    """The nodes of each host clear each other."""
    count = 2 * per_host
    links = [pair for one in rounds(count) for pair in one if (pair[0] < per_host) != (pair[1] < per_host)]
    named, said = judged(count, (), SILENT, links=links)
    assert named == {}
    assert len(said) == len(links) and all("Check the network between the two" in one for one in said)


def test_slow_pair_is_compared_with_pairs_of_the_same_kind() -> None:
    """A connection between two hosts is slower than one inside a host."""
    count, machines = 8, {slot: b"%d" % (slot // 4) for slot in range(8)}
    pairs = [pair for one in rounds(count) for pair in one]

    def said(slow_pair: Pair) -> list[str]:
        reports = {slot: NodeReport(f"worker {slot}", machines[slot]) for slot in range(count)}
        for pair in pairs:
            took_s = 0.01 if machines[pair[0]] == machines[pair[1]] else 0.2
            one = Sum(took_s * (4 if pair == slow_pair else 1))
            for slot in pair:
                reports[slot].sums[pair[slot == pair[0]]] = one
        found = [verdict(slot, reports, "") for slot in range(count)]
        assert [why for why, _ in found] == [""] * count
        return [text for _, texts in found for text in texts]

    assert said((9, 9)) == []
    (text,) = said((1, 5))
    assert text.startswith("worker 1 and worker 5: they need 800 ms for a sum; the other nodes need 200 ms, but")
    (text,) = said((1, 2))
    assert text.startswith("worker 1 and worker 2: they need 40 ms for a sum; the other nodes need 10 ms, but")


def test_message_names_the_witness() -> None:
    found = judged(4, {1}, WRONG)[0]
    assert found == {1: "together with worker 0 their sum is wrong, and worker 0 works well with other nodes"}
    assert "they need 1e+03 ms for a sum; the other nodes need 10 ms" in judged(6, {1}, "")[0][1]


def reports_of(figures: Mapping[int, NodeTimings], machines: Mapping[int, bytes] = {}) -> dict[int, NodeReport]:
    return {slot: NodeReport(machine=machines.get(slot, b"%d" % slot), figures=one) for slot, one in figures.items()}


def slow_ones(reports: Mapping[int, NodeReport], *, shares_all: bool = True) -> dict[int, str]:
    found = {slot: slow(slot, reports, shares_all=shares_all) for slot in reports}
    return {slot: text for slot, text in found.items() if text}


@pytest.mark.parametrize(("part", "factor"), list(enumerate(FACTORS.values())))
@pytest.mark.parametrize("count", [2, 3, 9])
def test_node_slower_by_a_multiple_is_slow(part: int, factor: float, count: int) -> None:
    def with_last(times: float) -> dict[int, NodeReport]:
        last = list(USUAL)
        last[part] *= times
        return reports_of(dict.fromkeys(range(count), USUAL) | {count - 1: NodeTimings(*last)})

    assert slow_ones(with_last(factor * 0.99)) == {}
    found = slow_ones(with_last(factor * 1.01))
    assert list(found) == [count - 1] and found[count - 1].startswith(("computes: ", "memory: ", "disk: ")[part])


def test_nodes_of_one_host_share_the_fastest_result_of_shared_hardware() -> None:
    """One of two nodes of host a was slow at everything, while the other one measured."""
    late = NodeTimings(0.1, 0.2, 0.9)
    reports = reports_of({0: USUAL, 1: late, 2: USUAL, 3: USUAL}, {0: b"a", 1: b"a", 2: b"b", 3: b"c"})
    assert slow_ones(reports) == {}
    assert slow_ones(reports, shares_all=False) == {
        1: "computes: 100 ms, the others 10 ms; memory: 200 ms, the others 20 ms"
    }


def test_missing_or_impossible_measurement_is_not_compared() -> None:
    assert slow_ones(reports_of({0: NodeTimings(1, 0, 0), 1: NodeTimings(1, 0, 9), 2: NodeTimings(1, 0, 0)})) == {}
    assert slow_ones(reports_of({0: USUAL})) == {}
    for value in (float("nan"), float("inf"), -1.0, 1e300):
        assert slow_ones(reports_of({0: USUAL, 1: NodeTimings(value, value, value), 2: USUAL})) == {}


@pytest.mark.parametrize(
    ("took_ms", "names"),
    [((10, 25, 60), {1, 2}), ((10, 10, 25, 60), {2, 3}), ((10, 25, 25, 26), set()), ((10, 21), {1})],
)
def test_each_node_is_compared_with_the_median_of_the_others(took_ms: tuple[int, ...], names: set[int]) -> None:
    """With two middle values it is the lower one."""
    figures = {slot: NodeTimings(ms / 1000, 0, 0) for slot, ms in enumerate(took_ms)}
    assert slow_ones(reports_of(figures)).keys() == names


def test_slow_node_is_named_with_its_reason() -> None:
    assert verdict(2, {2: NodeReport()}, "computes: 80 ms, the others 10 ms") == (
        "it is slow (computes: 80 ms, the others 10 ms)",
        [],
    )


def test_pair_that_did_not_meet_clears_no_node() -> None:
    wrong, unmet = Sum(0.0, WRONG), Sum(0.0, UNMET)
    sums = [{1: wrong, 2: unmet}, {0: wrong, 2: unmet}, {0: unmet, 1: unmet}]
    reports = {slot: NodeReport(f"worker {slot}", sums=one) for slot, one in enumerate(sums)}
    assert [EITHER in verdict(slot, reports, "")[0] for slot in range(3)] == [True, True, False]


def test_report_of_a_sum_with_a_node_that_knows_nothing_of_it_is_ignored() -> None:
    wrong = Sum(0.0, WRONG)
    lie = NodeReport(sums={0: wrong, 9: wrong, -1: wrong})
    assert verdict(0, {0: NodeReport(sums={2: Sum(0.01)}), 1: lie, 2: NodeReport(sums={0: Sum(0.01)})}, "") == ("", [])


@pytest.mark.parametrize("sizes", [(2, 2), (8, 8, 8), (1, 1, 1, 1), (4, 3, 4), (3, 3, 2)])
def test_first_partners_are_on_different_hosts(sizes: tuple[int, ...]) -> None:
    hosts = dict(enumerate(host for host, size in enumerate(sizes) for _ in range(size)))
    pairs = rounds(len(hosts))[0]
    assert len(pairs) == len(hosts) // 2 and all(hosts[first] != hosts[second] for first, second in pairs), pairs


def test_each_node_has_two_or_three_partners_and_reads_their_reports() -> None:
    for count in range(3, 60):
        found = rounds(count)
        assert all(len({slot for pair in one for slot in pair}) == 2 * len(one) for one in found)
        pairs = [pair for one in found for pair in one]
        assert len(set(pairs)) == len(pairs) and all(0 <= first < second < count for first, second in pairs)
        for slot in range(count):
            partners = {one for pair in pairs if slot in pair for one in pair} - {slot}
            read = peers(slot, count)
            assert 2 <= len(partners) <= 3, (count, slot)
            assert partners <= set(read) and (slot + 1) % count in read
            assert slot not in read and len(set(read)) == len(read)


def test_number_of_reports_that_a_node_reads_does_not_grow_with_the_world() -> None:
    assert max(len(peers(slot, 4096)) for slot in range(0, 4096, 97)) <= 9 + SAMPLE
    assert len(rounds(4096)) == len(rounds(4095)) == 3
