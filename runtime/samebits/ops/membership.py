"""What changed in a job's membership between two looks at it, in sentences for whoever follows the job.

Only the comparison lives here; views are ``job_view``'s, and when a sentence is said is the follower's. The one idea: a
slot is followed, not a node: it passes to another holder, is given up, or is new.
"""

from __future__ import annotations

from collections.abc import Mapping

from samebits.core.lines import replaces
from samebits.ops.job_view import JobView, Presence, WorkerView


def changes(before: JobView | None, now: JobView, ages: Mapping[str, float] | None = None) -> list[str]:
    """One sentence for each change of who holds the slots; none where the job has not begun, or names nobody.

    ``ages`` says how many seconds ago the process of a node was seen to be gone.
    """
    if before is None or before.job != now.job or not (before.nodes and now.nodes) or before.generation == 0:
        return []
    lines = [_taken(before, old, new, (ages or {}).get(old.node)) for old, new in _successions(before, now)]
    given_up = _given_up(before, now)
    if given_up:
        lines.append(f"the world goes on without worker {', '.join(given_up)}: {_size(now)}")
    joined = _joined(before, now)
    if joined:
        lines.append(f"worker {', '.join(joined)} joined: {_size(now)}")
    lines += [f"worker {node} is back as a spare" for node in _spared(before, now)]
    return lines


def _successions(before: JobView, now: JobView) -> list[tuple[WorkerView, WorkerView]]:
    holders = {worker.slot: worker for worker in before.workers}
    pairs = [(holders[worker.slot], worker) for worker in now.workers if worker.slot in holders]
    return [(old, new) for old, new in pairs if old.node != new.node]


def _taken(before: JobView, old: WorkerView, new: WorkerView, age_s: float | None) -> str:
    after = "" if age_s is None else f" after {age_s:.2f} s"
    if replaces(new.node, old.node):
        return f"worker {old.node}'s replacement, node {new.node} (pid {new.identity.pid}), took slot {new.slot}{after}"
    is_spare = before.is_spare(new.node)
    text = f"{'spare' if is_spare else 'worker'} {new.node} (pid {new.identity.pid}) took slot {new.slot} of worker "
    goes_on = f"; brought back, worker {old.node} becomes a spare" if is_spare and before.has_one_size else ""
    return f"{text}{old.node}{goes_on}"


def _given_up(before: JobView, now: JobView) -> list[str]:
    held = {worker.slot for worker in now.workers}
    return [one.node for one in before.workers if not one.is_joining and one.slot not in held]


def _joined(before: JobView, now: JobView) -> list[str]:
    members = {worker.slot for worker in before.workers if not worker.is_joining}
    return [one.node for one in now.workers if not one.is_joining and one.slot not in members]


def _spared(before: JobView, now: JobView) -> list[str]:
    known = {one.node for one in before.workers + before.retired}
    return [one.node for one in now.spares if one.node in known and one.presence is Presence.ALIVE]


def _size(view: JobView) -> str:
    return f"{view.world_size} worker{'s' if view.world_size != 1 else ''}"
