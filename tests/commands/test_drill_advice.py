"""A drill's advice on faulty scripts: the right fault for each, and none for a correct one."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.account.events import EventKind, JobEvent
from samebits.commands.drill.advice import USUAL, UserScript, advise, never_commits
from samebits.commands.drill.compare import Compared, Differing
from samebits.commands.drill.plan import DrillFault, DrillOutcome, Injected

ROOT = Path(__file__).resolve().parents[2]
DIGITS = (ROOT / "examples/digits/train.py").read_text(encoding="utf-8")
WHOLE = DrillOutcome(
    [JobEvent(EventKind.SCHEDULER, 1.0), JobEvent(EventKind.TRAINING, 2.0), JobEvent(EventKind.FINISHED, 9.0, step=50)]
)
KILLED = DrillOutcome(WHOLE.events, [Injected(DrillFault.KILL, "worker_1", 27, 4.0, 0.5)])
DIFFERS = Compared(
    (20, 40), 2, 9, "tensor x of rank 0 differs at step 40", 40, 20, (Differing(0, "x"), Differing(1, "x"))
)


def told(text: str, compared: Compared = DIFFERS, disturbed: DrillOutcome = KILLED) -> list[str]:
    return advise(UserScript("train.py", text), compared, WHOLE, disturbed)


def changed(old: str, new: str) -> str:
    assert DIGITS.count(old) == 1, old
    return DIGITS.replace(old, new)


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


def test_correct_script_gets_no_advice() -> None:
    assert told(DIGITS, Compared((20, 40), 2, 9)) == []


def test_first_difference_and_the_preceding_fault_are_named() -> None:
    assert told(DIGITS)[0] == "equal up to step 20, different at step 40; between them: kill of worker_1 at step 27"


def test_unexplained_difference_lists_the_usual_causes() -> None:
    _, said, *usual = told(DIGITS)
    assert said == "neither the script nor the logs point to a cause; these are the usual causes"
    assert tuple(usual) == USUAL


def test_counter_outside_the_state_is_named_with_its_line() -> None:
    text = changed("    @samebits.elastic.run\n", "    seen = 0\n\n    @samebits.elastic.run\n").replace(
        "        model.train()\n", "        nonlocal seen\n        model.train()\n"
    )
    text = text.replace(
        "                optimizer.zero_grad()\n", "                seen += 1\n                optimizer.zero_grad()\n"
    )
    (_, said) = told(text)
    assert said.startswith(f"train.py:{line_of(text, 'seen += 1')}: seen is counted outside of the state")
    assert "TorchState(…, seen=0), and state.seen in its place" in said


def test_counter_in_a_dictionary_counts_too() -> None:
    text = changed(
        "                optimizer.zero_grad()\n",
        '                COUNTS["seen"] += 1\n                optimizer.zero_grad()\n',
    )
    (_, said) = told(text)
    assert "COUNTS['seen'] is counted outside of the state" in said
    assert "state.COUNTS_seen" in said


def test_local_sum_is_no_counter() -> None:
    text = changed("        model.train()\n", "        model.train()\n        total = 0\n        total += 1\n")
    assert told(text)[1:] == told(DIGITS)[1:]


def test_sampler_outside_the_state_is_named_with_its_line() -> None:
    text = changed("        sampler=sampler,\n        epoch=0", "        epoch=0")
    (_, said) = told(text)
    assert said.startswith(f"train.py:{line_of(text, 'ElasticSampler(')}: the position in the data is in no State")


@pytest.mark.parametrize(
    "loader", ["DataLoader(data, shuffle=True)", "DataLoader(data, sampler=DistributedSampler(data))"]
)
def test_other_ways_to_draw_samples_are_named_too(loader: str) -> None:
    (_, said) = told(f"state = samebits.elastic.TorchState(model, optimizer, rng='per_step')\nloader = {loader}\n")
    assert said.startswith("train.py:2: the position in the data is in no State")


def test_sampler_without_set_epoch_is_named() -> None:
    (_, said) = told(changed("                sampler.record_batch(batch, args.batch_size)\n", ""))
    assert "the sampler is never told which samples are done" in said


def test_forgotten_commit_is_the_only_advice() -> None:
    text = changed("                state.commit()\n", "")
    idle = DrillOutcome(
        [JobEvent(EventKind.SCHEDULER, 1.0), JobEvent(EventKind.TRAINING, 2.0)], problem="it did not finish"
    )
    (said,) = advise(UserScript("train.py", text), Compared((), 0, 0, "no checkpoints"), idle, idle)
    assert said.startswith("train.py never calls commit(): it has trained and no step was committed")
    assert f"in line {line_of(text, 'optimizer.step()')}" in said


def test_forgotten_commit_is_reported_even_if_the_bits_are_equal() -> None:
    """Such a job restarts after a loss and may reach the same end, as one did."""
    ran = [
        JobEvent(EventKind.TRAINING, 2.0),
        JobEvent(EventKind.STEP, 3.0),
        JobEvent(EventKind.STEP, 4.0),
        JobEvent(EventKind.TRAINED, 9.0, step=50),
    ]
    text = changed("                state.commit()\n", "")
    equal = Compared((0, 50), 2, 20)
    (said,) = advise(UserScript("train.py", text), equal, DrillOutcome(ran), DrillOutcome(ran, KILLED.injected))
    assert said.startswith("train.py never calls commit()")
    assert never_commits(DrillOutcome(ran))
    assert not never_commits(DrillOutcome([*ran[:2], JobEvent(EventKind.STEP, 4.0, step=7), ran[3]]))
    assert not never_commits(DrillOutcome([ran[0], ran[3]])), "too short to tell"
    assert not never_commits(DrillOutcome())


def test_failing_script_gets_only_its_own_error() -> None:
    events = [
        JobEvent(EventKind.TRAINING, 2.0),
        JobEvent(EventKind.INTERRUPTED, 3.0, text="failed at train.py:7: TypeError"),
    ]
    failed = DrillOutcome(events, problem="failed at train.py:7: TypeError")
    assert advise(UserScript("train.py", DIGITS), Compared((), 0, 0), failed, DrillOutcome()) == []


def test_commit_that_is_never_reached_has_another_message() -> None:
    idle = DrillOutcome([JobEvent(EventKind.TRAINING, 2.0)], problem="it did not finish")
    (said,) = advise(UserScript("train.py", DIGITS), Compared((), 0, 0, "no checkpoints"), idle, idle)
    assert "its commit() is never reached" in said


def test_schedule_outside_the_state_is_named() -> None:
    text = changed(
        "    # Everything a step depends on",
        "    decay = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n    # Everything a step depends on",
    )
    (_, said) = told(text)
    assert "the schedule decay is in no State" in said


def test_unrestored_random_numbers_are_named() -> None:
    text = "state = samebits.elastic.TorchState(model, optimizer)\nnoise = torch.randn(3)\n"
    assert "draws random numbers" in told(text)[-1]
    assert "draws random numbers" not in told(text.replace("optimizer)", "optimizer, rng='per_step')"))[-1]


def test_workers_warnings_precede_findings_in_the_script() -> None:
    warned = "train.py:46: count was 1 when training began and is 7 as it begins anew"
    assert told(DIGITS, disturbed=DrillOutcome(WHOLE.events, said=[warned]))[1:] == [warned]


def test_single_differing_rank_is_named() -> None:
    odd = Compared(
        (20, 40), 3, 9, "tensor x of rank 1 differs at step 40", 40, 20, (Differing(1, "x"), Differing(1, "lr", False))
    )
    said = told(DIGITS, odd)
    assert said[1].startswith("only rank 1 of 3 differs")
    assert said[2] == "besides tensors these values of the state differ: lr"


def test_ranks_made_unequal_by_a_fault_are_reported() -> None:
    ended = [
        *WHOLE.events[:2],
        JobEvent(EventKind.INTERRUPTED, 8.0, text="the ranks are not equal", more={"end": "unequal"}),
    ]
    outcome = DrillOutcome(ended, KILLED.injected, problem="the ranks are not equal")
    said = advise(UserScript("train.py", DIGITS), Compared((), 0, 0, "no checkpoint"), WHOLE, outcome)
    assert said[0] == "undisturbed the ranks stay equal, under faults they do not, since kill of worker_1 at step 27"


@pytest.mark.parametrize("text", ["", "def broken(:\n", "\0", "x = " + "(" * 500])
def test_invalid_script_does_not_crash(text: str) -> None:
    assert told(text)[-1] == USUAL[-1]
