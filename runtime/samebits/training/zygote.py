"""A process that has imported what every worker imports, and forks one for each order; ``ops.zygote`` starts it.

Becoming a worker lives here. The one idea: the fork happens while there is one thread and no device was opened, and the
child then does what ``python script.py`` does, so that a script cannot tell. What differs is nothing to rely on: where
PYTHONHASHSEED is not set all workers of this host have the same string hashes, and ``ps`` shows this process's command.
A child is handed over to whoever ordered it: an intermediate process ends, and the one that ordered, which is a
subreaper at that moment (prctl(2)), becomes its parent.
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
from samebits.service.fork_orders import Answer, Order
from samebits.start_folder import starts_here
from samebits.store.child_processes import die_with
from samebits.training import elastic

IMPORTED = (torch, torch._dynamo, elastic)
_PID_BYTES = 20


def main() -> None:
    """Serve orders until nobody is at the other end; in a child, run what was ordered."""
    link = socket.socket(fileno=int(sys.argv[1]))
    problem = why_not()
    fork_orders.send_answer(link, Answer(0, problem or fork_orders.READY))
    if problem:
        return
    gc.collect()
    gc.freeze()  # a collection in a child would copy page after page
    order = serve(link)
    if order is not None:
        run(order)


def why_not() -> str:
    """Why this process must not be forked; empty where it may."""
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if threads > 1:
        return f"{threads} threads run after the imports, and a fork would lose {threads - 1}"
    if torch.cuda.is_initialized():
        return "an import has opened a device"
    return ""


def serve(link: socket.socket) -> Order | None:
    """Fork for every order; returns the order in the child, None in this process when nobody orders any more."""
    while (received := fork_orders.receive_order(link)) is not None:
        order, log = received
        shadowed = shadows(order)
        if shadowed:
            fork_orders.send_answer(link, Answer(0, f"{shadowed} in the script's folder is another module than here"))
        else:
            pid = fork(order, log, link)
            if pid is None:
                return order
            fork_orders.send_answer(link, Answer(pid))
        os.close(log)
    return None


def shadows(order: Order) -> str:
    """A module of the script's own folder that goes by the name of one that is imported here; empty where none does."""
    folder = Path(order.folder, order.script).parent
    for entry in os.scandir(folder):
        name = entry.name.partition(".")[0]
        known = sys.modules.get(name)
        if known is None or not (entry.name.endswith((".py", ".so")) or (entry.is_dir() and "." not in entry.name)):
            continue
        file = getattr(known, "__file__", None)
        if entry.is_dir() and not (Path(entry.path, "__init__.py").exists() or file is None):
            continue  # a folder without code gives way to any module
        if file is None or not Path(file).is_relative_to(folder):
            return entry.name
    return ""


def fork(order: Order, log: int, link: socket.socket) -> int | None:
    """The pid of the new process, whose parent is gone when this returns; None in that process."""
    told, tells = os.pipe()
    may_go, goes = os.pipe()
    supervisor = os.getppid()
    between = os.fork()
    if between:
        os.close(tells)
        os.close(may_go)
        pid = int(os.read(told, _PID_BYTES))  # once it leads a session
        os.close(told)
        os.waitpid(between, 0)
        os.close(goes)
        return pid
    os.close(goes)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.write(tells, b"%d" % os.getpid())
    os.read(may_go, 1)  # its end: from then on it has the parent that it keeps
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
    """Be the process that ``python script args`` is, up to its end: as Python ends a script, by coming to the end."""
    os.chdir(order.folder)
    starts_here()
    config.replace_environment(order.environment)
    signal.set_wakeup_fd(-1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # as its import does; Python's own does so by itself after a fork
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
    """A fresh ``__main__`` as Python makes it for a script."""
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    vars(module).update(__builtins__=builtins, __cached__=None, __annotations__={})
    return module


if __name__ == "__main__":
    main()
