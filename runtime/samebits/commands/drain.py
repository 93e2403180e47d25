"""``samebits drain``: make workers, or all workers of a host, leave at their next commit, and wait for them.

A machine can then be switched off without losing a step.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samebits.account.job_view import JobView, PresenceState
from samebits.commands.scale import view_of
from samebits.config import Settings
from samebits.core.replacement_names import root_of
from samebits.errors import UsageError
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.scheduler_link import decide_once
from samebits.launcher.spawning import StartLock
from samebits.option_types import interval

LOOK_S = 0.5
ASK_AGAIN_S = 2.0
_EPILOG = """\
examples:
  samebits drain 3                  worker 3 leaves at its next commit
  samebits drain node-b node-c      all workers on two hosts leave, and discovery no longer uses these hosts
  samebits drain --undo node-b      discovery may use the host again
  samebits scale --add              start a drained worker again, on its machine

A worker that receives SIGTERM leaves in the same way; clusters send it before they take a machine away.
Exits with 0 when the workers have left, and with 80 if this is refused or takes longer than --timeout.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = argparse.ArgumentParser(
        prog="samebits drain",
        description=textwrap.fill(
            "Make workers on any host leave the job at their next commit, and wait until they have left. No step is "
            "lost: a spare takes over, or a smaller world continues. The workers are not restarted until `samebits "
            "scale --add` starts them."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="+", metavar="NODE|HOST", help="the NODE_ID of a worker, or a host with all its workers"
    )
    parser.add_argument("--undo", action="store_true", help="let discovery use these hosts again")
    parser.add_argument("--anyway", action="store_true", help="even if fewer than MIN_WORKER_NUM workers would remain")
    parser.add_argument("--timeout", type=interval, default=600.0, metavar="S", help="seconds to wait (default 600)")
    options = parser.parse_args(arguments)
    log_dir, kept = job_spec.read_here()
    settings = job_spec.settings_here()
    names = tuple(dict.fromkeys(options.names))
    if options.undo:
        return _undo(log_dir, settings, names)
    view = view_of(settings)
    meant = meant_by(names, view, kept)
    if not options.anyway:
        require_enough(view, meant.nodes)
    with StartLock(log_dir):
        kept = job_spec.read(log_dir) or kept
        nodes = job_spec.nodes_of(log_dir, settings)
        drained = (*kept.drained, *(host for host in meant.hosts if host not in kept.drained))
        staying = tuple(node for node in nodes if node not in meant.nodes)
        job_spec.keep(log_dir, replace(kept, nodes=staying, drained=drained))
    if strangers := [node for node in meant.nodes if node not in nodes]:
        _say(f"worker {', '.join(strangers)} was started on another host and may be restarted there")
    leaving = f"worker {', '.join(meant.nodes)}" if meant.nodes else "no worker"
    text = f"{leaving} is to leave at the next commit: drained by hand ({', '.join(names)})"
    _say(text)
    wait_until_left(settings, text, meant.nodes, options.timeout)
    if back := way_back(meant, kept):
        _say(back)
    return 0


@dataclass(frozen=True, slots=True)
class Meant:
    """The live nodes that a user's words name, and the discovered hosts among these words."""

    nodes: tuple[str, ...]
    hosts: tuple[str, ...] = ()


def meant_by(names: Sequence[str], view: JobView, kept: JobSpec) -> Meant:
    """Return the nodes that these words name: a live node or its live replacement, or a host with all its live nodes.

    Raises:
        UsageError: a word names no living node.
    """
    alive = [one for one in view.nodes if one.presence is PresenceState.ALIVE]
    nodes: list[str] = []
    hosts: list[str] = []
    for name in names:
        named = [one.node for one in alive if name in (one.node, root_of(one.node))]
        if name in named or len(named) == 1:  # messages call the replacement 3.1 "worker 3 (second process)"
            nodes.append(name if name in named else named[0])
            continue
        there = [one.node for one in alive if name in (kept.hosts.get(one.node), one.host, one.host.partition("#")[0])]
        is_known = name in kept.hosts.values() or name in kept.drained
        if not (there or is_known):
            known = sorted({kept.hosts.get(one.node, one.host.partition("#")[0]) for one in alive})
            raise UsageError(
                f"{name[:80]!r} is neither a live worker nor the host of one. Fix: name one of the workers "
                f"{', '.join(one.node for one in alive[:12])}, or of the hosts {', '.join(known[:12])}"
            )
        nodes += there
        hosts += [name] if kept.hosts else []
    return Meant(tuple(dict.fromkeys(nodes)), tuple(hosts))


def way_back(meant: Meant, kept: JobSpec) -> str:
    """Return how to bring these workers back; "" if their host's follower decides that."""
    if meant.hosts:
        return f"to use {', '.join(meant.hosts)} again, run `samebits drain --undo {' '.join(meant.hosts)}`"
    if kept.hosts or not meant.nodes:
        return ""
    count = "" if len(meant.nodes) == 1 else f" {len(meant.nodes)}"
    return f"to bring {'it' if not count else 'them'} back, run `samebits scale --add{count}` on the same machine"


def require_enough(view: JobView, leaving: Collection[str]) -> None:
    """Raise if the job could not continue without these nodes.

    Raises:
        UsageError: the job would have to wait.
    """
    left = sum(one.presence is PresenceState.ALIVE and one.node not in leaving for one in (*view.workers, *view.spares))
    is_worker = any(one.node in leaving for one in view.workers)
    if is_worker and left < view.min_world_size:
        raise UsageError(
            f"MIN_WORKER_NUM={view.min_world_size}: {left} workers and spares would remain, and the job would wait for "
            "more. Fix: add workers first, or pass --anyway"
        )


def wait_until_left(settings: Settings, text: str, nodes: Sequence[str], timeout_s: float) -> None:
    """Ask these nodes to leave, wait until they have, and report each.

    ``text`` is recorded in the history.

    Raises:
        UsageError: some have not left after ``timeout_s`` seconds, or no scheduler answers.
    """
    waits_for, give_up_at, ask_at = list(nodes), time.monotonic() + timeout_s, 0.0
    while True:
        if ask_at <= time.monotonic():
            decide_once(settings, text, waits_for)
            text, ask_at = "", time.monotonic() + ASK_AGAIN_S
        view = view_of(settings)
        for node in list(waits_for):
            known = view.node(node)
            if known is None or known.presence is not PresenceState.ALIVE or view.job_finished:
                waits_for.remove(node)
                has_left = known is not None and known.presence is PresenceState.LEFT
                _say(f"worker {node} {'has left' if has_left else 'is gone'}")
        if not waits_for:
            return
        if time.monotonic() >= give_up_at:
            raise UsageError(
                f"worker {', '.join(waits_for)} has not left after {timeout_s:g} s; a worker leaves at its next "
                "commit. Fix: wait longer (--timeout), or see where it is with `samebits stack`"
            )
        time.sleep(LOOK_S)


def _undo(log_dir: Path, settings: Settings, hosts: Sequence[str]) -> int:
    with StartLock(log_dir):
        _, kept = job_spec.read_here()
        if strangers := [host for host in hosts if host not in kept.drained]:
            known = ", ".join(kept.drained) or "none"
            raise UsageError(f"{strangers[0][:80]!r} is not drained. Fix: name a drained worker or host: {known}")
        job_spec.keep(log_dir, replace(kept, drained=tuple(host for host in kept.drained if host not in hosts)))
    decide_once(settings, f"host {', '.join(hosts)} may be used again: by hand")
    _say(f"host {', '.join(hosts)} may be used again")
    return 0


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
