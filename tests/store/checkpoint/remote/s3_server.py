"""A real S3 server (moto) on loopback, in a thread of the test's process, that can stop and restart.

A test may hook every request just before it is answered, or after the bucket has changed and before the answer is sent.
The buckets' content survives :meth:`S3Server.stop`.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

import boto3
from moto import settings
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.moto_api._internal import moto_api_backend
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

BUCKET = "points"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "not-a-secret"}


class Silent(WSGIRequestHandler):
    def log(self, *args: Any) -> None:  # type: ignore[override]
        """Do not log requests."""


class S3Server:
    """A running server with one empty bucket."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self.before: Callable[[str], None] = lambda request: None
        self.after: Callable[[str], None] = lambda request: None
        self.requests: list[str] = []
        self._server: BaseWSGIServer | None = None
        self._also: list[tuple[BaseWSGIServer, threading.Thread]] = []
        self._port = 0
        self._empty()
        self.start()
        self.client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="tests",
            aws_secret_access_key="not-a-secret",
        )
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment that a client needs to find it."""
        # the client's own timeouts are seconds
        quickly = {"AWS_MAX_ATTEMPTS": "1", "AWS_EC2_METADATA_DISABLED": "true"}
        return {**CREDENTIALS, **quickly, "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": self.endpoint}

    def start(self) -> None:
        """Listen on the same port as before."""
        self._server = make_server("127.0.0.1", self._port, self._answer, threaded=True, request_handler=Silent)
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; further requests are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def listen_also(self, listening: socket.socket) -> str:
        """Also answer on this socket, which may be in another network namespace; return its URL."""
        address, port = listening.getsockname()[:2]
        server = make_server(address, port, self._answer, threaded=True, request_handler=Silent, fd=listening.detach())
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        self._also.append((server, thread))
        return f"http://{address}:{port}"

    def close(self) -> None:
        """Stop for good and discard all content."""
        self.stop()
        for server, thread in self._also:
            server.shutdown()
            server.server_close()
            thread.join()
        self._empty()

    def check_credentials(self, wanted: bool) -> None:
        """From now on, refuse every key that was not created here."""
        settings.INITIAL_NO_AUTH_ACTION_COUNT = 0 if wanted else float("inf")

    # ---- content of the bucket

    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET)
        return sorted(one["Key"] for one in found.get("Contents", ()))

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        is_clients = "boto3/" not in environ.get("HTTP_USER_AGENT", "").lower()
        if is_clients:
            self.requests.append(request)
            try:
                self.before(request)
            except ConnectionAbortedError:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)  # otherwise the client waits for an answer
                raise
        answered = list(self._app(environ, start_response))
        if is_clients:
            self.after(request)
        return answered

    @staticmethod
    def _empty() -> None:
        moto_api_backend.reset()
        assert not s3_backends[DEFAULT_ACCOUNT_ID]["global"].buckets if DEFAULT_ACCOUNT_ID in s3_backends else True


def step_of(name: str) -> int:
    """Return the step in the name of a point's object."""
    found = re.search(r"step_(\d+)", name)
    assert found is not None, name
    return int(found[1])
