"""Processes that are observed from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samebits.store.process_identity import ProcessIdentity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ProcessIdentity]]:
    """Start a script and return once it has reported that it is ready."""
    children: list[subprocess.Popen[bytes]] = []

    def run(source: str) -> ProcessIdentity:
        script = tmp_path / "script.py"
        script.write_text(source)
        child = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        children.append(child)
        assert child.stdout is not None and child.stdout.read(5) == b"ready"
        return ProcessIdentity.of_child(child.pid)

    yield run
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
