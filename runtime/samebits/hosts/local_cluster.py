"""The hosts of ``samebits cluster``: sets of namespaces on this machine, or groups of its processes.

With root, a host is a process that holds its own network, hostname, pids and /dev/shm (namespaces(7)). A bridge in
another network namespace connects the hosts, so the machine's own network is not changed. The namespaces have no names:
they and their interfaces end with the process that holds them.

Without root, a host is the set of processes with the same mark in their environment. These hosts share the machine's
network, so a host can only be cut off by suspending its processes.

A process of the cluster waits until it has been recorded in the cluster's file, and ends if its starter dies before
that. So ``down`` finds every process, even after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from samebits import config
from samebits.errors import StoreError, UsageError
from samebits.printable import listed
from samebits.store import durable, private
from samebits.store.process_identity import ProcessIdentity

FOLDER, STARTED = Path("cluster"), "was started"
MOST_HOSTS = 16
_FILE, _SECRET = "cluster.json", "secret"
_NETWORK = "192.0.2"  # TEST-NET-1 (RFC 5737); the hosts' bridge is not connected to any other network
_PROGRAMS = ("unshare", "nsenter", "ip", "mount", "bash")
_MARK = "SAMEBITS_CLUSTER_HOST"
_NEW_NS, _NEW_UTS, _NEW_PID, _NEW_NET = 0x20000, 0x4000000, 0x20000000, 0x40000000  # CLONE_NEW… in linux/sched.h
_COMMAND_S, _END_S = 60.0, 30.0
_MOST_BYTES = 1 << 20
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_UP = "samebits cluster up --hosts 3"

_SWITCH = "ip link add br0 type bridge; ip address add {address}/24 dev br0; ip link set br0 up; ip link set lo up"
_HOST = "mount -t tmpfs -o mode=1777 samebits /dev/shm; hostname {name}; ip link set lo up"
_PLUG = (
    "if ip link show {port} >/dev/null 2>&1; then ip link delete {port}; fi; "
    "ip link add {port} type veth peer name eth0 netns {pid}; ip link set {port} master br0 up"
)
_HOLD = "echo gate; read -r _; {program}; echo ready; exec </dev/null >/dev/null 2>&1; {rest}"
_SLEEP = "exec sleep infinity"
_REAP = "sleep infinity & wait"  # as pid 1, the shell reaps orphans meanwhile
_BECOME = 'umask 077; echo gate; read -r _; echo ready; exec "$@" </dev/null >>"$0" 2>&1'


class Isolation(enum.Enum):
    """The means by which hosts are isolated."""

    NAMESPACES = "namespaces"
    PROCESSES = "processes"


class Power(enum.Enum):
    """The state of a host."""

    OFF = "off"
    ON = "on"
    CUT = "cut off"


class Holder(msgspec.Struct, frozen=True):
    """A process that belongs to the cluster itself: it holds namespaces or serves the page."""

    pid: int
    started_at: int

    @property
    def identity(self) -> ProcessIdentity:
        """The identity of the process."""
        return ProcessIdentity(self.pid, self.started_at)


class ClusterHost(msgspec.Struct, frozen=True):
    """One simulated host. Without namespaces, it has no ``holder``."""

    number: int
    power: Power = Power.OFF
    holder: Holder | None = None

    @property
    def name(self) -> str:
        """The hostname, and the name of the host's folder."""
        return f"host{self.number}"


class ClusterFile(msgspec.Struct, frozen=True):
    """The content of the cluster's file."""

    way: Isolation
    hosts: tuple[ClusterHost, ...]
    port: int
    switch: Holder | None = None
    page: Holder | None = None


def refusal() -> str:
    """Return why this machine cannot simulate hosts with namespaces, or ""."""
    if os.geteuid() != 0:
        return "creating network namespaces needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"creating network namespaces needs {listed(missing)}, not found on this machine"
    apart = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
    done = _done([*apart, "bash", "-ec", _SWITCH.format(address=f"{_NETWORK}.254")])
    return "" if done.returncode == 0 else f"this machine refuses network namespaces ({_last(done.stdout)})"


