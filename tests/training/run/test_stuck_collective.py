"""Which of the main thread's waits count as one that only a peer could have ended."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from samebits.training.group.calling_place import PACKAGE_FOLDER
from samebits.training.run import stuck_collective

WITHIN_S = 60.0


@pytest.mark.parametrize("folder", ["group", "checkpoint"])
def test_wait_for_a_lock_counts_only_in_the_code_of_groups(folder: str) -> None:
    """Elsewhere, other threads of this process, such as those that copy a state, may release it much later."""
    file = f"{PACKAGE_FOLDER}training/{folder}/held.py"
    waiter: dict[str, Any] = {}
    exec(compile("def wait(event): event.wait(60)", file, "exec"), waiter)
    seen: list[str] = []
    is_over = threading.Event()

    def look() -> None:
        while not seen:
            call = stuck_collective._call()
            frame = call.frame
            if frame is not None and frame.f_code.co_filename == threading.__file__:
                while frame is not None and frame.f_code.co_filename != file:
                    frame = frame.f_back
                if frame is not None:
                    seen.append(call.file)
        is_over.set()

    other = threading.Thread(target=look, daemon=True)
    other.start()
    waiter["wait"](is_over)
    other.join(WITHIN_S)
    assert seen == [file if folder == "group" else sys.modules["threading"].__file__]
