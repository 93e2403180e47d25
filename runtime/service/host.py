"""This process, as others see it: host name, pid, start time."""

from __future__ import annotations

import functools
import socket

from runtime.core.messages import Process
from runtime.store.process_identity import ProcessIdentity


@functools.cache
def host_name() -> str:
    """The name this host is known by in the job."""
    return socket.gethostname()


def this_process(device: str) -> Process:
    """The present process, computing on ``device``."""
    me = ProcessIdentity.current()
    return Process(host_name(), me.pid, me.started_at, device)
