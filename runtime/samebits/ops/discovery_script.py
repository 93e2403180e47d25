"""Asking a discovery script which hosts there are, again and again, within bounds of time and output.

Here live the running of the script and the thread that does so; what its lines mean is ``core.hosts``', what follows is
``discovery``'s. The one idea: whatever the script does (hangs, fails, prints nonsense or without end) becomes a
sentence, and the answer before it stays the truth.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from samebits.config import OF_A_SHELL
from samebits.core.hosts import Host, parse
from samebits.errors import UsageError
from samebits.printable import printable
from samebits.store.command_group import end_group

EVERY_S = 1.0
TIMEOUT_S = 10.0
MAX_OUTPUT_BYTES = 1 << 20
CLOSING_LOOK_S = 0.25
_SHOWN_CHARACTERS = 200

Answer = tuple[Host, ...] | str
"""The hosts there are, or why the script has not said so."""


def words_of(text: str, folder: Path) -> list[str]:
    """The script's command: split into words, read by no shell; a file of the job's folder is found without ``./``.

    Raises:
        UsageError: it cannot be split into words, or is meant for a shell.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"HOST_DISCOVERY_SCRIPT={text[:120]}: {error}. Fix: close its quotes") from None
    if not words:
        raise UsageError("HOST_DISCOVERY_SCRIPT names no command. Fix: --host-discovery-script ./hosts.sh")
    if shell := next((word for word in words if word in OF_A_SHELL), None):
        raise UsageError(
            f"HOST_DISCOVERY_SCRIPT={text[:120]}: no shell reads it, and {shell!r} is a shell's. Fix: put that into a "
            "script, and name the script"
        )
    if "/" not in words[0] and (folder / words[0]).is_file():
        words[0] = f"./{words[0]}"
    return words


def ask(
    words: Sequence[str],
    folder: Path,
    slots: int,
    timeout_s: float = TIMEOUT_S,
    closing: threading.Event | None = None,
) -> Answer:
    """One run of the script, which has ended when this returns; cut short where ``closing`` is set meanwhile."""
    try:
        # Its own session: Ctrl-C in the terminal is meant for the job, and the whole of it can be ended.
        script = subprocess.Popen(
            list(words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"{words[0]} cannot be run: {error.strerror if isinstance(error, OSError) else error}"
    try:
        problem, output, errors = _read(script, timeout_s, closing or threading.Event())
        problem = problem or _ended(script, timeout_s, errors)
    finally:
        end_group(script, 0)
        script.wait()
        for pipe in (script.stdout, script.stderr):
            assert pipe is not None
            pipe.close()
    if problem:
        return f"{words[0]} {problem}"
    try:
        hosts = parse(output.decode(errors="replace"), slots)
    except UsageError as error:
        return str(error)
    return hosts if any(host.slots for host in hosts) else f"{words[0]} named no host with a slot"


def _read(script: subprocess.Popen[bytes], timeout_s: float, closing: threading.Event) -> tuple[str, bytes, bytes]:
    """What it prints until it closes both outputs; first why that is not to be used, else empty."""
    deadline_s = time.monotonic() + timeout_s
    assert script.stdout is not None and script.stderr is not None
    names = {script.stdout.fileno(): "out", script.stderr.fileno(): "err"}
    found = {"out": b"", "err": b""}
    poll = select.poll()
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    waits_for = set(names)
    while waits_for:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or closing.is_set():
            return f"has not ended after {timeout_s:g} s", b"", b""
        for descriptor, _ in poll.poll(min(left_s, CLOSING_LOOK_S) * 1000):
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poll.unregister(descriptor)
                waits_for.remove(descriptor)
            kept = found[names[descriptor]] + chunk
            if names[descriptor] == "err":
                kept = kept[-4096:]  # the last of it says why
            elif len(kept) > MAX_OUTPUT_BYTES:
                return f"printed more than {MAX_OUTPUT_BYTES >> 20} MiB", b"", b""
            found[names[descriptor]] = kept
    return "", found["out"], found["err"]


def _ended(script: subprocess.Popen[bytes], timeout_s: float, errors: bytes) -> str:
    if not end_group(script, timeout_s):
        return f"closed its output and has not ended after {timeout_s:g} s"
    status = script.wait()
    if status == 0:
        return ""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = printable(lines[-1], _SHOWN_CHARACTERS) if lines else ""
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return ended + (f": {said}" if said else "")


class DiscoveryScript:
    """Asks every second in a thread of its own; one thread calls these methods.

    Args:
        words: the script's command.
        folder: where it runs.
        slots: of a host that is named without a number.
    """

    def __init__(self, words: Sequence[str], folder: Path, slots: int) -> None:
        self._words, self._folder, self._slots = words, folder, slots
        self._answers: collections.deque[Answer] = collections.deque(maxlen=1)  # the newest is the truth
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samebits-discovery", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable as long as ``take`` has something to give."""
        return self._readable

    def take(self) -> Answer | None:
        """The newest answer since the last call; None where there is none."""
        try:
            os.read(self._readable, 4096)
        except BlockingIOError:
            return None
        try:
            return self._answers.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Ask no more; a script that runs is ended."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(4 * CLOSING_LOOK_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            answer = ask(self._words, self._folder, self._slots, closing=self._closing)
            if self._closing.is_set():
                return
            self._answers.append(answer)
            with contextlib.suppress(BlockingIOError):  # it is readable already
                os.write(self._writable, b"a")
            self._closing.wait(EVERY_S)
