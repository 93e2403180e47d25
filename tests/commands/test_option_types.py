"""Every numeric option of every subcommand has bounds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from samebits import __main__ as root
from samebits.__main__ import SUBCOMMANDS

WRONG = (
    *("-1", "", " 1", "1_000", "0x10", "1e400", "9" * 400, "99999999999999999999999", "nan", "inf", "-inf"),
    *("１", "\ud800", "1\n", "--", "\0"),
)


class Stopped(Exception):
    """The parser is ready to read words."""


def parsers_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[argparse.ArgumentParser]:
    """Return the parsers of one subcommand and of its own subcommands."""
    seen: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        seen.append(parser)
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", stop)
        patched.setattr(argparse.ArgumentParser, "parse_known_args", stop)
        run = next(one.run for one in SUBCOMMANDS if one.name == name)
        with pytest.raises(Stopped):
            run(["--", "x"] if name in ("keep", "drill") else [])
    return [parser for one in seen for parser in _with_inner(one)]


def _with_inner(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _with_inner(inner)


def numbers_in(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if callable(action.type):
            try:
                taken = action.type("1")
            except (ValueError, argparse.ArgumentTypeError):
                continue
            if type(taken) in (int, float):
                yield action


@pytest.mark.parametrize("name", [one.name for one in SUBCOMMANDS])
def test_every_number_has_bounds_and_shows_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for parser in parsers_of(monkeypatch, name):
        for action in numbers_in(parser):
            assert action.type not in (int, float), f"{name} {action.dest}: nan, 1_000 and 400 digits are accepted"
            for text in WRONG:
                with pytest.raises(argparse.ArgumentTypeError, match="expected"):
                    raise AssertionError(f"{name} {action.dest} takes {text!r} as {action.type(text)!r}")  # type: ignore[operator]
            if action.dest == "port":
                with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 65535"):
                    action.type("65536")  # type: ignore[operator,misc]


def test_search_finds_numeric_options(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        f"{one.name} {action.dest}"
        for one in SUBCOMMANDS
        for parser in parsers_of(monkeypatch, one.name)
        for action in numbers_in(parser)
    }
    assert found >= {"dashboard port", "run node_rank", "drill kills", "autoscale cpu", "stop drain", "scale size"}
    assert len(found) >= 25


@pytest.mark.parametrize(
    "words",
    [
        ["dashboard", "--port", "70000"],
        ["dashboard", "--linger", "nan"],
        ["logs", "-n", "-5"],
        ["scale", "0"],
        ["stop", "--drain", "0"],
        ["steps", "--from", str(2**63)],
    ],
)
def test_out_of_bounds_number_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        root.main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{words[-1]!r}: expected" in said and "Traceback" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["--sched-port", "70000"],
        ["--master-port", "-1"],
        ["-n", "99999999999"],
        ["-n", "0"],
        ["--nnodes", "3:2"],
        ["--spares", "9999999"],
        ["--rdzv-endpoint", "127.0.0.1:70000"],
        ["--host-rest", "nan:inf"],
        ["--monitor-interval", "1e400"],
    ],
)
def test_run_refuses_out_of_bounds_numbers_before_anything_starts(
    words: list[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(str(tmp_path))
    try:
        code = root.main(["run", "--dry-run", *words, "train.py"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr().err
    assert code == (64 if "Fix: export" in said else 2), said  # of a variable, or of words
    assert said and "Traceback" not in said