class Cluster:
    """The simulated cluster in one folder, with methods to change it.

    Args:
        folder: has the cluster's file, and a folder for each host.
        content: the content of the file.
    """

    def __init__(self, folder: Path, content: ClusterFile) -> None:
        self.folder = folder
        self.content = content

    # ---- the file

    @classmethod
    @contextlib.contextmanager
    def created(cls, folder: Path, hosts: int, way: Isolation, port: int) -> Iterator[Cluster]:
        """Context manager that records a new cluster in a new folder, and locks out other commands.

        Raises:
            UsageError: the folder exists.
            StoreError: the folder cannot be created.
        """
        with durable.disk_errors(folder, "making the cluster's folder"), contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        private.check_folder(folder, "PWD")
        with _locked(folder):
            if any(folder.iterdir()):
                raise UsageError(_why_taken(folder))
            made = cls(folder, ClusterFile(way, tuple(map(ClusterHost, range(hosts))), port))
            made._write(made.content)
            durable.write_file_atomically(folder / _SECRET, os.urandom(32).hex().encode())
            yield made

    @classmethod
    @contextlib.contextmanager
    def locked(cls, folder: Path) -> Iterator[Cluster]:
        """Context manager that opens the cluster for one command at a time.

        Raises:
            UsageError, StoreError: see :meth:`read`.
        """
        cls.read(folder)
        with _locked(folder):
            yield cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> Cluster:
        """Return the cluster in this folder.

        Raises:
            UsageError: there is no cluster.
            StoreError: the cluster's file cannot be used, or others can write to it.
        """
        private.check_folder(folder, "PWD")
        content = private.read(folder / _FILE, _MOST_BYTES)
        if content is None:
            raise UsageError(f"{folder.parent} has no cluster. Fix: {_UP}")
        try:
            return cls(folder, msgspec.json.decode(content, type=ClusterFile))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StoreError(
                f"{folder / _FILE}: expected the file of a cluster, found something else ({error}). Fix: end the "
                f"processes of the cluster with kill -9, then remove {folder}"
            ) from None

    def _write(self, content: ClusterFile) -> None:
        durable.write_file_atomically(self.folder / _FILE, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        self.content = content

    def _change(self, host: ClusterHost) -> ClusterHost:
        hosts = tuple(host if one.number == host.number else one for one in self.content.hosts)
        self._write(msgspec.structs.replace(self.content, hosts=hosts))
        return host

    # ---- queries of commands

    def host(self, number: int) -> ClusterHost:
        """Return the host in its current state.

        Raises:
            UsageError: the cluster has no host with this number.
        """
        hosts = self.content.hosts
        if number >= len(hosts):
            raise UsageError(f"there is no host {number}. Fix: give a host from 0 to {len(hosts) - 1}")
        host = hosts[number]
        if host.holder is not None and not host.holder.identity.is_alive():
            return msgspec.structs.replace(host, power=Power.OFF)
        return host

    def running(self, number: int) -> ClusterHost:
        """Return the host, which must be on.

        Raises:
            UsageError: the cluster has no host with this number, or the host is off.
        """
        host = self.host(number)
        if host.power is Power.OFF:
            raise UsageError(f"host {number} is off. Fix: samebits cluster heal {number}")
        return host

    def disk_of(self, host: ClusterHost) -> Path:
        """Return the host's own folder."""
        return self.folder / host.name

    def address(self, number: int) -> str:
        """Return the host's address in the cluster."""
        return f"{_NETWORK}.{number + 1}" if self.content.way is Isolation.NAMESPACES else "127.0.0.1"

    def environment(self, host: ClusterHost) -> dict[str, str]:
        """Return the environment for processes on this host, without the caller's own address and secret."""
        own = {
            "SCHED_HOST": self.address(0),
            "SCHED_PORT": str(self.content.port),
            "CLUSTER_SECRET_FILE": str(self.folder / _SECRET),
            _MARK: self._mark(host),
        }
        left_out = {*own, "CLUSTER_SECRET", "SCHED_BIND"}
        inherited = config.whole_environment()
        kept = {name: text for name, text in inherited.items() if name.removeprefix(config.PREFIX) not in left_out}
        # The last folder lets `samebits` be found if its environment was not activated.
        path = os.pathsep.join([inherited.get("PATH", os.defpath), str(Path(sys.executable).parent)])
        return {**kept, **own, "PATH": path}

    def _mark(self, host: ClusterHost) -> str:
        return f"{self.folder}:{host.number}"

    # ---- start and end

    def start_switch(self) -> None:
        """Start the network to which the hosts are connected."""
        if self.content.way is Isolation.PROCESSES:
            return
        program = _HOLD.format(program=_SWITCH.format(address=f"{_NETWORK}.254"), rest=_SLEEP)
        with _Gated(["unshare", "--net", "bash", "-ec", program], self.folder) as gated:
            self._write(msgspec.structs.replace(self.content, switch=gated.holder))
            gated.let_in()

    def start_page(self, words: Sequence[str], log: Path, kept: Sequence[int]) -> None:
        """Start the page's command with these descriptors in host 0's folder, but outside the hosts."""
        inside = ["nsenter", "--target", str(self.content.switch.pid), "--net"] if self.content.switch else []
        page = ["bash", "-ec", _BECOME, str(log), *inside, *words]
        host = self.content.hosts[0]
        environment = self.environment(host)
        del environment[_MARK]  # the page must outlive host 0
        with _Gated(page, self.disk_of(host), environment, kept) as gated:
            self._write(msgspec.structs.replace(self.content, page=gated.holder))
            gated.let_in()

    def heal(self, number: int) -> str:
        """Start the host if it is off, or reconnect it if it is cut off.

        Returns:
            A description of what was done, or an empty string.
        """
        host = self.host(number)
        if host.power is Power.ON:
            return ""
        if host.power is Power.OFF:
            self._start(host)
            return STARTED
        if self.content.way is Isolation.NAMESPACES:
            self._in_network(f"ip link set port{number} master br0")
        else:
            self._signal_marked(host, signal.SIGCONT)
        self._change(msgspec.structs.replace(host, power=Power.ON))
        return "reaches the other hosts again" if self.content.way is Isolation.NAMESPACES else "was resumed"

    def _start(self, host: ClusterHost) -> None:
        durable.make_directory(self.disk_of(host), sync=False)
        if self.content.way is Isolation.PROCESSES:
            self._change(ClusterHost(host.number, Power.ON))
            return
        if host.holder is not None:
            _kill(host.holder)  # an earlier start was interrupted
        apart = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        program = _HOLD.format(program=_HOST.format(name=host.name), rest=_REAP)
        with _Gated(["unshare", *apart, "bash", "-ec", program], self.folder, is_forked=True) as gated:
            self._change(ClusterHost(host.number, Power.OFF, gated.holder))
            gated.let_in()
        self._in_network(_PLUG.format(port=f"port{host.number}", pid=gated.holder.pid))
        address = self.address(host.number)
        _in_network_of(gated.holder, f"ip address add {address}/24 dev eth0; ip link set eth0 up")
        self._change(ClusterHost(host.number, Power.ON, gated.holder))

    def cut(self, number: int) -> None:
        """Cut the host off from the others.

        Packets are lost in both directions, and no connection is closed.
        """
        host = self.running(number)
        if self.content.way is Isolation.NAMESPACES:
            self._in_network(f"ip link set port{number} nomaster")
        else:
            self._signal_marked(host, signal.SIGSTOP)
        self._change(msgspec.structs.replace(host, power=Power.CUT))

    def kill(self, number: int) -> None:
        """Kill every process on the host with SIGKILL, and switch the host off."""
        host = self.running(number)
        if host.holder is not None:
            _kill(host.holder)  # the kernel kills the rest of its pid namespace (pid_namespaces(7))
        else:
            self._signal_marked(host, signal.SIGKILL)
        self._change(ClusterHost(number))

    def remove(self) -> None:
        """End every process of the cluster, and remove its folder."""
        content = self.content
        for host in content.hosts:
            if content.way is Isolation.PROCESSES:
                self._signal_marked(host, signal.SIGKILL)
        for holder in (content.page, *(host.holder for host in content.hosts), content.switch):
            if holder is not None:
                _kill(holder)
        with durable.disk_errors(self.folder, "removing the cluster's folder"):
            shutil.rmtree(self.folder)

    def _in_network(self, program: str) -> None:
        switch = self.content.switch
        if switch is None or not switch.identity.is_alive():
            raise UsageError("the cluster's network is gone. Fix: samebits cluster down, then samebits cluster up")
        _in_network_of(switch, program)

    def _signal_marked(self, host: ClusterHost, by: signal.Signals) -> None:
        """Signal the host's processes, including new ones, until each has received the signal."""
        mark, told = f"{_MARK}={self._mark(host)}".encode(), set[ProcessIdentity]()
        while new := {identity for identity in _marked(mark) if identity not in told}:
            for identity in new:
                _send(identity, by)
            told |= new
        if by is signal.SIGKILL:
            for identity in told:
                identity.wait_for_exit(_END_S)

    # ---- commands on a host

    def run(self, number: int, words: Sequence[str]) -> int:
        """Run a command on the host, in the host's folder; return its exit status.

        Raises:
            UsageError: the host is off or suspended, or the command does not exist.
        """
        host = self.running(number)
        if host.power is Power.CUT and self.content.way is Isolation.PROCESSES:
            raise UsageError(f"host {number} is suspended. Fix: samebits cluster heal {number}")
        program = shutil.which(words[0], path=self.environment(host)["PATH"])
        if program is None:
            raise UsageError(f"no command {words[0]!r} was found. Fix: check its name, or give its path")
        child = self._fork_on(host, [str(Path(program).absolute()), *words[1:]])
        for number_of_signal in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number_of_signal, signal.SIG_IGN)  # a terminal sends these to the command as well
        for passed_on in _PASSED_ON:
            signal.signal(passed_on, lambda received, _: os.kill(child, received))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status if status >= 0 else 128 - status

    def _fork_on(self, host: ClusterHost, words: list[str]) -> int:
        """Start a command on the host, and return its pid."""
        disk, environment = self.disk_of(host), self.environment(host)
        target = None if host.holder is None else os.pidfd_open(host.holder.pid)
        self.running(host.number)  # after the descriptor was opened, so that it cannot refer to another process
        if target is not None:
            _enter(target, _NEW_PID)  # affects only children (pid_namespaces(7))
        child = os.fork()
        if child == 0:
            try:
                if target is not None:
                    _enter(target, _NEW_NET | _NEW_UTS | _NEW_NS)
                os.chdir(disk)
                os.execve(words[0], words, environment)
            except OSError as error:
                os.write(2, f"samebits: {words[0]}: {error.strerror}\n".encode())
            finally:
                os._exit(126)
        if target is not None:
            os.close(target)
        return child


