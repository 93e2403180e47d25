"""An etcd of one process: the gateway's four requests over real HTTP, with faults between applying and answering."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

from samebits.etcd_place import EtcdPlace


class Etcd:
    """The keys, and the faults that are drawn for each write.

    Attributes:
        keys: value and revision of the last change, by key.
        faults: shares of writes that are lost, whose answer is lost, that are applied after later writes without an
            answer, and that are applied at once and again after later writes.
        is_full: whether writes are refused as by a full database.
        fills: whether the next write fills it: it is applied, and refused all the same.
        writes: how many were asked for.
        stale: an earlier state that half of all reads are answered from, as a suspended member does it.
    """

    def __init__(
        self, seed: int = 0, lost: float = 0.0, unanswered: float = 0.0, late: float = 0.0, twice: float = 0.0
    ) -> None:
        self.keys: dict[bytes, tuple[bytes, int]] = {}
        self.faults = (lost, unanswered, late, twice)
        self.is_full = False
        self.fills = False
        self.writes = 0
        self.stale: Etcd | None = None
        self._late: list[tuple[int, dict[str, Any]]] = []
        self._random = Random(seed)
        self._revision = 0
        self._lock = threading.Lock()

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any] | None:
        """Apply one request; None: the connection is closed without an answer."""
        with self._lock:
            if path == "/v3/kv/range":
                if self.stale is not None and self._random.random() < 0.5:
                    return self.stale._range(request)
                return self._range(request)
            assert path == "/v3/kv/txn", path
            if self.fills:
                self._write(request)
                self.fills, self.is_full = False, True
            if self.is_full:
                return {"code": 8, "message": "etcdserver: mvcc: database space exceeded"}
            self.writes += 1
            lost, unanswered, late, twice = self.faults
            drawn = self._random.random()
            if drawn >= 1.0 - twice:
                self._late.append((self.writes + self._delay(), request))
            if drawn < late:
                self._late.append((self.writes + self._delay(), request))
                return None
            answer = None if drawn < late + lost else self._write(request)
            for due, waiting in self._late:
                if due <= self.writes:
                    self._write(waiting)
            self._late = [(due, waiting) for due, waiting in self._late if due > self.writes]
            return None if drawn < late + lost + unanswered else answer

    def _delay(self) -> int:
        """Return after how many further writes a late one is applied: usually a few, sometimes a hundred."""
        return 1 + int(self._random.expovariate(1 / self._random.choice((3, 3, 30))))

    def lose_leader(self) -> None:
        """Lose some of the writes that are on the way; the others are applied later."""
        with self._lock:
            self._late = [one for one in self._late if self._random.random() < 0.5]

    def _write(self, request: dict[str, Any]) -> dict[str, Any]:
        self._revision += 1
        holds = all(self._holds(one) for one in request["compare"])
        for change in request["success"] if holds else []:
            if put := change.get("request_put"):
                self.keys[_bytes(put["key"])] = (_bytes(put["value"]), self._revision)
            else:
                first, end = (_bytes(change["request_delete_range"][name]) for name in ("key", "range_end"))
                self.keys = {key: value for key, value in self.keys.items() if not first <= key < end}
        return {"header": self._header()} | ({"succeeded": True} if holds else {})

    def _holds(self, one: dict[str, Any]) -> bool:
        value, _ = self.keys.get(_bytes(one["key"]), (None, 0))
        return value is None if one["target"] == "CREATE" else value == _bytes(one["value"])

    def _header(self) -> dict[str, str]:
        return {"revision": str(self._revision)}

    def suspend_a_member(self) -> None:
        """Keep the present state as the one that a member answers from."""
        with self._lock:
            self.stale = Etcd()
            self.stale.keys, self.stale._revision = dict(self.keys), self._revision

    def _range(self, request: dict[str, Any]) -> dict[str, Any]:
        first = _bytes(request["key"])
        end = _bytes(request["range_end"]) if "range_end" in request else first + b"\0"
        found = sorted(key for key in self.keys if first <= key < end)
        most = request.get("limit", len(found))
        pairs = [
            {"key": _text(key), "value": "" if request.get("keys_only") else _text(self.keys[key][0])}
            | {"mod_revision": str(self.keys[key][1])}
            for key in found[:most]
        ]
        return {
            "header": self._header(),
            "kvs": pairs,
            "count": str(len(found)),
            **({"more": True} if len(found) > most else {}),
        }


@contextmanager
def served(etcd: Etcd) -> Iterator[EtcdPlace]:
    """Serve the model on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # one packet an answer, which no delayed acknowledgement holds back

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = etcd.answer(self.path, request)
            if answer is None:
                self.close_connection = True
                return
            data = json.dumps(answer).encode()
            self.send_response(503 if "code" in answer else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield EtcdPlace.parse(f"etcd://127.0.0.1:{server.server_port}/jobs/digits")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
