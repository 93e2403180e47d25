"""Keeping PROBE_FILE: a thread that says every second that this process lives and how far it has come.

What the file says is ``store.probe_note``'s. The one idea: the thread needs the interpreter as training does, so a
process that stands still, or whose interpreter some C code holds, falls silent.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path

from samebits.errors import StoreError
from samebits.service import log
from samebits.store.probe_note import ProbeNote, State
from samebits.store.process_identity import ProcessIdentity

INTERVAL_S = 1.0


class ProbeBeat:
    """This process's note in PROBE_FILE, from now until it ends; without effect where there is no such file.

    Args:
        path: PROBE_FILE.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state = State.WAITING
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._identity = ProcessIdentity.current()
        if path is not None:
            self._write()
            threading.Thread(target=self._beat, name="samebits-probe", daemon=True).start()
            atexit.register(self._end)

    def ready(self) -> None:
        """From now on the process has its place in the job."""
        self._state = State.READY
        self._write()

    def _beat(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._write()

    def _end(self) -> None:
        if os.getpid() == self._identity.pid:  # else a fork's end, which is not this process's
            self._over.set()
            self._state = State.ENDED
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._writing:
            try:
                ProbeNote(self._identity, self._state, time.monotonic()).write(self._path)
            except StoreError as error:
                if not self._over.is_set():
                    log.warn(f"PROBE_FILE={self._path}: {error}; a liveness probe will take this process for stuck")
                    self._over.set()
