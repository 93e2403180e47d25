"""The parser of ``samebits run``'s words: torchrun's options where they exist, and ours.

Here live names, help and the shape of each value; what they mean for a job is ``run_options``'. The one idea: a job
that torchrun starts today is started by the same words, so what torchrun knows and we have no need of is taken, too.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from samebits.commands import near_name
from samebits.errors import SettingsError
from samebits.ops.option_types import seconds, whole

DEFAULT_WORKERS = 4
SUPERVISED_RESTARTS = 32767
_UNKNOWN = "unrecognized arguments: "  # as argparse begins
_EPILOG = """\
examples:
  samebits run -n 4 train.py --epochs 3        four workers and a scheduler on this machine
  samebits run -n 4 --spares 1 train.py        a warm spare takes a lost worker's place at once
  samebits run -m package.train                as python -m package.train
  samebits run --dry-run -n 4 train.py         says what would start where, and starts nothing
  samebits run --nnodes 2 --node-rank 0 --sched-host 192.0.2.2 -n 8 train.py     on each host, with its own rank
  samebits run --host-discovery-script ./hosts.sh --launch 'ssh {host} {command}' --nnodes 1:8 -n 4 train.py

Whatever has no option is a variable of the environment (samebits explain variables). Every variable PET_<OPTION> that
torchrun reads is read as well.
"""


@dataclass(frozen=True, slots=True)
class Streams:
    """Which streams of which local workers: by local rank, or for all under None. 1 is stdout, 2 stderr, 3 both.

    Both streams of a worker are one log here, so that any of them means that log.
    """

    of: Mapping[int | None, int]

    def has(self, local_rank: int) -> bool:
        """Whether anything of this worker's is meant."""
        return bool(self.of.get(local_rank, self.of.get(None, 0)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "required: script" in message:
            message = "which script? As in `samebits run train.py --epochs 3`"
        elif message.startswith(_UNKNOWN) and (meant := self._meant(message.removeprefix(_UNKNOWN).split(" ")[0])):
            message += f": did you mean {meant}?"
        self.print_usage(sys.stderr)
        self.exit(SettingsError.exit_code, f"{self.prog}: {message}\n")

    def _meant(self, typed: str) -> str | None:
        """The option that was probably meant by this word."""
        shown = [one for one in self._actions if one.help != argparse.SUPPRESS]
        return near_name(typed.partition("=")[0], [name for one in shown for name in one.option_strings])


def parser_for(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser; what ``environ`` says under torchrun's names (PET_*) is the default of its option."""

    def pet(name: str, otherwise: str | None = None) -> str | None:
        return environ.get(f"PET_{name}") or otherwise

    parser = _Parser(
        prog="samebits run",
        description="Check that a job may start in this folder, move a finished job's folders aside, start its workers "
        "and its scheduler on this machine, and follow it to its end. Exits with 0 only when it finished.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] script.py [arguments ...]",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what runs")
    what.add_argument("script", help="the training script (a module with -m, a program with --no-python)")
    what.add_argument("args", nargs=argparse.REMAINDER, help="its own words; nothing after the script is read here")
    what.add_argument(
        *("-m", "--module"), action="store_true", default=_is_on(pet("MODULE")), help="run as python -m SCRIPT"
    )
    what.add_argument(
        *("--no-python", "--no_python"),
        action="store_true",
        default=_is_on(pet("NO_PYTHON")),
        help="run SCRIPT itself, which is any program that starts the training",
    )
    what.add_argument(
        "--plain",
        action="store_true",
        help="the script is not ported: run it as torchrun would, and anew on every seat after a loss (PLAIN)",
    )
    what.add_argument(
        "--check",
        action="store_true",
        help="train nothing: run the script in folders of its own, take some of its steps twice, the second time as "
        "after a loss, and compare; exits with 0 if they are equal (docs/training.md)",
    )
    where = parser.add_argument_group("how many, and where")
    where.add_argument(
        *("-n", "--nproc-per-node", "--nproc_per_node"),
        dest="workers",
        metavar="N",
        default=pet("NPROC_PER_NODE"),
        help="workers of a host: a number, auto (accelerators, else cores), gpu or cpu; "
        f"default WORKER_NUM, else the accelerators there are, else {DEFAULT_WORKERS}",
    )
    where.add_argument("--spares", type=_count, metavar="N", help="spares of the whole job (SPARE_NUM)")
    where.add_argument(
        "--nnodes", type=_hosts, metavar="[MIN:]MAX", default=pet("NNODES"), help="hosts (1); with MIN: the fewest"
    )
    where.add_argument(
        *("--node-rank", "--node_rank"),
        type=_count,
        metavar="R",
        default=pet("NODE_RANK"),
        help="which of them this is (0); host 0 has the scheduler",
    )
    where.add_argument(
        *("--sched-host", "--master-addr", "--master_addr"),
        dest="sched_host",
        metavar="HOST",
        default=pet("MASTER_ADDR"),
        help="where the scheduler is reached (SCHED_HOST)",
    )
    where.add_argument(
        *("--sched-port", "--master-port", "--master_port"),
        dest="sched_port",
        metavar="PORT",
        default=pet("MASTER_PORT"),
        help="its port (SCHED_PORT)",
    )
    found = parser.add_argument_group("hosts that come and go (docs/worlds.md)")
    found.add_argument(
        *("--host-discovery-script", "--host_discovery_script"),
        metavar="COMMAND",
        help="prints the hosts there are, host or host:slots a line; asked every second (HOST_DISCOVERY_SCRIPT). -n is "
        "the slots of a host without a number, --nnodes bounds the workers: MIN and MAX times -n",
    )
    found.add_argument(
        "--launch",
        metavar="COMMAND",
        help="starts a worker on another host: {host}, {node} and {command}, a line for the shell there, are filled "
        "in, as in 'ssh -o BatchMode=yes {host} {command}' or 'srun -w {host} sh -c {command}' (HOST_LAUNCH)",
    )
    found.add_argument(
        *("--host-rest", "--host_rest"),
        metavar="FIRST:MOST",
        help="seconds that a host is left alone after it failed, doubled each time (HOST_REST, default 10:600)",
    )
    where.add_argument(
        *("--rdzv-endpoint", "--rdzv_endpoint"),
        metavar="HOST[:PORT]",
        default=pet("RDZV_ENDPOINT"),
        help="as torchrun writes --sched-host and --sched-port in one",
    )
    where.add_argument(
        *("--rdzv-id", "--rdzv_id"),
        metavar="ID",
        default=pet("RDZV_ID"),
        help="the name by which workers know their job (JOB_NAME)",
    )
    horovods = parser.add_argument_group("horovodrun's words, before `python train.py` as well (docs/porting.md)")
    horovods.add_argument(
        *("-np", "--num-proc"), dest="processes", type=_count, metavar="N", help="workers of the job, on all hosts"
    )
    horovods.add_argument(
        *("--min-np", "--min-num-proc"), type=_count, metavar="N", help="the fewest (-np); MIN_WORKER_NUM"
    )
    horovods.add_argument(
        *("--max-np", "--max-num-proc"), type=_count, metavar="N", help="the most (-np); MAX_WORKER_NUM"
    )
    # Of torchrun's and, the last one, of torch_npu_run's; nothing here depends on them.
    for name in ("rdzv-backend", "rdzv-conf", "start-method", "role", "enable-tiered-parallel-tcpstore"):
        names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        where.add_argument(*names, metavar="X", help=argparse.SUPPRESS)
    ends = parser.add_argument_group("deaths and ends")
    ends.add_argument(
        *("--max-restarts", "--max_restarts"),
        type=_count,
        metavar="N",
        default=pet("MAX_RESTARTS"),
        help=f"how often in one window a dead process is started again (MAX_RESTARTS, default {SUPERVISED_RESTARTS}); "
        "0: never",
    )
    ends.add_argument(
        *("--monitor-interval", "--monitor_interval"),
        type=seconds,
        metavar="S",
        default=pet("MONITOR_INTERVAL"),
        help="seconds between two looks at what runs (MONITOR_INTERVAL)",
    )
    ends.add_argument(
        *("--shutdown-timeout", "--shutdown_timeout"),
        type=seconds,
        metavar="S",
        default=pet("SHUTDOWN_TIMEOUT"),
        help="seconds from the request to end to SIGKILL (SHUTDOWN_TIMEOUT)",
    )
    ends.add_argument(
        *("--signals-to-handle", "--signals_to_handle"),
        type=_signals,
        metavar="NAMES",
        default=pet("SIGNALS_TO_HANDLE", ""),
        help="besides SIGINT and SIGTERM: signals of this command that end the job, as in SIGHUP,SIGQUIT",
    )
    ends.add_argument(
        "--die-with-me",
        action="store_true",
        help="end all that was started here at once when this command dies, even by kill -9 (DIE_WITH_ME); else the "
        "job goes on, and another run or recover in this folder adopts it",
    )
    ends.add_argument("--fresh", action="store_true", help="move an unfinished job's folders aside as well")
    ends.add_argument("--detach", action="store_true", help="leave the job to itself once it is started")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        *("--log-dir", "--log_dir"), metavar="DIR", default=pet("LOG_DIR"), help="logs and pid files (LOG_DIR)"
    )
    shown.add_argument(
        *("-t", "--tee"),
        type=_streams,
        metavar="SPEC",
        default=pet("TEE", "0"),
        help="show the workers' lines here as well: 3 for all workers, 0:3,2:3 for some, by local rank",
    )
    shown.add_argument(
        *("-r", "--redirects"),
        type=_streams,
        metavar="SPEC",
        default=pet("REDIRECTS", "3"),
        help="taken for torchrun's sake: what a worker prints always goes to its log",
    )
    shown.add_argument(
        *("--local-ranks-filter", "--local_ranks_filter"),
        type=_ranks,
        metavar="RANKS",
        default=pet("LOCAL_RANKS_FILTER", ""),
        help="of what -t shows only these workers, as in 0,1",
    )
    shown.add_argument("--json", action="store_true", help="a JSON object a line instead of text")
    shown.add_argument("--dry-run", action="store_true", help="say what would start where, and start nothing")
    parser.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)  # a job here is, unless it is told
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
            raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 3, or RANK:0 to 3 for some, as in 0:3,1:1")
        of[None if found[1] is None else int(found[1])] = int(found[2])
    return Streams(of)


def _signals(text: str) -> tuple[signal.Signals, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        found = [signal.Signals[name] for name in names]
    except KeyError as unknown:
        raise argparse.ArgumentTypeError(f"there is no signal {unknown}: expected names such as SIGHUP") from None
    if signal.SIGKILL in found or signal.SIGSTOP in found:
        raise argparse.ArgumentTypeError("SIGKILL and SIGSTOP are heard by nobody")
    return tuple(one for one in found if one not in (signal.SIGINT, signal.SIGTERM))
