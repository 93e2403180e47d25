"""A gate in a test script: the job waits there until the test has disturbed it.

Any script may use it, started in its job's folder; the probe has gates of its own (``--gates``). The test opens
it with ``JobFolder.open_gates``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

POLL_S = 0.002


def wait_at_gate(step: int, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Wait until the gate after that many steps is open.

    Args:
        step: the step in its name.
        meanwhile: called repeatedly; may raise if a peer was lost.
    """
    gate = Path(f"gate-{step}")
    while not gate.exists():
        meanwhile()
        time.sleep(POLL_S)
