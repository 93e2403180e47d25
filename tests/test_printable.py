"""Text of other programs, whatever it contains, is sent, stored and shown without controlling a terminal."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits import strict_json
from samebits.__main__ import main
from samebits.account.event_log import events_in, line_of
from samebits.account.events import EventKind, JobEvent
from samebits.core import messages, records
from samebits.core.causes.table import Observation
from samebits.core.end_kinds import EndKind
from samebits.core.messages import Credential, Leave, Process, ProcessEnded, Register, ReportEnvelope
from samebits.core.point import Point
from samebits.core.reports import LastWords
from samebits.errors import SettingsError
from samebits.launcher.progress_line import JsonScreen, Screen
from samebits.printable import IN_LOGS, PrintableStream, listed, printable, printable_lines
from samebits.service import log
from samebits.service.scheduling.unknown_peers import implausible
from samebits.service.status import decision, process_ended, stop_request
from samebits.store import durable
from samebits.store.checkpoint import PointHeader, write_point
from samebits.store.journal import Journal
from samebits.store.process_identity import ProcessIdentity
from tests.store.points import one_of_each_dtype

ANY = st.text(st.characters(exclude_categories=()), max_size=40)
EVIL = "\ud800 \x1b[2J\x1b]0;title\x07 \x9b31m \u202eback \u2066in\r\nover\x00\x7f\U000e0001 \udce9"
"""A lone surrogate, escape sequences, C1 controls, bidirectional overrides, line ends, a tag, a byte of a path."""

WHO = Credential("job", "0", "session", 1)


def is_harmless(shown: bytes) -> bool:
    """Return whether a terminal only prints it, by Unicode's tables, not by the code under test."""
    return all(one in "\n\t" or unicodedata.category(one) not in HARMFUL for one in shown.decode())


HARMFUL = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


@given(st.text("ab \n", max_size=200), st.integers(60, 120), st.sampled_from(["", IN_LOGS]))
def test_cut_text_ends_with_a_whole_word_and_where_the_rest_is(text: str, most: int, rest: str) -> None:
    line, cut = printable(text), printable(text, most, rest)
    if len(line) <= most:
        assert cut == line
    else:
        assert len(cut) <= most and cut.endswith(f"…{rest}")
        kept = cut.removesuffix(f"…{rest}")
        assert line.startswith(kept)
        has_long_word = max(map(len, line.split())) * 2 > most - len(rest)
        assert has_long_word or not line[len(kept)].isalpha(), "cut at a word's end"
        assert printable(f"{cut}; and more", most, rest).count(rest or "…") == 1, "a text cut twice says it once"


@given(ANY)
def test_any_text_becomes_one_encodable_printable_line(text: str) -> None:
    line = printable(text)
    assert is_harmless(line.encode()) and not set("\n\t") & set(line)
    assert printable(line) == line
    assert printable_lines(text).count("\n") == text.count("\n") and is_harmless(printable_lines(text).encode())
    assert len(printable(text, 10)) <= 10


@given(st.text(st.characters(categories=("L", "N", "P", "S")), max_size=40))
def test_printable_text_is_unchanged(text: str) -> None:
    if text.isprintable():  # Python's tables may be older than the characters
        assert printable(text) is text


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | ANY, lambda one: st.lists(one)))
def test_json_is_equivalent_and_printable(value: Any) -> None:
    text = strict_json.dumps(value)
    assert is_harmless(text.encode())
    assert strict_json.loads(text) == value == json.loads(text)


@given(ANY)
def test_any_text_is_sent_and_stored(text: str) -> None:
    for schema, value in (
        (messages.SCHEMA, ReportEnvelope(WHO, LastWords(text))),
        (messages.SCHEMA, Leave(WHO, False, text)),
        (messages.SCHEMA, messages.EndJob("job", 1, EndKind.FINISHED, text)),
        (records.SCHEMA, records.JobInterrupted(EndKind.FINISHED, 1, text)),
        (records.SCHEMA, records.SeatLost("0", 1, 0.0, text)),
    ):
        again = schema.unpack(schema.pack(value))
        assert again == value, "memory equals what is read back"
        told = again.body if isinstance(again, ReportEnvelope) else again
        assert printable(text) in [getattr(told, name, None) for name in ("text", "cause", "reason")]
    event = JobEvent(EventKind.LOST, 1.0, node=text, text=text, more={"last": text})
    (read,) = events_in([line_of(event)])
    assert read == JobEvent(EventKind.LOST, 1.0, node=text, text=text, more={"last": printable(text)})
    read.text.encode()


@given(ANY)
def test_name_that_is_no_text_is_sent_escaped(text: str) -> None:
    """The name of a host, a script or a device must not kill the sender's thread."""
    register = Register(9, "", text, text, text, 0, Process(text, 1, 1, text), (("a", text),))
    assert msgpack.unpackb(messages.SCHEMA.pack(register))


def test_scheduler_accepts_the_result_for_any_text() -> None:
    seen = Observation(status=1, error=EVIL)
    ended = process_ended("0", ProcessIdentity.current(), seen, EVIL)
    for message in (stop_request(EVIL), decision(EVIL), ended):
        assert implausible(messages.SCHEMA.unpack(messages.SCHEMA.pack(message))) is None
    assert isinstance(ended, ProcessEnded)


