"""Anomaly detection: spikes, NaN and shifts are reported, noise is not."""

from __future__ import annotations

import math
import random

import pytest

from samebits.core.messages import Activity, ReportEnvelope, RoundOpened
from samebits.core.reports import MAX_ANOMALY_CHARS, Anomaly
from samebits.core.watch.anomalies import MOVED, WINDOW, AnomalyVerdict, Band, Odd
from samebits.core.watch.health_judge import MOST_ANOMALIES
from tests.core.house import House, policy


def falling(steps: int, seed: int = 0, noise: float = 0.1) -> list[float]:
    """Return a realistic loss that falls with noise."""
    draw = random.Random(seed)
    return [2 * math.exp(-step / 300) + 0.5 + noise * draw.gauss(0, 1) for step in range(steps)]


def told(band: Band, values: list[float], step: int | None = None) -> list[str]:
    """Return the problems of values, the first of which belongs to ``step``, by default the next step."""
    first = band._step + 1 if step is None else step
    return [text for at, value in enumerate(values, first) if (text := band.take(at, value))]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_an_anomaly(seed: int) -> None:
    assert told(Band(), falling(2000, seed)) == []


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, "is not a number"), (math.inf, "is infinite"), (-math.inf, "is infinite")]
)
def test_nan_is_reported_from_the_first_value_on_and_once(value: float, text: str) -> None:
    band = Band()
    assert told(band, [value, value, 1.0, value]) == [text, text]


def test_spike_is_reported_once_and_does_not_widen_the_band() -> None:
    band = Band()
    values = falling(200, noise=0.02)
    assert told(band, values) == []
    first = told(band, [50.0])
    assert len(first) == 1 and first[0].startswith("is 50 after ")
    assert told(band, [50.0, 60.0]) == [], "one report per excursion"
    assert len(told(band, [values[-1], 50.0])) == 1, "the next one is new"


