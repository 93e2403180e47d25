"""PROBE_FILE: a process's note as liveness and readiness probes judge it."""

from __future__ import annotations

from pathlib import Path

import pytest

from samebits.errors import StoreError
from samebits.store.probe_note import SILENT_S, ProbeNote, ProbeState, is_alive, is_ready, read
from samebits.store.process_identity import ProcessIdentity

NOW_S = 1000.0
ME = ProcessIdentity(7, 42)


def note(state: ProbeState, silent_s: float = 1.0) -> ProbeNote:
    return ProbeNote(ME, state, NOW_S - silent_s)


@pytest.mark.parametrize(
    ("found", "lives", "alive", "ready", "says"),
    [
        (None, False, False, False, "has not reached samebits.init"),
        (note(ProbeState.WAITING), True, True, False, "waits for its seat"),
        (note(ProbeState.READY), True, True, True, "is in the job"),
        (note(ProbeState.READY), False, False, False, "is gone and did not report"),
        (note(ProbeState.WAITING), False, False, False, "is gone and did not report"),
        (note(ProbeState.ENDED), False, True, False, "has ended by itself"),
        (
            note(ProbeState.ENDED),
            True,
            True,
            False,
            "has ended by itself",
        ),  # another process has its pid, or it is ending
        (note(ProbeState.READY, SILENT_S), True, True, True, "is in the job"),
        (note(ProbeState.READY, SILENT_S + 1), True, False, False, "silent for 61 s"),
        (note(ProbeState.READY, -5), True, True, True, "is in the job"),  # written between the two checks
    ],
)
def test_judgement(found: ProbeNote | None, lives: bool, alive: bool, ready: bool, says: str) -> None:
    assert is_alive(found, lives, NOW_S)[0] is alive
    yes, why = is_ready(found, lives, NOW_S)
    assert yes is ready
    assert says in why


def test_note_round_trip(tmp_path: Path) -> None:
    written = ProbeNote(ProcessIdentity(7, 42), ProbeState.READY, 12.5)
    written.write(tmp_path / "probe")
    assert read(tmp_path / "probe") == written
    assert (tmp_path / "probe").stat().st_mode & 0o777 == 0o600
    assert read(tmp_path / "none") is None


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"7 42 ready",
        b"7 42 ready now\n",
        b"7 42 dancing 1\n",
        b"-7 42 ready 1\n",
        b"0 42 ready 1\n",
        "7 42 ready ١\n".encode(),
        b"7 42 ready 1 1\n",
        b"\0" * 300,
        b"7 " * 4000,
    ],
)
def test_invalid_note_is_refused(nonsense: bytes, tmp_path: Path) -> None:
    path = tmp_path / "probe"
    path.write_bytes(nonsense)
    path.chmod(0o600)
    with pytest.raises(StoreError, match="Fix: "):
        read(path)


def test_note_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    ProbeNote(ME, ProbeState.READY, 1).write(path)
    path.chmod(0o666)
    with pytest.raises(StoreError, match="other users can write"):
        read(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="a link"):
        read(path)
