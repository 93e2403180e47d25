"""A user's rows in the table of causes: their effect, and mistakes reported with their line."""

from __future__ import annotations

import random
import string

import pytest

from samebits.core.causes.restarts import Sort, sort_of
from samebits.core.causes.table import DEFAULT, CauseClass, Observation, Remedy, Retry
from samebits.core.hangs import Hang
from samebits.core.watch.hang_judge import Cure, cure_of
from samebits.errors import SettingsError
from samebits.service.cause_file import MAX_BYTES, MAX_CHARS, MAX_ROWS, read_rules
from tests.core.test_core_hang_judge import SLEEPS, ended, pass_time, training_for_a_while

LICENSE = """
# ours
[[cause]]
fault = "the license server is away"
error = "LicenseError"
class = "network"
strategy = "wait"
fix = "call the license desk"

[[cause]]
exit_status = 3
signal = "SIGUSR1"
class = "data"
strategy = "stop"
"""


def failure(error: str) -> Observation:
    return Observation(1, None, error, is_failure=True)


def test_users_rows_come_first_and_the_others_stay() -> None:
    table = read_rules(LICENSE, "causes.toml")
    row = table.of(failure("x.licenseerror: none left"))
    assert (row.cause, row.retry, row.strategies) == (CauseClass.NETWORK, Retry.YES, (Remedy.WAIT,))
    assert (row.fault, row.fix) == ("the license server is away", "call the license desk")
    assert table.of(failure("KeyError: 1")) is DEFAULT.of(failure("KeyError: 1"))
    assert sort_of(failure("LicenseError"), table) is Sort.OUTSIDE and sort_of(failure("LicenseError")) is Sort.OWN


def test_every_condition_of_a_row_must_hold() -> None:
    table = read_rules(LICENSE, "causes.toml")
    assert table.of(Observation(status=3)).cause is CauseClass.SOFTWARE
    assert table.of(Observation(status=3, signal=10)).retry is Retry.NO


@pytest.mark.parametrize(
    ("strategy", "cure"),
    [("wait", Cure.NONE), ("restart", Cure.END), ("spare", Cure.END), ("roll back", Cure.FORM_ANEW)],
)
def test_remedy_for_a_hang_can_be_changed(strategy: str, cure: Cure) -> None:
    table = read_rules(f'[[cause]]\nhang = "stuck"\nclass = "software"\nstrategy = "{strategy}"\n', "c")
    assert cure_of(Hang.STUCK, table) is cure and cure_of(Hang.BUSY, table) is Cure.END
    assert table.of(Observation(hang=Hang.STUCK)).retry is Retry.YES


def test_scheduler_applies_the_rows() -> None:
    table = read_rules('[[cause]]\nhang = "stuck"\nclass = "software"\nstrategy = "wait"\n', "c")
    house = training_for_a_while(step_timeout_s=6.0, causes=table)
    pass_time(house, 60, n2=SLEEPS)
    assert len(house.notes) == 1 and ended(house) == [] and "ended and replaced" not in house.notes[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[cause]\n", "line 1: not TOML: "),
        ("\n\nx =\n", "line 3: not TOML: "),
        ("[[causes]]\nclass = 'data'\n", "line 1: 'causes' is not known. Fix: write [[cause]]"),
        ("a = 1\n", "line 1: 'a' is not known"),
        ("\ncause = 3\n", "line 2: `cause` is not a list of tables"),
        ("cause = [1]\n", "line 1: `cause` is not a list of tables"),
        ("[[cause]]\nclass='data'\nstrategy='wait'\n", "line 1: a row without a condition. Fix: add one of error,"),
        ("\n[[cause]]\nerror='x'\n", "line 2: a row without class or strategy"),
        ("[[cause]]\nerror='x'\nclass='data'\n", "line 1: a row without class or strategy"),
        ("[[cause]]\nerror='x'\nclass='date'\nstrategy='wait'\n", "line 1: class = 'date'. Fix: write one of node,"),
        ("[[cause]]\nerror='x'\nclass=['data']\nstrategy='wait'\n", "line 1: class = ['data']"),
        ("[[cause]]\nerror='x'\nclass='data'\nstrategy='pray'\n", "line 1: strategy = 'pray'"),
        ("[[cause]]\nerror=''\nclass='data'\nstrategy='wait'\n", "line 1: error = ''"),
        ("[[cause]]\nerror=\"a\\u001b\"\nclass='data'\nstrategy='wait'\n", "line 1: error = "),
        (f"[[cause]]\nerror='{'x' * 201}'\nclass='data'\nstrategy='wait'\n", "line 1: error = "),
        ("[[cause]]\nexit_status=256\nclass='data'\nstrategy='wait'\n", "exit_status = 256. Fix: write a whole number"),
        ("[[cause]]\nexit_status=true\nclass='data'\nstrategy='wait'\n", "exit_status = True"),
        ("[[cause]]\nsignal='SIGNOT'\nclass='data'\nstrategy='wait'\n", "signal = 'SIGNOT'"),
        ("[[cause]]\nsignal=0\nclass='data'\nstrategy='wait'\n", "signal = 0"),
        ("[[cause]]\nhang='asleep'\nclass='data'\nstrategy='wait'\n", "hang = 'asleep'. Fix: write one of stuck,"),
        ("[[cause]]\nhang='stuck'\nclass='data'\nstrategy='stop'\n", "strategy = 'stop' of a hang"),
        ("[[cause]]\nerror='x'\nclass='data'\nstrategy='wait'\nagain='maybe'\n", "again = 'maybe'"),
        ("[[cause]]\nerror='x'\nregex='.*'\nclass='data'\nstrategy='wait'\n", "the key 'regex' is not known"),
        ("#" * (MAX_BYTES + 1), "line 1: more than 65536 characters"),
        ("[[cause]]\nerror='x'\nclass='data'\nstrategy='wait'\n" * (MAX_ROWS + 1), "65 rows, at most 64 are read"),
        ("a = " + "[" * 20_000, "line 1: "),
    ],
)
def test_mistake_is_one_sentence_with_its_line(text: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_rules(text, "causes.toml")
    (problem,) = caught.value.problems
    assert problem.startswith("CAUSE_TABLE=causes.toml, line ") and says in problem and ". Fix: " in problem
    assert "\n" not in problem and len(problem) < 400


def test_largest_allowed_file_is_read() -> None:
    row = f"[[cause]]\nerror='{'x' * MAX_CHARS}'\nclass='data'\nstrategy='wait'\n"
    assert len(read_rules((row * MAX_ROWS).ljust(MAX_BYTES, "#"), "c").own) == MAX_ROWS


def test_line_is_that_of_the_row() -> None:
    text = LICENSE + "\n\n  [[ cause ]]\nerror = 'x'\nclass = 'nothing'\nstrategy = 'wait'\n"
    with pytest.raises(SettingsError) as caught:
        read_rules(text, "c")
    assert text.splitlines()[int(str(caught.value).split("line ")[1].split(":")[0]) - 1].strip() == "[[ cause ]]"


def test_nonsense_is_refused_or_read() -> None:
    chance = random.Random(28)
    for _ in range(2000):
        text = list(LICENSE)
        for _ in range(chance.randrange(1, 6)):
            text[chance.randrange(len(text))] = chance.choice(string.printable + "é\0")
        try:
            table = read_rules("".join(text), "c")
        except SettingsError as error:
            assert len(error.problems) == 1
        else:
            assert len(table.own) <= MAX_ROWS
