"""A process that imports once what its children need, and forks one for every Python command it receives.

Started by ``processes.WarmStarter`` with the names of the modules. A child becomes what the command would have become:
its own session, folder, environment, log, ``sys.argv``, ``sys.path`` and ``__main__``. There are two differences: it
imports nothing again, and its objects are not destroyed one by one at its end. If such a child starts a Python process
itself (``samebits run`` the scheduler, the workers and the zygote, ``run --check`` its job, a worker its checkpoint
writer), that one is forked as well: ``execvpe`` and ``Popen`` with a command that can be imitated load no new program,
and a process that was forked ahead becomes the writer.

The fork happens while there is a single thread, and the command runs at the bottom of its stack.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import inspect
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from samebits import start_folder
from samebits.store.child_processes import die_with
from tests.clusters.namespaces import fork_inside
from tests.system.processes import READ_AT_START, REPOSITORY, SAMEBITS, identity_of_child

_MAIN = Path(start_folder.__file__).with_name("__main__.py")
_HERE = {name: os.environ.get(name) for name in READ_AT_START}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ABOVE = 200
"""Descriptors from here on do not collide with others."""
_ZYGOTE = ("-P", "-m", "samebits.training.zygote")
_exec = os.execvpe
_EXECUTE_CHILD = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_path: list[str] = []  # the module path without the entries of PYTHONPATH


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork for every order; return the order in the child, None in the parent when the other end is closed.

    Then the tests are over or were killed, and children that are left would wait half an hour for their job.
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
                # Opened before the answer: a caller that reads a pipe closes its own write end.
                log = open_log(order) if order["inside"] is None else -1
                pid = fork_inside(order["inside"])
                if pid == 0:
                    for other in children:
                        os.close(other)
                    return order | {"opened": log}
                if log >= 0:
                    os.close(log)
                descriptor = os.pidfd_open(pid)
                children[descriptor] = pid
                poll.register(descriptor, select.POLLIN)
                _tell(link, {"pid": pid, "started_at": identity_of_child(pid).started_at})


def _reap(pid: int) -> dict[str, int]:
    _, status = os.waitpid(pid, 0)
    return {"pid": pid, "status": os.waitstatus_to_exitcode(status)}


def _tell(link: socket.socket, message: dict[str, int]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def open_log(order: dict[str, Any]) -> int:
    return os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def become(order: dict[str, Any]) -> None:
    """Turn this child into a process that was started to run the command."""
    os.setsid()
    os.chdir(order["folder"])
    log = order["opened"] if order["opened"] >= 0 else open_log(order)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # otherwise it inherits an ignored SIGHUP if the tests run under nohup
    os.execvpe = _exec_warm
    subprocess.Popen = _ForkedCommand  # type: ignore[misc]
    _take(order["words"], order["environment"])
    _keep_writer_ready(order["environment"])


def _exec_warm(file: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Do what ``os.execvpe`` does, without a new program if ``run`` supports the Python command."""
    words = list(words)
    is_known = tuple(words[1:4]) in (SAMEBITS, _ZYGOTE) or (len(words) > 1 and words[1].endswith(".py"))
    if file != sys.executable or not is_known or {name: environment.get(name) for name in READ_AT_START} != _HERE:
        _exec(file, words, environment)
    gc.freeze()  # an object collected later would close a descriptor that has another owner by then
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as execve(2) does
        with contextlib.suppress(OSError):
            if int(name) > 2 and fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python starts
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    _take(words[1:], environment)
    _keep_writer_ready(environment)
    run(words[1:])


def _take(words: list[str], environment: Mapping[str, str]) -> None:
    """Make this process's environment, command line and standard streams those of ``python WORDS``."""
    start_folder.starts_here()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_path]
    _show("environ", [f"{name}={text}" for name, text in environment.items()])
    _show("cmdline", [sys.executable, *words])
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    encoding = "utf-8" if sys.__stdout__ is None else sys.__stdout__.encoding
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=encoding,
            errors="strict" if name == "stdout" else "backslashreplace",
            line_buffering=name == "stderr",
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(what: str, texts: Sequence[str]) -> None:
    """Let ``/proc/PID/<what>`` show these texts, in memory reserved when this process started.

    The environment's own space is free for it, since its content has been replaced. A list that does not fit is
    omitted.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    first = 45 if what == "cmdline" else 47  # proc(5): arg_start, arg_end, env_start, env_end
    begin, end = map(int, fields[first : first + 2])
    shown = b"".join(os.fsencode(text) + b"\0" for text in texts)
    room = end - begin
    if len(shown) < room:
        ctypes.memmove(begin, shown.ljust(room, b"\0"), room)


class _ForkedCommand(subprocess.Popen[bytes]):
    """Forks for a ``samebits`` command instead of starting an interpreter, while there is a single thread."""

    def _execute_child(self, *values: Any, **named: Any) -> None:
        given = _EXECUTE_CHILD.bind(self, *values, **named).arguments
        words, environment = list(given["args"]), given["env"]
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if words[:4] != [sys.executable, *SAMEBITS] or environment is None or threads > 1:
            super()._execute_child(*values, **named)  # type: ignore[misc]
            return
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                for number, descriptor in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
                    if descriptor >= 0:
                        os.dup2(descriptor, number)
                os.chdir(given["cwd"] or ".")
                if given["start_new_session"]:
                    os.setsid()
                if given["preexec_fn"] is not None:
                    given["preexec_fn"]()
                _exec_warm(sys.executable, words, environment)
            finally:
                os._exit(127)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _WriterAhead:
    """Replaces the module ``subprocess`` where a worker starts its checkpoint writer.

    Args:
        link: to the process that was forked ahead; the next ``Popen`` makes it become the command.
        pid: that process's pid.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self, link: socket.socket, pid: int) -> None:
        self._link: socket.socket | None = link
        self._pid = pid

    def Popen(self, words: Sequence[str], *, pass_fds: Sequence[int], **options: Any) -> subprocess.Popen[bytes]:
        if (link := self._link) is None or list(words[:3]) != [sys.executable, "-P", "-c"]:
            return subprocess.Popen(words, pass_fds=pass_fds, **options)
        self._link = None
        order = {"words": words[1:], "folder": str(Path.cwd()), "environment": dict(os.environ), "opened": pass_fds}
        with link:
            socket.send_fds(link, [json.dumps(order).encode()], list(pass_fds))
            begun = link.recv(1)
        if not begun:  # it was killed
            os.waitpid(self._pid, 0)
            return subprocess.Popen(words, pass_fds=pass_fds, **options)
        child: subprocess.Popen[bytes] = subprocess.Popen.__new__(subprocess.Popen)
        vars(child).update(args=words, pid=self._pid, returncode=None, stdin=None, stdout=None, stderr=None)
        vars(child).update(_child_created=True, _waitpid_lock=threading.Lock(), _sigint_wait_secs=0.25)
        return child


