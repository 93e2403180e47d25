"""Connect to a scheduler, receive snapshots of the job, and request its end.

A small thread turns incoming messages into one readable descriptor, which a follower can poll together with others.
"""

from __future__ import annotations

import collections
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from samebits.account.job_view import JobView
from samebits.config import Settings
from samebits.core.messages import StopJob
from samebits.errors import SecretError, StoreError
from samebits.launcher import job_spec
from samebits.net.address_book import addresses_now
from samebits.net.client import Client, Down, Got, ShutOut, Up
from samebits.net.curve import cluster_keys
from samebits.scheduler_hosts import NotHostsError, SchedulerAddress, names_one
from samebits.service import status
from samebits.service.status import stored_view
from samebits.store import checkpoint as checkpoints
from samebits.store.owner import read_owner

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0  # for a scheduler that is listening; on a busy machine, an answer takes a while


@dataclass(frozen=True, slots=True)
class Linked:
    """The connection was established. ``address`` is its address if the scheduler has several, otherwise ""."""

    address: str = ""


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The connection was lost. It is retried until it is established again."""


LinkNews = Linked | Unlinked | JobView


class SchedulerLink:
    """A connection to the job's scheduler that survives its restarts. Only one thread may use it.

    Raises:
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret.
    """

    def __init__(self, settings: Settings) -> None:
        self._client = _client(settings)
        self._has_choice = not names_one(settings.sched_host)
        self._elsewhere = False
        self._terms: dict[str, int] = {}  # the highest term of each job, by job id
        self._told: collections.deque[LinkNews] = collections.deque()
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop: StopJob | None = None
        self._to_tell: collections.deque[status.ForHistory] = collections.deque()
        self._asks = False
        self._shut_out: str | None = None
        self._was_linked = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="samebits-follower", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``take`` has something to return."""
        return self._readable

    def take(self) -> list[LinkNews]:
        """Return the messages and connection changes since the last call, in order.

        Raises:
            SecretError: this process never had the scheduler's secret.
        """
        try:
            os.read(self._readable, 4096)
        except BlockingIOError:
            return []
        if self._shut_out is not None:
            raise SecretError(self._shut_out)
        told = []
        while self._told:
            told.append(self._told.popleft())
        return told

    def ask_to_stop(self, by: str, exit_code: int = 0) -> None:
        """Ask the current scheduler to end its job gracefully; ``exit_code`` is ``StopJob.status``."""
        self._stop = status.stop_request(by, exit_code)
        self._client.wake()

    def decide(self, text: str, drain: Sequence[str] = ()) -> None:
        """Send a decision for the job's history, and ask the nodes in ``drain`` to leave."""
        self.tell(status.decision(text, drain))

    def tell(self, message: status.ForHistory) -> None:
        """Send a message to the current scheduler."""
        self._to_tell.append(message)
        self._client.wake()

    def ask(self) -> None:
        """Request a snapshot that lists every worker, even in a large job."""
        self._asks = True
        self._client.wake()

    def look_elsewhere(self) -> None:
        """Try the next address, because the scheduler at the current one belongs to another job."""
        self._elsewhere = True
        self._client.wake()

    def close(self) -> None:
        """Close the connection."""
        self._closing = True
        self._client.wake()
        self._thread.join()
        self._client.close()
        os.close(self._readable)
        os.close(self._writable)

    def _run(self) -> None:
        while not self._closing:
            for incoming in self._client.drain():
                match incoming:
                    case Up():
                        self._was_linked = True
                        self._client.send(status.question(follow=True))
                        self._tell(Linked(str(self._client.address) if self._has_choice else ""))
                    case Down():
                        self._tell(Unlinked())
                    case ShutOut(why):
                        self._told_shut_out(why)
                    case Got(message):
                        view = status.view_in(message)
                        if view is not None:
                            self._hear(view)
            if self._stop is not None:
                self._client.send(self._stop)
                self._stop = None
            if self._asks:
                self._asks = False
                self._client.send(status.question(follow=False))
            while self._to_tell:
                self._client.send(self._to_tell.popleft())
            if self._elsewhere:
                self._elsewhere = False
                self._client.look_elsewhere()
            self._client.wait(None)

    def _hear(self, view: JobView) -> None:
        """Handle a snapshot. One from an earlier term is ignored, because that scheduler was replaced."""
        newest = self._terms.setdefault(view.job, view.term)
        if view.term < newest:
            self._client.look_elsewhere()
            return
        self._terms[view.job] = view.term
        self._tell(view)
        if view.job_finished or view.ended is not None:  # the scheduler exits once it knows that this has arrived
            self._client.send(status.question(follow=False))

    def _told_shut_out(self, text: str) -> None:
        """Handle a rejected secret. If an earlier connection accepted it, a different scheduler has answered."""
        if not self._was_linked:
            self._shut_out = text
            self._ring()

    def _tell(self, told: LinkNews) -> None:
        self._told.append(told)
        self._ring()

    def _ring(self) -> None:
        try:
            os.write(self._writable, b"t")
        except BlockingIOError:
            return  # the pipe is full, so the reader will wake up anyway


