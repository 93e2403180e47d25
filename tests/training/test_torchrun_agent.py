"""torch's agent with ``--rdzv-backend=samebits``: what torch documents of torchrun's environment, results and errors.

The functions are the agent's workers. Each is a process, and the agent is in this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from samebits.service import log
from tests.system.processes import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

DOCUMENTED = (
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
)
"""The environment variables that torchrun's page lists for each worker."""
RUN_ID, MAX_RESTARTS = "documented", 2


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, object]]:
    """Return torch's launcher with one agent of two workers, and this backend."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEALTH", "off")
    for name in ("propagate", "handlers", "level"):  # an agent sets up the log of its process, which is this one
        monkeypatch.setattr(log.LOGGER, name, getattr(log.LOGGER, name))

    def launched(function: Callable[..., object], *arguments: object) -> dict[int, object]:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            run_id=RUN_ID,
            rdzv_endpoint=f"127.0.0.1:{free_port()}",
            rdzv_backend="samebits",
            max_restarts=MAX_RESTARTS,
            monitor_interval=0.1,
        )
        results: dict[int, object] = elastic_launch(config, function)(*arguments)
        return results

    return launched


def summed_environment() -> tuple[float, dict[str, str]]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item(), {name: os.environ[name] for name in DOCUMENTED}


@record
def fails_until(attempts: int, folder: str) -> str:
    """Fail on rank 1 in the first attempts, while rank 0 waits for it in a collective."""
    dist.init_process_group("gloo")
    restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
    Path(folder, f"attempt_{restart}_{dist.get_rank()}").touch()
    if int(restart) < attempts and dist.get_rank() == 1:
        raise ValueError(f"attempt {restart} fails")
    dist.barrier()
    return restart


def test_workers_have_the_documented_environment_and_their_results_come_back(
    launch: Callable[..., dict[int, tuple[float, dict[str, str]]]],
) -> None:
    results = launch(summed_environment)
    assert sorted(results) == [0, 1]
    for rank, (total, environment) in results.items():
        assert total == 3.0
        assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == dict.fromkeys(
            ("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)
        )
        assert environment["GROUP_RANK"] == "0"
        assert {environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"2"}
        assert environment["TORCHELASTIC_RUN_ID"] == RUN_ID
        assert environment["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert environment["TORCHELASTIC_MAX_RESTARTS"] == str(MAX_RESTARTS)


def test_failed_worker_restarts_all_workers_of_the_agent(launch: Callable[..., dict[int, str]], tmp_path: Path) -> None:
    assert launch(fails_until, 1, str(tmp_path)) == {0: "1", 1: "1"}
    assert len(list(tmp_path.glob("attempt_*"))) == 4


def test_failure_beyond_max_restarts_is_the_first_workers_error(
    launch: Callable[..., dict[int, str]], tmp_path: Path
) -> None:
    with pytest.raises(ChildFailedError) as raised:
        launch(fails_until, MAX_RESTARTS + 1, str(tmp_path))
    rank, first = raised.value.get_first_failure()
    assert (rank, first.local_rank, first.exitcode) == (1, 1, 1)
    assert f"ValueError: attempt {MAX_RESTARTS} fails" in str(first.message)
    assert len(list(tmp_path.glob("attempt_*"))) == 2 * (MAX_RESTARTS + 1)
