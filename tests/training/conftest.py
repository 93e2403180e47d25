"""What a test of training must not leave to the next test in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samebits.training.group import meshes


@pytest.fixture(autouse=True)
def forget_declared_meshes() -> Iterator[None]:
    """A mesh in a reference cycle outlives its test, and the next generation of another test would form it."""
    yield
    meshes._meshes._roots.clear()
    meshes._meshes._parts.clear()
