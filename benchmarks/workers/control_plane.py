"""The processes that play simulated workers: a crowd in one, or a process for each, to be killed.

Here live what a process is told to be and the forking; what its workers say is ``control_plane_crowd``'s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType

from benchmarks.moments import Notebook
from benchmarks.workers.control_plane_crowd import Crowd, Plan
from samebits.config import Settings, read


def be_victims(plan: Plan, settings: Settings, notebook: Notebook) -> None:
    """Fork them, reap them, stay until this process is asked to end; they begin with the end of stdin.

    It stays: taken down with the last of them, it would be in the way of who decides on that loss.
    """
    victims = {}
    for slot in plan.slots:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            crowd = Crowd(Plan("victims", slot, 1), settings, Notebook.from_environment())
            sys.stdin.buffer.read()
            crowd.begin()
            crowd.serve()
        victims[pid] = slot

    is_asked = False

    def end_all(signal_number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end_all)
    notebook.note("ready")
    while victims:
        pid, _ = os.wait()  # reaped at once, as by a launcher: a pid in ``victims`` is never another process's
        del victims[pid]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if not is_asked:
        signal.sigwait({signal.SIGTERM})


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    settings, _ = read()
    notebook = Notebook.from_environment()
    if plan.kind == "victims":
        be_victims(plan, settings, notebook)
    else:
        notebook.note("ready")
        Crowd(plan, settings, notebook).serve()


if __name__ == "__main__":
    main()
