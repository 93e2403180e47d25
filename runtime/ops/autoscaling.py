"""``autoscale``: looks at the job now and then, decides how many workers it should have, and starts or releases them.

Measuring and acting live here; the policy is ``core.autoscale``'s, starting and leaving are ``resizing``'s. The one
idea: every decision is said with its reason, and with ``--dry-run`` nothing else happens, so that a policy can be
watched before it is trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.core.autoscale import Autoscaler, Decision, Limits, Reading
from runtime.errors import SameBitsError, UsageError
from runtime.ops import kept_start
from runtime.ops.autoscale_export import KINDS, manifest
from runtime.ops.job_view import JobView, Presence
from runtime.ops.local_processes import name_of, read_pid_files
from runtime.ops.resizing import bring_to, view_of
from runtime.ops.spawning import StartLock, hear_signals
from runtime.ops.stop_signals import Signals
from runtime.store import private

MAX_QUEUE_BYTES = 64
_EPILOG = """\
examples:
  samebits autoscale --queue-file queue --queue-per-worker 100     by what waits
  samebits autoscale --cpu 0.8 --dry-run                           by CPU; only says what it would do
  samebits autoscale --export hpa --least 2 --most 8 --cpu 0.8     a manifest for Kubernetes
  samebits autoscale --export keda --least 2 --most 8 --queue-per-worker 100 \\
      --prometheus http://prometheus:9090 --query 'sum(jobs_waiting)'

Ends with 0 when the job has finished, or at Ctrl-C; the job goes on.
"""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str]) -> int:
    """Run ``autoscale``."""
    options = _options(arguments)
    if options.export:
        return _export(options)
    hear_signals()
    log_dir, _ = kept_start.read_here()
    settings = kept_start.settings_here()
    view = view_of(settings)
    limits = Limits(
        least=options.least or view.min_world_size,
        most=options.most or view.max_world_size,
        cpu=options.cpu,
        queue=options.queue_per_worker,
        settle_s=options.settle,
        shrink_after_s=options.shrink_after,
        least_gain=options.least_gain,
    )
    scaler, meter, said = Autoscaler(limits), Meter(options.queue_file), Decision(0, "")
    _say(f"{limits.least} to {limits.most} workers, looked at every {options.every:g} s; Ctrl-C ends this, not the job")
    with Signals() as signals:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        while not poll.poll(options.every * 1000):
            view = view_of(settings)
            if view.training_finished or view.job_finished:
                _say("the job has finished")
                break
            pids = pids_here(log_dir, view)
            decision = scaler.decide(meter.read(view, pids, time.monotonic(), options.room))
            if decision.size != view.world_size and decision != said:
                _say(f"{view.world_size} → {decision.size} workers: {decision.reason}")
            said = decision
            if decision.size != view.world_size and not options.dry_run:
                try:
                    with StartLock(log_dir):
                        bring_to(log_dir, decision.size, decision.reason)
                except SameBitsError as error:  # said, and seen again at the next look
                    _say(str(error))
    return 0


def _export(options: argparse.Namespace) -> int:
    if not 1 <= options.least <= options.most:
        raise UsageError(
            f"--export: --least {options.least}, --most {options.most}: expected 1 or more, the smaller first. Fix: "
            "give both, as MIN_WORKER_NUM and MAX_WORKER_NUM of the job that is to run there"
        )
    limits = Limits(
        least=options.least,
        most=options.most,
        cpu=options.cpu,
        memory=options.memory,
        queue=options.queue_per_worker,
        settle_s=options.settle,
        shrink_after_s=options.shrink_after,
    )
    text = manifest(
        options.export,
        limits,
        target=options.target,
        prometheus=options.prometheus,
        query=options.query,
        every_s=options.every,
    )
    print(text, end="")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="samebits autoscale",
        description=textwrap.fill(
            "Size the job of this folder: by the CPU that its workers here use, by a queue, or, without both, by "
            "whether one worker more makes it faster. Workers are started on this machine, or on the hosts that are "
            "discovered, and leave at a commit. Each decision is said with its reason, and kept in the job's history."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--least", type=int, default=0, metavar="N", help="never fewer (default MIN_WORKER_NUM)")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="never more (default MAX_WORKER_NUM)")
    parser.add_argument("--cpu", type=float, default=0.0, metavar="SHARE", help="of a core that a worker is to use")
    parser.add_argument("--queue-file", type=Path, help="a file with one number: how much waits")
    parser.add_argument(
        "--queue-per-worker", type=float, default=0.0, metavar="X", help="what may wait for each worker"
    )
    parser.add_argument("--room", type=int, metavar="N", help="workers that this machine has room for")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between looks (default 10)")
    parser.add_argument("--settle", type=float, default=30.0, metavar="S", help="seconds left alone after a change")
    parser.add_argument("--shrink-after", type=float, default=300.0, metavar="S", help="seconds a smaller size must do")
    parser.add_argument(
        "--least-gain",
        type=float,
        default=0.3,
        metavar="SHARE",
        help="of its cost that a worker must bring, or it goes",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    export = parser.add_argument_group("for Kubernetes to carry out", "prints a manifest, and looks at no job")
    export.add_argument("--export", choices=KINDS, default="", help="HorizontalPodAutoscaler, or KEDA's ScaledObject")
    export.add_argument("--target", type=_name, default="samebits-worker", metavar="NAME", help="the StatefulSet")
    export.add_argument("--memory", type=float, default=0.0, metavar="SHARE", help="of the memory that a pod asks for")
    export.add_argument("--prometheus", default="", metavar="URL", help="keda: the server that knows the queue")
    export.add_argument("--query", default="", metavar="PROMQL", help="keda: how much waits for all workers")
    options = parser.parse_args(arguments)
    if not 0 < options.every < float("inf"):
        raise UsageError(f"--every {options.every:g}: expected seconds above 0. Fix: leave it out")
    if not options.export and bool(options.queue_file) != bool(options.queue_per_worker):
        raise UsageError("--queue-file and --queue-per-worker belong together. Fix: give both, or neither")
    return options


def _name(text: str) -> str:
    """A name that Kubernetes takes (RFC 1123)."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected lower-case letters, digits, '-' and '.'")
    return text