def test_log_line_is_one_harmless_line(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("sys.stderr", raw)
    monkeypatch.setattr(log.LOGGER, "handlers", [])
    log.set_up("worker 0")
    log.say(EVIL)
    log.warn(EVIL)
    log.tell([(logging.INFO, EVIL), (logging.WARNING, EVIL)])
    raw.flush()
    shown = raw.buffer.getvalue()  # type: ignore[attr-defined]
    assert shown.count(b"\n") == shown.count(b"\\u001b[2J") == 4
    assert is_harmless(shown)


@pytest.mark.parametrize("screen", [Screen, JsonScreen])
def test_foreign_text_does_not_control_a_followers_screen(screen: type[Screen]) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    shown = screen(PrintableStream(raw))  # type: ignore[arg-type]
    shown.say(EVIL)
    shown.raw(EVIL.replace("\n", ""))
    assert raw.buffer.getvalue().count(b"\n") == 2  # type: ignore[attr-defined]
    assert is_harmless(raw.buffer.getvalue())  # type: ignore[attr-defined]


# ---- commands on a folder in which every file has such text


def a_table(path: Path) -> None:
    device = {"device_id": "0", "rank_id": "0", "device_ip": "192.0.2.1"}
    servers = [{"server_id": EVIL.replace("\ud800", "").replace("\udce9", ""), "device": [device]}]
    path.write_text(json.dumps({"version": "1.0", "server_count": "1", "server_list": servers}))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ("RECOVERY_PATH", "LOG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("WORKER_NUM", "1")
    monkeypatch.setenv("SCHED_PORT", "1")  # no server listens there: `status` reads the journal
    tmp_path.chmod(0o700)
    lines = [
        {"kind": "job", "at": 1.0, "term": 1, "text": EVIL, "job": EVIL},
        {"kind": "lost", "at": 2.0, "term": 1, "node": EVIL, "text": f"failed: RuntimeError: {EVIL}"},
        {"kind": "round", "at": 2.1, "term": 1, "text": EVIL, "round": "1.1", "missing": EVIL},
        {"kind": "generation", "at": 2.2, "term": 1, "generation": 1, "text": EVIL, "last": EVIL, "members": 2},
        {"kind": "training", "at": 2.3, "term": 1, "generation": 1, "text": EVIL, "last": EVIL},
        {"kind": "interrupted", "at": 3.0, "term": 1, "text": f"RuntimeError: {EVIL}", "end": EVIL, "last": EVIL},
        {"kind": "finished", "at": 4.0, "term": 1, "text": EVIL},
    ]
    written = "".join(f"{json.dumps(line)}\n" for line in lines)
    durable.write_file_atomically(tmp_path / "events.jsonl", written.encode())
    durable.write_file_atomically(tmp_path / "worker_0.log", f"{EVIL}\n".encode(errors="replace"))
    evil = EVIL.replace("\ud800", "").replace("\udce9", "")  # a state has no text that is not Unicode
    tree = {"name": evil, evil: [evil, 10**5000], "nested": {evil: {evil: evil}}}
    header = PointHeader(evil, Point(10, 1), 1, 0, 0, evil)
    write_point(tmp_path / "ckpt", header, one_of_each_dtype(), tree, {evil: evil})
    a_table(tmp_path / "table.json")
    # As the previous release wrote a journal: nothing in it was escaped.
    ended = [10, int(EndKind.FAILED), 3, f"RuntimeError: {evil}", 1]
    job = records.SCHEMA.pack(records.JobCreated("job", "digits", (("WORKER_NUM", "1"),)))
    with Journal.open(tmp_path)[0] as journal:
        journal.append([job, msgpack.packb(ended)])
    return tmp_path


SHOWING: dict[str, Callable[[Path], list[str]]] = {
    "history": lambda _: ["history"],
    "history --json": lambda _: ["history", "--json"],
    "history --follow": lambda _: ["history", "--follow"],
    "history --html --json": lambda _: ["history", "--html", "--json"],
    "history --otel --json": lambda _: ["history", "--otel", "--json"],
    "status": lambda _: ["status"],
    "logs": lambda _: ["logs"],
    "ckpt show": lambda folder: ["ckpt", "show", "0/10", "--folder", str(folder / "ckpt")],
    "ckpt show --json": lambda folder: ["ckpt", "show", "0/10", "--json", "--folder", str(folder / "ckpt")],
    "ranktable": lambda folder: ["ranktable", "check", str(folder / "table.json")],
    "a wrong word": lambda _: ["history", EVIL.replace("\0", "")],
    "no such command": lambda _: [EVIL],
}


@pytest.mark.parametrize("name", SHOWING)
def test_no_command_prints_terminal_controls(name: str, here: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with contextlib.suppress(SystemExit):  # argparse's
        main(SHOWING[name](here))
    shown, said = capfdbinary.readouterr()
    assert b"u001b" in shown + said or b"x1b" in shown + said, "it shows what is there"
    assert is_harmless(shown) and is_harmless(said)
    if name.endswith("--json"):
        assert [json.loads(line) for line in shown.splitlines()]


def test_error_that_names_such_a_file_is_harmless(here: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["ranktable", "check", "\x1b[31m\udce9"]) == SettingsError.exit_code
    said = capfdbinary.readouterr().err
    assert is_harmless(said) and b"\\u001b[31m\\udce9 cannot be read" in said


@pytest.mark.parametrize(
    ("names", "text"), [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c"), ("abcdef", "a, b, c and 3 more")]
)
def test_long_list_ends_with_the_number_of_the_others(names: str, text: str) -> None:
    assert listed(names, 3) == text
