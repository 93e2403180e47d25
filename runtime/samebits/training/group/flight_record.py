"""The collectives that a broken group had on its way, as torch's flight recorder has them, in a file of LOG_DIR.

Never here: whether a job hangs, and who is to blame; ``core.watch.progress`` says that. The one idea: torch records
every collective anyway, in memory that is gone with the process, and a rank that does not come out of one is ended
soon; so what is still open is written as soon as the group is broken, aside, and never keeps a recovery waiting.
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
    """Replace this node's file by what is recorded now; None where nothing is, or it cannot be written.

    Args:
        folder: LOG_DIR; where it is not there nobody looks into it.
        node: this process's.
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
    except (StoreError, RuntimeError, ValueError) as error:  # a device that has failed cannot be asked either
        log.warn(f"what torch recorded of its collectives is not kept: {error}")
        return None
    return path
