"""The jobs of the shell's tests: a folder, the scripts called in it, and the proof that nothing of them is left."""

from __future__ import annotations

from tests.ops.conftest import job, new_job

__all__ = ["job", "new_job"]
