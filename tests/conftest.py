"""What every test may use; nothing here starts a process or opens a socket."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parents[1]
