"""The system tests' jobs."""

from __future__ import annotations

from tests.system.conftest import has_relay, new_job, watched

__all__ = ["has_relay", "new_job", "watched"]
