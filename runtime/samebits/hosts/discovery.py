"""Run the discovery script of a job, and move the job's workers as its hosts change.

``hosts.placement`` decides which worker runs on which host. The job spec is changed before any action: its ``nodes``
belong to the job, and nodes that are only in its ``hosts`` are leaving. If this process is killed, the next one
continues from there. The script is run in a thread, with limits on time and output.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from samebits import config
from samebits.account.job_view import JobView, PresenceState
from samebits.config import OF_A_SHELL, Settings
from samebits.core.causes.restarts import Backoff
from samebits.core.messages import OperatorDecision
from samebits.core.replacement_names import number_of, root_of, successor_of
from samebits.errors import SameBitsError, UsageError
from samebits.hosts.host_list import Host, Resting, parse
from samebits.hosts.placement import Placement
from samebits.launcher import job_spec
from samebits.launcher.follower import Turn
from samebits.launcher.job_spec import JobSpec, program_of
from samebits.launcher.processes import name_of, node_of, read_pid_files, send_signal
from samebits.launcher.spawning import EXAMPLE, BusyError, Spawn, StartLock, is_here, launch, reserved
from samebits.launcher.supervising import Supervisor
from samebits.printable import printable
from samebits.store.child_processes import end_group
from samebits.store.process_identity import ProcessIdentity

EVERY_S = 1.0
TIMEOUT_S = 10.0
MAX_OUTPUT_BYTES = 1 << 20
CLOSING_LOOK_S = 0.25
_SHOWN_CHARACTERS = 200

DiscoveryResult = tuple[Host, ...] | str
"""The current hosts, or the reason why the script reported none."""


def words_of(text: str, folder: Path) -> list[str]:
    """Split the script's command into words without a shell. Files in the job's folder need no ``./``.

    Raises:
        UsageError: the command cannot be split, or needs a shell.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"HOST_DISCOVERY_SCRIPT={text[:120]}: {error}. Fix: close its quotes") from None
    if not words:
        raise UsageError("HOST_DISCOVERY_SCRIPT names no command. Fix: --host-discovery-script ./hosts.sh")
    if shell := next((word for word in words if word in OF_A_SHELL), None):
        raise UsageError(
            f"HOST_DISCOVERY_SCRIPT={text[:120]}: the command runs without a shell, but {shell!r} needs one. Fix: put "
            "the command into a script, and name the script"
        )
    if "/" not in words[0] and (folder / words[0]).is_file():
        words[0] = f"./{words[0]}"
    return words


