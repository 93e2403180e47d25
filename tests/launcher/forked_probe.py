"""Print what this script sees of its own process, to compare two ways of starting it."""

import atexit
import json
import os
import pathlib
import random
import signal
import sys
import threading

import numpy
import torch


class Own:
    """A class of this script: to be pickled by name it must be found in ``__main__``."""


DISPOSITIONS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE")
seen = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "name": __name__,
    "file": __file__,
    "spec": __spec__ is None,
    "main": sys.modules["__main__"].__dict__ is globals() and Own.__module__,
    "path": sys.path[0],
    "cwd": str(pathlib.Path.cwd()),
    "node": os.environ.get("NODE_ID"),
    "leads": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "dispositions": [str(signal.getsignal(getattr(signal, name))) for name in DISPOSITIONS],
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "stdin": os.read(0, 1).decode(),
    "threads": sum(1 for _ in pathlib.Path("/proc/self/task").iterdir()),
    "python_threads": threading.active_count(),
    "descriptors": sorted({str(pathlib.Path(f"/proc/self/fd/{one}").readlink()) for one in (0, 1, 2)}),
    "line_buffering": sys.stdout.line_buffering,
    "warn": sys.warnoptions,
    "torch_threads": torch.get_num_threads(),
    "environment": sorted(set(os.environ) - {"NODE_ID", "ROLE"}),
}
unlike = {
    "torch": torch.initial_seed(),
    "random": random.random(),
    "numpy": float(numpy.random.rand()),
    "pid": os.getpid(),
}
atexit.register(lambda: print("at the exit", flush=True))
print(json.dumps([seen, unlike]), flush=True)
kept_open = pathlib.Path("kept_open.txt").open("w")  # noqa: SIM115
kept_open.write("flushed by the interpreter's end")


def fails() -> None:
    raise ValueError(f"of {sys.argv[1]}")


if sys.argv[1] == "raises":
    fails()
sys.exit(int(sys.argv[2]))
