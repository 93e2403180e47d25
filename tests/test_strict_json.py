"""Numbers in files: reading refuses an integer of 400 digits and a NaN, before any sum."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits import strict_json
from samebits.__main__ import main
from samebits.account import event_log
from samebits.account.event_log import events_in
from samebits.account.goodput import goodput_of
from samebits.account.recoveries import recoveries_of
from samebits.errors import StoreError
from samebits.hosts.autoscale import Autoscaler, Limits, LoadReading
from samebits.launcher import job_spec
from samebits.store import durable, private
from samebits.store.lock import HOLDER_FILE, read_holder
from samebits.store.owner import decode_owner
from samebits.store.probe_note import read as read_probe
from samebits.store.process_identity import ProcessIdentity
from samebits.store.progress_report import read_report, report_file

HUGE = "9" * 400
NUMBERS = [HUGE, f"-{HUGE}", "9" * 5000, "18446744073709551616", "-9223372036854775809", "1e999", "-1E+400", "NaN"]
NUMBERS += ["Infinity", "-Infinity", f"{HUGE}.5", f"{HUGE}e0"]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("place", ["{}", "[1, {}]", '{{"a": {{"b": [{}]}}}}'])
def test_unusable_number_is_refused(number: str, place: str) -> None:
    for text in (place.format(number), place.format(number).encode()):
        with pytest.raises(ValueError, match=r"has more than 64 bits|is not a JSON number"):
            strict_json.loads(text)


@given(st.recursive(st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False), st.lists))
def test_every_other_number_is_read_unchanged(value: Any) -> None:
    assert strict_json.loads(json.dumps(value)) == value


def test_invalid_json_is_a_value_error() -> None:
    for data in (b"\xff", "1".encode("utf-16"), b"[" * 100_000, b"", b"{"):
        with pytest.raises(ValueError):
            strict_json.loads(data)


# ---- each file that we read


def line(**more: str) -> str:
    """Return an event with numbers as they are written."""
    known = {"kind": '"step"', "at": "2.0", "term": "1", "generation": "1", "step": "5"}
    return "{" + ",".join(f'"{name}":{text}' for name, text in {**known, **more}.items()) + "}"


SOUND = [
    line(kind='"job"', at="1.0", text='"digits"', job='"j"'),
    line(kind='"training"', at="1.5"),
    line(kind='"lost"', node='"1"', silent_ms="5.0", slot="1"),
    line(kind='"finished"', at="3.0"),
]
FIELDS = ("at", "step", "term", "generation", "stalled_ms", "silent_ms", "after_ms", "point", "members", "slot")
KINDS = ("step", "lost", "round", "generation", "training", "committed", "carried")
FORGED = [
    line(**{name: number, "kind": f'"{kind}"'})
    for number in (HUGE, f"-{HUGE}", "1e308", "NaN")
    for name in FIELDS
    for kind in KINDS
]
FORGED += [line(kind='"carried"', totals_us=f'{{"productive":{HUGE}}}', missing="[]", stage='"training"')]


@pytest.mark.parametrize("name", FIELDS)
def test_forged_number_of_an_event_costs_only_that_event(name: str) -> None:
    forged = [one for one in FORGED if f'"{name}":' in one]
    for at in range(len(SOUND) + 1):
        found = events_in([*SOUND[:at], *forged, *SOUND[at:]])
        assert "digits" in {event.text for event in found} and len(found) >= len(SOUND)
        assert math.isfinite(goodput_of(found).wall_us() / 1e6)
        assert len(recoveries_of(found)) <= len(found)


def test_history_and_log_continue_past_a_forged_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECOVERY_PATH", str(tmp_path))
    written = "".join(f"{one}\n" for one in [*SOUND[:3], *FORGED, SOUND[3]])
    durable.write_file_atomically(tmp_path / "events.jsonl", written.encode())
    for words in (["history"], ["history", "--json"], ["history", "--html", "--json"], ["history", "--otel", "--json"]):
        assert main(words) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert json.loads(event_log._carried(written.splitlines()))["kind"] == "carried", "what begins the log's next part"


def put(path: Path, text: str) -> None:
    private.make_folder(path.parent)
    durable.write_file_atomically(path, text.encode())


def start_with(folder: Path, name: str, number: str) -> object:
    known = '"version":1,"folder":"/","interpreter":"p","script":"s","args":[],"environment":{}'
    put(folder / job_spec.START_FILE, f'{{{known},"script_sha256":"","{name}":{number}}}')
    return job_spec.read(folder)


def holder_with(folder: Path, number: str) -> object:
    put(folder / HOLDER_FILE, f'{{"pid":{number},"started_at":1,"host":"h","role":"r"}}')
    return read_holder(folder)


def progress_with(folder: Path, step: str, total: str, value: str) -> object:
    put(report_file(folder, "0"), f'{{"step":{step},"total_steps":{total},"values":{{"loss":{value}}}}}')
    return read_report(folder, "0")


def probe_with(folder: Path, number: str) -> object:
    put(folder / "probe", f"7 42 ready {number}\n")
    return read_probe(folder / "probe")


READERS: dict[str, Callable[[Path, str], object]] = {
    "a pid file": lambda _, number: ProcessIdentity.from_line(f"{number} 1"),
    "PROBE_FILE": probe_with,
    "the lock's note": holder_with,
    "the lock's note, as text": lambda folder, number: holder_with(folder, f'"{number}"'),
    "the owner": lambda _, number: decode_owner(f'{{"job":"j","job_name":"n","more":{number}}}'.encode()),
    "progress: the step": lambda folder, number: progress_with(folder, number, "null", "1.5"),
    "progress: all steps": lambda folder, number: progress_with(folder, "1", number, "1.5"),
    "progress: a value": lambda folder, number: progress_with(folder, "1", "9", number),
    "progress: a value, as text": lambda folder, number: progress_with(folder, "1", "9", f'"{number}"'),
    "start.json: size": lambda folder, number: start_with(folder, "size", number),
    "start.json: size, as text": lambda folder, number: start_with(folder, "size", f'"{number}"'),
    "start.json: the script": lambda folder, number: start_with(folder, "script_changed_at", number),
}


@pytest.mark.parametrize("number", [HUGE, f"-{HUGE}", "1e999", "NaN"])
@pytest.mark.parametrize("name", READERS)
def test_each_reader_refuses_it_with_its_own_message_or_returns_nothing(name: str, number: str, tmp_path: Path) -> None:
    try:
        found = READERS[name](tmp_path / "own", number)
    except (StoreError, ValueError) as error:
        assert len(str(error)) < 600
    else:
        assert found is None


@pytest.mark.parametrize("queue", [1e308, 5e-324, 0.0])
def test_figure_of_any_size_leaves_the_job_within_its_bounds(queue: float) -> None:
    limits = Limits(1, 4, queue=1e-300, settle_s=0.0)
    scaler = Autoscaler(limits)
    for now in range(9):
        assert 1 <= scaler.decide(LoadReading(now * 100.0, 2, queue=queue, speed=1.0)).size <= 4


PLAIN_JSON = {
    "strict_json.py": "the helper",
    "store/checkpoint/point_format.py": "its numbers are compared with the file's size and meet no float",
    "commands/drill/inside.py": "copied into a drill's processes; has the standard library alone",
    "store/etcd/gateway.py": "typed structs of bytes and integers, of bounded size",
    "hosts/local_cluster.py": "typed structs in a file that only this command writes",
}


def test_no_other_module_reads_json_itself() -> None:
    package = Path(strict_json.__file__).parent
    reading = re.compile(r"(?<!strict_)\bjson\.loads?\(|msgspec\.json\.decode\((?!text, type=RankTable)")
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py") if reading.search(path.read_text())}
    assert found == PLAIN_JSON.keys()