class Meter:
    """What was measured since the last look. ``queue_file`` holds one number."""

    def __init__(self, queue_file: Path | None) -> None:
        self._queue_file = queue_file
        self._before: tuple[float, int, int, Mapping[int, float]] | None = None  # when, generation, step, CPU seconds

    def read(self, view: JobView, pids: Sequence[int], now_s: float, room: int | None) -> Reading:
        """A reading of this moment. Speed is in steps a second times workers; a change of generation voids it."""
        cpu_s = {pid: used for pid in pids if (used := _cpu_seconds(pid)) is not None}
        before, self._before = self._before, (now_s, view.generation, view.step, cpu_s)
        cpu = speed = None
        if before is not None and before[1] == view.generation and now_s > before[0]:
            elapsed_s = now_s - before[0]
            speed = (view.step - before[2]) / elapsed_s * view.world_size
            shares = [(cpu_s[pid] - before[3][pid]) / elapsed_s for pid in cpu_s.keys() & before[3].keys()]
            cpu = min(1.0, sum(shares) / len(shares)) if shares else None
        return Reading(now_s, view.world_size, cpu=cpu, queue=self._queue(), speed=speed, room=room)

    def _queue(self) -> float | None:
        if self._queue_file is None:
            return None
        try:
            text = private.read(self._queue_file, MAX_QUEUE_BYTES)
            waits = float(text or b"")
        except (SameBitsError, ValueError):
            return None  # half written, or not there: nobody knows
        return waits if 0 <= waits < float("inf") else None


def pids_here(log_dir: Path, view: JobView) -> list[int]:
    """Of the workers of this machine; not of the command that holds one on another host, which computes nothing."""
    alive = {name_of(one.node): one.identity for one in view.workers if one.presence is Presence.ALIVE}
    started = read_pid_files(log_dir, alive)
    return [identity.pid for name, identity in started.items() if identity == alive[name] and identity.is_alive()]


def _cpu_seconds(pid: int) -> float | None:
    """Of all its threads (proc(5)); None of one that is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return None


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
