"""Node check: exactly the slow or wrong nodes are named, for any number of nodes but two."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from samebits.core.watch.node_check import (
    FACTORS,
    MOST_ROUNDS,
    SILENT,
    WRONG,
    NodeTimings,
    NodeVerdict,
    Pair,
    Sum,
    across_hosts,
    by_host,
    next_pairs,
    slow,
    verdict,
)

PROBLEMS = (WRONG, SILENT, "")
EITHER = "no other pair shows which of the two is at fault"


def judged(count: int, bad: Collection[int], problem: str, links: Collection[Pair] = ()) -> NodeVerdict:
    """Run the check among this many nodes, some of which have this problem ("": slow in a sum)."""
    sums: dict[Pair, Sum] = {}
    for _ in range(MOST_ROUNDS):
        pairs = next_pairs(range(count), sums)
        assert len({slot for pair in pairs for slot in pair}) == 2 * len(pairs), "no node in two pairs at once"
        assert all(first < second < count and (first, second) not in sums for first, second in pairs)
        if not pairs:
            break
        for pair in pairs:
            fails = pair in links or any(slot in bad for slot in pair)
            sums[pair] = Sum(0.0 if fails and problem else 1.0 if fails else 0.01, problem if fails else "")
    return verdict({slot: f"worker {slot}" for slot in range(count)}, {}, sums)


@pytest.mark.parametrize(
    ("count", "problem"),
    [*((3, one) for one in (WRONG, SILENT)), *((count, one) for count in range(4, 12) for one in PROBLEMS)],
)
def test_single_bad_node_of_three_or_more_is_named_alone(count: int, problem: str) -> None:
    """If two of three pairs are slow, the usual speed is unknown, so a slow node is named from four nodes on."""
    for culprit in range(count):
        found = judged(count, {culprit}, problem)
        assert set(found.bad) == {culprit}, (count, culprit, found)


def test_with_two_nodes_the_message_says_that_neither_can_be_singled_out() -> None:
    found = judged(2, {1}, WRONG)
    either = "worker 0 and worker 1: their sum is wrong, and no other pair shows which of the two is at fault"
    assert found == NodeVerdict({0: either, 1: either}, [])
    assert judged(2, {1}, "") == NodeVerdict({}, []), "there is nothing to compare with"


@pytest.mark.parametrize("problem", PROBLEMS)
def test_random_checks_never_name_a_healthy_node_and_find_most_bad_ones(problem: str) -> None:
    draw = random.Random(28)
    named = there = 0
    for _ in range(400):
        count = draw.randrange(4, 40)
        bad = set(draw.sample(range(count), draw.randrange(0, max(2, count // 5))))
        found = judged(count, bad, problem)
        single = {slot for slot, why in found.bad.items() if EITHER not in why}
        assert single <= bad, (count, bad, found)
        if not bad:
            assert found == NodeVerdict({}, [])
        named, there = named + len(single), there + len(bad)
    assert named >= 0.95 * there > 100, (named, there)


def test_no_node_is_singled_out_if_all_are_bad() -> None:
    found = judged(6, set(range(6)), WRONG)
    assert found.bad.keys() == set(range(6)) and all(EITHER in why for why in found.bad.values())


def test_slow_link_is_distinguished_from_its_ends() -> None:
    found = judged(6, (), SILENT, links=[(2, 3)])
    assert found.bad == {}
    assert found.said == [
        "worker 2 and worker 3: they get no answer from each other, but each works well with other nodes. Check the "
        "network between the two",
    ]


def test_message_names_the_witness() -> None:
    found = judged(4, {1}, WRONG)
    assert found.bad == {1: "together with worker 0 their sum is wrong, and worker 0 works well with other nodes"}
    assert "they need 1e+03 ms for a sum; the other nodes need 10 ms" in judged(6, {1}, "").bad[1]


@pytest.mark.parametrize(("part", "factor"), list(enumerate(FACTORS.values())))
@pytest.mark.parametrize("count", [2, 3, 9])
def test_node_slower_by_a_multiple_twice_is_slow(part: int, factor: float, count: int) -> None:
    def with_last(times: float) -> dict[int, NodeTimings]:
        usual = {slot: NodeTimings(0.010, 0.020, 0.030) for slot in range(count)}
        last = [0.010, 0.020, 0.030]
        last[part] *= times
        return usual | {count - 1: NodeTimings(*last)}

    assert slow(with_last(factor * 0.99)) == {}
    found = slow(with_last(factor * 1.01))
    assert list(found) == [count - 1] and found[count - 1].startswith(("computes: ", "memory: ", "disk: ")[part])
    figures = with_last(factor * 3)
    assert slow(figures, again={count - 1: figures[count - 1]}) == slow(figures)
    assert slow(figures, again={count - 1: figures[0]}) == {}, "the second time it was as fast as all"
    assert slow(figures, again={}) == {}, "it did not report its second time"


def test_nodes_of_one_host_share_the_fastest_result_of_shared_hardware() -> None:
    figures = {0: NodeTimings(1, 5, 9), 1: NodeTimings(4, 2, 3), 2: NodeTimings(7, 7, 7), 3: NodeTimings(0, 0, 0)}
    hosts = {0: b"a", 1: b"a", 2: b"b", 3: b"b"}
    assert by_host(figures, hosts, shares_all=True) == {
        **dict.fromkeys((0, 1), NodeTimings(1, 2, 3)),
        **dict.fromkeys((2, 3), NodeTimings(7, 7, 7)),
    }
    own = by_host(figures, hosts, shares_all=False)
    assert own == {0: NodeTimings(1, 5, 3), 1: NodeTimings(4, 2, 3), 2: NodeTimings(7, 7, 7), 3: NodeTimings(0, 0, 7)}


def test_missing_measurement_is_not_compared() -> None:
    assert slow({0: NodeTimings(0.01, 0, 0), 1: NodeTimings(0.01, 0, 9), 2: NodeTimings(0.01, 0, 0)}) == {}
    assert slow({0: NodeTimings(0.01, 1, 1)}) == {} and slow({}) == {}


@pytest.mark.parametrize(
    ("took_ms", "names"),
    [((10, 25, 60), {1, 2}), ((10, 10, 25, 60), {2, 3}), ((10, 25, 25, 26), set()), ((10, 21), {1})],
)
def test_each_node_is_compared_with_the_median_of_the_others(took_ms: tuple[int, ...], names: set[int]) -> None:
    """With two middle values it is the lower one."""
    assert slow({slot: NodeTimings(ms / 1000, 0, 0) for slot, ms in enumerate(took_ms)}).keys() == names


def test_slow_node_is_named_with_its_reason() -> None:
    slow_one = {2: "computes: 80 ms, the others 10 ms"}
    assert verdict({}, slow_one, {}).bad == {2: "it is slow (computes: 80 ms, the others 10 ms)"}


@pytest.mark.parametrize("sizes", [(2, 2), (8, 8, 8), (1, 1, 1, 1), (4, 3, 4), (3, 3, 2)])
def test_pairs_span_two_hosts(sizes: tuple[int, ...]) -> None:
    hosts = dict(enumerate(b"%d" % host for host, size in enumerate(sizes) for _ in range(size)))
    order = across_hosts(hosts)
    assert sorted(order) == list(hosts)
    pairs = next_pairs(order, {})
    assert len(pairs) == len(hosts) // 2 and all(hosts[first] != hosts[second] for first, second in pairs), pairs


def test_pairs_on_one_host_are_better_than_none() -> None:
    assert next_pairs(across_hosts(dict.fromkeys(range(5), b"a")), {}) == ((0, 1), (2, 3))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_cost_of_judging_grows_linearly_with_the_number_of_nodes(
    problem: str,
) -> None:
    """Each slot is examined a few times per round. Examining all pairs would take sixteen million steps."""
    count, looks = 4096, 0

    class Counted(dict[Pair, Sum]):
        def __contains__(self, pair: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(pair)

    sums = Counted()
    for _ in range(MOST_ROUNDS):
        for pair in next_pairs(range(count), sums):
            fails = any(slot % 4 < 2 for slot in pair)
            sums[pair] = Sum(0.0 if fails and problem else 1.0 if fails else 0.01, problem if fails else "")
    assert looks < 8 * MOST_ROUNDS * count
    assert set(verdict(dict.fromkeys(range(count), ""), {}, sums).bad) <= {
        slot for slot in range(count) if slot % 4 < 2
    }
