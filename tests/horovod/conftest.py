"""The jobs of the system tests, for scripts with Horovod's calls."""

from __future__ import annotations

from tests.system.conftest import new_job, watched

__all__ = ["new_job", "watched"]
