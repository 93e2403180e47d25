"""A gate in a script of the tests: the job waits there until it was disturbed, however late that comes.

Here lives the one that any script may have, in the folder it is run in, which is its job's; the probe has several of
its own (``--gates``). The test opens it with ``JobFolder.open_gates``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.002


def wait_at_gate(step: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Until the gate behind that many steps is open.

    Args:
        step: of its name.
        meanwhile: called again and again; may raise, where a peer was lost.
    """
    gate = Path(f"gate-{step}")
    while not gate.exists():
        meanwhile()
        time.sleep(POLL_S)
