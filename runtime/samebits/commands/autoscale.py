"""``samebits autoscale``: decide at intervals how many workers the job should have, and start or release them.

The policy is in ``hosts.autoscale``. Each decision is printed with its reason; ``--dry-run`` only prints decisions.
"""

from __future__ import annotations

import argparse
import re
import select
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

from samebits import config
from samebits.account.job_view import JobView, PresenceState, WorkerView
from samebits.commands.recover import look
from samebits.commands.scale import bring_to, view_of
from samebits.config import Settings
from samebits.errors import SameBitsError, UsageError
from samebits.hosts.autoscale import Autoscaler, Limits, LoadReading, ScalingDecision
from samebits.hosts.autoscale_export import KINDS, manifest
from samebits.hosts.discovery import ask, words_of
from samebits.launcher import job_spec
from samebits.launcher.interrupts import Signals
from samebits.launcher.job_spec import JobSpec
from samebits.launcher.spawning import StartLock, device_files, hear_signals, is_here, usable_devices
from samebits.option_types import interval, seconds, share, whole
from samebits.store import private

MAX_QUEUE_BYTES = 64
_EPILOG = """\
examples:
  samebits autoscale --queue-per-worker 100                        by the queue in samebits.report(queue=…)
  samebits autoscale --queue-file queue --queue-per-worker 100     by the queue in a file with one number
  samebits autoscale --cpu 0.8 --dry-run                           by CPU; only print the decisions
  samebits autoscale --export hpa --least 2 --most 8 --cpu 0.8     write a manifest for Kubernetes
  samebits autoscale --export keda --least 2 --most 8 --queue-per-worker 100 --prometheus http://prometheus:9090

Exits with 0 when the job has finished, or at Ctrl-C, which does not stop the job.
"""


def main(arguments: Sequence[str]) -> int:
    """Run ``autoscale``."""
    options = _options(arguments)
    if options.export:
        return _export(options)
    hear_signals()
    log_dir, _ = job_spec.read_here()
    settings = job_spec.settings_here()
    view_of(settings)
    devices = usable_devices(config.whole_environment(), device_files())
    limits = Limits(
        least=options.least or settings.min_worker_num,
        most=options.most or settings.max_worker_num,
        cpu=options.cpu,
        memory=options.memory,
        queue=options.queue_per_worker,
        settle_s=options.settle,
        shrink_after_s=options.shrink_after,
        least_gain=options.least_gain,
    )
    scaler, meter, said, trouble = Autoscaler(limits), Meter(options.queue_file), ScalingDecision(0, ""), ""
    _say(
        f"{limits.least} to {limits.most} workers, checked every {options.every:g} s; Ctrl-C stops this command, not "
        "the job"
    )
    with Signals() as signals:
        poll = select.poll()
        poll.register(signals, select.POLLIN)
        while not poll.poll(options.every * 1000):
            found = look(settings)
            view = found.view
            if view is not None and (view.training_finished or view.job_finished):
                _say("the job has finished")
                break
            if view is None or not found.scheduler_serves:
                trouble = _said_once(
                    trouble, "no scheduler of this job answers, so its size does not change until one does"
                )
                continue
            decision = scaler.decide(
                meter.read(view, time.monotonic(), options.room or room_for(job_spec.read(log_dir), settings, devices))
            )
            if decision.size != view.world_size and decision != said:
                _say(f"{view.world_size} → {decision.size} workers: {decision.reason}")
            said = decision
            try:
                if decision.size != view.world_size and not options.dry_run:
                    with StartLock(log_dir):
                        bring_to(log_dir, decision.size, decision.reason)
                trouble = ""
            except SameBitsError as error:  # report once, and retry at the next look
                trouble = _said_once(trouble, str(error))
    return 0


def room_for(kept: JobSpec | None, settings: Settings, devices: int) -> int | None:
    """Return how many workers there is room for: on the discovered hosts, or on this machine's accelerators.

    Returns:
        None if that is unknown: the script has not answered, or there is neither a script nor an accelerator.
    """
    if settings.host_discovery_script is None or kept is None:
        return devices or None
    answer = ask(words_of(settings.host_discovery_script, kept.folder), kept.folder, settings.host_slots)
    if isinstance(answer, str):
        return None
    usable_hosts = (one for one in answer if one.name not in kept.drained)
    return sum(one.slots for one in usable_hosts if settings.host_launch is not None or is_here(one.name))


