"""Save torch's flight recorder to a file in LOG_DIR when a group is broken, to show the open collectives.

torch records collectives in memory that is lost with the process, and a rank that hangs in a collective is soon ended.
The record is therefore written as soon as the group is broken, in a thread for which no recovery waits.
"""

from __future__ import annotations

import json
from pathlib import Path

from samebits import strict_json
from samebits.errors import StoreError
from samebits.service import log
from samebits.store import durable
from samebits.training import torch_private

MOST_BYTES = 16 << 20


def write(folder: Path, node: str, reason: str) -> Path | None:
    """Replace this node's file with the current record. Return None if it is empty or cannot be written.

    Args:
        folder: LOG_DIR; if it is missing, nothing is written.
        node: this process's node.
        reason: why the group was broken.
    """
    path = folder / f"flight_{node}.json"
    try:
        record = torch_private.flight_record()
        if not folder.is_dir() or not 0 < len(record) <= MOST_BYTES:
            return None
        read = strict_json.loads(record)
        if not read.get("entries"):
            return None
        durable.replace_note(path, json.dumps({"node": node, "broken": reason, "record": read}).encode())
    except (StoreError, RuntimeError, ValueError) as error:  # a failed device cannot be queried either
        log.warn(f"torch's record of its collectives could not be saved: {error}")
        return None
    return path
