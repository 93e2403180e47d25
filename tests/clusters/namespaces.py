"""Simulated hosts on one machine: own network, host name, pids and /dev/shm, on one switch that can be cut.

A host is a process that only holds namespaces (namespaces(7)). Everything started inside dies with it, as in a power
cut, and everything made here is removed when the test dies. The machine's own network is untouched. Needs root and
iproute2. A link that loses everything is a neighbour entry with an unused address (ip-neighbour(8)): the sender gets no
error, one direction is cut at a time, and no packet filter is needed.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

NEW_NS, NEW_UTS, NEW_PID, NEW_NET, NEW_TIME = 0x20000, 0x4000000, 0x20000000, 0x40000000, 0x80  # sched.h, CLONE_NEW…
Family = Literal["IPv4", "IPv6"]
NOBODY = "02:00:00:00:00:fe"  # a locally administered address that no interface here has
SHARED_MEMORY_MIB = 256
_PATIENCE_S = 60.0


def missing() -> str:
    """Return briefly why this machine cannot have hosts, or an empty string."""
    try:
        with Switch():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces and iproute2 are needed, as root: {error}"


def fork_inside(host: int | None) -> int:
    """``os.fork`` into the namespaces of the process with the pid ``host``; for a process with one thread.

    The parent gets the child's pid as the parent sees it.
    """
    if host is None:
        return os.fork()
    target, own = os.pidfd_open(host), os.pidfd_open(os.getpid())
    try:
        _enter(target, NEW_PID)  # of the children that follow: pid_namespaces(7)
        try:
            pid = os.fork()
        except BaseException:
            _enter(own, NEW_PID)
            raise
        if pid == 0:
            _enter(target, NEW_NET | NEW_UTS | NEW_NS | NEW_TIME)
        else:
            _enter(own, NEW_PID)
    finally:
        os.close(target)
        os.close(own)
    return pid


def threads_inside(host: Host) -> ThreadPoolExecutor:
    """Return a thread of this process, as a pool of one, whose sockets are made in the host's network."""

    def enter() -> None:
        target = os.pidfd_open(host.pid)
        try:
            _enter(target, NEW_NET)  # of this thread alone: setns(2)
        finally:
            os.close(target)

    return ThreadPoolExecutor(1, initializer=enter)


def listening_inside(host: Host) -> socket.socket:
    """Return a socket of this process that listens in the host's network, on its address and a free port."""
    with threads_inside(host) as inside:
        return inside.submit(socket.create_server, (host.address(), 0)).result()


