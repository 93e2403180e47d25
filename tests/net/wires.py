"""Sockets between or in place of the two ends: one that records, one that hangs up."""

from __future__ import annotations

import contextlib
import socket
import threading

from samebits.net.curve import ClusterKeys


class Tap:
    """Forward every connection to a port on loopback and record both directions."""

    def __init__(self, to_port: int) -> None:
        self.seen = b""
        self.sent = b""  # the part that the connecting side sent
        self._to_port = to_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return  # closed
            other = socket.create_connection(("127.0.0.1", self._to_port))
            self._open += [one, other]
            for source, sink in ((one, other), (other, one)):
                thread = threading.Thread(target=self._forward, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                self.sent += data if source in self._open[::2] else b""
                sink.sendall(data)
        except OSError:
            return  # closed

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed by its peer
        for thread in self._threads:
            thread.join()
        for connection in self._open:
            connection.close()


class Closer:
    """Accept every connection and close it at once, like a proxy without a backend."""

    def __init__(self) -> None:
        self.closed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            connection.close()
            self.closed += 1

    def __enter__(self) -> Closer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class Turnstile:
    """Greet every client as a scheduler does, then close.

    Args:
        keys: its own key pair; with one it greets with CURVE.
        closes_silent: also close a client that is silent after its greeting.
    """

    def __init__(self, keys: ClusterKeys | None, *, closes_silent: bool) -> None:
        self.closed = 0
        mechanism = b"NULL" if keys is None else b"CURVE"
        self._greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
        self._closes_silent = closes_silent
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._greet, args=(connection,)))
            self._threads[-1].start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.sendall(self._greeting)
            wanted = len(self._greeting) + (0 if self._closes_silent else 1)
            heard = b""
            while len(heard) < wanted and (more := connection.recv(wanted - len(heard))):
                heard += more
            self.closed += 1  # before the other end can see it
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed by its peer

    def __enter__(self) -> Turnstile:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for connection in self._open:
            with contextlib.suppress(OSError):  # closed by its peer
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._open:
            connection.close()
