"""What is to be seen of a process of this host that says nothing: its state, and when its Python last ran.

Only looking lives here; what a sight means is ``core.hangs``'. The one idea: the kernel tells the state of any process,
and a worker's control thread leaves a mark in shared memory each time it runs, so nothing is asked of the process.
"""

from __future__ import annotations

from pathlib import Path

from samebits.core.hangs import Doing, Sight
from samebits.printable import printable
from samebits.service.life_sign import quiet_s
from samebits.store.process_identity import ProcessIdentity

MOST_THREADS = 64
_STATES = {"T": Doing.STOPPED, "t": Doing.TRACED, "D": Doing.DISK}


def look(identity: ProcessIdentity) -> Sight | None:
    """What this process does; None where it is gone, or cannot be seen."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_bytes()
    except OSError:
        return None
    state = stat[stat.rindex(b")") + 2 :][:1].decode(errors="replace")
    sight = Sight(_STATES.get(state, Doing.RUNS), quiet_s(identity.pid))
    return sight if identity.is_alive() else None  # asked last: it was exactly this process that was seen


def threads(pid: int) -> list[str]:
    """Of a process that cannot be asked, a line a thread: its name, its state, what it waits for in the kernel."""
    lines = []
    try:
        tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))[:MOST_THREADS]
    except OSError:
        return []
    for task in tasks:
        try:
            stat, waits_in = (task / "stat").read_bytes(), _line(task / "wchan")
        except OSError:  # a thread that ends
            continue
        state = stat[stat.rindex(b")") + 2 :][:1].decode(errors="replace")
        waits = f", waits in {waits_in}" if waits_in not in ("", "0") else ""
        lines.append(f"thread {task.name} ({_line(task / 'comm')}): state {state}{waits}")
    return lines


def _line(file: Path) -> str:
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return ""
    return printable(text[:100].strip())
