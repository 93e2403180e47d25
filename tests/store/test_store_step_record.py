"""Step records: the meaning of a log's entries, and the difference of two records of a step."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.store import step_record
from samebits.store.step_record import (
    History,
    LateSamples,
    LogHeader,
    NewLine,
    StepEntry,
    StepEntryError,
    StepRecord,
    difference,
)


def record(step: int = 7, **values: object) -> StepRecord:
    base = StepRecord(step, 1, 4, 2, 5, (0.01,), (3, 1, 4, 1, 5, 9), "ab" * 16)
    return replace(base, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entry", [record(), record(samples=(), weights=None, learning_rates=()), LateSamples(3, (2, 7)), NewLine(8, "why")]
)
def test_entry_round_trip(entry: StepEntry) -> None:
    assert step_record.unpack(step_record.pack(entry)) == entry


def test_header_round_trip() -> None:
    header = LogHeader("job", 3, "worker-3")
    assert step_record.unpack_header(step_record.pack_header(header)) == header


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([9, 1]),
        msgpack.packb([1, 1, 1, 1]),
        msgpack.packb([1, 1, 1, 1, 1, 1, ["0.1"], [], None]),
        msgpack.packb([1, 1, 1, 1, 1, 1, [0.1], ["x"], None]),
        msgpack.packb([2, 1, [1.5]]),
        msgpack.packb([0, 1, "job", 3, "node"]),
    ],
)
def test_invalid_entry_is_refused(payload: bytes) -> None:
    with pytest.raises(StepEntryError):
        step_record.unpack(payload)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_raise_no_other_error(payload: bytes) -> None:
    for read in (step_record.unpack, step_record.unpack_header):
        try:
            read(payload)
        except StepEntryError:
            continue


def test_header_of_another_version_is_refused() -> None:
    with pytest.raises(StepEntryError, match="version"):
        step_record.unpack_header(msgpack.packb([0, step_record.VERSION + 1, "job", 3, "node"]))


# ---- history


def test_next_record_of_the_generation_completes_a_step() -> None:
    history = History.of([record(1), record(2), record(3, generation=2)])
    assert [one.is_complete for one in history.records] == [True, False, False]
    assert history.line[1].is_complete and history.last_step == 3


def test_late_samples_belong_to_the_previous_step() -> None:
    history = History.of([record(1, samples=(1,)), LateSamples(1, (2, 3)), record(2, samples=())])
    assert history.records[0].samples == (1, 2, 3) == history.line[1].samples
    assert history.records[1].samples == ()
    assert history.records[0].is_complete


def test_late_samples_of_an_earlier_step_are_dropped() -> None:
    assert History.of([record(1, samples=()), LateSamples(2, (9,))]).records[0].samples == ()


def test_repeated_step_replaces_the_first() -> None:
    history = History.of([record(1), record(2), record(3), record(2, generation=2)])
    assert [one.step for one in history.records] == [1, 2, 3, 2]
    assert [(step, one.generation) for step, one in sorted(history.line.items())] == [(1, 1), (2, 2), (3, 1)]
    assert history.last_step == 2


def test_new_line_drops_the_abandoned_records() -> None:
    history = History.of([record(1), record(2), record(3), NewLine(2, "another world"), record(3, world_size=3)])
    assert [one.world_size for one in history.line.values()] == [4, 4, 3]
    assert sorted(History.of([record(1), record(2), NewLine(1, "")]).line) == [1]


def test_steps_up_to_the_requested_one_are_skipped_but_counted() -> None:
    history = History.of([record(1), record(2), LateSamples(2, (9,)), record(3)], after_step=2)
    assert [one.step for one in history.records] == [3]
    assert history.records[0].samples == record().samples
    assert History.of([record(1)], after_step=5).last_step == 1


# ---- differences


@pytest.mark.parametrize(
    ("change", "what", "one", "other"),
    [
        ({"world_size": 3}, "world", "rank 2 of 4", "rank 2 of 3"),
        ({"rank": 1}, "world", "rank 2 of 4", "rank 1 of 4"),
        ({"seed": 6}, "seed", "5", "6"),
        ({"learning_rates": (0.02,)}, "learning rate", "0.01", "0.02"),
        ({"learning_rates": ()}, "learning rate", "0.01", "none"),
        ({"samples": (3, 1, 2, 1, 5, 9)}, "samples", "…, 4, 1, 5, 9 (6 in all)", "…, 2, 1, 5, 9 (6 in all)"),
        ({"samples": (7, 1, 4, 1, 5, 9)}, "samples", "3, 1, 4, 1, … (6 in all)", "7, 1, 4, 1, … (6 in all)"),
        ({"weights": "cd" * 16}, "weights before it", "ab" * 16, "cd" * 16),
    ],
)
def test_difference_is_named_with_both_values(change: dict[str, object], what: str, one: str, other: str) -> None:
    found = difference(record(), record(**change))
    assert found is not None
    assert (found.what, found.one, found.other) == (what, one, other)


def test_value_that_only_one_rank_records_does_not_count_as_a_difference() -> None:
    assert difference(record(), record(generation=9)) is None
    assert difference(record(weights=None), record()) is None
    assert difference(record(samples=()), record()) is None
    assert difference(record(samples=(3, 1)), record()) is None


def test_samples_missing_from_a_complete_step_are_a_difference() -> None:
    assert difference(record(samples=(3, 1), is_complete=True), record()) is not None
    assert difference(record(), record(samples=(3, 1), is_complete=True)) is not None
    assert difference(record(is_complete=True), record(samples=(3, 1))) is None


def test_rank_and_samples_may_differ_between_ranks() -> None:
    other = record(rank=3, samples=(8,), is_complete=True)
    assert difference(record(), other, same_rank=False) is None
    found = difference(record(), replace(other, world_size=3), same_rank=False)
    assert found is not None and (found.one, found.other) == ("4 ranks", "3 ranks")
    assert difference(record(), replace(other, weights="cd" * 16), same_rank=False) is not None