class _Gated:
    """A process that waits after its start until it was recorded in the cluster's file.

    If it is not let in, it ends.

    Args:
        words: the process's command, whose shell prints ``gate``, waits for a line, and prints ``ready`` when ready.
        folder: the process's working folder.
        environment: the process's environment; None for that of the caller.
        kept: descriptors that the process inherits.
        is_forked: whether the shell is the child of the started process.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        kept: Sequence[int] = (),
        *,
        is_forked: bool = False,
    ) -> None:
        self._process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=kept,
            start_new_session=True,
        )
        self._wait_for(b"gate\n")
        pid = self._process.pid
        if is_forked:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        identity = ProcessIdentity.of_child(pid)
        self.holder = Holder(identity.pid, identity.started_at)

    def let_in(self) -> None:
        """Let the process start its work, and wait until it is ready.

        Raises:
            UsageError: the process failed.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        self._wait_for(b"ready\n")

    def _wait_for(self, expected: bytes) -> None:
        assert self._process.stdout is not None
        text = b""
        for line in self._process.stdout:
            if line == expected:
                return
            text += line
        self._process.wait()
        raise UsageError(
            f"a host or the network of the cluster could not be started: {_last(text.decode(errors='replace'))}. "
            "Fix: samebits cluster down, then samebits cluster up"
        )

    def __enter__(self) -> _Gated:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.returncode = 0  # the process outlives this one, which therefore never waits for it


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _why_taken(folder: Path) -> str:
    if not (folder / _FILE).exists():
        return f"{folder} exists and is not a cluster. Fix: move it away, or use another folder"
    return f"{folder.parent} has a cluster already. Fix: samebits cluster down, then {_UP}"


