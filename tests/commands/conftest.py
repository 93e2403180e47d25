"""The fixtures of ``tests/launcher``, for commands that need a running job."""

from __future__ import annotations

from tests.launcher.conftest import job, new_job

__all__ = ["job", "new_job"]
