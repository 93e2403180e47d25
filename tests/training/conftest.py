"""Clean up after each test of training, since one process runs many of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samebits.training.group import meshes


@pytest.fixture(autouse=True)
def forget_declared_meshes() -> Iterator[None]:
    """Declared meshes are kept for good, and a generation of another test would form them."""
    yield
    kept = meshes._meshes
    for declared in (kept._roots, kept._parts, kept._of_one, kept._resharded):
        declared.clear()
    kept._shrinking = None
