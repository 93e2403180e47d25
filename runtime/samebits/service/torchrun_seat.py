"""Recover a ported script that torchrun started, without restarts by torchrun's agents.

torch's agents restart all workers of a job if one of their processes ends. So ``samebits.init()`` replaces the agent's
child with a keeper, ``samebits keep --torchrun``: a small process without torch, with the same pid, which starts the
script again as its own child. If that child is killed, the keeper starts another one in its seat, and the agents notice
nothing. If the script fails, the keeper ends with the script's status, and torchrun decides as usual.

Each rank is one worker of a job whose scheduler the keepers keep running. That scheduler is not the one that agents
with ``--rdzv-backend=samebits`` use for their rendezvous.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from samebits import config
from samebits.config import Settings, TorchrunSeat
from samebits.errors import SettingsError
from samebits.net.address import free_port, loopback
from samebits.scheduler_hosts import addresses_in, file_in, names_one
from samebits.service.scheduler_address import listening_place
from samebits.store import private
from samebits.store.process_identity import ProcessIdentity, host_id, launcher_of_session

WORKERS = "workers"
"""The folder in RECOVERY_PATH for the ranks' job, beside the journal of the agents' job."""
_MAX_BYTES = 1024
_OTHER_BACKEND = (
    "torchrun runs this script on {nodes} nodes with another rendezvous backend than samebits, and the script calls "
    "samebits.init(). Fix: add --rdzv-backend=samebits --rdzv-endpoint=<a node's name>:8118 --rdzv-id=<a name> on "
    "every node"
)
_A_FUNCTION = (
    "torch's launcher has started this process as a function (torch.distributed.launcher.elastic_launch), and it calls "
    "samebits.init(), which has to start its script again. Fix: start the script with torchrun, or with `samebits run`"
)
_IN_ETCD = (
    "RECOVERY_PATH names an etcd, and torchrun has started this script, which calls samebits.init(): its ranks' "
    "journal is in a folder. Fix: export RECOVERY_PATH=<a folder that the nodes share>, or start the script with "
    "`samebits run`"
)
_NO_SCHEDULER = (
    "no agent of torchrun may start a scheduler on the machine of --rdzv-endpoint, and the script calls "
    "samebits.init(). Fix: run torchrun on that machine too, without --rdzv-conf=is_host=0, and name hosts in "
    "--rdzv-endpoint, not a file"
)


def become_keeper(seat: TorchrunSeat, folder: Path) -> NoReturn:
    """Replace this process with the keeper of its rank, which runs the same command as its child.

    Args:
        seat: the rank that torchrun assigned to this process.
        folder: the folder in which this process was started.

    Raises:
        SettingsError: a variable is wrong, or this job's agents are not supported.
    """
    if multiprocessing.parent_process() is not None:
        raise SettingsError([_A_FUNCTION])
    os.chdir(folder)
    environment = config.environment_of_seat(_told(seat, folder, config.read(role_required=False)[0]))
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, "-P", "-m", "samebits", "keep", "--torchrun", "--", *command]
    os.execve(sys.executable, words, environment)


def _told(seat: TorchrunSeat, folder: Path, settings: Settings) -> dict[str, str]:
    """Return the variables of this rank's seat and of its job."""
    if settings.journal_place is not None:
        raise SettingsError([_IN_ETCD])
    path, name = settings.recovery_path, {}
    if seat.has_our_rendezvous:
        if seat.scheduler is None:
            raise SettingsError([_NO_SCHEDULER])
        (host, port), path, name = seat.scheduler, path / WORKERS, {"JOB_NAME": seat.run_id}
    elif seat.nodes > 1:
        raise SettingsError([_OTHER_BACKEND.format(nodes=seat.nodes)])
    else:
        host = loopback()
        port = agreed_port(path, [host], launcher_of_session())
    return {
        "ROLE": "worker",
        "WORKER_NUM": str(seat.world_size),
        "SPARE_NUM": "0",
        "NODE_ID": str(seat.rank),
        "SCHED_HOST": host,
        "SCHED_PORT": str(port),
        "ENABLE_RECOVERY": "1",
        "REGISTER_COOLDOWN": "0",  # a keeper, and torch's agent, have seen the previous process of this rank end
        "RECOVERY_PATH": str(path),
        "LOG_DIR": str(path),
        "PROBE_FILE": str(path / f"worker_{seat.rank}.probe"),
        config.START_FOLDER: str(folder),
        **name,
    }


def offered_port(settings: Settings, folder: Path) -> int:
    """Return the port for the ranks' scheduler on this machine, in case the script is ported.

    Args:
        settings: the agent's settings.
        folder: the folder in which the agent was started.

    Returns:
        0 if the endpoint is a file.
    """
    if file_in(settings.sched_host) is not None:
        return 0
    return agreed_port(folder / settings.recovery_path / WORKERS, listening_place(settings).addresses)


def offer(settings: Settings, port: int) -> None:
    """Give this agent's workers the scheduler's port on the endpoint's machines.

    Args:
        settings: the agent's settings.
        port: the port that an agent there has offered; 0 if there is none.
    """
    host = settings.sched_host
    if not names_one(host):
        host = ",".join(str(one._replace(port=port)) for one in addresses_in(host, port))
    config.offer_scheduler(host if port else "", port)


def agreed_port(recovery_path: Path, addresses: Sequence[str], launcher: ProcessIdentity | None = None) -> int:
    """Return the port of the ranks' scheduler.

    A file beside RECOVERY_PATH stores the port for all processes of this folder.

    Args:
        recovery_path: the job's RECOVERY_PATH.
        addresses: the addresses on which a new port must be free.
        launcher: the job's only agent, if there is only one; another agent must not train in the same folder.

    Raises:
        SettingsError: another torchrun trains in this folder.
        ListenError: no port is free.
    """
    recovery_path.parent.mkdir(parents=True, exist_ok=True)
    path = recovery_path.with_name(f"{recovery_path.name}.torchrun")
    descriptor = private.open_to_append(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        port, holder = _noted(private.read(path, _MAX_BYTES) or b"")
        if launcher is not None and holder is not None and holder != launcher and holder.is_alive():
            raise SettingsError(
                [
                    f"torchrun (pid {holder.pid}) trains in this folder, and so does this one (pid {launcher.pid}): "
                    f"both would use RECOVERY_PATH={recovery_path}. Fix: start this one in another folder"
                ]
            )
        port = port or free_port(addresses)
        identity = launcher or ProcessIdentity(0, 0)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{port} {host_id()} {identity.to_line()}".encode())
    finally:
        os.close(descriptor)
    return port


def _noted(data: bytes) -> tuple[int, ProcessIdentity | None]:
    """Return the port in such a file (0: none), and the agent that uses it.

    The agent is None unless it is on this machine.
    """
    words = data.decode(errors="replace").split()
    if len(words) != 4 or not all(word.isascii() and word.isdigit() for word in (words[0], *words[2:])):
        return 0, None  # new, or its writer was killed
    holder = ProcessIdentity(int(words[2]), int(words[3]))
    return int(words[0]), holder if words[1] == host_id() and holder.pid else None
