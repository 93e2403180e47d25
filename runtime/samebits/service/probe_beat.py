"""Update PROBE_FILE every second in a thread, to show that this process is alive.

``store.probe_note`` defines the content. Like training, the thread needs the Python interpreter, so the file is no
longer updated if the process is stopped or C code holds the GIL.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path

from samebits.errors import StoreError
from samebits.service import log
from samebits.store.probe_note import ProbeNote, ProbeState
from samebits.store.process_identity import ProcessIdentity

INTERVAL_S = 1.0


class ProbeBeat:
    """Writes this process's state to PROBE_FILE until the process ends.

    Args:
        path: PROBE_FILE; None to write nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state = ProbeState.WAITING
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._identity = ProcessIdentity.current()
        if path is not None:
            self._write()
            threading.Thread(target=self._beat, name="samebits-probe", daemon=True).start()
            atexit.register(self._end)

    def ready(self) -> None:
        """Mark the process as ready, because it has joined the job."""
        self._state = ProbeState.READY
        self._write()

    def _beat(self) -> None:
        while not self._over.wait(INTERVAL_S):
            self._write()

    def _end(self) -> None:
        if os.getpid() == self._identity.pid:  # otherwise this is a forked child's exit
            self._over.set()
            self._state = ProbeState.ENDED
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._writing:
            try:
                ProbeNote(self._identity, self._state, time.monotonic()).write(self._path)
            except StoreError as error:
                if not self._over.is_set():
                    log.warn(f"PROBE_FILE={self._path}: {error}; a liveness probe will consider this process stuck")
                    self._over.set()
