"""This process on its host: as others see it (host, pid, start time), and what it may have of it."""

from __future__ import annotations

from samebits.core.messages import Process
from samebits.net.address import loopback as loopback
from samebits.net.descriptors import raise_descriptor_limit as raise_descriptor_limit
from samebits.store.process_identity import ProcessIdentity, host_id


def this_process(device: str) -> Process:
    """The present process, computing on ``device``."""
    me = ProcessIdentity.current()
    return Process(host_id(), me.pid, me.started_at, device)
