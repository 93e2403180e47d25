"""The system tests' jobs."""

from __future__ import annotations

from tests.system.conftest import new_job, watched

__all__ = ["new_job", "watched"]