def ask(
    words: Sequence[str],
    folder: Path,
    slots: int,
    timeout_s: float = TIMEOUT_S,
    closing: threading.Event | None = None,
) -> DiscoveryResult:
    """Run the script once until it ends, or stop it early if ``closing`` is set."""
    try:
        # In a separate session, because Ctrl-C in the terminal is for the job, and so that the session can be ended.
        script = subprocess.Popen(
            list(words),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return f"{words[0]} cannot be run: {error.strerror if isinstance(error, OSError) else error}"
    try:
        problem, output, errors = _read(script, timeout_s, closing or threading.Event())
        problem = problem or _ended(script, timeout_s, errors)
    finally:
        end_group(script, 0)
        script.wait()
        for pipe in (script.stdout, script.stderr):
            assert pipe is not None
            pipe.close()
    if problem:
        return f"{words[0]} {problem}"
    try:
        hosts = parse(output.decode(errors="replace"), slots)
    except UsageError as error:
        return str(error)
    return hosts if any(host.slots for host in hosts) else f"{words[0]} named no host with a slot"


def _read(script: subprocess.Popen[bytes], timeout_s: float, closing: threading.Event) -> tuple[str, bytes, bytes]:
    """Return why the output is unusable, or "", then the output and the error output."""
    deadline_s = time.monotonic() + timeout_s
    assert script.stdout is not None and script.stderr is not None
    names = {script.stdout.fileno(): "out", script.stderr.fileno(): "err"}
    found = {"out": b"", "err": b""}
    poll = select.poll()
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    waits_for = set(names)
    while waits_for:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or closing.is_set():
            return f"has not ended after {timeout_s:g} s", b"", b""
        for descriptor, _ in poll.poll(min(left_s, CLOSING_LOOK_S) * 1000):
            chunk = os.read(descriptor, 65536)
            if not chunk:
                poll.unregister(descriptor)
                waits_for.remove(descriptor)
            kept = found[names[descriptor]] + chunk
            if names[descriptor] == "err":
                kept = kept[-4096:]  # an error message's reason is at its end
            elif len(kept) > MAX_OUTPUT_BYTES:
                return f"printed more than {MAX_OUTPUT_BYTES >> 20} MiB", b"", b""
            found[names[descriptor]] = kept
    return "", found["out"], found["err"]


def _ended(script: subprocess.Popen[bytes], timeout_s: float, errors: bytes) -> str:
    if not end_group(script, timeout_s):
        return f"closed its output and has not ended after {timeout_s:g} s"
    status = script.wait()
    if status == 0:
        return ""
    lines = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    said = printable(lines[-1], _SHOWN_CHARACTERS) if lines else ""
    ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return ended + (f": {said}" if said else "")


class DiscoveryScript:
    """Runs the script every second in a thread. Only one thread may call the methods.

    Args:
        words: the script's command.
        folder: the script's working folder.
        slots: number of slots of a host that the script prints without a number.
    """

    def __init__(self, words: Sequence[str], folder: Path, slots: int) -> None:
        self._words, self._folder, self._slots = words, folder, slots
        self._answers: collections.deque[DiscoveryResult] = collections.deque(maxlen=1)  # only the newest answer counts
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samebits-discovery", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``take`` has a new answer."""
        return self._readable

    def take(self) -> DiscoveryResult | None:
        """Return a new answer, or None."""
        try:
            os.read(self._readable, 4096)
        except BlockingIOError:
            return None
        try:
            return self._answers.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Stop running the script, and end a running one."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join(4 * CLOSING_LOOK_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            answer = ask(self._words, self._folder, self._slots, closing=self._closing)
            if self._closing.is_set():
                return
            self._answers.append(answer)
            with contextlib.suppress(BlockingIOError):  # already readable
                os.write(self._writable, b"a")
            self._closing.wait(EVERY_S)


ASK_AGAIN_S = 2.0  # interval for repeating a request to leave through the scheduler
LAUNCHER_GRACE_S = 30.0  # how long a remote worker's launching process may outlive the worker's seat
BUSY_RETRY_S = 0.1
TOLD_TO_LEAVE = 128 + signal.SIGTERM  # not sent by this driver, so the machine is about to be preempted
LAUNCHER_FAILED = 255  # ssh(1): an error of ssh itself


def discovery_for(settings: Settings, supervisor: Supervisor | None) -> Discovery | None:
    """Return the driver for a job with HOST_DISCOVERY_SCRIPT, or None for other jobs.

    Raises:
        UsageError: the script's command is invalid.
    """
    if supervisor is None or settings.host_discovery_script is None or not settings.enable_recovery:
        return None
    return Discovery(settings, supervisor.spawn_worker)


class Discovery:
    """Starts and drains a job's workers as its hosts change. ``now`` is in monotonic seconds.

    Args:
        settings: the job's settings, with absolute folders.
        spawn_worker: starts workers' processes, as in ``spawning.launch``.
    """

    def __init__(self, settings: Settings, spawn_worker: Spawn | None = None) -> None:
        self._settings = settings
        self._spawn_worker = spawn_worker
        self._placement = Placement(settings.max_worker_num, Resting(*settings.grace.host))
        words_of(settings.host_discovery_script or "", settings.log_dir)
        self._script: DiscoveryScript | None = None
        self._answer: tuple[Host, ...] | None = None
        self._drained: tuple[str, ...] = ()
        self._problem = ""
        self._not_reached: set[str] = set()
        self._told: dict[str, float] = {}  # by leaving node: time of the last request to leave
        self._seated: set[str] = set()  # leaving nodes that got a seat meanwhile
        self._vacant: dict[str, float] = {}  # by running process: time since which its seat is free
        self._retry_at: float | None = None
        self._backoff = Backoff()
        self._turn = Turn()

    def start(self, folder: Path) -> int:
        """Start the script; return a descriptor that becomes readable when the script has answered."""
        words = words_of(self._settings.host_discovery_script or "", folder)
        self._script = DiscoveryScript(words, folder, self._settings.host_slots)
        return self._script.fileno()

    @property
    def is_started(self) -> bool:
        """Return whether the script was started."""
        return self._script is not None

    def close(self) -> None:
        """Stop running the script."""
        if self._script is not None:
            self._script.close()

    def wake_at(self, now: float) -> float | None:
        """Return when ``turn`` must be called even if nothing happens, or None."""
        ats = (self._retry_at, self._placement.wake_at(now))
        return min((at for at in ats if at is not None), default=None)

    # ---- deaths

    def takes(self, name: str, identity: ProcessIdentity, status: int | None, now: float, *, has_joined: bool) -> bool:
        """Return whether the driver restarts this dead worker on another host.

        This is the case if its slot was given to another host, or another process already has its name.
        """
        node = node_of(name) or ""
        if read_pid_files(self._settings.log_dir, [name]).get(name, identity) != identity:
            return True
        kept = job_spec.read(self._settings.log_dir)
        host = None if kept is None else kept.hosts.get(node)
        if kept is None or host is None or node not in (kept.nodes or ()):
            return False
        reason: OperatorDecision | None
        if status == LAUNCHER_FAILED and not is_here(host):
            why = f"what starts it there ended with status {status}"
            reason = self._placement.failed(node, host, now, why)
        elif status == TOLD_TO_LEAVE:
            reason = self._placement.failed(node, host, now, "it was asked to leave there (SIGTERM)")
        else:
            reason = self._placement.died(node, host, now, has_joined=has_joined)
        if reason is None:
            return False
        try:
            with StartLock(self._settings.log_dir, wait=False):
                self._keep(_without(job_spec.read(self._settings.log_dir) or kept, [node]))
        except (BusyError, SameBitsError):  # another process starts workers here, or a disk error
            return False  # the worker is restarted in place; its next death is judged again
        self._decide(reason)
        self._told[node] = now  # the worker has ended, though the scheduler may notice a little later
        self._retry_at = now
        return True

    def turn(self, view: JobView | None, now: float) -> Turn:
        """Carry out the actions that are due.

        These are handling the script's answer, starting workers, requesting departures, and forgetting nodes that are
        gone.
        """
        answer = None if self._script is None else self._script.take()
        if answer is not None:
            self._take(answer)
        waits = self._backoff.has_failed and self._retry_at is not None and now < self._retry_at
        is_over = view is None or view.training_finished or view.job_finished
        if self._answer is not None and view is not None and not (is_over or waits):
            self._retry_at = None
            try:
                with StartLock(self._settings.log_dir, wait=False):
                    self._carry_out(view, now)
                if self._backoff.has_failed:
                    self._backoff.succeeded()
                    self._say("processes can be started again")
            except BusyError:
                self._retry_at = now + BUSY_RETRY_S
            except SameBitsError as error:
                if not self._backoff.has_failed:
                    self._say(f"{error}; it is retried until it succeeds")
                self._retry_at = self._backoff.failed(now)
        turn, self._turn = self._turn, Turn()
        return turn

    def _take(self, answer: DiscoveryResult) -> None:
        if isinstance(answer, str):
            so_far = "the hosts before stay" if self._answer is not None else "nothing is changed until it does"
            self._say_problem(f"the discovery script: {answer}; {so_far}")
            return
        if self._problem:
            self._problem = ""
            self._say("the discovery script answers again")
        self._answer = tuple(host for host in answer if self._can_be_reached(host.name))
        self._see()

    def _see(self) -> None:
        for reason in self._placement.seen(self._answer or (), self._drained):
            self._decide(reason)

    def _can_be_reached(self, host: str) -> bool:
        if self._settings.host_launch is not None or is_here(host):
            return True
        if host not in self._not_reached:
            self._not_reached.add(host)
            self._say(
                f"host {host} is not this machine, and no command is set that starts a worker there, so the host is "
                "not used. Fix: "
                f"--launch '{EXAMPLE}' (HOST_LAUNCH)"
            )
        return False

    def _carry_out(self, view: JobView, now: float) -> None:
        kept = job_spec.read(self._settings.log_dir)
        if kept is None:
            return  # the folder was moved away, along with its processes
        if kept.drained != self._drained:
            self._drained = kept.drained
            self._see()
        kept = self._forget_gone(kept, view, now)
        nodes = kept.nodes or ()
        running = {node: kept.hosts[node] for node in nodes if node in kept.hosts}
        leaving = {node: host for node, host in kept.hosts.items() if node not in nodes}
        alive = [one.node for one in view.nodes if one.presence is PresenceState.ALIVE]
        lost = [one.node for one in view.nodes if one.presence is PresenceState.LOST]
        orders = self._placement.next(
            running,
            leaving,
            now,
            wish=kept.size,
            used={root_of(node) for node in (*nodes, *alive)},
            lost={root_of(node) for node in lost},
        )
        if orders.drain:
            kept = _without(kept, orders.drain, keep_hosts=True)
            self._keep(kept)
            leaving |= {node: running[node] for node in orders.drain}
        for reason in orders.reasons:
            self._decide(reason, elsewhere={node for node, host in kept.hosts.items() if not is_here(host)})
        if leaving:
            self._ask_to_leave(leaving, orders.drain, now)
        self._ask_unknown([node for node in alive if node not in kept.hosts and node not in nodes], now)
        if orders.start:
            self._start(kept, {name_for(number, view): host for number, host in orders.start})

    # ---- starts

    def _start(self, kept: JobSpec, hosts: Mapping[str, str]) -> None:
        present = config.whole_environment()
        log_dir = self._settings.log_dir
        with reserved(log_dir, [name_of(node) for node in hosts]) as berths:
            wider = replace(kept, nodes=(*(kept.nodes or ()), *hosts), hosts={**kept.hosts, **hosts})
            self._keep(wider)
            for node in hosts:
                self._told.pop(node, None)
            running: list[ProcessIdentity] = []
            try:
                program = program_of(wider, present, job_spec.secrets_for(kept, present))
                launch(berths, program, running, self._spawn_worker)
            except SameBitsError:
                self._keep(_without(wider, list(hosts)[len(running) :]))
                raise
            self._turn.started += map(name_of, hosts)

    # ---- leaving

    def _ask_unknown(self, nodes: Sequence[str], now: float) -> None:
        """Ask workers that are not in the job spec to leave, for example after their host became reachable again."""
        due = [node for node in nodes if self._told.get(node, -ASK_AGAIN_S) <= now - ASK_AGAIN_S]
        new = [node for node in due if node not in self._told]
        self._told |= dict.fromkeys(due, now)
        if new:
            self._say(
                f"worker {', '.join(new)} leaves at the next commit: it was started by hand, or its host is no longer "
                "used. Fix: have the discovery script print the host that it should run on"
            )
        if due:
            text = self._turn.lines[-1] if new else ""
            self._turn.decisions.append(OperatorDecision(text, tuple(due)))

    def _ask_to_leave(self, leaving: Mapping[str, str], now_asked: Iterable[str], now: float) -> None:
        """Send each local node one signal, and ask remote nodes through the scheduler until they are gone."""
        here = [node for node, host in leaving.items() if is_here(host) and node not in self._told]
        there = read_pid_files(self._settings.log_dir, map(name_of, here))
        for node in here:
            if (identity := there.get(name_of(node))) is not None:
                send_signal(identity, signal.SIGTERM)
                self._told[node] = now
        asked = set(now_asked)
        due = [
            node
            for node, host in leaving.items()
            if not is_here(host) and node not in asked and self._told.get(node, -ASK_AGAIN_S) <= now - ASK_AGAIN_S
        ]
        self._told |= dict.fromkeys([*due, *asked], now)
        if due:
            self._turn.decisions.append(OperatorDecision("", tuple(due)))

    def _forget_gone(self, kept: JobSpec, view: JobView, now: float) -> JobSpec:
        """Remove leaving nodes whose process has ended, and end processes that have lost their seat."""
        leaving = [node for node in kept.hosts if node not in (kept.nodes or ())]
        if not leaving:
            return kept
        log_dir = self._settings.log_dir
        there = read_pid_files(log_dir, map(name_of, leaving))
        gone = []
        for node in leaving:
            identity, known = there.get(name_of(node)), view.node(node)
            if identity is None or not identity.is_alive():
                gone.append(node)
            elif known is not None and known.presence is PresenceState.ALIVE:
                self._seated.add(node)
                self._vacant.pop(node, None)
            elif node not in self._seated:
                continue  # the node has not joined yet, so only its launching process can be awaited
            elif now - self._vacant.setdefault(node, now) > LAUNCHER_GRACE_S:
                is_new = now - self._vacant[node] < 2 * LAUNCHER_GRACE_S
                send_signal(identity, signal.SIGTERM if is_new else signal.SIGKILL)
        if gone:
            for node in gone:
                self._told.pop(node, None)
                self._vacant.pop(node, None)
                self._seated.discard(node)
                (log_dir / f"{name_of(node)}.pid").unlink(missing_ok=True)
            kept = replace(kept, hosts={node: host for node, host in kept.hosts.items() if node not in gone})
            self._keep(kept)
        return kept

    def _keep(self, kept: JobSpec) -> None:
        job_spec.keep(self._settings.log_dir, kept)

    def _decide(self, reason: OperatorDecision, elsewhere: Collection[str] = ()) -> None:
        self._say(reason.text)
        drain = tuple(node for node in reason.drain if node in elsewhere)  # local nodes get a signal
        self._turn.decisions.append(OperatorDecision(reason.text, drain))

    def _say(self, text: str) -> None:
        self._turn.lines.append(text)

    def _say_problem(self, text: str) -> None:
        """Report a problem once, until it changes."""
        if text != self._problem:
            self._problem = text
            self._say(text)


def name_for(number: str, view: JobView) -> str:
    """Return the node to start under this number.

    If the node was lost, this is the name of its replacement, which has no cool-down.
    """
    line = [one for one in view.nodes if root_of(one.node) == number]
    if not line:
        return number
    last = max(line, key=lambda one: number_of(one.node))
    return last.node if last.presence is PresenceState.LEFT else successor_of(last.node)


def _without(kept: JobSpec, nodes: Iterable[str], *, keep_hosts: bool = False) -> JobSpec:
    """Return the job spec without these nodes; with ``keep_hosts``, they stay in ``hosts`` as leaving nodes."""
    gone = set(nodes)
    hosts = kept.hosts if keep_hosts else {node: host for node, host in kept.hosts.items() if node not in gone}
    return replace(kept, nodes=tuple(node for node in kept.nodes or () if node not in gone), hosts=hosts)
