"""What a person does to a running job from its page: end one process, have one leave, or lose one that chance picks.

What may be done, and that it is written down before it is done, lives here; who may ask is the page's guard's. The one
idea: nothing here can do what the user's own shell cannot, and a signal goes only to a process that the job's pid files
prove; what is done is an event of the job's history, with who has asked.
"""

from __future__ import annotations

import enum
import secrets
import signal
import time
from collections.abc import Mapping, Sequence

from samebits import strict_json
from samebits.config import Settings
from samebits.core.events import MAX_TEXT, Event, Kind
from samebits.errors import UsageError
from samebits.ops import kept_start, resizing
from samebits.ops.job_view import Presence
from samebits.ops.local_processes import name_of, read_pid_files, send_signal
from samebits.ops.spawning import BusyError, StartLock
from samebits.store import asked_log
from samebits.store.process_identity import ProcessIdentity


class Deed(enum.StrEnum):
    """What may be asked for."""

    KILL = "kill"
    DRAIN = "drain"
    DRILL = "drill"

    @property
    def text(self) -> str:
        """In a sentence, before the worker."""
        return {Deed.KILL: "kill -9 of", Deed.DRAIN: "leave for good:", Deed.DRILL: "drill: kill -9 of"}[self]


def act(settings: Settings, deed: Deed, node: str, asker: str) -> str:
    """Do it, written down before; what was done, in a sentence.

    Args:
        settings: of the job that was started in the current folder.
        node: of whom; of ``DRILL`` nobody's: chance picks one of the ranks here.
        asker: who has asked, for the history.

    Raises:
        UsageError: that cannot be done now; nothing was.
        StoreError: it could not be written down; nothing was done.
    """
    if not settings.enable_recovery:
        raise UsageError("this job was started with ENABLE_RECOVERY=0: it would end. Fix: start it with recovery on")
    running = _running(settings)
    if deed is Deed.DRILL:
        node = secrets.choice(_ranks(settings, running))
    if node not in running:
        raise UsageError(
            f"worker {node or '?'} does not run on this machine. Fix: one of {', '.join(running) or 'none'}"
        )
    if deed is Deed.DRAIN:
        return _drain(settings, node, running[node], asker)
    _write_down(settings, deed, node, running[node], asker)
    if not send_signal(running[node], signal.SIGKILL):
        raise UsageError(f"worker {node} ({running[node]}) had ended before the signal. Fix: look again")
    return f"worker {node} ({running[node]}) was killed"


def _drain(settings: Settings, node: str, identity: ProcessIdentity, asker: str) -> str:
    try:
        with StartLock(settings.log_dir, wait=False):
            resizing.check_removal(kept_start.nodes_of(settings.log_dir, settings), resizing.view_of(settings), [node])
            _write_down(settings, Deed.DRAIN, node, identity, asker)
            resizing.release(settings.log_dir, [node])
    except BusyError:
        raise UsageError(
            "somebody else starts or removes processes of this job at the moment. Fix: ask again"
        ) from None
    return f"worker {node} ({identity}) leaves after its present step"


def _running(settings: Settings) -> dict[str, ProcessIdentity]:
    nodes = kept_start.nodes_of(settings.log_dir, settings)
    found = read_pid_files(settings.log_dir, map(name_of, nodes))
    return {node: one for node in nodes if (one := found.get(name_of(node))) is not None and one.is_alive()}


def _ranks(settings: Settings, running: Mapping[str, ProcessIdentity]) -> Sequence[str]:
    workers = resizing.view_of(settings).workers
    ranks = [one.node for one in workers if one.presence is Presence.ALIVE and one.node in running]
    if not ranks:
        raise UsageError("no rank of this job runs on this machine. Fix: ask the page of a host that has one")
    return ranks


def _write_down(settings: Settings, deed: Deed, node: str, identity: ProcessIdentity, asker: str) -> None:
    text = f"{deed.text} worker {node} ({identity}), asked for by {asker}"[:MAX_TEXT]
    event = Event(Kind.ASKED, time.time(), node=node, text=text, more={"deed": str(deed)})
    asked_log.append(settings.recovery_path, strict_json.dumps(event.plain()))
