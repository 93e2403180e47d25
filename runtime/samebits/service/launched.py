"""What a worker's process can show of where it comes from: that the job's own launcher has started it.

Only the looking lives here; what is proved is ``core.replacements``'. The one idea: nobody is asked for a proof whose
name does not say that it is a replacement, so a process that was started in any other way opens no file.
"""

from __future__ import annotations

from samebits.config import Settings
from samebits.core.lines import number_of
from samebits.core.replacements import proof_of
from samebits.store.owner import read_owner, read_token


def proof_for(settings: Settings, node: str, session: str) -> bytes:
    """The proof of this session of this node; empty where it is no replacement, or no launcher has left a token.

    Raises:
        StoreError: what lies in LOG_DIR cannot be believed.
    """
    if number_of(node) == 0 or not settings.enable_recovery:
        return b""
    token, owner = read_token(settings.log_dir), read_owner(settings.log_dir)
    return proof_of(token, owner.job, node, session) if token and owner is not None else b""
