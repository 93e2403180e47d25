"""A proxy on loopback between the scheduler and its job, which can be cut for one process.

The scheduler listens on a different loopback address (SCHED_BIND) than the one in SCHED_HOST, and the proxy forwards
bytes between the two. A cut connection forwards nothing and stays open, as in a network that drops every packet. The
proxy needs no privileges and does not affect the ranks' own connections.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from pathlib import Path

OUTSIDE, INSIDE = "127.0.0.1", "127.0.0.2"
_LOOK_S = 0.05
_CHUNK_BYTES = 1 << 16
_LISTENING = "0A"
_MAPPED = "0000000000000000FFFF0000" if sys.byteorder == "little" else "00000000000000000000FFFF"


class PortForward:
    """Forwards one port from ``OUTSIDE`` to ``INSIDE`` while something listens inside.

    Otherwise the proxy does not listen either, so that a check for a scheduler gets a correct answer.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._cut: set[int] = set()  # pids of processes that are cut off
        self._open: dict[socket.socket, threading.Event] = {}  # callers, each with whether its bytes are forwarded
        self._thread = threading.Thread(target=self._serve, name="drill-line", daemon=True)
        self._thread.start()

    def cut(self, pid: int) -> int:
        """Stop forwarding to and from this process, and return how many of its open connections are cut."""
        with self._lock:
            self._cut.add(pid)
            ports = _ports_of(pid, self._port)
            cut = [flows for caller, flows in self._open.items() if _port_of(caller) in ports]
            for flows in cut:
                flows.clear()
            return len(cut)

    def mend(self) -> None:
        """Forward everything again, starting with the bytes that were held back."""
        with self._lock:
            self._cut.clear()
            for flows in self._open.values():
                flows.set()

    def close(self) -> None:
        """Close every connection, and stop listening."""
        self._is_over.set()
        self.mend()
        with self._lock:
            for caller in self._open:
                with contextlib.suppress(OSError):
                    caller.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _serve(self) -> None:
        listener: socket.socket | None = None
        while not self._is_over.is_set():
            is_there = _is_listening(INSIDE, self._port)
            if is_there and listener is None:
                listener = _listen(self._port)
            elif not is_there and listener is not None:
                listener.close()
                listener = None
            if listener is None:
                self._is_over.wait(_LOOK_S)
                continue
            with contextlib.suppress(OSError):
                caller, _ = listener.accept()
                self._take(caller)
        if listener is not None:
            listener.close()

    def _take(self, caller: socket.socket) -> None:
        caller.settimeout(None)
        try:
            callee = socket.create_connection((INSIDE, self._port), timeout=5)
        except OSError:
            caller.close()
            return
        callee.settimeout(None)
        flows = threading.Event()
        with self._lock:
            port = _port_of(caller)
            if not any(port in _ports_of(pid, self._port) for pid in self._cut):
                flows.set()
            self._open[caller] = flows
        for end in (caller, callee):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((caller, callee), (callee, caller)):
            threading.Thread(target=self._pass_on, args=(source, target, caller, flows), daemon=True).start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, caller: socket.socket, flows: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                flows.wait()
                target.sendall(data)
        flows.wait()  # while cut, the end of the other side is not forwarded either
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if self._open.pop(caller, None) is None:  # the other direction has ended already
                source.close()
                target.close()


def _listen(port: int) -> socket.socket | None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((OUTSIDE, port))
        listener.listen(128)
    except OSError:
        listener.close()
        return None
    listener.settimeout(_LOOK_S)
    return listener


def _port_of(caller: socket.socket) -> int:
    try:
        return int(caller.getpeername()[1])
    except OSError:
        return 0


def _rows() -> list[list[str]]:
    """Return the machine's TCP sockets (proc_net(5)): local and remote address, state, …, inode.

    ZeroMQ's sockets are IPv6 with mapped IPv4 addresses; these are returned as IPv4.
    """
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            found += Path("/proc/net", name).read_text().splitlines()[1:]
    rows = [line.split() for line in found]
    return [[row[0], *(address.removeprefix(_MAPPED) for address in row[1:3]), *row[3:]] for row in rows]


def _hex(address: str, port: int) -> str:
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"


def _is_listening(address: str, port: int) -> bool:
    wanted = _hex(address, port)
    return any(row[1] == wanted and row[3] == _LISTENING for row in _rows())


def _ports_of(pid: int, port: int) -> set[int]:
    """Return the local ports from which this process has connected to ``OUTSIDE``."""
    inodes = set()
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(entry.readlink()))
    wanted = _hex(OUTSIDE, port)
    return {int(row[1].partition(":")[2], 16) for row in _rows() if row[2] == wanted and f"socket:[{row[9]}]" in inodes}
