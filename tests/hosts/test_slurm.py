"""Slurm: host lists, workers in blocks per host, spares at the end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samebits.__main__ import main
from samebits.errors import SettingsError
from samebits.exit_codes import codes_to_give_up_at
from samebits.hosts.slurm import MOST_HOSTS, Placed, SlurmStepOptions, hosts_of, placed, plan, port_of, share_of


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]-[1-2]", ["rack1-1", "rack1-2", "rack2-1", "rack2-2"]),
        ("gpu[1,3]a.example,x-y_z", ["gpu1a.example", "gpu3a.example", "x-y_z"]),
    ],
)
def test_host_list_is_expanded(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        ",",
        "n1,",
        "n[",
        "n]",
        "n[]",
        "n[1",
        "n[a]",
        "n[1-]",
        "n[3-1]",
        "n[1--2]",
        "n[[1]]",
        "n[1]]",
        "n[1,]",
        "n[١]x[",
    ],
)
def test_invalid_host_list_is_refused(nonsense: str) -> None:
    with pytest.raises(ValueError, match=r"host name|range of numbers"):
        hosts_of(nonsense)


@pytest.mark.parametrize("bomb", [f"n[0-{MOST_HOSTS}]", "n[1-99999]x[1-99999]", "n[1-999999999999999999999]"])
def test_host_list_is_bounded_before_it_is_expanded(bomb: str) -> None:
    with pytest.raises(ValueError, match=r"longer|more than|range"):
        hosts_of(bomb)


def test_workers_go_to_hosts_in_blocks_and_spares_to_the_last() -> None:
    assert placed(["a", "b", "c"], 2, 1) == [
        Placed("scheduler", "a"),
        Placed("worker_0", "a", "0", "0"),
        Placed("worker_1", "a", "1", "1"),
        Placed("worker_2", "b", "2", "0"),
        Placed("worker_3", "b", "3", "1"),
        Placed("worker_4", "c", "4", "0"),
        Placed("worker_5", "c", "5", "1"),
    ]


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, 2),
        ({"SLURM_NTASKS_PER_NODE": "3"}, 6),
        ({"SLURM_GPUS_ON_NODE": "8"}, 16),
        ({"SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "8"}, 4),
    ],
)
def test_slurm_gives_the_number_of_workers_per_host(variables: dict[str, str], workers: int) -> None:
    found = plan({"SLURM_JOB_NODELIST": "n[1-2]", **variables})
    assert [one.node_id for one in found] == ["", *map(str, range(workers))]


@pytest.mark.parametrize(
    ("variables", "spares", "named"),
    [
        ({}, 0, "SLURM_JOB_NODELIST is not set"),
        ({"SLURM_JOB_NODELIST": "n["}, 0, "SLURM_JOB_NODELIST=n["),
        ({"SLURM_JOB_NODELIST": "n1"}, 1, "leave none to train on"),
        ({"SLURM_JOB_NODELIST": "n1"}, -1, "leave none to train on"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "4(x2)"}, 0, "SLURM_NTASKS_PER_NODE"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS_PER_NODE": "0"}, 0, "SLURM_NTASKS_PER_NODE"),
    ],
)
def test_invalid_allocation_is_refused_in_a_sentence(variables: dict[str, str], spares: int, named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        plan(variables, spares)
    assert named in str(caught.value)
    assert "Fix: " in str(caught.value)


def test_subcommand_prints_one_line_per_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    assert main(["slurm", "--spare-hosts", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == ["scheduler n1  ", "worker_0 n1 0 0", "worker_1 n2 1 0"]


def test_batch_script_gives_up_if_a_restart_cannot_help(repository: Path) -> None:
    script = (repository / "scripts" / "slurm" / "samebits.sbatch").read_text()
    (listed,) = re.findall(r"case \$1 in ([\d|]+)\) true", script)
    assert [int(code) for code in listed.split("|")] == [0, *codes_to_give_up_at()]


STEP = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "20007",
}


def test_task_of_a_step_knows_its_share() -> None:
    assert share_of(STEP) == SlurmStepOptions(hosts=2, node_rank=1, first_host="n1", port=10_007, job=20_007)


def test_without_a_step_of_several_hosts_there_is_no_share() -> None:
    assert share_of({}) is None
    assert share_of({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1"}) is None
    assert share_of(STEP | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "one task on each of 2 hosts"),
        ({"SLURM_NODEID": "2"}, "do not agree"),
        ({"SLURM_NODEID": ""}, "expected a number"),
        ({"SLURM_NODEID": "-1"}, "expected a number"),
        ({"SLURM_JOB_ID": "1" * 40}, "expected a number"),
        ({"SLURM_STEP_NODELIST": "n["}, "not a host name"),
        ({"SLURM_STEP_NODELIST": "n[1-3]"}, "do not agree"),
    ],
)
def test_invalid_step_is_refused(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        share_of(STEP | wrong)


def test_batch_script_uses_the_same_port() -> None:
    script = (Path(__file__).parents[2] / "scripts" / "slurm" / "samebits.sbatch").read_text()
    found = re.search(r"\$\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)", script)
    assert found is not None
    assert port_of(123_456) == int(found[1]) + 123_456 % int(found[2])