def test_no_band_exists_before_half_a_window() -> None:
    assert told(Band(), [1.0] * (WINDOW // 2 - 1) + [1e6]) == []
    assert told(Band(), [1.0] * (WINDOW // 2) + [1e6]) != []


def test_shifted_series_is_accepted_after_a_while() -> None:
    band = Band()
    told(band, [1.0] * WINDOW)
    assert len(told(band, [100.0] * (3 * MOVED))) == 1
    assert told(band, [101.0, 99.0]) == []


def test_constant_series_has_a_band_and_a_drop_is_not_an_anomaly() -> None:
    band = Band()
    told(band, [1.0] * WINDOW)
    assert told(band, [1.2, 0.0, 1.0]) == []
    assert told(band, [1.3]) != []


def test_steps_repeated_after_a_rollback_are_not_compared_with_later_ones() -> None:
    values = [2.5 + 5.5 / (1 + step) for step in range(200)]
    assert told(band := Band(), values, 0) == []
    assert told(band, values[1:], 1) == [], "the loss of step 1 is far above that of step 200"
    assert told(band, values[150:], 150) == []
    assert len(told(band, [50.0], 190)) == 1, "the values before a step that is repeated are kept"


def test_problem_is_told_again_if_its_step_is_repeated() -> None:
    band = Band()
    assert told(band, [1.0, math.nan, math.nan, math.nan], 0) == ["is not a number"]
    assert told(band, [math.nan], 2) == [], "the excursion began at step 1, which is not repeated"
    assert told(band, [math.nan, math.nan], 0) == ["is not a number"]


def test_values_outside_the_band_do_not_count_twice_if_their_steps_are_repeated() -> None:
    band = Band()
    told(band, [1.0] * WINDOW, 0)
    for _ in range(MOVED):
        assert len(told(band, [100.0, 100.0], WINDOW)) == 1


# ---- the scheduler's side


def test_report_has_step_and_rank_and_comes_from_one_rank_only() -> None:
    house = House(policy(2)).fill().train()
    for node in ("1", "0", "1"):
        credential = house.credential(node)
        house.receive(credential.session, ReportEnvelope(credential, Anomaly(412, "the loss is not a number")))
    assert [note for note in house.notes if "loss" in note] == ["worker 1 (rank 1), step 412: the loss is not a number"]
    house.now += 60
    credential = house.credential("0")
    house.receive(credential.session, ReportEnvelope(credential, Anomaly(500, "the loss is infinite")))
    assert house.notes[-1] == "worker 0 (rank 0), step 500: the loss is infinite"


def test_threads_ending_in_different_errors_are_each_logged_up_to_a_bound() -> None:
    house = House(policy(2)).fill().train()
    first, second = house.credential("0"), house.credential("1")
    house.receive(first.session, ReportEnvelope(first, Anomaly(9, "the loss is not a number")))
    for _ in range(2):
        house.receive(first.session, ReportEnvelope(first, Anomaly(9, "its thread feeder failed: ValueError: no")))
        house.receive(second.session, ReportEnvelope(second, Anomaly(9, "its thread feeder failed: ValueError: no")))
        house.receive(second.session, ReportEnvelope(second, Anomaly(9, "its thread logger failed: OSError: full")))
    assert [note for note in house.notes if "thread" in note] == [
        "worker 0 (rank 0), step 9: its thread feeder failed: ValueError: no",
        "worker 1 (rank 1), step 9: its thread logger failed: OSError: full",
    ]
    for number in range(3 * MOST_ANOMALIES):
        house.receive(second.session, ReportEnvelope(second, Anomaly(9, f"its thread {number} failed: OSError: full")))
    assert sum("thread" in note for note in house.notes) < MOST_ANOMALIES
    house.receive(first.session, ReportEnvelope(first, Anomaly(9, "a transient error", is_verdict=True)))
    assert "a transient error" in house.notes[-1]
    house.now += 60
    house.receive(second.session, ReportEnvelope(second, Anomaly(9, "its thread feeder failed: ValueError: no")))
    assert house.notes[-1] == "worker 1 (rank 1), step 9: its thread feeder failed: ValueError: no"


def test_hidden_state_is_reported_once_for_all_ranks_and_hides_no_anomaly() -> None:
    house = House(policy(2)).fill().train()
    for node in ("0", "1"):
        credential = house.credential(node)
        house.receive(
            credential.session, ReportEnvelope(credential, Anomaly(4, "hidden state: h (train.py:3) changed"))
        )
    house.receive(credential.session, ReportEnvelope(credential, Anomaly(5, "the loss is not a number")))
    assert [note for note in house.notes if "hidden" in note or "loss" in note] == [
        "worker 0 (rank 0), step 4: hidden state: h (train.py:3) changed",
        "worker 1 (rank 1), step 5: the loss is not a number",
    ]


def test_identified_fault_is_reported_with_its_process_even_if_the_value_was() -> None:
    house = House(policy(2)).fill().train()
    credential = house.credential("1")
    house.receive(credential.session, ReportEnvelope(credential, Anomaly(412, "the loss is not a number")))
    for _ in range(2):
        house.receive(
            credential.session, ReportEnvelope(credential, Anomaly(412, "a transient error", is_verdict=True))
        )
    process = house.core.state.seats["1"].process
    assert house.notes[-2:] == [
        "worker 1 (rank 1), step 412: the loss is not a number",
        f"worker 1 (rank 1, {process}), step 412: a transient error",
    ]


def test_each_devices_fault_is_reported_however_soon_it_follows_another() -> None:
    house = House(policy(3)).fill().train()
    for node, step in (("1", 50), ("2", 100), ("0", 100)):
        credential = house.credential(node)
        anomaly = Anomaly(step, f"rank {node}'s device is at fault", is_verdict=True, comes_again=True)
        house.receive(credential.session, ReportEnvelope(credential, anomaly))
    assert [note[-27:] for note in house.notes if "at fault" in note] == [
        "rank 1's device is at fault",
        "rank 2's device is at fault",
    ]
    for step in range(3 * MOST_ANOMALIES):
        anomaly = Anomaly(200 + step, "a transient error", is_verdict=True)
        house.receive(credential.session, ReportEnvelope(credential, anomaly))
    assert sum("transient" in note for note in house.notes) == MOST_ANOMALIES - 2


def test_round_that_recomputes_a_step_gives_that_as_its_reason() -> None:
    house = House(policy(2)).fill().train()
    credential = house.credential("1")
    house.receive(
        credential.session, ReportEnvelope(credential, Anomaly(412, "the loss is not a number", comes_again=True))
    )
    house.beat("0", Activity.WAITING)
    why = "worker 1 reported an implausible number: step 412 is repeated"
    assert house.answer("s0", RoundOpened).text == why
    for node in ("0", "1"):
        house.join(node)
    house.train()
    house.beat("0", Activity.WAITING)
    assert house.answer("s0", RoundOpened).text == "a collective of generation 2 failed at worker 0"


# ---- a value that was computed twice

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("first", "step", "value", "problem", "verdict"),
    [
        (NAN, 39, 1.0, "", None),
        (NAN, 40, NAN, "is not a number", AnomalyVerdict.LASTING),
        (INF, 40, INF, "is infinite", AnomalyVerdict.LASTING),
        (50.0, 40, 50.0, "is 50", AnomalyVerdict.LASTING),
        (NAN, 40, 1.0, "", AnomalyVerdict.TRANSIENT),
        (50.0, 40, 1.0, "", AnomalyVerdict.TRANSIENT),
        (INF, 40, -INF, "is infinite", AnomalyVerdict.UNSTEADY),
        (50.0, 40, NAN, "is not a number", AnomalyVerdict.UNSTEADY),
        (NAN, 41, 1.0, "", AnomalyVerdict.MISSED),
    ],
)
def test_conclusion_from_the_second_value(
    first: float, step: int, value: float, problem: str, verdict: AnomalyVerdict | None
) -> None:
    odd = Odd(40, "loss", first, "is odd")
    assert odd.judge(step, value, problem) is verdict
    if verdict is not None:
        said = odd.sentence(verdict, value)
        assert said.startswith("the loss is odd, ") and len(said) <= MAX_ANOMALY_CHARS and said.isprintable()
