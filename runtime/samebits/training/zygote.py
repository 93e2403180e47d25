"""A process that has imported what every worker needs, and forks one worker for each order.

The launcher starts it. It forks while it has one thread and no open device, and the child then does what ``python
script.py`` does. Two differences remain, on which no script should rely: without PYTHONHASHSEED, all workers of this
host have the same string hashes, and ``ps`` shows this process's command. The new worker becomes a child of the process
that ordered it: an intermediate process exits, and the kernel gives its child to the nearest subreaper (prctl(2)),
which is the ordering process at that moment.
"""

from __future__ import annotations

import builtins
import gc
import importlib.machinery
import io
import os
import signal
import socket
import sys
import types
from pathlib import Path

import torch
import torch._dynamo

from samebits import config
from samebits.service import fork_orders
from samebits.service.fork_orders import ForkResult, Order
from samebits.start_folder import starts_here
from samebits.store.child_processes import die_with
from samebits.training import elastic

IMPORTED = (torch, torch._dynamo, elastic)
_PID_BYTES = 20


def main() -> None:
    """Serve orders until the other end closes. In a forked child, execute the order."""
    link = socket.socket(fileno=int(sys.argv[1]))
    problem = why_not()
    fork_orders.send_answer(link, ForkResult(0, problem or fork_orders.READY))
    if problem:
        return
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a child would copy page after page
    order = serve(link)
    if order is not None:
        run(order)


def why_not() -> str:
    """Return why this process must not be forked, or "" if it may be."""
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        return f"{threads} threads run after the imports, and a fork would lose {threads - 1}"
    if torch.cuda.is_initialized():
        return "an import has opened a device"
    return ""


def serve(link: socket.socket) -> Order | None:
    """Fork for every order. Return the order in a child, and None in this process when the other end closes."""
    while (received := fork_orders.receive_order(link)) is not None:
        order, log = received
        shadowed = shadows(order)
        if shadowed:
            fork_orders.send_answer(
                link, ForkResult(0, f"{shadowed} in the script's folder shadows a module that is imported here")
            )
        else:
            pid = fork(order, log, link)
            if pid is None:
                return order
            fork_orders.send_answer(link, ForkResult(pid))
        os.close(log)
    return None


def shadows(order: Order) -> str:
    """Return a module in the script's folder that has the same name as a module imported here, or ""."""
    folder = Path(order.folder, order.script).parent
    for entry in os.scandir(folder):
        name = entry.name.partition(".")[0]
        known = sys.modules.get(name)
        if known is None or not (entry.name.endswith((".py", ".so")) or (entry.is_dir() and "." not in entry.name)):
            continue
        file = getattr(known, "__file__", None)
        if entry.is_dir() and not (Path(entry.path, "__init__.py").exists() or file is None):
            continue  # a module takes precedence over a folder without code
        if file is None or not Path(file).is_relative_to(folder):
            return entry.name
    return ""


def fork(order: Order, log: int, link: socket.socket) -> int | None:
    """Fork a worker and hand it over to its parent. Return its pid, or None in the new process."""
    told, tells = os.pipe()
    may_go, goes = os.pipe()
    supervisor = os.getppid()
    between = os.fork()
    if between:
        os.close(tells)
        os.close(may_go)
        pid = int(os.read(told, _PID_BYTES))  # arrives once the process leads a session
        os.close(told)
        os.waitpid(between, 0)
        os.close(goes)
        return pid
    os.close(goes)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(tells, b"%d" % os.getpid())
    os.read(may_go, 1)  # returns when the pipe closes; from then on this process has its final parent
    for descriptor in (told, tells, may_go):
        os.close(descriptor)
    if config.dies_with_starter(order.environment):
        die_with(supervisor)
    link.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return None


def run(order: Order) -> None:
    """Act as ``python script args``; the caller must return afterwards, so that Python ends as after a script."""
    os.chdir(order.folder)
    starts_here()
    config.replace_environment(order.environment)
    signal.set_wakeup_fd(-1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # as importing NumPy does; Python's own generator reseeds itself after a fork
    torch.default_generator.seed()
    sys.argv = [order.script, *order.args]
    sys.orig_argv = [order.interpreter, *sys.argv]
    if not order.environment.get("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(order.folder, order.script).resolve().parent))
    module = main_module(order.script)
    sys.modules["__main__"] = module
    try:
        with io.open_code(order.script) as file:
            code = compile(file.read(), order.script, "exec", dont_inherit=True)
        exec(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(own), own)
        raise SystemExit(1) from None


def main_module(script: str) -> types.ModuleType:
    """Return a fresh ``__main__`` as Python creates it for a script."""
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    vars(module).update(__builtins__=builtins, __cached__=None, __annotations__={})
    return module


if __name__ == "__main__":
    main()