def _enter(process: int, namespaces: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(process, namespaces) != 0:  # a pidfd since Linux 5.8: setns(2)
        raise OSError(ctypes.get_errno(), f"setns({namespaces:#x}): {os.strerror(ctypes.get_errno())}")


class Holder:
    """A process that holds new namespaces until it is ended, or the test is.

    Args:
        program: what the shell in it does first.
        namespaces: unshare(1)'s options.
    """

    def __init__(self, program: str, *namespaces: str) -> None:
        serve = "set -e; " + program + '; echo "ready $$"; while read -r _; do :; done'
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", serve],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if not self._process.stdout.readline().startswith(b"ready"):
            self._process.wait(_PATIENCE_S)
            raise OSError(self._process.stderr.read().decode(errors="replace").strip())
        # With a new pid namespace `unshare` has forked: the shell is its child (proc(5)), and pid 1 in there.
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(children[0]) if children else self._process.pid

    def run(self, *words: str) -> str:
        """Run a command in this holder's network, on this machine's files; return its output."""
        done = subprocess.run(
            ["nsenter", "--target", str(self.pid), "--net", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End it, and with it all that runs in its namespaces."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()  # the shell reads its end, and nothing in a pid namespace outlives its pid 1
        self._process.wait(_PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Link:
    """One interface of a host: its name there, the number of its network, and the addresses in it."""

    interface: str
    network: int
    number: int

    @property
    def mac(self) -> str:
        return f"02:00:00:00:{self.network:02x}:{self.number:02x}"

    def address(self, family: Family) -> str:
        return f"10.99.{self.network}.{self.number}" if family == "IPv4" else f"fd00:99:{self.network}::{self.number}"


class Host:
    """One host on a switch: reached at ``address()``, its processes started with ``fork_inside(host.pid)``."""

    def __init__(self, switch: Switch, number: int, name: str, networks: int, up_s: int) -> None:
        self.name = name
        self.number = number
        program = (
            "mount --make-rprivate /"
            f"; mount -t tmpfs -o mode=1777,size={SHARED_MEMORY_MIB}m samebits /dev/shm"
            f"; hostname {name}"
            "; ip link set lo up"
        )
        clocks = ("--time", "--boottime", str(up_s), "--monotonic", str(up_s)) if up_s else ()
        apart = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", *clocks)
        self._holder = Holder(program, *apart)
        self.links = [Link(f"eth{network}", network, number) for network in range(networks)]
        for link in self.links:
            switch.connect(self, link)

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def memory(self) -> Path:
        """Return this host's /dev/shm as seen from outside the host."""
        return Path(f"/proc/{self.pid}/root/dev/shm")

    def address(self, family: Family = "IPv4", network: int = 0) -> str:
        return self.links[network].address(family)

    def run(self, *words: str) -> str:
        return self._holder.run(*words)

    def cut_towards(self, other: Host) -> None:
        """Lose everything that this host sends to the other one, without an error."""
        self._set_neighbour(other, NOBODY)

    def mend_towards(self, other: Host) -> None:
        """Undo :meth:`cut_towards`."""
        self._set_neighbour(other, None)

    def _set_neighbour(self, other: Host, mac: str | None) -> None:
        for mine, theirs in zip(self.links, other.links, strict=True):
            for family in ("IPv4", "IPv6"):
                entry = ("lladdr", mac or theirs.mac, "nud", "permanent", "dev", mine.interface)
                self.run("ip", "neighbour", "replace", theirs.address(family), *entry)

    def unplug(self) -> None:
        """Cut this host off from all others, both ways."""
        for link in self.links:
            self.run("ip", "link", "set", link.interface, "down")

    def slow_down(self, rate: str, network: int = 0) -> None:
        """Limit the interface's sending rate, such as ``10mbit`` (tc-tbf(8))."""
        limit = ("root", "tbf", "rate", rate, "burst", "16kb", "latency", "500ms")
        self.run("tc", "qdisc", "replace", "dev", self.links[network].interface, *limit)

    def lose_packets(self, percent: int) -> None:
        """Drop this percentage of arriving packets at random (nft(8))."""
        rule = "table inet lossy {{ chain in {{ type filter hook input priority 0; iif lo accept; "
        rule += f"numgen random mod 100 < {percent} drop; }}; }}"
        self.run("nft", rule)

    def segments_sent_again(self) -> int:
        """Return this host's number of retransmitted TCP segments (RFC 4022, tcpRetransSegs)."""
        names, values = (
            line.split() for line in self.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("RetransSegs")])

    def bytes_sent(self, network: int) -> int:
        """Return the bytes sent by the interface since it was made."""
        text = self.run("cat", "/proc/net/dev")  # /proc/net is the reader's own network: proc_pid_net(5)
        fields = next(line for line in text.splitlines() if f"{self.links[network].interface}:" in line).split()
        return int(fields[9])

    def lose(self) -> None:
        """Simulate a power cut: off the network at once, so that no peer notices, then kill every process and the
        memory.
        """
        self.unplug()
        self.close()

    def close(self) -> None:
        self._holder.close()


class Switch:
    """Connects hosts: one bridge for each network, in a network namespace of its own. A context manager."""

    def __init__(self, networks: int = 1) -> None:
        self.networks = networks
        bridges = "; ".join(
            f"ip link add br{network} type bridge && ip link set br{network} up" for network in range(networks)
        )
        self._holder = Holder(bridges, "--net")
        self.hosts: list[Host] = []
        self._made = self._ports = 0

    def host(self, name: str, number: int | None = None, up_s: int = 0) -> Host:
        """Add a host with an address in every network: its own, or that of the lost host with this number.

        It reports an uptime ``up_s`` longer than this machine's (time_namespaces(7)).
        """
        if number is None:
            self._made += 1
        made = Host(self, number or self._made, name, self.networks, up_s)
        self.hosts.append(made)
        return made

    def connect(self, host: Host, link: Link) -> None:
        self._ports += 1  # a lost host's port is removed with its namespace, some time later
        port = f"port{self._ports}"
        bridge = f"br{link.network}"
        self._holder.run(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", link.interface),
            *("address", link.mac, "netns", str(host.pid)),
        )
        self._holder.run("ip", "link", "set", port, "master", bridge, "up")
        host.run("ip", "address", "add", f"{link.address('IPv4')}/24", "dev", link.interface)
        host.run("ip", "address", "add", f"{link.address('IPv6')}/64", "dev", link.interface, "nodad")
        host.run("ip", "link", "set", link.interface, "up")

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every remaining host, then the switch."""
        for host in self.hosts:
            host.close()
        self._holder.close()


def cut_off(host: Host, others: Iterable[Host]) -> None:
    """Drop all packets between a host and others, in both directions."""
    for other in others:
        host.cut_towards(other)
        other.cut_towards(host)


def mend(host: Host, others: Iterable[Host]) -> None:
    """Undo :func:`cut_off`."""
    for other in others:
        host.mend_towards(other)
        other.mend_towards(host)
