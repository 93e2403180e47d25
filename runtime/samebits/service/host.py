"""Describe this process on its host, and prove that it replaces another worker's process."""

from __future__ import annotations

from samebits.config import Settings
from samebits.core.membership.replacement_proofs import proof_of
from samebits.core.messages import Process
from samebits.core.replacement_names import number_of
from samebits.net.address import loopback as loopback
from samebits.net.descriptors import raise_descriptor_limit as raise_descriptor_limit
from samebits.store.owner import read_owner, read_token
from samebits.store.process_identity import ProcessIdentity, host_id


def proof_for(settings: Settings, node: str, session: str) -> bytes:
    """Return the proof that this session may replace the node's process.

    The proof is empty if the process is no replacement or there is no token.

    Raises:
        StoreError: the files in LOG_DIR cannot be trusted.
    """
    if number_of(node) == 0 or not settings.enable_recovery:
        return b""
    token, owner = read_token(settings.log_dir), read_owner(settings.log_dir)
    return proof_of(token, owner.job, node, session) if token and owner is not None else b""


def this_process(device: str) -> Process:
    """Return the identity of this process, which computes on ``device``."""
    me = ProcessIdentity.current()
    return Process(host_id(), me.pid, me.started_at, device)
