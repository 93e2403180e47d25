"""The options of ``samebits run``: torchrun's where they exist, and SameBits' own.

Each option sets an environment variable. Options take precedence over the environment, then torchrun's PET_* variables,
then the defaults. Every process gets the result.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NoReturn

from samebits.errors import WRONG_WORDS
from samebits.hosts.slurm import SlurmStepOptions, share_of
from samebits.launcher.job_spec import ON_RAY
from samebits.launcher.spawning import Way, device_files, usable_devices
from samebits.option_types import seconds, whole
from samebits.printable import printable
from samebits.spelling import near_name

DEFAULT_WORKERS = 4
SUPERVISED_RESTARTS = 32767
_UNKNOWN = "unrecognized arguments: "  # the beginning of argparse's message
_EPILOG = """\
examples:
  samebits run -n 4 train.py --epochs 3        four workers and a scheduler on this machine
  samebits run -n 4 --spares 1 train.py        a warm spare takes a lost worker's place at once
  samebits run -m package.train                like python -m package.train
  samebits run --dry-run -n 4 train.py         print what would start, and where, without starting it
  samebits run --nnodes 2 --node-rank 0 --sched-host 192.0.2.2 -n 8 train.py     type on each host, with its own rank
  samebits run --host-discovery-script ./hosts.sh --launch 'ssh {host} {command}' --nnodes 1:8 -n 4 train.py

