"""Find out where this machine's workers are stuck, if the job makes no progress or workers do not join it.

A follower runs on the same host as the workers. It can therefore read from the kernel what a worker cannot report
itself (that it is stopped, that a thread holds the GIL, or that it waits in the kernel). It saves the stacks to a file,
and ends a process that cannot end by itself.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from samebits.account.job_view import JobView, PresenceState, WorkerView
from samebits.config import Settings
from samebits.core.causes.table import DEFAULT, CauseTable, Remedy
from samebits.core.hangs import OF_CLOSED, OF_SILENCE, SILENT_KINDS, Hang, ProcessState, classify_hang, fix_of
from samebits.errors import StoreError
from samebits.printable import printable_lines
from samebits.service import process_state, stacks
from samebits.store import collective_ring, durable, private
from samebits.store.process_identity import ProcessIdentity
from samebits.tracebacks import place_in_dump

PATIENCE_S = 15.0  # minimum time from a process's start to its samebits.init(), except waits for a CPU
LOOK_S = 5.0
LONGEST_S = 120.0
LEAST_READ_BYTES = 32 << 10  # within LOOK_S; a few compiled modules


def bytes_read(identity: ProcessIdentity) -> int | None:
    """Return the number of bytes that the process has read, including cached ones, or None if it is not visible."""
    try:
        found = re.search(r"^rchar: (\d+)$", Path(f"/proc/{identity.pid}/io").read_text(), re.MULTILINE)
    except OSError:  # the process is gone, or another user's
        return None
    return int(found[1]) if found and identity.is_alive() else None


def waited_for_cpu_s(identity: ProcessIdentity) -> float:
    """Return how many seconds the process's main thread has waited for a CPU, or 0.0 if this is not visible."""
    try:
        found = Path(f"/proc/{identity.pid}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(found[1]) / 1e9 if len(found) == 3 and identity.is_alive() else 0.0


@dataclass(slots=True)
class _WatchedProcess:
    identity: ProcessIdentity
    began_at: float
    look_at: float
    read: int | None = None


class UnjoinedProcesses:
    """Processes that have not joined the job and have not been reported yet.

    Args:
        read: :func:`bytes_read`, or a replacement.
        waited_s: :func:`waited_for_cpu_s`, or a replacement.
    """

    def __init__(
        self,
        read: Callable[[ProcessIdentity], int | None] = bytes_read,
        waited_s: Callable[[ProcessIdentity], float] = waited_for_cpu_s,
    ) -> None:
        self._read = read
        self._waited_s = waited_s
        self._watched: dict[str, _WatchedProcess] = {}

    def began(self, name: str, identity: ProcessIdentity, now: float) -> None:
        """Watch the process that was found under this name."""
        self._watched[name] = _WatchedProcess(identity, now, now + PATIENCE_S - LOOK_S)

    def wake_at(self) -> float | None:
        """Return when ``due`` must be called next."""
        return min((one.look_at for one in self._watched.values()), default=None)

    def due(self, now: float) -> dict[str, tuple[ProcessIdentity, float]]:
        """Return each process once when it no longer seems to be importing modules.

        The result includes the seconds since the process was found.
        """
        if not any(one.look_at <= now for one in self._watched.values()):
            return {}
        found = {}
        for name, one in list(self._watched.items()):
            if one.look_at > now + 1.0:  # processes that are due within a second are reported together
                continue
            before, one.read = one.read, self._read(one.identity)
            ran_s = now - one.began_at - self._waited_s(one.identity)
            is_first = ran_s < PATIENCE_S - LOOK_S / 2
            reads = before is not None and one.read is not None and one.read - before >= LEAST_READ_BYTES
            if (is_first or reads) and now - one.began_at < LONGEST_S:
                one.look_at = now + LOOK_S
            else:
                found[name] = one.identity, now - one.began_at
                del self._watched[name]
        return found


FOLDER = "stalls"
MOST_FILES = 16
MOST_BYTES = 256 << 10
"""Size limit of one file with stacks, in bytes; the innermost frames come first."""
COLLECTIVES = 4
"""Number of collectives in a file, newest last; ``samebits stack --fr`` shows all."""
MOST_ASKED = 8
"""Limit on the processes that are examined during one standstill."""
SETTLED_S, LEAVING_S = 1.0, 10.0
"""Seconds after its loss during which a process that still runs may be about to end. The second one applies if its end
was reported with a cause, since Python may take seconds to release a model."""
LEAST_PATIENCE_S = 30.0
"""Seconds from the loss of a stopped or GIL-holding process to its end, if HANG sets no step timeout."""
CANNOT_LEAVE = (Hang.STOPPED, Hang.LOCKED)
"""States that a process cannot leave by itself, but in which a signal can still end it."""
_FILE = re.compile(r"step-\d+-(?:rank|node)-[^/]+\.txt")


@dataclass(frozen=True, slots=True)
class Looked:
    """An examined process: its state, and the file with its threads' stacks, or None if that could not be written.

    ``cause`` is the reported cause of its end, if it should have ended.
    """

    title: str
    hang: Hang | None
    pid: int
    place: str
    file: Path | None
    is_told: bool  # whether to report it; False if it only waits for the others
    cause: str = ""

    def __str__(self) -> str:
        fix = ""
        if self.hang in SILENT_KINDS and self.hang is not None:
            what, fix = self.hang.value, fix_of(self.hang, self.pid)
            if self.hang is Hang.LOCKED and self.place:
                what, fix = f"holds Python's lock (the GIL) in {self.place}", _LETS_GO
        else:
            what = f"is in {self.place or CODE_OF_OTHERS}"
        where = f"; its threads: {self.file}" if self.file is not None else ""
        who = f"{self.title} is lost: {self.cause}. Its process has not ended, and" if self.cause else self.title
        return f"{who} {what}{where}" + (f". Fix: {fix}" if fix else "")


CODE_OF_OTHERS = "code that is not the script's"
_LETS_GO = "call it so that it lets the lock go (ctypes.CDLL instead of PyDLL, Py_BEGIN_ALLOW_THREADS in C)"


@dataclass(frozen=True, slots=True)
class _Question:
    worker: WorkerView
    rank: int | None
    step: int
    silent_s: float  # 0 if the process still sends messages
    is_told: bool
    cause: str = ""


@dataclass(slots=True)
class _Lost:
    identity: ProcessIdentity
    since: float
    is_asked: bool = False
    is_over: bool = False
    hang: Hang | None = None


@dataclass(slots=True)
class HangFindings:
    """The result of ``take``: lines to print, and processes to end with SIGKILL."""

    lines: list[str] = field(default_factory=list)
    end: list[ProcessIdentity] = field(default_factory=list)


class HangStacks:
    """A follower's search for the causes of hangs. It runs in a thread, because each inspection takes seconds.

    ``look`` and ``take`` return at once.

    Args:
        settings: the job's settings, with an absolute LOG_DIR.
        causes: decides whether a process that is stopped, or holds the GIL, is ended.
        ask, see: functions that request a process's stacks, and read its state.
    """

    def __init__(
        self,
        settings: Settings,
        causes: CauseTable = DEFAULT,
        *,
        ask: Callable[[ProcessIdentity], stacks.StackDump] = stacks.ask,
        see: Callable[[ProcessIdentity], ProcessState | None] = process_state.look,
    ) -> None:
        self._folder = settings.log_dir / FOLDER
        self._silent_s = settings.node_timeout_s
        ended = {hang for hang in CANNOT_LEAVE if causes.strategy_for(hang) in (Remedy.SPARE, Remedy.RESTART)}
        self._ended = ended if settings.hang.policy == "end" else set()
        fixed_s = settings.hang.step_timeout_s
        self._patience_s = LEAST_PATIENCE_S if fixed_s is None else 2 * fixed_s
        self._ask, self._see = ask, see
        self._stall: object = None  # the stall that was examined last
        self._lost: dict[str, _Lost] = {}
        self._questions: queue.Queue[_Question] = queue.Queue()
        self._looked: queue.SimpleQueue[tuple[str, Looked]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, view: JobView | None, here: Mapping[str, ProcessIdentity], now: float) -> None:
        """Examine the local processes that the scheduler reports as stuck or has lost.

        ``here`` maps nodes to live local processes.
        """
        if view is None or view.from_journal:
            return
        stall = view.stall
        if stall is not None and (key := (stall, view.generation)) != self._stall:
            self._stall = key
            for node in [*stall.culprits[:MOST_ASKED], *stall.waiting[:1]]:
                silent_s = self._silent_s if node in stall.silent else 0.0
                self._question(view, here, node, stall.step, silent_s, is_told=node in stall.culprits)
        elif stall is None:
            self._stall = None
        self._look_for_lost(view, here, now)

    def take(self, now: float, *, may_end: bool) -> HangFindings:
        """Return the findings since the last call.

        Args:
            may_end: whether this follower restarts a process after ending it.
        """
        found = HangFindings()
        while not self._looked.empty():
            node, looked = self._looked.get()
            if looked.is_told:
                found.lines.append(str(looked))
            if node in self._lost and self._lost[node].identity.pid == looked.pid:
                self._lost[node].hang = looked.hang
        for node, lost in self._lost.items():
            is_due = may_end and not lost.is_over and now - lost.since >= self._patience_s
            if is_due and lost.hang in self._ended:
                lost.is_over = True
                if classify_hang(self._see(lost.identity), self._silent_s) is lost.hang:
                    what = f"{lost.hang.value}, {now - lost.since:.0f} s after it was lost"
                    found.lines.append(f"worker {node} ({lost.identity}) {what}: it is ended (HANG=end)")
                    found.end.append(lost.identity)
        return found

    def wait(self) -> None:
        """Wait until all requested observations are done; used in tests."""
        self._questions.join()

    def _look_for_lost(self, view: JobView, here: Mapping[str, ProcessIdentity], now: float) -> None:
        """Examine processes that still run although the scheduler counts them as lost."""
        gone = (one for one in view.nodes if one.presence is PresenceState.LOST)
        lost = {one.node: one for one in gone if here.get(one.node) == one.identity}
        for node, known in list(self._lost.items()):
            if node not in lost or lost[node].identity != known.identity:
                del self._lost[node]
        for node, worker in lost.items():
            known = self._lost.setdefault(node, _Lost(worker.identity, now))
            cause = "" if worker.reason.startswith((OF_SILENCE, OF_CLOSED)) else worker.reason
            settled_s = min(LEAVING_S, self._patience_s) if cause else SETTLED_S
            if not known.is_asked and now - known.since >= settled_s:
                known.is_asked = True
                self._question(view, here, node, worker.step or view.step, self._silent_s, is_told=True, cause=cause)

    def _question(
        self,
        view: JobView,
        here: Mapping[str, ProcessIdentity],
        node: str,
        step: int,
        silent_s: float,
        *,
        is_told: bool,
        cause: str = "",
    ) -> None:
        worker = view.node(node)
        if worker is None or here.get(node) != worker.identity:
            return  # on another host, whose follower handles it
        members = [one.node for one in view.workers if not one.is_joining]
        rank = members.index(node) if node in members else None
        self._questions.put(_Question(worker, rank, step, silent_s, is_told, cause))
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer_all, name="samebits-stalls", daemon=True)
            self._thread.start()

    # ---- in the thread

    def _answer_all(self) -> None:
        while True:
            question = self._questions.get()
            self._looked.put((question.worker.node, self._answer(question)))
            self._questions.task_done()

    def _answer(self, question: _Question) -> Looked:
        worker = question.worker
        identity = worker.identity
        hang = classify_hang(self._see(identity), question.silent_s) if question.silent_s else None
        answer = self._ask(identity)
        place = place_in_dump(answer.text, Path.cwd())
        rank = "" if question.rank is None else f"rank {question.rank}, "
        title = f"worker {worker.node} ({rank}{identity})"
        head = [
            f"{title} at step {question.step}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
            hang.value if hang is not None else f"in {place or CODE_OF_OTHERS}",
            answer.silence.value if answer.silence is not None else "",
            self._collectives(identity),
        ]
        body = answer.text or "\n".join(process_state.threads(identity.pid))
        text = "\n".join([*filter(None, head), "", body, ""])
        file = None
        if answer.silence is not stacks.NoStackReason.GONE:
            name = f"node-{worker.node}" if question.rank is None else f"rank-{question.rank}"
            file = self._keep(f"step-{question.step}-{name}.txt", text)
        is_gone = answer.silence is stacks.NoStackReason.GONE  # the end of the process is reported elsewhere
        return Looked(title, hang, identity.pid, place, file, question.is_told and not is_gone, question.cause)

    def _collectives(self, identity: ProcessIdentity) -> str:
        contents = collective_ring.read(identity)
        if contents is None or not contents.launched:
            return ""
        return "its last collectives: " + "; ".join(map(str, contents.launched[-COLLECTIVES:]))

    def _keep(self, name: str, text: str) -> Path | None:
        """Write the text to a file (mode 0600), and remove the oldest files beyond ``MOST_FILES``.

        Returns:
            The file's path, or None on a disk error.
        """
        path = self._folder / name
        try:
            private.make_folder(self._folder)
            durable.write_file_atomically(path, printable_lines(text).encode()[:MOST_BYTES])
            kept = [one for one in self._folder.iterdir() if _FILE.fullmatch(one.name)]
            for old in sorted(kept, key=lambda one: one.lstat().st_mtime, reverse=True)[MOST_FILES:]:
                old.unlink(missing_ok=True)
        except (StoreError, OSError):
            return None
        return path
