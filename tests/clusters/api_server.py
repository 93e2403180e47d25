"""A small HTTPS server that knows one StatefulSet's ``scale`` subresource, as strict as the documentation of it.

kubernetes.io/docs/reference/kubernetes-api (StatefulSet, partially update scale) and RFC 7386. Its certificate is of an
authority of its own, as a cluster's is. Never here: a promise.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "a.token.of-this.pod"
PATH = "/apis/apps/v1/namespaces/jobs/statefulsets/samebits-worker/scale"


@dataclass
class ApiServer:
    """Serves until closed. ``account`` is what a pod of the cluster finds in its service account's folder."""

    folder: Path
    replicas: int = 2
    answer: tuple[int, bytes] | None = None  # in place of the right one
    asked: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        key, certificate = self.folder / "key", self.folder / "ca.crt"
        words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        words += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=test", "-days", "2"]
        subprocess.run([*words, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True, timeout=60)
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "namespace").write_text("jobs")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self._server.server_port)}

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def scale(self) -> dict[str, Any]:
        """A Scale (autoscaling/v1); where a number is 0 it is left out, as Go's encoder does."""
        spec = {"replicas": self.replicas} if self.replicas else {}
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": "samebits-worker", "namespace": "jobs"},
            "spec": spec,
            "status": {"replicas": self.replicas},
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_PATCH(self) -> None:
                if self.headers["Content-Type"] != "application/merge-patch+json":
                    return self._send(
                        415, {"kind": "Status", "message": "the body of the request was in an unknown format"}
                    )
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                return None

            def _answer(self, patch: dict[str, Any] | None) -> None:
                server.asked.append((self.command, self.path))
                if server.answer is not None:
                    self._send(*server.answer)
                elif self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self._send(401, {"kind": "Status", "message": "Unauthorized"})
                elif self.path != PATH:
                    self._send(404, {"kind": "Status", "message": "statefulsets.apps not found"})
                else:
                    if patch is not None:
                        assert patch.keys() == {"spec"} and patch["spec"].keys() == {"replicas"}
                        server.replicas = patch["spec"]["replicas"]
                    self._send(200, server.scale())

            def _send(self, status: int, content: dict[str, Any] | bytes) -> None:
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        return Handler
