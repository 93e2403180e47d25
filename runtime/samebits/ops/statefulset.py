"""The size of a Kubernetes StatefulSet, read and changed by its ``scale`` subresource, from inside the cluster.

Here live the two requests and what a pod knows of its cluster (its service account's token, certificate and namespace;
kubernetes.io/docs/tasks/run-application/access-api-from-pod). Never here: which size is right. The one idea: the pods'
own names say who leaves (the highest go first) and SIGTERM says when, so a number is all that is to be told.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits import strict_json
from samebits.errors import UsageError
from samebits.named_file import read_named_file
from samebits.printable import printable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 1 << 20
MAX_TOKEN_BYTES = 1 << 16
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class StatefulSet:
    """One StatefulSet of this pod's namespace.

    Args:
        name: its name.
        host, port: of the API server, which is asked by https.
        account: the folder with this pod's ``token``, ``ca.crt`` and ``namespace``; each call reads them anew.
    """

    name: str
    host: str
    port: int
    account: Path = ACCOUNT

    @classmethod
    def of_this_pod(cls, name: str, environ: Mapping[str, str], account: Path = ACCOUNT) -> StatefulSet:
        """The one of this name in the cluster that this process runs in.

        Raises:
            UsageError: it runs in none.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdecimal() or not (account / "token").exists():
            raise UsageError(
                f"--statefulset {name}: this is no pod with a service account (KUBERNETES_SERVICE_HOST, "
                f"{account}/token). Fix: run it in the cluster, as deploy/kubernetes/autoscale does"
            )
        return cls(name, host, int(port), account)

    def size(self) -> int:
        """How many pods it is to have now.

        Raises:
            UsageError: the API server does not say so.
        """
        return self._ask("GET", None)

    def scale(self, size: int) -> None:
        """Have it be of this size.

        Raises:
            UsageError: the API server refuses, or is not reached.
        """
        found = self._ask("PATCH", {"spec": {"replicas": size}})
        if found != size:
            raise UsageError(f"statefulset {self.name}: asked for {size} pods, and the API server says {found}")

    def _ask(self, method: str, patch: Mapping[str, Any] | None) -> int:
        """The replicas of the Scale (autoscaling/v1) that is answered."""
        try:
            namespace = _text(self.account / "namespace", 253)
            path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{self.name}/scale"
            headers = {"Authorization": f"Bearer {_text(self.account / 'token', MAX_TOKEN_BYTES)}"}
            headers |= {"Accept": "application/json"}
            body = None
            if patch is not None:
                body, headers["Content-Type"] = json.dumps(patch), "application/merge-patch+json"  # RFC 7386
            trusted = ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=trusted)
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                text = answer.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise UsageError(
                f"statefulset {self.name}: the API server at {self.host}:{self.port} does not answer "
                f"({type(error).__name__}: {error}). Fix: look whether this pod may reach it"
            ) from None
        if answer.status != http.HTTPStatus.OK:
            raise UsageError(
                f"statefulset {self.name}: {method} {path}: status {answer.status}: {_reason(text)}. Fix: its service "
                "account needs get and patch of statefulsets/scale, as in deploy/kubernetes/autoscale"
            )
        try:
            replicas = strict_json.loads(text)["spec"].get("replicas", 0)  # 0 is left out there
        except (ValueError, KeyError, TypeError, AttributeError):
            replicas = None
        if type(replicas) is not int or replicas < 0:
            raise UsageError(f"statefulset {self.name}: the API server has answered no Scale: {_shown(text)}")
        return replicas


def _text(path: Path, most_bytes: int) -> str:
    text = read_named_file(path, most_bytes).strip()
    if not text or len(text) > most_bytes or not text.isascii():
        raise ValueError(f"{path} holds no {path.name}")
    return text.decode()


def _reason(text: bytes) -> str:
    """The message of a Status (meta/v1)."""
    try:
        return printable(str(strict_json.loads(text)["message"]), _SHOWN_CHARACTERS)
    except (ValueError, KeyError, TypeError):
        return _shown(text)


def _shown(text: bytes) -> str:
    return printable(text.decode(errors="replace"), _SHOWN_CHARACTERS)
