"""``samebits cluster``: simulate several hosts on this machine that can be cut off, killed and healed.

This is for users without a cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from samebits.hosts import local_cluster
from samebits.hosts.local_cluster import Cluster, Isolation, Power
from samebits.launcher.processes import DASHBOARD_NEEDS
from samebits.net.address import loopback
from samebits.option_types import whole
from samebits.printable import counted
from samebits.store import checkpoint as checkpoints
from samebits.store import owner

PAGE_PORT, SCHED_PORT = 8265, 8118
_PAGE_LOG = "page.log"
_PAGE_S, _LOOK_S = 60.0, 0.1
_ADDRESS = re.compile(r"the dashboard is at (\S+)")
_VERBS = {
    "up": "start the hosts, and a page that shows their job",
    "exec": "run a command on a host, in the host's folder: exec 1 -- samebits status",
    "cut": "cut a host off from the other hosts; its processes continue",
    "kill": "kill every process on a host with SIGKILL; its folder is kept",
    "heal": "start a killed host and reconnect a cut one; without HOST, all of them",
    "down": "end everything that runs on the hosts, and remove the folder `cluster`",
}
_WITH_HOST = ("exec", "cut", "kill")


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand."""
    parser = _parser()
    at = 2 if arguments[:1] == ["exec"] else len(arguments)  # after `exec HOST`, everything is the command
    options = parser.parse_args(arguments[:at])
    words, folder = list(arguments[at:]), Path.cwd() / local_cluster.FOLDER
    if words[:1] == ["--"]:
        del words[0]
    if options.verb in _WITH_HOST and options.host is None:
        parser.error(f"which host? As in: samebits cluster {options.verb} 2")
    if options.verb in ("up", "down") and options.host is not None:
        parser.error(f"`{options.verb}` takes no host: found {options.host}")
    if options.verb == "exec" and not words:
        parser.error("which command? As in: samebits cluster exec 1 -- samebits status")
    match options.verb:
        case "up":
            _up(folder, options.hosts)
        case "exec":
            return Cluster.read(folder).run(options.host, words)
        case "heal":
            _heal(folder, options.host)
        case "down":
            _down(folder)
        case _:
            _harm(folder, options.verb, options.host)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="samebits cluster",
        usage="%(prog)s up [--hosts N] | exec HOST -- COMMAND | cut HOST | kill HOST | heal [HOST] | down",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Simulate hosts on this machine, to try a job that runs on several hosts. As root, each host has\n"
        "its own network, hostname, pids and /dev/shm (network namespaces); otherwise the hosts are groups of\n"
        "processes. Hosts are numbered from 0. Files are in the folder `cluster`.\n\n"
        + "\n".join(f"  {verb:<5} {text}" for verb, text in _VERBS.items()),
    )
    parser.add_argument("verb", choices=_VERBS, metavar="VERB", help="what to do")
    parser.add_argument("host", nargs="?", type=whole(most=local_cluster.MOST_HOSTS - 1), metavar="HOST")
    parser.add_argument("--hosts", type=whole(1, local_cluster.MOST_HOSTS), default=3, metavar="N", help="default 3")
    return parser


def _up(folder: Path, hosts: int) -> None:
    refusal = local_cluster.refusal()
    way = Isolation.PROCESSES if refusal else Isolation.NAMESPACES
    with Cluster.created(folder, hosts, way, _free_port() if refusal else SCHED_PORT) as cluster:
        try:
            cluster.start_switch()
            for number in range(hosts):
                cluster.heal(number)
            page = _start_page(cluster)
        except BaseException:  # also Ctrl-C
            cluster.remove()
            raise
    if refusal:
        _say(
            f"{refusal}, so the {counted(hosts, 'host')} are groups of processes that share this machine's network: "
            "`cut` suspends a host, and the page shows one host"
        )
    else:
        names = ", ".join(f"{host.name} ({cluster.address(host.number)})" for host in cluster.content.hosts)
        _say(f"{counted(hosts, 'host')} in network namespaces on this machine: {names}")
    _say(page)
    _say(f"each host works in its own folder in {folder}")
    _say("`samebits cluster exec 0 -- COMMAND` runs a command on host 0; `samebits cluster down` ends the cluster")


def _free_port() -> int:
    with socket.create_server((loopback(), 0)) as free:
        return int(free.getsockname()[1])


def _start_page(cluster: Cluster) -> str:
    """Start the page on this machine's loopback address, and return a sentence about it."""
    missing = [name for name in DASHBOARD_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return f"no page, because {' and '.join(missing)} is missing. Fix: pip install 'samebits[dashboard]'"
    try:
        listener = socket.create_server((loopback(), PAGE_PORT))
    except OSError:
        listener = socket.create_server((loopback(), 0))
    log = cluster.folder / _PAGE_LOG
    with listener:
        words = [sys.executable, "-P", "-m", "samebits", "dashboard", "--listener", str(listener.fileno())]
        cluster.start_page(words, log, [listener.fileno()])
    deadline_s = time.monotonic() + _PAGE_S
    page = cluster.content.page
    while time.monotonic() < deadline_s and page is not None and page.identity.is_alive():
        if log.exists() and (found := _ADDRESS.search(log.read_text(errors="replace"))):
            return f"the page is at {found[1]}"
        time.sleep(_LOOK_S)
    return f"the page did not start. Fix: read {log}"


def _harm(folder: Path, verb: str, number: int) -> None:
    with Cluster.locked(folder) as cluster:
        way = cluster.content.way
        if verb == "kill":
            cluster.kill(number)
            _say(f"every process on host {number} was killed; `samebits cluster heal {number}` starts the host again")
        elif cluster.host(number).power is Power.CUT:
            _say(f"host {number} is cut off already")
        else:
            cluster.cut(number)
            what = "was cut off from the other hosts" if way is Isolation.NAMESPACES else "was suspended (SIGSTOP)"
            _say(f"host {number} {what}; `samebits cluster heal {number}` undoes this")


def _heal(folder: Path, number: int | None) -> None:
    with Cluster.locked(folder) as cluster:
        numbers = range(len(cluster.content.hosts)) if number is None else (number,)
        done = [(one, what) for one in numbers if (what := cluster.heal(one))]
    for one, what in done:
        again = f"; `samebits cluster exec {one} -- samebits recover` restarts its part of a job"
        _say(f"host {one} {what}{again if what == local_cluster.STARTED else ''}")
    if not done:
        _say("nothing to heal: every host is on and connected" if number is None else f"host {number} is on")


def _down(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()  # a start was killed before it recorded anything
        _say(f"{folder} was removed")
        return
    with Cluster.locked(folder) as cluster:
        jobs = {found.job for disk in folder.glob("host*/device") if (found := owner.read_owner(disk)) is not None}
        cluster.remove()
    for job in jobs:  # memory of hosts in namespaces is gone with them
        checkpoints.free_rooms(checkpoints.SHARED_MEMORY, job)
    _say(f"the cluster was ended, and {folder} was removed")


def _say(text: str) -> None:
    print(f"samebits: {text}", flush=True)
