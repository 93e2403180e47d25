"""Run the probe as if on a host of its own: another host name and private shared memory.

``TEST_HOST`` names the host, ``TEST_MEMORY`` the folder that stands for its shared memory, if any. Its disk is what
``CHECKPOINT_PATH`` says.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from samebits.store import checkpoint
from samebits.store.process_identity import host_id
from tests.system import probe

HOST, MEMORY = "TEST_HOST", "TEST_MEMORY"


def main() -> None:
    name = os.environ.get(HOST)
    if name is not None:
        socket.gethostname = lambda: name
        host_id.cache_clear()
        if MEMORY in os.environ:
            checkpoint.SHARED_MEMORY = Path(os.environ[MEMORY])  # type: ignore[misc]
    probe.main()


if __name__ == "__main__":
    main()
