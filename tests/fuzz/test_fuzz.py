"""The campaigns' targets with inputs from hypothesis: arbitrary bytes, and good inputs with changes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebits import config
from samebits.errors import JournalDamagedError
from samebits.store import journal_format
from samebits.store.checkpoint.point_format import Manifest
from samebits.store.journal import JOURNAL_FILE, Journal, read_journal
from tests.fuzz import environment, journal_file, manifest
from tests.fuzz.targets import TARGETS

EXAMPLES = 400
THOROUGH_EXAMPLES = 1500
LONGEST = 600
MOST_MEMORY_BYTES = 128 << 20

patient = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
very_patient = settings(patient, max_examples=THOROUGH_EXAMPLES)
targets = pytest.mark.parametrize("name", TARGETS)
changes = st.lists(st.tuples(st.integers(0, 4095), st.integers(0, 255)), min_size=1, max_size=6)


@targets
def test_good_inputs_are_accepted(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[name].check(seed)


@targets
@patient
@given(data=st.binary(max_size=LONGEST))
def test_arbitrary_bytes_are_read_or_refused_in_a_sentence(name: str, data: bytes) -> None:
    TARGETS[name].check(data)


@targets
@patient
@given(data=st.data(), changed=changes, cut=st.integers(0, 4))
def test_changed_input_is_read_or_refused(
    name: str, data: st.DataObject, changed: list[tuple[int, int]], cut: int
) -> None:
    _check_changed(name, data, changed, cut)


@pytest.mark.thorough
@targets
@very_patient
@given(data=st.binary(max_size=LONGEST), good=st.data(), changed=changes, cut=st.integers(0, 4))
def test_many_more_inputs_show_no_defect(
    name: str, data: bytes, good: st.DataObject, changed: list[tuple[int, int]], cut: int
) -> None:
    TARGETS[name].check(data)
    _check_changed(name, good, changed, cut)


def _check_changed(name: str, data: st.DataObject, changed: list[tuple[int, int]], cut: int) -> None:
    damaged = bytearray(data.draw(st.sampled_from(list(TARGETS[name].seeds()))))
    for at, value in changed:
        damaged[at % len(damaged)] = value
    TARGETS[name].check(bytes(damaged[: len(damaged) - cut]))


def test_defect_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that accepts everything would find nothing."""
    from tests.fuzz import decoder

    monkeypatch.setattr(decoder.messages.SCHEMA, "unpack", lambda data: 1 / len(data))
    with pytest.raises(ZeroDivisionError):
        TARGETS["decoder"].check(b"")


def test_input_can_be_reproduced(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "input").write_bytes(b"\x93\x01\x02")
    command = [sys.executable, "-m", "tests.fuzz", "--target", "decoder", "--reproduce", str(tmp_path / "input")]
    shown = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "shows no defect" in shown.stdout


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_reader_and_writer_agree_on_a_changed_journal_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, changed = Path(name), journal_file.change(data)
        (folder / JOURNAL_FILE).write_bytes(changed)
        try:
            seen = read_journal(folder)
        except JournalDamagedError:
            with pytest.raises(JournalDamagedError):
                Journal.open(folder)
            assert (folder / JOURNAL_FILE).read_bytes() == changed
            return
        journal, payloads = Journal.open(folder)
        journal.close()
        assert seen is not None
        assert payloads == seen.payloads
        cut = b"" if seen.torn_tail is None else changed[seen.torn_tail.offset :]
        kept = b"".join(path.read_bytes() for path in folder.glob(f"{JOURNAL_FILE}.torn-*"))
        assert kept == cut, "what is cut off is kept, to the byte"


@pytest.mark.parametrize("size", [4096, 65536, 1 << 20])
def test_nested_size_claims_cost_bounded_memory(size: int) -> None:
    """Arrays that each claim as many items as the message has bytes, as deep as msgpack goes."""
    claims = (b"\xdd" + size.to_bytes(4, "big")) * 1022
    bomb = claims[:size].ljust(size, b"\xc0")
    tracemalloc.start()
    try:
        TARGETS["decoder"].check(bomb)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < MOST_MEMORY_BYTES


def test_defects_found_by_campaigns_stay_fixed() -> None:
    # str.strip() takes the separators of ASCII for blanks, int() does not.
    environment.check_environment({"WORKER_NUM": "6\x1d\t"}, role_required=False)
    chunks = list(manifest.FIELDS).index("chunks")
    tree = list(manifest.FIELDS).index("tree")
    for field, value in [
        (chunks, b"\x93\x01\x02\x03"),  # digests that are numbers
        (chunks, b"\xa3abc"),
        (list(manifest.FIELDS).index("data_bytes"), b"\xfb"),  # -5 bytes in no chunks
        (tree, b"\x81\xc7\x03\x01\x92\x01\x02\xc0"),  # a tuple as a key
        (tree, b"\xd6\xff\x00\x00\x00\x01"),  # msgpack's own timestamp
        (tree, b"\x91" * 100 + b"\xc0"),  # deeper than a tree is ever saved
    ]:
        TARGETS["manifest"].check(bytes([2, field]) + value)


def _damage_is_a_torn_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_format, "_raise_if_damaged", lambda *details: None)
    changed = bytearray(journal_file.WHOLE)
    changed[journal_file.ENDS[1] - 1] ^= 1  # in a batch that others follow
    assert journal_file.decode(bytes(changed)) is not None
    at = (journal_file.ENDS[1] - 1).to_bytes(2, "little")
    TARGETS["journal"].check(b"\2\0" + at + b"\1\0\0")


def _chunks_are_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Manifest, "__post_init__", lambda manifest: None)
    TARGETS["manifest"].check(bytes([2, list(manifest.FIELDS).index("chunks")]) + b"\x93\x01\x02\x03")


def _secrets_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_shown", lambda variable, name, text: f"{name}={text}")
    environ = {"CLUSTER_SECRET": "a" * 40, "MS_CLUSTER_SECRET": "b" * 40}
    environment.check_environment(environ, role_required=False)


@pytest.mark.parametrize("broken", [_damage_is_a_torn_end, _chunks_are_anything, _secrets_are_shown])
def test_broken_build_is_caught(monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError):
        broken(monkeypatch)