All other settings are environment variables (samebits explain variables). torchrun's PET_<OPTION> variables work too.
"""


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of local workers to show, by local rank, or for all under None: 1 is stdout, 2 stderr, 3 both.

    Both streams of a worker go to one log here, so selecting either selects that log.
    """

    of: Mapping[int | None, int]

    def has(self, local_rank: int) -> bool:
        """Return whether any stream of this worker is selected."""
        return bool(self.of.get(local_rank, self.of.get(None, 0)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "required: script" in message:
            message = "which script? As in `samebits run train.py --epochs 3`"
        elif message.startswith(_UNKNOWN) and (meant := self._meant(message.removeprefix(_UNKNOWN).split(" ")[0])):
            message += f": did you mean {meant}?"
        self.print_usage(sys.stderr)
        self.exit(WRONG_WORDS, f"{self.prog}: {message}\n")

    def _meant(self, typed: str) -> str | None:
        """Return the option that the user probably meant by this word, or None."""
        shown = [one for one in self._actions if one.help != argparse.SUPPRESS]
        return near_name(typed.partition("=")[0], [name for one in shown for name in one.option_strings])


def parser_for(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser. torchrun's variables (PET_*) in ``environ`` are the defaults of their options."""

    def pet(name: str, otherwise: str | None = None) -> str | None:
        return environ.get(f"PET_{name}") or otherwise

    parser = _Parser(
        prog="samebits run",
        description="Start a job's workers and its scheduler on this machine, and follow the job to its end. A "
        "finished job's folders are moved aside first; an unfinished job is not touched. Exits with 0 only if the "
        "job finished.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] script.py [arguments ...]",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what runs")
    what.add_argument("script", help="the training script (a module with -m, a program with --no-python)")
    what.add_argument(
        "args", nargs=argparse.REMAINDER, help="arguments of the script; options of this command go before the script"
    )
    what.add_argument(
        *("-m", "--module"),
        action="store_true",
        default=_is_on(pet("MODULE")),
        help="run the script as python -m SCRIPT",
    )
    what.add_argument(
        *("--no-python", "--no_python"),
        action="store_true",
        default=_is_on(pet("NO_PYTHON")),
        help="run SCRIPT directly, without Python; it may be any program that starts the training",
    )
    what.add_argument(
        "--plain",
        action="store_true",
        help="the script does not call samebits: run it as torchrun would, and restart all workers after a loss "
        "(PLAIN)",
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="do not train: run the script in a separate folder, repeat some of its steps as if after a loss, and "
        "compare the results; exits with 0 if they are equal (docs/explanation/same-bits.md)",
    )
    where = parser.add_argument_group("how many, and where")
    where.add_argument(
        "--on",
        choices=("ray",),
        help="ray: start the job on the hosts of a Ray cluster, in a folder that all of them share "
        "(docs/how-to/ray.md)",
    )
    where.add_argument(
        *("-n", "--nproc-per-node", "--nproc_per_node"),
        dest="workers",
        metavar="N",
        default=pet("NPROC_PER_NODE"),
        help="workers per host: a number, auto (one per accelerator, or per core if there is none), gpu or cpu; "
        f"default: WORKER_NUM, else the number of accelerators, else {DEFAULT_WORKERS}",
    )
    where.add_argument(
        "--spares",
        type=_count,
        metavar="N",
        help="spares for the whole job (SPARE_NUM); default: one on a host without accelerators, if memory allows",
    )
    where.add_argument(
        "--nnodes",
        type=_hosts,
        metavar="[MIN:]MAX",
        default=pet("NNODES"),
        help="number of hosts (default 1), or a range",
    )
    where.add_argument(
        *("--node-rank", "--node_rank"),
        type=_count,
        metavar="R",
        default=pet("NODE_RANK"),
        help="index of this host (default 0); the scheduler runs on host 0",
    )
    where.add_argument(
        *("--sched-host", "--master-addr", "--master_addr"),
        dest="sched_host",
        metavar="HOST",
        default=pet("MASTER_ADDR"),
        help="address of the scheduler (SCHED_HOST)",
    )
    where.add_argument(
        *("--sched-port", "--master-port", "--master_port"),
        dest="sched_port",
        metavar="PORT",
        default=pet("MASTER_PORT"),
        help="port of the scheduler (SCHED_PORT)",
    )
    found = parser.add_argument_group("hosts that come and go (docs/how-to/elastic-and-autoscale.md)")
    found.add_argument(
        *("--host-discovery-script", "--host_discovery_script"),
        metavar="COMMAND",
        help="command that prints the available hosts, one host or host:slots per line; run every second "
        "(HOST_DISCOVERY_SCRIPT). -n is the number of slots of a host printed without one, and --nnodes MIN:MAX limits "
        "the workers to MIN × -n to MAX × -n",
    )
    found.add_argument(
        "--launch",
        metavar="COMMAND",
        help="command that starts a worker on another host, with {host}, {node} and {command} (a shell command line) "
        "filled in: 'ssh -o BatchMode=yes {host} {command}' or 'srun -w {host} sh -c {command}' (HOST_LAUNCH)",
    )
    found.add_argument(
        *("--host-rest", "--host_rest"),
        metavar="FIRST:MOST",
        help="seconds for which a failed host gets no workers, doubled after each failure (host in GRACE)",
    )
    where.add_argument(
        *("--rdzv-endpoint", "--rdzv_endpoint"),
        metavar="HOST[:PORT]",
        default=pet("RDZV_ENDPOINT"),
        help="torchrun's form of --sched-host and --sched-port",
    )
    where.add_argument(
        *("--rdzv-id", "--rdzv_id"),
        metavar="ID",
        default=pet("RDZV_ID"),
        help="name of the job (JOB_NAME)",
    )
    horovods = parser.add_argument_group(
        "horovodrun's options, which may precede `python train.py` (docs/how-to/migrate-horovod.md)"
    )
    horovods.add_argument(
        *("-np", "--num-proc"),
        dest="processes",
        type=_count,
        metavar="N",
        help="number of workers on all hosts together",
    )
    horovods.add_argument(
        *("--min-np", "--min-num-proc"),
        type=_count,
        metavar="N",
        help="smallest number of workers (default -np; MIN_WORKER_NUM)",
    )
    horovods.add_argument(
        *("--max-np", "--max-num-proc"),
        type=_count,
        metavar="N",
        help="largest number of workers (default -np; MAX_WORKER_NUM)",
    )
    # Options of torchrun and, for the last one, torch_npu_run, which have no effect here.
    for name in ("rdzv-backend", "rdzv-conf", "start-method", "role", "enable-tiered-parallel-tcpstore"):
        names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        where.add_argument(*names, metavar="X", help=argparse.SUPPRESS)
    ends = parser.add_argument_group("restarting and stopping")
    ends.add_argument(
        *("--max-restarts", "--max_restarts"),
        type=_count,
        metavar="N",
        default=pet("MAX_RESTARTS"),
        help=f"restarts of dead processes within one time window (MAX_RESTARTS, default {SUPERVISED_RESTARTS}); 0: "
        "none",
    )
    ends.add_argument(
        *("--monitor-interval", "--monitor_interval"),
        type=seconds,
        metavar="S",
        help="accepted for torchrun's command lines; has no effect, because a process's death is reported at once",
    )
    ends.add_argument(
        *("--shutdown-timeout", "--shutdown_timeout"),
        type=seconds,
        metavar="S",
        default=pet("SHUTDOWN_TIMEOUT"),
        help="seconds between the request to stop and SIGKILL (shutdown in GRACE)",
    )
    ends.add_argument(
        *("--signals-to-handle", "--signals_to_handle"),
        type=_signals,
        metavar="NAMES",
        default=pet("SIGNALS_TO_HANDLE", ""),
        help="signals to this command that end the job, besides SIGINT and SIGTERM: for example SIGHUP,SIGQUIT",
    )
    ends.add_argument(
        "--die-with-me",
        action="store_true",
        help="if this command dies, even by kill -9, kill all processes that it started (DIE_WITH_ME); by default "
        "the job continues, and `samebits recover` in this folder adopts it",
    )
    ends.add_argument("--fresh", action="store_true", help="start over: move an unfinished job's folders aside, too")
    ends.add_argument("--detach", action="store_true", help="exit as soon as the job has started, and leave it running")
    shown = parser.add_argument_group("output")
    shown.add_argument(
        *("--log-dir", "--log_dir"),
        metavar="DIR",
        default=pet("LOG_DIR"),
        help="folder for logs and pid files (LOG_DIR)",
    )
    shown.add_argument(
        *("-t", "--tee"),
        type=_streams,
        metavar="SPEC",
        default=pet("TEE", "0"),
        help="also show workers' output here: 3 for all workers, or 0:3,2:3 for some local ranks",
    )
    shown.add_argument(
        *("-r", "--redirects"),
        type=_streams,
        metavar="SPEC",
        default=pet("REDIRECTS", "3"),
        help="accepted as in torchrun; a worker's output always goes to its log",
    )
    shown.add_argument(
        *("--local-ranks-filter", "--local_ranks_filter"),
        type=_ranks,
        metavar="RANKS",
        default=pet("LOCAL_RANKS_FILTER", ""),
        help="with -t, show only these local ranks, for example 0,1",
    )
    shown.add_argument("--json", action="store_true", help="print one JSON object per line instead of text")
    shown.add_argument("--dry-run", action="store_true", help="print what would start, and where, without starting it")
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)  # the default here
    # An actor in a Ray cluster passes this before the words that were typed.
    parser.add_argument("--ray-host", action="store_true", help=argparse.SUPPRESS)
    return parser


def _is_on(text: str | None) -> bool:
    return text not in (None, "", "0", "false", "False")


_count = whole()


def _hosts(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text)
    least, most = (int(found[1] or found[2]), int(found[2])) if found else (0, 0)
    if not 1 <= least <= most:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of hosts, or MIN:MAX, as in 2:4")
    return least, most


def _ranks(text: str) -> frozenset[int] | None:
    return frozenset(_count(part.strip()) for part in text.split(",")) if text else None


def _streams(text: str) -> Streams:
    of: dict[int | None, int] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-3])", part.strip())
        if found is None:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected a number from 0 to 3 for all ranks, or RANK:NUMBER for some, as in 0:3,1:1"
            )
        of[None if found[1] is None else int(found[1])] = int(found[2])
    return Streams(of)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        found = [signal.Signals[name] for name in names]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"there is no signal {unknown}: expected names such as SIGHUP") from None
    if signal.SIGKILL in found or signal.SIGSTOP in found:
        raise argparse.ArgumentTypeError("SIGKILL and SIGSTOP cannot be handled")
    return tuple(one for one in found if one not in (signal.SIGINT, signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a user asks ``samebits run`` to do.

    Attributes:
        way, script, args: the command of a worker.
        environment: variables exported to every process of the job, in addition to the current environment.
        nodes: node ids of this host's workers and spares; None: all of the job's.
        has_scheduler: whether the scheduler is started on this host.
        hosts: the host on which each node is started, if hosts are discovered.
        tee: the workers whose log lines are shown as they are written.
        words: the words that were typed.
        signals: signals to this command that end the job, besides SIGINT and SIGTERM.
        check: whether to only check the script, in a separate job.
        adds_spare: whether the spare was not requested, so that it is started later and only if memory allows.
        on_ray: number of hosts and of workers on each, if the job runs on a Ray cluster.
    """

    way: Way
    script: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    nodes: tuple[str, ...] | None = None
    has_scheduler: bool = True
    hosts: Mapping[str, str] = field(default_factory=dict)
    fresh: bool = False
    detach: bool = False
    check: bool = False
    dry_run: bool = False
    as_json: bool = False
    tee: Streams = field(default_factory=lambda: Streams({}))
    words: tuple[str, ...] = ()
    signals: tuple[signal.Signals, ...] = ()
    adds_spare: bool = False
    on_ray: tuple[int, int] | None = None


def parse(words: Sequence[str], environ: Mapping[str, str], *, devices: int | None = None) -> RunRequest:
    """Parse a command line in this environment. If it is invalid, print a message and exit with status 2.

    Args:
        devices: number of accelerators on this machine; None: detect it.
    """
    parser = parser_for(environ)
    slurm_share = share_of(environ)
    # Everything after the script belongs to the script, whatever it looks like. `--` may precede the script.
    options = parser.parse_args(list(words))
    given = _Given(environ)
    if slurm_share is not None and not (options.host_discovery_script or given.value("HOST_DISCOVERY_SCRIPT")):
        _take_share(options, slurm_share, given)
    nodes_least, nodes_most = options.nnodes or (1, 1)
    if options.no_python and options.module:
        parser.error("--no-python and -m: a module needs Python")
    if options.die_with_me and options.detach:
        parser.error("--die-with-me and --detach: a detached command cannot end the job when it dies")
    if options.check:
        _require_checkable(parser, options, nodes_most, given)
    if options.on is not None:
        _require_on_ray(parser, options, given)
    node_rank = options.node_rank or 0
    if not 0 <= node_rank < nodes_most:
        parser.error(f"--node-rank {node_rank}: expected 0 to {nodes_most - 1}, for --nnodes {nodes_most}")
    endpoint_host, endpoint_port = _endpoint(parser, options.rdzv_endpoint)
    if endpoint_host and nodes_most > 1 and options.node_rank is None:
        parser.error(
            "--rdzv-endpoint with several hosts: host ranks are not assigned automatically, because they must stay the "
            "same after a crash. Fix: --node-rank 0 on the endpoint's host, and 1, 2, … on the others"
        )
    for name, value in (
        ("SCHED_HOST", options.sched_host or endpoint_host),
        ("SCHED_PORT", options.sched_port or endpoint_port),
        ("JOB_NAME", options.rdzv_id),
    ):
        if value:
            given.say(name, value)
    for name, value in (
        ("SPARE_NUM", options.spares),
        ("MAX_RESTARTS", options.max_restarts),
        ("LOG_DIR", options.log_dir),
        ("HOST_DISCOVERY_SCRIPT", options.host_discovery_script),
        ("HOST_LAUNCH", options.launch),
    ):
        if value is not None:
            given.say(name, str(value))
    for name, value in (("shutdown", options.shutdown_timeout), ("host", options.host_rest)):
        if value is not None:
            given.say("GRACE", ",".join(filter(None, [given.value("GRACE"), f"{name}={value}"])))
    _take_horovods(parser, options, given)
    if given.value("HOST_DISCOVERY_SCRIPT"):
        _take_bounds(parser, options, given, devices)
        per_node = None
    else:
        if given.value("HOST_LAUNCH") or options.host_rest:
            what = "--launch" if options.launch else "--host-rest" if options.host_rest else "HOST_LAUNCH"
            parser.error(
                f"{what} applies only to hosts that a discovery script prints, and no script is set. Fix: "
                f"--host-discovery-script ./hosts.sh, or leave {what} out"
            )
        per_node = _workers_per_node(parser, options.workers, given, nodes_most, devices)
    if per_node is not None:
        given.say("WORKER_NUM", str(nodes_most * per_node))
        if nodes_least < nodes_most:
            given.say("MIN_WORKER_NUM", str(nodes_least * per_node))
    if options.plain:
        given.say("PLAIN", "1")
    if options.die_with_me:
        given.say("DIE_WITH_ME", "1")
    given.default("ENABLE_RECOVERY", "1")
    given.default("MAX_RESTARTS", str(SUPERVISED_RESTARTS))
    given.default("JOB_NAME", printable(PurePath(options.script).name))
    if given.value("WORKER_NUM") != "1":
        given.default("OMP_NUM_THREADS", "1", is_ours=False)
    is_elsewhere = nodes_most > 1 or options.on is not None
    adds_spare = not (is_elsewhere or options.detach or options.check) and _may_add_spare(given, devices)
    if adds_spare:
        given.say("SPARE_NUM", "1")
    share = None
    if nodes_most > 1 and not given.value("HOST_DISCOVERY_SCRIPT"):
        assert per_node is not None
        share = nodes_of_host(node_rank, nodes_most, per_node, _number(given.value("SPARE_NUM")))
    return RunRequest(
        way=Way.PROGRAM if options.no_python else Way.MODULE if options.module else Way.SCRIPT,
        script=options.script,
        args=tuple(options.args),
        environment=given.said,
        nodes=share,
        has_scheduler=node_rank == 0,
        fresh=options.fresh,
        detach=options.detach,
        check=options.check,
        dry_run=options.dry_run,
        as_json=options.json,
        tee=_shown(options.tee, options.local_ranks_filter),
        words=(*ON_RAY, *words[words.index("--ray-host") + 1 :]) if options.ray_host else tuple(words),
        signals=options.signals_to_handle,
        adds_spare=adds_spare,
        on_ray=None if options.on is None else (nodes_most, per_node or 1),
    )


def _may_add_spare(given: _Given, devices: int | None) -> bool:
    """Return whether a spare would cost only memory, and no setting specifies the number of spares."""
    decided = (given.value(name) for name in ("SPARE_NUM", "HOST_DISCOVERY_SCRIPT", "PLAIN"))
    is_restarted = given.value("ENABLE_RECOVERY") == "1" and given.value("MAX_RESTARTS") != "0"
    has_peers = _number(given.value("WORKER_NUM")) > 1
    return not any(decided) and is_restarted and has_peers and not _has_devices(given, devices)


def _has_devices(given: _Given, devices: int | None) -> bool:
    """Return whether ranks may train on accelerators, in which case a spare needs its own."""
    named = given.value("DEVICE")
    return named not in ("", "cpu") or (
        not named and bool(usable_devices(given.merged(), device_files() if devices is None else devices))
    )


def _require_checkable(parser: argparse.ArgumentParser, options: argparse.Namespace, hosts: int, given: _Given) -> None:
    """Exit with a message if the options ask for what a check cannot do: it runs one job, on this host."""
    has_hosts = hosts > 1 or given.value("HOST_DISCOVERY_SCRIPT") or options.host_discovery_script
    refused = {
        "--plain": options.plain,
        "--no-python": options.no_python,
        "--detach": options.detach,
        "--fresh": options.fresh,
        "--dry-run": options.dry_run,
        "--log-dir": options.log_dir is not None,
        "several hosts": has_hosts,
    }
    found = [name for name, is_given in refused.items() if is_given]
    if found:
        parser.error(f"--check and {found[0]}: a check runs as a separate job on this host. Fix: leave {found[0]} out")


def _require_on_ray(parser: argparse.ArgumentParser, options: argparse.Namespace, given: _Given) -> None:
    """Exit with a message if an option sets what the Ray cluster decides."""
    refused = {
        "--detach": options.detach,
        "--dry-run": options.dry_run,
        "--node-rank": options.node_rank is not None,
        "--sched-host": options.sched_host is not None or options.rdzv_endpoint is not None,
        "--log-dir": options.log_dir is not None,
        "--host-discovery-script": given.value("HOST_DISCOVERY_SCRIPT") or options.host_discovery_script,
        "-np": options.processes is not None,
    }
    found = [name for name, is_given in refused.items() if is_given]
    if found:
        parser.error(f"--on ray and {found[0]}: Ray places the hosts of this job. Fix: leave {found[0]} out")


HOROVOD_WAIT_S = "600"
"""HOROVOD_ELASTIC_TIMEOUT's default."""


def _take_horovods(parser: argparse.ArgumentParser, options: argparse.Namespace, given: _Given) -> None:
    """Translate horovodrun's options, and `python` before the script, to SameBits' own."""
    if options.processes is None:
        if options.min_np is not None or options.max_np is not None:
            parser.error("--min-np and --max-np need -np, the number of workers, as with horovodrun")
        return
    if options.workers is not None or options.nnodes is not None:
        parser.error("-np counts the workers of all hosts. Fix: leave -n and --nnodes out, or use them without -np")
    least = options.processes if options.min_np is None else options.min_np
    most = options.processes if options.max_np is None else options.max_np
    if not 1 <= least <= options.processes <= most:
        parser.error(
            f"-np {options.processes} --min-np {least} --max-np {most}: expected 1 <= --min-np <= -np <= --max-np"
        )
    given.say("MIN_WORKER_NUM", str(least))
    given.say("MAX_WORKER_NUM", str(most))
    given.default("TOPO_TIMEOUT", given.foreign("HOROVOD_ELASTIC_TIMEOUT") or HOROVOD_WAIT_S)
    if not given.value("HOST_DISCOVERY_SCRIPT"):
        options.workers = str(options.processes)
    if re.fullmatch(r"python3?(\.[0-9]+)?", PurePath(options.script).name) and options.args:
        options.script, *options.args = options.args
        if options.script == "-m" and options.args:
            options.module = True
            options.script, *options.args = options.args
        if options.script.startswith("-"):
            parser.error(
                f"python {options.script}: Python's own options are not supported here. Fix: name only the script"
            )


def _take_share(options: argparse.Namespace, share: SlurmStepOptions, given: _Given) -> None:
    """Apply Slurm's description of this host, unless options or the environment set the same."""
    if options.nnodes is None:
        options.nnodes = (share.hosts, share.hosts)
    if options.node_rank is None:
        options.node_rank = share.node_rank
    if not (options.sched_host or options.rdzv_endpoint or given.value("SCHED_HOST")):
        options.sched_host = share.first_host
    if not (options.sched_port or options.rdzv_endpoint or given.value("SCHED_PORT")):
        options.sched_port = str(share.port)
    if options.log_dir is None and not given.value("LOG_DIR"):
        options.log_dir = f"device/host{share.node_rank}"  # hosts share this folder, but each has its own pid files
    if share.node_rank and not given.value("RECOVERY_PATH"):
        given.say(
            "RECOVERY_PATH", f"device/host{share.node_rank}/recovery"
        )  # not the scheduler's variable, since the scheduler starts at the same time


def nodes_of_host(node_rank: int, hosts: int, per_host: int, spares: int) -> tuple[str, ...]:
    """Return the node IDs that one of several equal hosts starts: its block of workers, and its spares."""
    first_spare = hosts * per_host
    workers = range(node_rank * per_host, (node_rank + 1) * per_host)
    return tuple(map(str, (*workers, *range(first_spare + node_rank, first_spare + spares, hosts))))


def _endpoint(parser: argparse.ArgumentParser, text: str | None) -> tuple[str, str]:
    """Parse torchrun's ``HOST[:PORT]``, with IPv6 in brackets. Port 0 means any; both are empty if not given."""
    if not text:
        return "", ""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%\w]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", text)
    if found is None:
        parser.error(f"--rdzv-endpoint {text}: expected HOST or HOST:PORT, as in 192.0.2.2:8118")
    return found[1].strip("[]"), "" if int(found[2] or 0) == 0 else found[2]


class _Given:
    """The current environment, and the settings that the processes get in addition to it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.said: dict[str, str] = {}

    def say(self, name: str, value: str) -> None:
        self.said[name] = value

    def value(self, name: str) -> str:
        """Return a variable of SameBits, also under MindSpore's prefix, or "" if it is not set."""
        return self.said.get(name) or self._environ.get(name) or self._environ.get(f"MS_{name}") or ""

    def foreign(self, name: str) -> str:
        """Return a variable of another tool, or "" if it is not set."""
        return self._environ.get(name, "")

    def default(self, name: str, value: str, *, is_ours: bool = True) -> None:
        found = self.value(name) if is_ours else self._environ.get(name)
        if not found:
            self.said[name] = value

    def merged(self) -> dict[str, str]:
        return {**self._environ, **self.said}


def _take_bounds(
    parser: argparse.ArgumentParser, options: argparse.Namespace, given: _Given, devices: int | None
) -> None:
    """Set the limits of the number of workers if hosts are discovered.

    The discovery script determines the initial number.
    """
    if options.node_rank:
        parser.error("--node-rank: with --host-discovery-script this command starts the workers of all hosts")
    if _number(given.value("SPARE_NUM")):
        parser.error("--spares: with --host-discovery-script, a lost worker is replaced on another host")
    if options.workers is not None or not given.value("HOST_SLOTS"):
        slots = 1
        if options.workers is not None:
            slots = _workers_per_node(parser, options.workers, given, 1, devices) or 1
        given.say("HOST_SLOTS", str(slots))
    slots = _number(given.value("HOST_SLOTS"))
    if options.nnodes is not None:
        least, most = options.nnodes
        given.say("MIN_WORKER_NUM", str(least * slots))
        given.say("MAX_WORKER_NUM", str(most * slots))
    elif not given.value("MAX_WORKER_NUM"):
        parser.error("--host-discovery-script: the maximum number of hosts is missing. Fix: --nnodes 1:8")
    given.default("MIN_WORKER_NUM", "1")


def _workers_per_node(
    parser: argparse.ArgumentParser, asked: str | None, given: _Given, hosts: int, devices: int | None
) -> int | None:
    """Return how many workers each host starts, or None if the environment gives the job's total."""
    if asked is None and given.value("WORKER_NUM"):
        total = _number(given.value("WORKER_NUM"))
        if hosts > 1 and total % hosts:
            parser.error(f"--nnodes {hosts}: WORKER_NUM={total} workers cannot be divided evenly among the hosts")
        return total // hosts if hosts > 1 else None
    if asked is not None and asked.isdigit() and int(asked):
        return int(asked)
    found = usable_devices(given.merged(), device_files() if devices is None else devices)
    match asked:
        case "gpu" if not found:
            return parser.error(
                "--nproc-per-node gpu: no accelerator is visible on this machine. Fix: -n auto, or a number"
            )
        case "cpu":
            return os.cpu_count() or 1
        case "auto" | "gpu":
            return found or os.cpu_count() or 1
        case None:
            found -= _number(given.value("SPARE_NUM"))  # a spare needs its own device
            return found if found > 0 else DEFAULT_WORKERS
    return parser.error(f"--nproc-per-node {asked}: expected a number, auto, gpu or cpu")


def _number(text: str) -> int:
    """Return the number in a text that is validated elsewhere, or 0 if it is not a number."""
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else 0


def _shown(tee: Streams, ranks: frozenset[int] | None) -> Streams:
    """Restrict ``tee`` to the ranks of a filter. A filter without ``tee`` selects these ranks' streams."""
    if ranks is None:
        return tee
    return Streams({None: 0, **{rank: tee.of.get(rank, tee.of.get(None, 0)) or 3 for rank in ranks}})
