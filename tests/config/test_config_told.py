"""Settings as used elsewhere: the documented table, restarts, the job's common settings, torch."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from samebits.config import (
    KEPT_NAMES,
    environment_table,
    environment_table_zh,
    fixed_settings,
    kept_environment,
    leave_failures_to_us,
    publish,
    read,
)
from samebits.settings_table import VARIABLES

WORKER = {"ROLE": "worker", "WORKER_NUM": "4", "NODE_ID": "0"}


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


@pytest.mark.parametrize("table", [environment_table(), environment_table_zh()], ids=["en", "zh"])
def test_table_has_one_complete_row_per_variable(table: str) -> None:
    head, rule, *rows = cells(table)
    assert len(head) == 4
    assert rule == ["---"] * 4
    assert [row[0] for row in rows] == [f"`{variable.name}`" for variable in VARIABLES]
    assert all(len(row) == 4 and all(row) for row in rows)


def test_table_states_defaults_and_refused_values() -> None:
    rows = {row[0].strip("`"): row for row in cells(environment_table())}
    assert rows["SCHED_PORT"][1:3] == ["8118", "a whole number from 1 to 65535"]
    assert rows["MIN_WORKER_NUM"][1] == "WORKER_NUM"
    assert rows["NODE_ID"][1] == "random"
    assert rows["JOB_NAME"][1] == "the script's file name"


def test_restart_keeps_exactly_the_jobs_names_and_the_allow_list() -> None:
    kept = {
        "WORKER_NUM": "4",
        "MS_SCHED_HOST": "127.0.0.1",
        "ENABLE_RECOVERY": "1",
        "CLUSTER_SECRET_FILE": "/run/secret",
        "PATH": "/bin",
        "PYTHONPATH": "/lib",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0",
        "ASCEND_RT_VISIBLE_DEVICES": "0",
        "DATA_PATH": "/data",
        "LD_LIBRARY_PATH": "/opt/lib",
        "MKL_NUM_THREADS": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONHASHSEED": "0",
    }
    dropped = {
        "CLUSTER_SECRET": "hunter2",
        "MS_CLUSTER_SECRET": "hunter2",
        "ROLE": "worker",
        "MS_ROLE": "MS_WORKER",
        "NODE_ID": "0",
        "MS_NODE_ID": "7",
        "HOME": "/root",
        "AWS_SECRET_ACCESS_KEY": "x",
        "path": "lower case is another name",
        "MY_OMP_NUM_THREADS": "1",
        "RANK": "0",
        "TORCHELASTIC_RUN_ID": "1",
        "BATCH": "64",
    }
    assert kept_environment({**dropped, **kept}) == kept
    assert "CLUSTER_SECRET" not in KEPT_NAMES


def test_settings_a_job_shares() -> None:
    assert fixed_settings(read({**WORKER, "MS_ENABLE_RECOVERY": "1"})[0]) == (
        ("WORKER_NUM", "4"),
        ("ENABLE_RECOVERY", "1"),
        ("LOSS_ANOMALY", "tell"),
        ("HIDDEN_STATE", "tell"),
        ("CONSISTENCY_EVERY", "50"),
        ("AUDIT", "0"),
        ("MIN_WORKER_NUM", "4"),
        ("MAX_WORKER_NUM", "4"),
        ("SPARE_NUM", "0"),
        ("SHARD_COPY_EVERY", "auto"),
    )
    # What differs between processes, or is another way to the same scheduler, is no reason to refuse.
    elsewhere = {**WORKER, "NODE_ID": "3", "SCHED_HOST": "::1", "LOG_DIR": "/logs", "NODE_TIMEOUT": "9"}
    assert fixed_settings(read(elsewhere)[0]) == fixed_settings(read(WORKER)[0])


def test_nccl_guards_are_off_unless_the_user_sets_them() -> None:
    environ: dict[str, str] = {}
    assert leave_failures_to_us(environ) == [] == leave_failures_to_us(environ)
    assert environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",
        "HCCL_ASYNC_ERROR_HANDLING": "0",
    }
    chosen = {"NCCL_ASYNC_ERROR_HANDLING": "1", "HCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_NVLS_ENABLE": "0"}
    environ = dict(chosen)
    (broken,) = leave_failures_to_us(environ)
    assert broken.startswith("NCCL_ASYNC_ERROR_HANDLING=1: ") and broken.endswith("Fix: unset it, or set it to 0")
    assert chosen.items() <= environ.items(), "the user's own values win, also under an older name"
    assert not {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_HCCL_ASYNC_ERROR_HANDLING"} & environ.keys()


def test_publish_sets_torchs_variables() -> None:
    environ = {"RANK": "9", "HOME": "/root"}
    publish(2, 1, 4, 3, "::1", 29500, environ)
    assert environ == {
        "HOME": "/root",
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def test_torchs_rank_0_joins_the_store_that_holds_the_published_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=30), wait_for_workers=False)
    written: dict[str, str] = {}
    publish(0, 0, 1, 1, "127.0.0.1", server.port, written)
    for name, text in written.items():
        monkeypatch.setenv(name, text)
    assert os.environ["RANK"] == "0"
    client, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=30)))
    server.set("said", "by the server")
    assert (client.get("said"), rank, world_size) == (b"by the server", 0, 1)
