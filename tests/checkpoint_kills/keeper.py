"""The victim's buddy: a process that keeps copies of its points, as on another host, and is killed as well.

``python -m tests.checkpoint_kills.keeper MEMORY`` prints its address and keeps copies until it is killed; ``Keeper`` is
that process as the campaign sees it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from samebits.service.copies.buddy import CopyListener, brief_of
from samebits.service.copies.copying_writer import Copies
from samebits.store.checkpoint import MemoryRoom
from samebits.store.process_identity import ProcessIdentity
from tests.checkpoint_kills.victim import JOB, SLOT

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_SLOT = SLOT + 1


class Keeper:
    """A succession of keepers on one memory.

    Args:
        memory: the folder of the slots.
    """

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._process: subprocess.Popen[str] | None = None
        self._endpoint = ""

    def endpoint(self) -> str:
        """Return a keeper's address, starting one if there is none."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.checkpoint_kills.keeper", str(self._memory)]
            self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            self._endpoint = self._process.stdout.readline().strip()
            assert self._endpoint, "the keeper ended before it printed its address"
        return self._endpoint

    def stop(self) -> None:
        """Stop it (SIGSTOP), in the middle of any action, before this returns."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Continue it after :meth:`stop`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def main(memory: Path) -> None:
    """Keep copies until killed."""
    parent = ProcessIdentity.of(os.getppid())
    assert parent is not None
    room, listener = MemoryRoom(memory, JOB, OWN_SLOT), CopyListener("127.0.0.1")
    descriptor = os.dup(listener.descriptor)
    copies = Copies(room.path, room.descriptor, memory, descriptor, ProcessIdentity.current(), lambda *words: None)
    copies.brief(brief_of(None, str(memory), JOB, "", "", (SLOT,), listener.keeper.ticket).pack())
    print(listener.keeper, flush=True)
    parent.wait_for_exit(float(1 << 20))
    copies.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