def _done(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")


def _in_network_of(holder: Holder, program: str) -> None:
    """Run shell commands in the holder's network."""
    done = _done(["nsenter", "--target", str(holder.pid), "--net", "bash", "-ec", program])
    if done.returncode != 0:
        raise UsageError(
            f"`{program}` failed in the cluster's network: {_last(done.stdout)}. Fix: samebits cluster down, then "
            "samebits cluster up"
        )


def _enter(target: int, namespaces: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(target, namespaces) != 0:  # accepts a pidfd since Linux 5.8 (setns(2))
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "setns")


def _kill(holder: Holder) -> None:
    if _send(holder.identity, signal.SIGKILL) and not holder.identity.wait_for_exit(_END_S):
        raise UsageError(
            f"the cluster's process (pid {holder.pid}) has not ended after {_END_S:g} s. Fix: run the command again"
        )


def _send(identity: ProcessIdentity, by: signal.Signals) -> bool:
    """Send a signal to exactly this process, and return False if it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not identity.is_alive():
            return False
        signal.pidfd_send_signal(descriptor, by)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def _marked(mark: bytes) -> Iterator[ProcessIdentity]:
    """Yield this user's processes that have this variable in their environment, except this process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        identity = ProcessIdentity.of(int(entry.name))
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if identity is not None and mark in (entry / "environ").read_bytes().split(b"\0"):
                yield identity
