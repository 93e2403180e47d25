"""Assign a job's processes to the hosts of a Slurm allocation, for ``samebits slurm`` (samebits.sbatch).

Hosts get consecutive blocks of workers, so a worker's number determines its host and device, and a step that is
restarted with the same command line is the same worker. The module also reads the options that ``samebits run`` needs
from the environment inside ``srun``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from samebits import config
from samebits.errors import SettingsError
from samebits.option_types import whole

MOST_HOSTS = 100_000
_PART = re.compile(r"([^\[\],]*)\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one process of the job runs.

    Attributes:
        name: ``scheduler``, or ``worker_<node id>``.
        host: the process's initial host.
        node_id: the worker's node id; "" for the scheduler.
        local_rank: the worker's index among the workers of its host, 0-based; "" for the scheduler.
    """

    name: str
    host: str
    node_id: str = ""
    local_rank: str = ""


def hosts_of(nodelist: str) -> list[str]:
    """Return the hosts in a Slurm list such as ``n[01-03,7],login`` (scontrol(1), show hostnames).

    Raises:
        ValueError: the text is not such a list, or names more than MOST_HOSTS hosts.
    """
    found: list[str] = []
    for item in _split(nodelist):
        names = [""]
        end = 0
        for match in _PART.finditer(item):
            if match.start() != end:
                raise ValueError(f"{item!r} is not a host name")
            numbers = _numbers(match[2])
            if len(names) * len(numbers) > MOST_HOSTS:
                raise ValueError(f"more than {MOST_HOSTS} hosts")
            names = [name + match[1] + number for name in names for number in numbers]
            end = match.end()
        rest = item[end:]
        if not item or "[" in rest or "]" in rest:
            raise ValueError(f"{item!r} is not a host name")
        found += [name + rest for name in names]
        if len(found) > MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
    return found


def _split(nodelist: str) -> list[str]:
    """Split at commas outside brackets."""
    items, depth = [""], 0
    for char in nodelist:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    return items


def _numbers(ranges: str) -> list[str]:
    """Return the numbers in ``01-03,7`` as strings, keeping leading zeros."""
    found: list[str] = []
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None or len(text) > 2 * _MOST_DIGITS:
            raise ValueError(f"[{ranges}] is not a range of numbers")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_HOSTS - len(found):
            raise ValueError(f"[{ranges}] is not a range of numbers, or has more than {MOST_HOSTS} numbers")
        found += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return found


def placed(hosts: Sequence[str], workers_per_host: int, spare_hosts: int) -> list[Placed]:
    """Place the scheduler on the first host, spares on the last ``spare_hosts``, and workers on the others.

    Raises:
        ValueError: no host is left for workers.
    """
    training = len(hosts) - spare_hosts
    if training < 1 or workers_per_host < 1 or spare_hosts < 0:
        raise ValueError(f"{len(hosts)} hosts, {spare_hosts} of them for spares, leave none to train on")
    workers = [
        Placed(f"worker_{number}", host, str(number), str(local))
        for index, host in enumerate(hosts)
        for local in range(workers_per_host)
        for number in [index * workers_per_host + local]
    ]
    return [Placed("scheduler", hosts[0]), *workers]


