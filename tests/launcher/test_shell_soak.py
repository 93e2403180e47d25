"""One job in the shell with random faults, another one every day; ``python -m tests.launcher.shell_soak`` runs more."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest

from tests.launcher.shell_job import ShellJob
from tests.launcher.shell_soak import ShellSoak, settings_of


@pytest.mark.system
@pytest.mark.thorough  # → test_recover_sh, test_supervised_sh: each signal to each process by itself
def test_whatever_is_killed_the_two_commands_bring_the_job_to_its_end(new_job: Callable[..., ShellJob]) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    soak = ShellSoak(new_job("a job", **settings_of(seed)), seed)
    soak.run()
    print(soak.story())
    assert soak.happened, "nothing happened to it"
