"""Carry out the page's actions: kill a worker, make it leave, or kill a random rank.

An action is a few bytes of JSON, which are read only after ``guard`` has admitted the request. One action runs at a
time.
"""

from __future__ import annotations

import asyncio
import enum
import pwd
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request

from samebits import strict_json
from samebits.account.events import MAX_TEXT, EventKind, JobEvent
from samebits.account.job_view import PresenceState
from samebits.commands import scale
from samebits.config import Settings
from samebits.dashboard.guard import uid_of
from samebits.errors import SameBitsError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import name_of, read_pid_files, send_signal
from samebits.launcher.spawning import BusyError, StartLock
from samebits.printable import shortened
from samebits.store import text_log
from samebits.store.process_identity import ProcessIdentity


class Deed(enum.StrEnum):
    """An action that can be requested."""

    KILL = "kill"
    DRAIN = "drain"
    DRILL = "drill"

    @property
    def text(self) -> str:
        """The action as a phrase that precedes the worker's name in a sentence."""
        return {Deed.KILL: "kill -9 of", Deed.DRAIN: "leave for good:", Deed.DRILL: "drill: kill -9 of"}[self]


def act(settings: Settings, deed: Deed, node: str, asker: str) -> str:
    """Record an action in the job's history, carry it out, and return what was done.

    Args:
        settings: settings of the job that was started in the current folder.
        deed: the action.
        node: the worker; ignored for ``DRILL``, which picks one of this machine's ranks at random.
        asker: a description of the requester, for the history.

    Raises:
        UsageError: the action is not possible now; nothing was done.
        StoreError: the action could not be recorded; nothing was done.
    """
    if not settings.enable_recovery:
        raise UsageError(
            "this job was started with ENABLE_RECOVERY=0: this action would end it. Fix: start the job "
            "with ENABLE_RECOVERY=1"
        )
    running = _running(settings)
    if deed is Deed.DRILL:
        node = secrets.choice(_ranks(settings, running))
    if node not in running:
        raise UsageError(
            f"worker {node or '?'} does not run on this machine. Fix: choose one of {', '.join(running) or 'none'}"
        )
    if deed is Deed.DRAIN:
        return _drain(settings, node, running[node], asker)
    _write_down(settings, deed, node, running[node], asker)
    if not send_signal(running[node], signal.SIGKILL):
        raise UsageError(f"worker {node} ({running[node]}) had ended before the signal. Fix: reload the page")
    return f"worker {node} ({running[node]}) was killed"


def _drain(settings: Settings, node: str, identity: ProcessIdentity, asker: str) -> str:
    try:
        with StartLock(settings.log_dir, wait=False):
            scale.check_removal(job_spec.nodes_of(settings.log_dir, settings), scale.view_of(settings), [node])
            _write_down(settings, Deed.DRAIN, node, identity, asker)
            scale.release(settings.log_dir, [node])
    except BusyError:
        raise UsageError("another command is starting or removing processes of this job. Fix: try again") from None
    return f"worker {node} ({identity}) leaves after its current step"


def _running(settings: Settings) -> dict[str, ProcessIdentity]:
    nodes = job_spec.nodes_of(settings.log_dir, settings)
    found = read_pid_files(settings.log_dir, map(name_of, nodes))
    return {node: one for node in nodes if (one := found.get(name_of(node))) is not None and one.is_alive()}


def _ranks(settings: Settings, running: Mapping[str, ProcessIdentity]) -> Sequence[str]:
    workers = scale.view_of(settings).workers
    ranks = [one.node for one in workers if one.presence is PresenceState.ALIVE and one.node in running]
    if not ranks:
        raise UsageError("no rank of this job runs on this machine. Fix: use the page on a host that has one")
    return ranks


def _write_down(settings: Settings, deed: Deed, node: str, identity: ProcessIdentity, asker: str) -> None:
    text = shortened(f"{deed.text} worker {node} ({identity}), requested by {asker}", MAX_TEXT)
    event = JobEvent(EventKind.ASKED, time.time(), node=node, text=text, more={"deed": str(deed)})
    text_log.append_asked(settings.recovery_path, strict_json.dumps(event.plain()))


MOST_BYTES = 512


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an action, for the page."""

    status: HTTPStatus
    text: str


class Actions:
    """Carries out actions on this folder's job, one at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._one_at_a_time = asyncio.Lock()

    async def take(self, request: Request) -> Done:
        """Carry out the action in a request that ``guard`` has admitted."""
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BYTES:
                    return Done(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"an action has at most {MOST_BYTES} bytes")
        except ClientDisconnect:
            return Done(HTTPStatus.BAD_REQUEST, "the connection ended before the request was complete")
        ordered = order_in(bytes(body))
        if ordered is None:
            expected = " or ".join(f'{{"do": "{deed}", "node": "1"}}' for deed in Deed)
            return Done(HTTPStatus.BAD_REQUEST, f"unknown action. Fix: send {expected}, with a node's name")
        deed, node = ordered
        asker = asker_of(request)
        async with self._one_at_a_time:
            try:
                return Done(HTTPStatus.OK, await asyncio.to_thread(act, self._settings, deed, node, asker))
            except SameBitsError as error:
                return Done(HTTPStatus.CONFLICT, str(error))


def order_in(body: bytes) -> tuple[Deed, str] | None:
    """Return the action and the node in a request's body, or None if it is invalid."""
    try:
        told = strict_json.loads(body)
    except ValueError:
        return None
    if not isinstance(told, dict) or told.get("do") not in list(map(str, Deed)) or told.keys() - {"do", "node"}:
        return None
    node = told.get("node", "")
    # A lone surrogate is not printable, and could not be sent back in the answer.
    is_name = isinstance(node, str) and len(node) <= 128 and node.isprintable()
    return (Deed(told["do"]), node) if is_name else None


def asker_of(request: Request) -> str:
    """Describe the requester by its address and, on loopback, the connection's user."""
    if request.client is None:
        return "the page"
    uid = uid_of(request.client, request.scope.get("server"))
    return f"the page at {request.client.host}" + (f", user {_name_of(uid)}" if uid is not None else "")


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