def plan(environ: Mapping[str, str], spare_hosts: int = 0) -> list[Placed]:
    """Return the processes for the allocation that Slurm's variables describe.

    See sbatch(1), output environment variables.

    Args:
        environ: the environment, with SLURM_JOB_NODELIST. The number of workers per host is SLURM_NTASKS_PER_NODE, else
            SLURM_GPUS_ON_NODE, else 1.
        spare_hosts: number of hosts for spares, at the end of the list.

    Raises:
        SettingsError: this is not an allocation, or it has no host to train on.
    """
    nodelist = environ.get("SLURM_JOB_NODELIST", "")
    if not nodelist:
        raise SettingsError(
            ["SLURM_JOB_NODELIST is not set: expected a Slurm allocation. Fix: sbatch scripts/slurm/samebits.sbatch"]
        )
    asked = next((name for name in ("SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE") if environ.get(name)), "")
    count = environ.get(asked, "1")
    if not (count.isascii() and count.isdigit() and len(count) <= _MOST_DIGITS and int(count) > 0):
        raise SettingsError(
            [f"{asked}={count!r}: expected the number of workers on each host. Fix: sbatch --ntasks-per-node=4"]
        )
    try:
        return placed(hosts_of(nodelist), int(count), spare_hosts)
    except ValueError as error:
        raise SettingsError(
            [f"SLURM_JOB_NODELIST={nodelist[:200]}: {error}. Fix: ask for more --nodes, or fewer SPARE_HOSTS"]
        ) from None


@dataclass(frozen=True, slots=True)
class SlurmStepOptions:
    """Options for ``samebits run`` from a Slurm step's environment, on each host.

    Attributes:
        hosts: number of hosts in the step.
        node_rank: index of this host, 0-based.
        first_host: the scheduler's host.
        port: SCHED_PORT, derived from the Slurm job's number so that two jobs on one host do not collide.
        job: number of the Slurm job.
    """

    hosts: int
    node_rank: int
    first_host: str
    port: int
    job: int


def share_of(environ: Mapping[str, str]) -> SlurmStepOptions | None:
    """Return this task's share of its Slurm step (srun(1), output environment variables).

    Returns:
        None outside a step, and in a step with a single host, which needs no share.

    Raises:
        SettingsError: the step does not have one task per host, or its variables are inconsistent.
    """
    names = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NODEID", "SLURM_JOB_ID")
    if not environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return None
    texts = {name: environ.get(name, "") for name in names}
    wrong = [name for name, text in texts.items() if not (text.isascii() and text.isdigit() and len(text) < 10)]
    if wrong:
        raise SettingsError(
            [f"{wrong[0]}={texts[wrong[0]]!r}: expected a number that Slurm sets. Fix: srun samebits run"]
        )
    hosts, tasks, node_rank, job = map(int, texts.values())
    if tasks != hosts:
        raise SettingsError(
            [
                f"SLURM_STEP_NUM_TASKS={tasks}: expected one task on each of {hosts} hosts, which starts its workers. "
                "Fix: srun --ntasks-per-node=1 samebits run -n <workers of a host> train.py"
            ]
        )
    try:
        names_of_hosts = hosts_of(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        text = environ["SLURM_STEP_NODELIST"][:200]
        raise SettingsError([f"SLURM_STEP_NODELIST={text}: {error}. Fix: srun samebits run"]) from None
    if len(names_of_hosts) != hosts or node_rank >= hosts:
        raise SettingsError(
            [
                f"SLURM_NODEID={node_rank}, SLURM_STEP_NUM_NODES={hosts} and the {len(names_of_hosts)} hosts of "
                "SLURM_STEP_NODELIST do not agree. Fix: srun samebits run"
            ]
        )
    return SlurmStepOptions(hosts, node_rank, names_of_hosts[0], port_of(job), job)


def port_of(job: int) -> int:
    """Return the scheduler's port for this Slurm job. It is below the range for outgoing connections."""
    return 10_000 + job % 20_000


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand: print the name, host, node id and local rank of each process."""
    parser = argparse.ArgumentParser(
        prog="samebits slurm",
        description="For scripts/slurm/samebits.sbatch: print one line per process of the job in this Slurm "
        "allocation, with its name, host, NODE_ID and local rank.",
    )
    parser.add_argument(
        "--spare-hosts", type=whole(), default=0, metavar="N", help="number of hosts, the last ones, that hold spares"
    )
    options = parser.parse_args(arguments)
    for one in plan(config.whole_environment(), options.spare_hosts):
        print(one.name, one.host, one.node_id, one.local_rank)
    return 0
