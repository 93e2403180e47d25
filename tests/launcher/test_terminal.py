"""A follower on a real terminal: its line is redrawn every second and never wraps, and Ctrl-C asks."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tests.launcher.shell_job import ENDLESS, WAIT_S, WORKER, ShellJob

pytestmark = pytest.mark.system

LEADS_A_SESSION = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """A pseudo-terminal of a given width with a command in its foreground; records all that is drawn."""

    def __init__(self, job: ShellJob, columns: int, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {**os.environ, **job.settings, "TERM": "xterm"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEADS_A_SESSION, *words],
            cwd=job.folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, pattern: str, begin: int = 0) -> int:
        """Wait until it is drawn after ``begin``; return where it ends."""
        deadline = time.monotonic() + WAIT_S
        while (found := re.compile(pattern).search(self.text, begin)) is None:
            left = deadline - time.monotonic()
            assert left > 0, f"{pattern!r} was not drawn:\n{self.text[-2000:]}"
            self._read(left)
        return found.end()

    def _read(self, at_most_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], at_most_s)
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # every holder has closed it
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def types(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def end(self) -> int:
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            while self._read(0.0):
                pass
            raise AssertionError(f"it did not end:\n{self.text[-3000:]!r}") from None
        while self._read(0.0):
            pass
        os.close(self._ours)
        return status

    def lines(self) -> list[str]:
        """Return everything that ever stood on a line of its own."""
        return [line for line in re.split(r"\r\x1b\[K|\r\n", self.text) if line]


def run_words() -> list[str]:
    return [sys.executable, "-P", "-m", "samebits", "run", "--spares", "0", str(WORKER), *ENDLESS]


def test_ctrl_c_asks_d_leaves_the_job_running_and_a_second_one_ends_it(job: ShellJob) -> None:
    terminal = Terminal(job, 80, *run_words())
    at = terminal.wait_for(r"tiny_worker\.py · step [1-9]")
    terminal.types("\x03")
    at = terminal.wait_for("Ctrl-C again within 3 s ends the job", at)
    terminal.types("d")
    assert terminal.end() == 0, terminal.text
    assert "the job continues without this command" in terminal.text
    assert all(len(line) < 80 for line in terminal.lines() if "samebits:" not in line)
    assert job.wait_training().alive == 3

    again = Terminal(job, 200, sys.executable, "-P", "-m", "samebits", "follow")
    at = again.wait_for("step [1-9]")
    again.types("\x03")
    at = again.wait_for("ends the job", at)
    again.types("x")
    at = again.wait_for("the job continues", at)
    at = again.wait_for(r"steps/s", at)
    again.types("\x03")
    at = again.wait_for("ends the job", at)
    again.types("\x03")
    at = again.wait_for("ends the job|ending the job", at)
    while not again.text[:at].endswith("ending the job"):  # the machine took 3 s in between, so it asks again
        again.types("\x03")
        at = again.wait_for("ends the job|ending the job", at)
    assert again.end() == 78, again.text
    assert "stopped by Ctrl-C" in again.text
    assert re.search(r"\d+ steps in .* 0 recoveries", again.text), again.text
    assert job.running() == []


@pytest.mark.thorough
@pytest.mark.parametrize("columns", [80, 200])
def test_line_shows_exactly_the_jobs_own_steps(job: ShellJob, columns: int) -> None:
    terminal = Terminal(job, columns, *run_words())
    terminal.wait_for(r"step [1-9]")
    for _ in range(5):
        asked, drawn, begin = job.wait_training().step, 0, len(terminal.text)
        while drawn < asked:
            end = terminal.wait_for(r"step [\d,]+ ", begin)
            drawn = int(re.findall(r"step ([\d,]+) ", terminal.text[begin:end])[-1].replace(",", ""))
            begin = end
        assert drawn <= job.wait_training().step
    assert all(len(line) < columns for line in terminal.lines() if "samebits:" not in line)
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.end() == 78
