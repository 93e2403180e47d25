"""The processes of simulated workers: many in one, or one process each, to be killed.

The module reads a process's role and forks; ``control_plane_crowd`` has the conversation. It also runs the scheduler
with a smaller tree of relays.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from types import FrameType

from benchmarks.moments import Notebook
from benchmarks.workers.control_plane_crowd import Crowd, Plan
from benchmarks.workers.control_plane_tree import HostRelays
from samebits.__main__ import main as run
from samebits.config import Settings, read
from samebits.net import relay_tree


def be_victims(plan: Plan, settings: Settings, notebook: Notebook) -> None:
    """Fork the victims and reap them until this process is asked to end; they start at the end of stdin.

    If this process ended together with the last victim, it would delay the decision on that loss.
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
        pid, _ = os.wait()  # reaped at once, as by a launcher, so that a pid in ``victims`` is never reused
        del victims[pid]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if not is_asked:
        signal.sigwait({signal.SIGTERM})


def be_scheduler(fan_out: int) -> int:
    """Run the product's scheduler, which sends relays beyond the first few below others."""
    relay_tree.FAN_OUT = fan_out  # type: ignore[misc]
    return run(["scheduler"])


def main() -> None:
    if sys.argv[1] == "scheduler":
        sys.exit(be_scheduler(int(sys.argv[2])))
    plan = Plan(**json.loads(sys.argv[1]))
    settings, _ = read()
    notebook = Notebook.from_environment()
    if plan.kind == "victims":
        be_victims(plan, settings, notebook)
    else:
        notebook.note("ready")
        (HostRelays if plan.kind == "tree" else Crowd)(plan, settings, notebook).serve()


if __name__ == "__main__":
    main()