def _export(options: argparse.Namespace) -> int:
    if not 1 <= options.least <= options.most:
        raise UsageError(
            f"--export: --least {options.least}, --most {options.most}: expected 1 or more, with --least not above "
            "--most. Fix: give the MIN_WORKER_NUM and MAX_WORKER_NUM of the job that will run there"
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
            "Adapt the number of workers of this folder's job to their CPU or memory use, to a queue, or by default to "
            "the speed that one more worker brings. Workers start here or on discovered hosts, and leave at a commit. "
            "Each decision is printed and kept in the job's history. In Kubernetes the cluster does this: see --export."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--least", type=whole(), default=0, metavar="N", help="fewest workers (default MIN_WORKER_NUM)")
    parser.add_argument("--most", type=whole(), default=0, metavar="N", help="most workers (default MAX_WORKER_NUM)")
    parser.add_argument("--cpu", type=share, default=0.0, metavar="SHARE", help="target share of a core per worker")
    parser.add_argument(
        "--memory", type=share, default=0.0, metavar="SHARE", help="target share of the host's or pod's memory"
    )
    parser.add_argument(
        "--queue-per-worker",
        type=share,
        default=0.0,
        metavar="X",
        help="target number of waiting items per worker, as reported by samebits.report(queue=…)",
    )
    parser.add_argument("--queue-file", type=Path, help="read the number of waiting items from this file")
    parser.add_argument(
        "--room",
        type=whole(),
        metavar="N",
        help="most workers that fit (default: the slots of the discovered hosts, else the accelerators here)",
    )
    parser.add_argument("--every", type=interval, default=10.0, metavar="S", help="seconds between checks (default 10)")
    parser.add_argument("--settle", type=seconds, default=30.0, metavar="S", help="seconds to wait after a change")
    parser.add_argument(
        "--shrink-after", type=seconds, default=300.0, metavar="S", help="seconds for which a smaller size must suffice"
    )
    parser.add_argument(
        "--least-gain",
        type=share,
        default=0.3,
        metavar="SHARE",
        help="share of linear speed-up that a worker must bring; otherwise it is released",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be done")
    export = parser.add_argument_group("for Kubernetes", "print a manifest, without contacting a job")
    export.add_argument(
        "--export",
        choices=KINDS,
        default="",
        help="HorizontalPodAutoscaler, KEDA's ScaledObject, or the rule with which Prometheus' adapter gives the HPA "
        "the queue",
    )
    export.add_argument("--target", type=_name, default="samebits-worker", metavar="NAME", help="the StatefulSet")
    export.add_argument("--prometheus", default="", metavar="URL", help="keda: the server that has the queue")
    export.add_argument("--query", default="", metavar="PROMQL", help="keda: query for the queue, if not as reported")
    options = parser.parse_args(arguments)
    if not options.export and options.queue_file and not options.queue_per_worker:
        raise UsageError("--queue-file needs a target. Fix: give --queue-per-worker as well")
    return options


def _name(text: str) -> str:
    """Convert a text to a name that Kubernetes accepts (RFC 1123)."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: expected lower-case letters, digits, '-' and '.'")
    return text


class Meter:
    """Measures the job between two readings. If ``queue_file`` is given, its number replaces the workers' reports."""

    def __init__(self, queue_file: Path | None) -> None:
        self._queue_file = queue_file
        self._before: tuple[float, int, int] | None = None  # time, generation and step of the last look

    def read(self, view: JobView, now_s: float, room: int | None) -> LoadReading:
        """Return the current measurements.

        Speed is in steps per second times workers. It is None after a change of generation, and if nothing waits in the
        queue, because workers may then take steps without work.
        """
        before, self._before = self._before, (now_s, view.generation, view.step)
        speed = None
        if before is not None and before[1] == view.generation and now_s > before[0]:
            speed = (view.step - before[2]) / (now_s - before[0]) * view.world_size
        alive = [one for one in view.workers if one.presence is PresenceState.ALIVE and not one.is_joining]
        waits = self._in_file() if self._queue_file is not None else _reported(alive)
        return LoadReading(
            now_s,
            view.world_size,
            cpu=_mean([one.figures["cpu"] for one in alive if "cpu" in one.figures]),
            memory=_mean([one.figures["memory"] for one in alive if "memory" in one.figures]),
            queue=waits,
            speed=None if waits == 0 else speed,
            room=room,
        )

    def _in_file(self) -> float | None:
        assert self._queue_file is not None
        try:
            text = private.read(self._queue_file, MAX_QUEUE_BYTES)
            waits = float(text or b"")
        except (SameBitsError, ValueError):
            return None  # a file that is incomplete or missing
        return waits if 0 <= waits < float("inf") else None


def _mean(shares: Sequence[float]) -> float | None:
    """Return the mean of the workers' values, at most 1, or None if no worker reports a value."""
    return min(1.0, max(0.0, sum(shares) / len(shares))) if shares else None


def _reported(alive: Sequence[WorkerView]) -> float | None:
    """Return the queue length that the worker with the lowest slot reports (``samebits.report``), or None."""
    waits = next((one.figures["queue"] for one in alive if "queue" in one.figures), None)
    return None if waits is None else max(0.0, waits)


def _said_once(before: str, text: str) -> str:
    if text != before:
        _say(text)
    return text


def _say(text: str) -> None:
    print(f"samebits: {text}", file=sys.stderr, flush=True)