def ask_once(settings: Settings, timeout_s: float) -> JobView | None:
    """Return one snapshot that includes every worker, or None if no scheduler answers in time.

    If SCHED_HOST names several hosts, each is asked. The snapshot with the highest term for this folder's job is
    returned, with its scheduler's ``address``.

    Raises:
        SecretError: a scheduler is listening, but has a different secret from this process.
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret.
    """
    told = _told_by(settings, timeout_s)
    return None if told is None else told[1]


def decide_once(
    settings: Settings, text: str, drain: Sequence[str] = (), *, timeout_s: float = ANSWER_TIMEOUT_S
) -> bool:
    """Send a decision to the scheduler, ask these nodes to leave, and return whether the scheduler answered.

    Raises:
        SecretError: a scheduler is listening, but has a different secret from this process.
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret.
    """
    return _tell_once(settings, status.decision(text, drain), timeout_s)


def stop_once(settings: Settings, by: str, *, at_commit: bool = False) -> bool:
    """Ask the scheduler to end its job gracefully.

    With ``at_commit``, all workers first stop after the same commit.

    Returns:
        Whether the scheduler answered, and so received the request.

    Raises:
        SecretError: a scheduler is listening, but has a different secret from this process.
        SettingsError: CLUSTER_SECRET_FILE contains no usable secret.
    """
    return _tell_once(settings, status.stop_request(by, at_commit=at_commit), ANSWER_TIMEOUT_S)


def is_listening(settings: Settings) -> bool:
    """Return whether a process accepts connections at the scheduler's address."""
    return any(_is_there(address) for address in known_addresses(settings))


def known_addresses(settings: Settings) -> tuple[SchedulerAddress, ...]:
    """Return the addresses in SCHED_HOST, or an empty tuple if the file that it names is unusable."""
    try:
        return addresses_now(settings.sched_host, settings.sched_port)
    except NotHostsError:
        return ()


def at_address(settings: Settings, address: SchedulerAddress) -> Settings:
    """Return the same settings with only this address in SCHED_HOST."""
    return replace(settings, sched_host=address.host, sched_port=address.port)


def _is_there(address: SchedulerAddress) -> bool:
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def _client(settings: Settings) -> Client:
    keys = cluster_keys(settings.cluster_secret, settings.cluster_secret_file)
    name = f"follower-{uuid.uuid4().hex}"
    return Client(settings.sched_host, settings.sched_port, name, settings.node_timeout_s, keys=keys)


def _tell_once(settings: Settings, message: object, timeout_s: float) -> bool:
    """Send a message to this job's current scheduler only, and return whether it answered."""
    there = settings
    if not names_one(settings.sched_host):
        told = _told_by(settings, timeout_s)
        if told is None:
            return False
        there = told[0]
    return _asked(there, timeout_s, message) is not None


def _told_by(settings: Settings, timeout_s: float) -> tuple[Settings, JobView] | None:
    """Ask the scheduler at each address, and return the best answer; other jobs' schedulers are ignored.

    Raises:
        SecretError: no scheduler answers, and one that is listening has a different secret.
    """
    answers: list[tuple[Settings, JobView]] = []
    shut_out: SecretError | None = None
    for address in known_addresses(settings):
        there = at_address(settings, address)
        try:
            view = _asked(there, timeout_s)
        except SecretError as error:
            shut_out = error
            continue
        if view is not None:
            where = "" if names_one(settings.sched_host) else str(address)
            answers.append((there, msgspec.structs.replace(view, address=where)))
    if shut_out is not None and not answers:
        raise shut_out
    if len({view.job for _, view in answers}) > 1:
        own = own_job(settings)
        answers = [answer for answer in answers if answer[1].job == own] or answers[:1]
    return max(answers, key=lambda answer: answer[1].term, default=None)


def own_job(settings: Settings) -> str:
    """Return the ID of the job to which this folder's files belong, or "" if unknown.

    The journal exists only on the scheduler's host; on other hosts, the owner of LOG_DIR or of the checkpoints is used.
    A job without recovery has neither, so its job spec is used.
    """
    folders = [settings.log_dir]
    try:
        if not settings.enable_recovery:
            start = job_spec.read(settings.log_dir)
            # In a folder that a job has owned, the scheduler does not take the id of its start.
            return "" if start is None or read_owner(settings.log_dir) is not None else start.job
        stored = stored_view(settings.recovery_path)
        if stored is not None:
            return stored.job
        if isinstance(settings.checkpoint_path, Path):
            roots = checkpoints.folders_with_points(settings.checkpoint_path)
            folders += [checkpoints.rank_directory(root, slot) for root in roots for slot in checkpoints.slots_in(root)]
        owners = [owner.job for folder in folders if (owner := read_owner(folder)) is not None]
    except StoreError:
        return ""
    return owners[0] if owners else ""


def _asked(settings: Settings, timeout_s: float, *first: object) -> JobView | None:
    """Send these messages, and return the scheduler's snapshot, or None if it does not answer in time."""
    if not is_listening(settings):
        return None
    client = _client(settings)
    deadline_s = time.monotonic() + timeout_s
    try:
        while (left_s := deadline_s - time.monotonic()) > 0:
            client.wait(left_s)
            for incoming in client.drain():
                match incoming:
                    case Up():
                        for message in (*first, status.question(follow=False)):
                            client.send(message)
                    case ShutOut(why):
                        raise SecretError(why)
                    case Got(message) if (view := status.view_in(message)) is not None:
                        return view
        return None
    finally:
        client.close()
