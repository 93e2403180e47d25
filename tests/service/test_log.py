"""Several messages logged together: one line each, as if logged one by one."""

from __future__ import annotations

import errno
import io
import logging
from collections.abc import Callable, Iterator

import pytest

from samebits.service import log

EVENTS = [(logging.INFO, "worker 1 is in"), (logging.WARNING, "worker 2 is lost"), (logging.DEBUG, "a whisper")]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setattr(log.LOGGER, "handlers", [])
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    monkeypatch.setattr(log.LOGGER, "level", logging.NOTSET)
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    log.set_up("scheduler")
    yield stream
    log.LOGGER.setLevel(logging.NOTSET)


@pytest.fixture
def ours_alone(said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Leave only our handler on the logger; pytest adds its own before each phase of a test."""
    yield lambda: monkeypatch.setattr(log.LOGGER, "handlers", log.LOGGER.handlers[:1])


def test_each_message_has_its_own_line_with_time_and_name(said: io.StringIO, ours_alone: Callable[[], None]) -> None:
    ours_alone()
    log.tell(EVENTS)
    lines = said.getvalue().splitlines()
    assert [line[20:] for line in lines] == [
        "samebits scheduler: worker 1 is in",
        "samebits scheduler: worker 2 is lost",
    ]
    log.say("alone")
    assert said.getvalue().splitlines()[-1][20:] == "samebits scheduler: alone"


def test_setup_again_renames_the_handler_unless_the_logger_is_the_users(
    said: io.StringIO, ours_alone: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", said)
    log.set_up("worker 1")
    ours_alone()
    log.say("alone")
    assert [line[20:] for line in said.getvalue().splitlines()] == ["samebits worker 1: alone"]
    users = [logging.NullHandler()]
    monkeypatch.setattr(log.LOGGER, "handlers", users)
    log.set_up("worker 2")
    assert log.LOGGER.handlers is users and len(users) == 1 and type(users[0]) is logging.NullHandler


def test_users_own_logger_gets_each_message_as_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = records.append  # type: ignore[method-assign]
    monkeypatch.setattr(log.LOGGER, "handlers", [handler])
    monkeypatch.setattr(log.LOGGER, "propagate", False)
    log.LOGGER.setLevel(logging.DEBUG)
    log.tell(EVENTS)
    assert [(record.levelno, record.getMessage()) for record in records] == EVENTS[:2]
    log.LOGGER.setLevel(logging.NOTSET)


def test_no_messages_log_nothing(said: io.StringIO) -> None:
    log.tell([])
    log.tell([(logging.DEBUG, "a"), (logging.DEBUG, "b")])
    assert said.getvalue() == ""


def test_unwritable_log_ends_no_process(
    said: io.StringIO, ours_alone: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours_alone()

    def refuse(text: str) -> int:
        raise OSError(errno.EIO, "a terminal that was closed")

    monkeypatch.setattr(said, "write", refuse)
    log.tell(EVENTS)
    log.say("alone")
