"""Read and write PROBE_FILE, from which a container runtime's probes learn a process's state.

The file has one line, replaced every second: ``<pid> <start time> <state> <milliseconds>``. The time is from the clock
that all processes of a machine share (``time.monotonic``). ``service.probe_beat`` writes the file, and ``samebits
probe`` reads it.

The state concerns only the process itself, so a liveness probe never restarts a worker because its scheduler is away.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from samebits.errors import StoreError
from samebits.store import durable, private
from samebits.store.process_identity import ProcessIdentity

SILENT_S = 60.0
"""After this many silent seconds, a live process counts as stuck: it is stopped, or C code holds the GIL."""
_MAX_BYTES = 256
_MOST_DIGITS = 18


class ProbeState(enum.Enum):
    """The stage that the process has reached."""

    WAITING = "waiting"  # a worker waits for its seat, a scheduler for its journal and its port
    READY = "ready"  # a worker has its seat, a scheduler serves
    ENDED = "ended"  # the process ended by itself; its exit status shows the result


@dataclass(frozen=True, slots=True)
class ProbeNote:
    """The newest state that a process reported; ``at_s`` is on the machine's monotonic clock."""

    identity: ProcessIdentity
    state: ProbeState
    at_s: float

    def write(self, path: Path) -> None:
        """Replace the file's content.

        Raises:
            StoreError: the file cannot be written.
        """
        line = f"{self.identity.pid} {self.identity.started_at} {self.state.value} {round(self.at_s * 1000)}\n"
        durable.require_replaceable(path)
        durable.replace_note(path, line.encode())


def read(path: Path) -> ProbeNote | None:
    """Return the note in the file; None if there is none yet.

    Raises:
        StoreError: the file does not contain a note, or belongs to another user.
    """
    data = private.read(path, _MAX_BYTES)
    if data is None:
        return None
    try:
        pid, started_at, state, at_ms = data.decode("ascii").split()
        identity = ProcessIdentity.from_line(f"{pid} {started_at}")
        if len(at_ms) > _MOST_DIGITS:
            raise ValueError(f"{at_ms[:40]} is no time")
        return ProbeNote(identity, ProbeState(state), int(at_ms) / 1000)
    except (UnicodeDecodeError, ValueError):
        raise StoreError(
            f"PROBE_FILE={path}: expected the state that a process of a job writes there. Fix: remove it, or set "
            "PROBE_FILE to a file that no other program writes"
        ) from None


def is_alive(note: ProbeNote | None, lives: bool, now_s: float) -> tuple[bool, str]:
    """Return whether the process needs no restart, and why, in a sentence.

    Args:
        note: the newest note; None if there is none.
        lives: whether exactly the process that wrote the note is still running.
        now_s: the current time on the machine's monotonic clock.
    """
    if note is None:
        return False, "no process has written PROBE_FILE yet: it has not reached samebits.init()"
    who = note.identity
    if note.state is ProbeState.ENDED:
        return True, f"{who} has ended by itself; see its exit status"
    if not lives:
        return False, f"{who} is gone and did not report its end"
    silent_s = max(0.0, now_s - note.at_s)
    if silent_s > SILENT_S:
        return False, f"{who} is alive, but was silent for {silent_s:.0f} s; expected a report every second"
    return True, f"{who} is alive"


def is_ready(note: ProbeNote | None, lives: bool, now_s: float) -> tuple[bool, str]:
    """Return whether a worker has its seat, or a scheduler serves, and why.

    The arguments are those of :func:`is_alive`.
    """
    alive, why = is_alive(note, lives, now_s)
    if not alive or note is None or note.state is ProbeState.ENDED:
        return False, why
    if note.state is ProbeState.WAITING:
        return False, f"{note.identity} is alive and waits for its seat"
    return True, f"{note.identity} is in the job"
