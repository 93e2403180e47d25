"""Three real etcd servers, which a test may kill, stop and start again: on loopback, or each on a host of its own."""

from __future__ import annotations

import json
import shutil
import signal
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samebits.etcd_place import EtcdAccess, EtcdPlace
from tests.clusters.namespaces import Host, threads_inside
from tests.system.processes import free_port

ETCD = shutil.which("etcd")
READY_S = 60.0


class EtcdCluster:
    """The servers of one etcd.

    Args:
        folder: for their data and logs.
        arguments: the arguments of every server.
        access: the client that the servers' TLS options in ``arguments`` admit; None without TLS.
        hosts: where the members run, one on each; none: on loopback. A lost host's member is killed by the caller.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        members: int = 3,
        access: EtcdAccess | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self._context = None
        if access is not None:
            self._context = ssl.create_default_context(cafile=access.authority)
            if access.certificate is not None:
                self._context.load_cert_chain(access.certificate, access.key)
        self._folder, self._arguments = folder, arguments
        self._clients = [free_port() for _ in range(members)]
        self._peers = [free_port() for _ in range(members)]
        self._servers: list[subprocess.Popen[bytes] | None] = [None] * members
        self._hosts = hosts
        self._addresses = [host.address() for host in hosts] or ["127.0.0.1"] * members
        self.inside: list[ThreadPoolExecutor] = [threads_inside(host) for host in hosts]
        """A thread on each host, in its network."""
        for member in range(members):
            self.start(member)

    @property
    def members(self) -> range:
        return range(len(self._servers))

    def place(self, prefix: str = "/jobs/digits") -> EtcdPlace:
        """Return where a job's journal lies in it."""
        members = (f"{address}:{port}" for address, port in zip(self._addresses, self._clients, strict=True))
        return EtcdPlace.parse(f"etcd://{','.join(members)}{prefix}")

    def url(self, member: int) -> str:
        """Return the member's address for clients."""
        return f"{'http' if self._context is None else 'https'}://{self._addresses[member]}:{self._clients[member]}"

    def start(self, member: int) -> None:
        peers = [f"http://{address}:{port}" for address, port in zip(self._addresses, self._peers, strict=True)]
        client, peer = self.url(member), peers[member]
        cluster = ",".join(f"m{other}={url}" for other, url in enumerate(peers))
        inside = ("nsenter", "--target", str(self._hosts[member].pid), "--net", "--mount") if self._hosts else ()
        assert ETCD is not None
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._servers[member] = subprocess.Popen(
                [
                    *(*inside, ETCD, "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}")),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster, *self._arguments),
                ],
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Wait until a majority has a leader."""
        deadline = time.monotonic() + READY_S
        while self.leader() is None:
            assert time.monotonic() < deadline, [log.read_text()[-500:] for log in sorted(self._folder.glob("m*.log"))]
            time.sleep(0.05)

    def leader(self, asked: Iterable[int] | None = None) -> int | None:
        """Return the member that leads, as the first of the ``asked`` members that answers says."""
        for member in self.members if asked is None else asked:
            if self._servers[member] is not None and (status := self._status(member)):
                named = [other for other in self.members if self._id(other) == status["leader"]]
                if named:
                    return named[0]
        return None

    def signal(self, member: int, number: int) -> None:
        """Send a signal to one server; SIGKILL also waits for its end."""
        server = self._servers[member]
        assert server is not None
        server.send_signal(number)
        if number == signal.SIGKILL:
            server.wait()
            self._servers[member] = None

    def wait(self, member: int) -> None:
        """Wait until a server has ended by itself."""
        server = self._servers[member]
        assert server is not None
        server.wait(READY_S)
        self._servers[member] = None

    def close(self) -> None:
        for member, server in enumerate(self._servers):
            if server is not None:
                self.signal(member, signal.SIGKILL)
        for threads in self.inside:
            threads.shutdown()

    def _id(self, member: int) -> str | None:
        status = self._status(member) if self._servers[member] is not None else None
        return status["header"]["member_id"] if status else None

    def _status(self, member: int) -> dict[str, Any] | None:
        if self._hosts:
            return self.inside[member].submit(self._answered_status, member).result()
        return self._answered_status(member)

    def _answered_status(self, member: int) -> dict[str, Any] | None:
        url = f"{self.url(member)}/v3/maintenance/status"
        try:
            with urllib.request.urlopen(url, b"{}", timeout=2, context=self._context) as answer:
                found: dict[str, Any] = json.load(answer)
        except OSError:
            return None
        return found if found.get("leader", "0") != "0" else None


@contextmanager
def cluster_in(
    folder: Path, *arguments: str, members: int = 3, access: EtcdAccess | None = None, hosts: Sequence[Host] = ()
) -> Iterator[EtcdCluster]:
    """Run an etcd until the block ends."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = EtcdCluster(folder, *arguments, members=members, access=access, hosts=hosts)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.close()
