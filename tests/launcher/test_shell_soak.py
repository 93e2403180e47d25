"""One job in the shell with random faults, different each day; ``python -m tests.launcher.shell_soak`` runs more."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tests.launcher.shell_job import ShellJob
from tests.launcher.shell_soak import ShellSoak, settings_of


@pytest.mark.system
@pytest.mark.thorough  # → test_recover_sh, test_supervised_sh: each signal to each process
def test_run_and_recover_finish_the_job_whatever_is_killed(new_job: Callable[..., ShellJob]) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    soak = ShellSoak(new_job("a job", **settings_of(seed)), seed)
    soak.run()
    print(soak.story())
    assert soak.happened, "it met no fault"
