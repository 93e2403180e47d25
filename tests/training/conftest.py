"""What a test of training must not leave to the next test in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samebits.training.group import meshes


@pytest.fixture(autouse=True)
def forget_declared_meshes() -> Iterator[None]:
    """Declared meshes are kept for good, and a generation of another test would form them."""
    yield
    meshes._meshes.forget_all()
