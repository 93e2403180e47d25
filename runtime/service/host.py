"""This process, as others see it: host, pid, start time."""

from __future__ import annotations

from runtime.core.messages import Process
from runtime.store.process_identity import ProcessIdentity, host_id


def this_process(device: str) -> Process:
    """The present process, computing on ``device``."""
    me = ProcessIdentity.current()
    return Process(host_id(), me.pid, me.started_at, device)
