"""A process that has imported torch once and forks a child for every script it is told to run.

Started by ``processes.WarmStarter``. A child becomes what ``python script.py`` would have become: its own session,
folder, environment and log, ``sys.argv``, ``sys.path`` and ``__main__``. Two things differ: the imports below cost it
nothing, and one that comes to the end of its script is not taken apart object by object. The one idea: the fork happens
while there is a single thread, and whatever a child does (exit, an uncaught exception, ``kill -9``) happens at the
bottom of its stack, as in any script.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import filelock
import msgpack
import safetensors
import sklearn.datasets
import torch
import torch._dynamo
import xxhash
import zmq

import samebits.service.scheduler
import samebits.training.run.elastic_run  # with it all that a worker loads
from samebits import start_folder
from tests.clusters.namespaces import fork_inside
from tests.system.processes import identity_of_child

IMPORTED = (filelock, msgpack, safetensors, samebits, sklearn.datasets, torch, xxhash, zmq)


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork for every order; returns the order in the child, None in the parent when the other end is closed.

    Then the tests are over, or were killed: children that are left would wait for their job for half an hour.
    """
    children: dict[int, int] = {}  # pidfd → pid
    rest = b""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    _tell(link, {"ready": 1})
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                _tell(link, _reap(children.pop(descriptor)))
                continue
            try:
                received = link.recv(1 << 20)
            except ConnectionResetError:  # closed with something unread
                received = b""
            if not received:
                for child in children:
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(child, signal.SIGKILL)
                return None
            rest += received
            while b"\n" in rest:
                line, _, rest = rest.partition(b"\n")
                order: dict[str, Any] = json.loads(line)
                pid = fork_inside(order["inside"])
                if pid == 0:
                    for other in children:
                        os.close(other)
                    return order
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
                _tell(link, {"pid": pid, "started_at": identity_of_child(pid).started_at})


def _reap(pid: int) -> dict[str, int]:
    _, status = os.waitpid(pid, 0)
    return {"pid": pid, "status": os.waitstatus_to_exitcode(status)}


def _tell(link: socket.socket, message: dict[str, int]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def become(order: dict[str, Any]) -> None:
    """Turn this child into a process that was started to run the script."""
    os.setsid()
    os.chdir(order["folder"])
    start_folder.starts_here()
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["environment"])
    script = Path(order["script"])
    sys.argv = [str(script), *order["args"]]
    sys.path[0] = str(script.parent)


def leave() -> NoReturn:
    """End as Python ends a script, in the same order, up to where it takes its objects apart.

    In a forked process that copies page after page of memory that is shared so far: as much as all else it does.
    Processes that are started anew (``ColdStarter``, the scripts) end as ever.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"a fork would lose {threads - 1} threads"
    gc.freeze()
    order = serve(link)
    link.close()
    if order is not None:
        become(order)
        runpy.run_path(order["script"], run_name="__main__")
        leave()


if __name__ == "__main__":
    main()