def _keep_writer_ready(environment: Mapping[str, str]) -> None:
    """Fork the process that becomes this worker's checkpoint writer, while there is a single thread.

    Until then it stays in the root folder without the job's environment, so that it is not taken for part of it, and
    ends with its parent.
    """
    if environment.get("ROLE") != "worker" or "samebits.service.copies.copying_writer" not in sys.modules:
        return
    from samebits.store.checkpoint import writer

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        writer.subprocess = _WriterAhead(ours, pid)  # type: ignore[attr-defined]
        return
    ours.close()
    die_with(parent)
    os.chdir("/")
    _show("environ", [])
    _show("cmdline", [])
    message, received, _, _ = socket.recv_fds(theirs, 1 << 18, 16)
    if not message:
        os._exit(0)
    order = json.loads(message)
    lasts = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for one in (theirs.detach(), *received)]
    for descriptor, last in zip(order["opened"], lasts[1:], strict=True):
        os.dup2(last, descriptor)
        os.close(last)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.setpgid(0, 0)
    os.chdir(order["folder"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)  # a writer outlives its trainer
    _take(order["words"], order["environment"])
    warnings.simplefilter("ignore", RuntimeWarning)  # runpy warns that the module is imported already
    os.write(lasts[0], b"1")
    os.close(lasts[0])
    run(order["words"])


def run(words: list[str]) -> NoReturn:
    """Run ``python WORDS`` from its first line to its end."""
    status = 0
    try:
        if words[:2] == ["-P", "-c"]:
            sys.argv = ["-c", *words[3:]]
            exec(compile(words[2], "<string>", "exec"), vars(types.ModuleType("__main__")))
        elif words[:3] == list(SAMEBITS):
            from samebits.__main__ import main

            sys.argv = [str(_MAIN), *words[3:]]
            sys.exit(main())
        elif tuple(words[:3]) == _ZYGOTE:
            sys.argv = words[2:]
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        elif words[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            _run_script(words)
    except SystemExit as leaving:
        status = _status_of(leaving)
    except KeyboardInterrupt:
        _leave(None)
    except BaseException as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename in (__file__, str(Path(__file__))):
            own = own.tb_next
        sys.excepthook(type(error), error.with_traceback(own), own)
        status = 1
    _leave(status)


def _run_script(words: list[str]) -> None:
    sys.argv = list(words)
    sys.orig_argv = [sys.executable, *words]
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    module = types.ModuleType("__main__")
    module.__file__ = words[0]
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", words[0])
    vars(module).update(__builtins__=builtins, __cached__=None, __annotations__={})
    sys.modules["__main__"] = module
    with io.open_code(words[0]) as file:
        code = compile(file.read(), words[0], "exec", dont_inherit=True)
    exec(code, vars(module))


def _status_of(leaving: SystemExit) -> int:
    """Return the status as Python does on ``sys.exit``."""
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def _leave(status: int | None) -> NoReturn:
    """End as Python does, in the same order, up to the destruction of its objects; None: by the SIGINT it received.

    In a forked process destroying them copies page after page of shared memory, which costs as much as all else it
    does. Newly started processes (``ColdStarter``, the scripts) end as usual.
    """
    try:
        if status is None:
            traceback.print_exc()
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
        if status is None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1 if status is None else status)


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2].split():
        importlib.import_module(name)
    named = [str(REPOSITORY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]  # it was started in the first
    _path[:] = [entry for entry in sys.path if entry not in named]
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"a fork would lose {threads - 1} threads"
    gc.freeze()
    order = serve(link)
    link.close()
    if order is not None:
        become(order)
        run(order["words"])


if __name__ == "__main__":
    main()
