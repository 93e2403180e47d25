"""``samebits run``: its options, the environment of the job, and this host's share of it."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

import samebits.__main__
from samebits import config
from samebits.__main__ import main
from samebits.commands.run.check import words_of_job
from samebits.commands.run.options import SUPERVISED_RESTARTS, RunRequest, Streams, nodes_of_host, parse
from samebits.commands.run.prepare import read_start
from samebits.launcher import job_spec
from samebits.launcher.spawning import Way
from samebits.spelling import spelled, spelled_run

DEFAULTS = {
    "WORKER_NUM": "4",
    "ENABLE_RECOVERY": "1",
    "MAX_RESTARTS": str(SUPERVISED_RESTARTS),
    "JOB_NAME": "train.py",
    "OMP_NUM_THREADS": "1",
    "SPARE_NUM": "1",
}


def asked(line: str, environ: dict[str, str] | None = None, *, devices: int = 0) -> RunRequest:
    return parse(line.split(), environ or {}, devices=devices)


def test_script_alone_is_a_recoverable_job_of_four() -> None:
    request = asked("here/train.py")
    assert (request.way, request.script, request.args) == (Way.SCRIPT, "here/train.py", ())
    assert request.environment == DEFAULTS
    assert (request.nodes, request.has_scheduler) == (None, True)


def test_words_after_the_script_are_its_arguments() -> None:
    for line in ("--fresh train.py --fresh -n 7 -- x --", "--fresh -- train.py --fresh -n 7 -- x --"):
        request = asked(line)
        assert (request.script, request.args) == ("train.py", ("--fresh", "-n", "7", "--", "x", "--"))
        assert request.fresh
        assert request.environment == DEFAULTS


def test_spare_is_added_where_it_costs_only_memory_and_nothing_was_requested() -> None:
    assert asked("-n 2 train.py").adds_spare and asked("train.py", {"DEVICE": "cpu"}, devices=4).adds_spare
    for line, environ, devices in (
        ("--spares 1 train.py", {}, 0),
        ("--spares 0 train.py", {}, 0),
        ("train.py", {"MS_SPARE_NUM": "2"}, 0),
        ("-n 1 train.py", {}, 0),
        ("train.py", {}, 4),
        ("train.py", {"DEVICE": "npu"}, 0),
        ("--detach train.py", {}, 0),
        ("--plain train.py", {}, 0),
        ("--check train.py", {}, 0),
        ("--max-restarts 0 train.py", {}, 0),
        ("train.py", {"ENABLE_RECOVERY": "0"}, 0),
        ("--nnodes 2 --sched-host 192.0.2.1 --node-rank 0 train.py", {}, 0),
        ("--on ray --nnodes 2 -n 2 train.py", {}, 0),
        ("--host-discovery-script ./h --nnodes 1:4 train.py", {}, 0),
    ):
        request = asked(line, environ, devices=devices)
        assert not request.adds_spare, line
        assert request.environment.get("SPARE_NUM", "0") == ("1" if line.startswith("--spares 1") else "0"), line


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("-n 2 train.py", {"WORKER_NUM": "8"}, {"WORKER_NUM": "2"}),
        ("train.py", {"WORKER_NUM": "8"}, {"WORKER_NUM": None}),
        ("train.py", {"MS_WORKER_NUM": "8"}, {"WORKER_NUM": None}),
        ("train.py", {"PET_NPROC_PER_NODE": "3"}, {"WORKER_NUM": "3"}),
        ("--nproc-per-node=2 train.py", {"PET_NPROC_PER_NODE": "3"}, {"WORKER_NUM": "2"}),
        ("--nproc_per_node 2 train.py", {}, {"WORKER_NUM": "2"}),
        ("-n 1 train.py", {}, {"WORKER_NUM": "1", "OMP_NUM_THREADS": None}),
        ("train.py", {"OMP_NUM_THREADS": "8"}, {"OMP_NUM_THREADS": None}),
        ("train.py", {"MS_ENABLE_RECOVERY": "0"}, {"ENABLE_RECOVERY": None}),
        ("train.py", {"MAX_RESTARTS": "0"}, {"MAX_RESTARTS": None}),
        ("--max-restarts 3 train.py", {"MAX_RESTARTS": "0"}, {"MAX_RESTARTS": "3"}),
        ("--max-restarts 0 train.py", {}, {"MAX_RESTARTS": "0"}),
        ("--monitor-interval 0.5 --shutdown-timeout 30 train.py", {}, {"GRACE": "shutdown=30.0"}),
        ("--shutdown-timeout 30 train.py", {}, {"GRACE": "shutdown=30.0"}),
        ("--spares 2 train.py", {}, {"SPARE_NUM": "2"}),
        ("--log-dir logs train.py", {}, {"LOG_DIR": "logs"}),
        ("--master-addr a.b --master-port 29500 train.py", {}, {"SCHED_HOST": "a.b", "SCHED_PORT": "29500"}),
        ("--nnodes 2:4 -n 2 train.py", {}, {"WORKER_NUM": "8", "MIN_WORKER_NUM": "4"}),
        ("--nnodes 2 train.py", {"WORKER_NUM": "6"}, {"WORKER_NUM": "6"}),
        ("-m package.train", {}, {"JOB_NAME": "package.train"}),
    ],
)
def test_option_precedes_the_environment_which_precedes_the_default(
    line: str, environ: dict[str, str], said: dict[str, str | None]
) -> None:
    environment = asked(line, environ).environment
    assert {name: environment.get(name) for name in said} == said


@pytest.mark.parametrize(
    ("line", "devices", "workers"),
    [
        ("train.py", 8, 8),
        ("--spares 1 train.py", 8, 7),
        ("-n auto train.py", 8, 8),
        ("-n gpu train.py", 2, 2),
    ],
)
def test_number_of_workers_defaults_to_the_accelerators(line: str, devices: int, workers: int) -> None:
    assert asked(line, devices=devices).environment["WORKER_NUM"] == str(workers)


def test_host_starts_its_block_of_workers_and_its_share_of_the_spares() -> None:
    assert nodes_of_host(0, 2, 2, 3) == ("0", "1", "4", "6")
    assert nodes_of_host(1, 2, 2, 3) == ("2", "3", "5")
    first = asked("--nnodes 2 --sched-host h -n 2 --spares 1 train.py")
    second = asked("--nnodes 2 --node-rank 1 --sched-host h -n 2 --spares 1 train.py")
    assert (first.nodes, first.has_scheduler) == (("0", "1", "4"), True)
    assert (second.nodes, second.has_scheduler) == (("2", "3"), False)
    assert first.environment == second.environment, "all processes of the job must agree on it"


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("--nnodes 2:4 -n 3", {}, {"HOST_SLOTS": "3", "MIN_WORKER_NUM": "6", "MAX_WORKER_NUM": "12"}),
        ("--nnodes 4", {}, {"HOST_SLOTS": "1", "MIN_WORKER_NUM": "4", "MAX_WORKER_NUM": "4"}),
        ("--nnodes 1:2", {"HOST_SLOTS": "8"}, {"HOST_SLOTS": None, "MIN_WORKER_NUM": "8", "MAX_WORKER_NUM": "16"}),
        ("", {"MAX_WORKER_NUM": "7"}, {"MIN_WORKER_NUM": "1", "MAX_WORKER_NUM": None}),
        ("--nnodes 1:2 --launch x --host-rest 1:2", {}, {"HOST_LAUNCH": "x", "GRACE": "host=1:2"}),
        ("--nnodes 1:2", {"WORKER_NUM": "9"}, {"WORKER_NUM": None}),
    ],
)
def test_options_set_the_bounds_with_discovered_hosts(
    line: str, environ: dict[str, str], said: dict[str, str | None]
) -> None:
    request = asked(f"--host-discovery-script ./h {line} train.py", environ)
    assert {name: request.environment.get(name) for name in said} == said
    assert (request.nodes, request.has_scheduler) == (None, True)
    assert request.environment["HOST_DISCOVERY_SCRIPT"] == "./h"


@pytest.mark.parametrize(
    ("line", "environ", "said"),
    [
        ("-np 3 python train.py", {}, {"WORKER_NUM": "3", "MIN_WORKER_NUM": "3", "MAX_WORKER_NUM": "3"}),
        (
            "-np 8 --min-np 4 --max-np 12 --host-discovery-script discover_hosts.sh python train.py",
            {},
            {"WORKER_NUM": None, "MIN_WORKER_NUM": "4", "MAX_WORKER_NUM": "12", "TOPO_TIMEOUT": "600"},
        ),
        (
            "-np 18 --host-discovery-script discover_hosts.sh /usr/bin/python3.11 train.py",
            {"HOROVOD_ELASTIC_TIMEOUT": "90"},
            {"MIN_WORKER_NUM": "18", "MAX_WORKER_NUM": "18", "TOPO_TIMEOUT": "90"},
        ),
        ("-np 2 train.py", {"TOPO_TIMEOUT": "7"}, {"TOPO_TIMEOUT": None}),
    ],
)
def test_horovodrun_options_start_the_same_job(line: str, environ: dict[str, str], said: dict[str, str | None]) -> None:
    request = asked(f"{line} --lr 1", environ)
    assert (request.way, request.script, request.args) == (Way.SCRIPT, "train.py", ("--lr", "1"))
    assert request.environment["JOB_NAME"] == "train.py"
    assert {name: request.environment.get(name) for name in said} == said


def test_horovodrun_python_may_start_a_module() -> None:
    request = asked("-np 2 python -m package.train -x")
    assert (request.way, request.script, request.args) == (Way.MODULE, "package.train", ("-x",))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--min-np 2 train.py", "--min-np and --max-np need -np"),
        ("-np 2 --min-np 3 train.py", "expected 1 <= --min-np <= -np <= --max-np"),
        ("-np 2 -n 2 train.py", "-np counts the workers of all hosts. Fix: "),
        ("-np 2 python -u train.py", "python -u: Python's own options are not supported here. Fix: "),
        ("--host-discovery-script ./h train.py", "the maximum number of hosts is missing. Fix: --nnodes 1:8"),
        ("--host-discovery-script ./h --nnodes 1:2 --spares 1 train.py", "--spares: with"),
        ("--host-discovery-script ./h --nnodes 1:2 --node-rank 1 train.py", "--node-rank: with"),
        (
            "--launch 'ssh' train.py",
            "--launch applies only to hosts that a discovery script prints, and no script is set. Fix: ",
        ),
        (
            "--host-rest 1:2 train.py",
            "--host-rest applies only to hosts that a discovery script prints, and no script is set. Fix: ",
        ),
        ("", "which script? As in"),
        ("--nproc 3 train.py", "unrecognized arguments|--nproc"),
        ("--spare 1 train.py", "unrecognized arguments: --spare: did you mean --spares?"),
        ("--max-restart=3 train.py", "did you mean --max-restarts?"),
        ("--nproc_pernode 3 train.py", "did you mean --nproc_per_node?"),
        ("-n many train.py", "--nproc-per-node many: expected a number, auto, gpu or cpu"),
        ("-n 0 train.py", "--nproc-per-node 0"),
        ("-n gpu train.py", "no accelerator is visible on this machine. Fix:"),
        ("--nnodes 3:2 train.py", "'3:2': expected a number of hosts, or MIN:MAX"),
        ("--nnodes 2 --node-rank 2 train.py", "--node-rank 2: expected 0 to 1, for --nnodes 2"),
        ("--spares -1 train.py", "expected"),
        ("--signals-to-handle SIGWHAT train.py", "there is no signal 'SIGWHAT'"),
        ("--signals-to-handle SIGKILL train.py", "cannot be handled"),
        ("-t 9 train.py", "'9': expected a number from 0 to 3"),
        ("-m --no-python train.py", "a module needs Python"),
        ("--check --detach train.py", "--check and --detach"),
        ("--check --plain train.py", "--check and --plain"),
        ("--check --nnodes 2 --node-rank 0 train.py", "--check and several hosts"),
    ],
)
def test_usage_error_has_status_2(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        asked(line)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert any(part in said for part in text.split("|")), said


def test_workers_whose_output_is_shown() -> None:
    def shown(line: str) -> list[int]:
        tee = asked(f"{line} train.py").tee
        return [rank for rank in range(4) if tee.has(rank)]

    assert shown("") == []
    assert shown("-t 3") == [0, 1, 2, 3]
    assert shown("-t 0:3,2:1") == [0, 2]
    assert shown("-t 3 --local-ranks-filter 1") == [1]
    assert shown("--local-ranks-filter 0,3") == [0, 3]
    assert Streams({}).has(0) is False


def test_signals_that_end_the_job() -> None:
    assert asked("train.py").signals == ()
    assert asked("--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT train.py").signals == (
        signal.SIGHUP,
        signal.SIGQUIT,
    )


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (Way.SCRIPT, ["python", "train.py", "-x"]),
        (Way.MODULE, ["python", "-m", "train.py", "-x"]),
        (Way.PROGRAM, ["train.py", "-x"]),
    ],
)
def test_command_of_a_worker(way: Way, words: list[str]) -> None:
    assert way.words("python", "train.py", ("-x",)) == words


# ---- through the command line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in config.kept_environment():
        if name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def test_dry_run_shows_what_would_start_and_leaves_nothing_behind(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--dry-run", "-n", "2", "--spares", "1", "train.py", "--lr", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[2:]] == ["worker 0", "worker 1", "worker 2", "the scheduler"]
    assert lines[3] == f"worker 1: ROLE=worker NODE_ID=1 {sys.executable} train.py --lr 0.1"
    assert main(["run", "--dry-run", "--json", "-n", "2", "train.py"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["environment"]["WORKER_NUM"] == "2"
    assert [one["process"] for one in told["processes"]] == ["worker_0", "worker_1", "scheduler"]
    assert [entry.name for entry in here.iterdir()] == ["train.py"]


def test_dry_run_runs_the_discovery_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "hosts").write_text("localhost:2\nb\n")
    found = ["--host-discovery-script", "cat hosts", "--nnodes", "1:4"]
    assert main(["run", "--dry-run", *found, "--launch", "ssh {host} {command}", "train.py"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.partition(":")[0] for line in lines[2:]] == ["worker 0", "worker 1", "worker 2", "the scheduler"]
    assert "WORKER_NUM=3" in lines[1] and lines[4].startswith("worker 2: ROLE=worker NODE_ID=2 ssh b 'cd ")
    assert "workers on b can reach it only if they run on this machine, too" in said.err
    assert main(["run", "--dry-run", *found, "--launch", "ssh {hots}", "train.py"]) == 80
    assert "{hots} is no placeholder" in capsys.readouterr().err


def test_secret_is_in_no_command_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", "a secret of some length")
    words = ["--host-discovery-script", "echo b", "--nnodes", "1", "--launch", "ssh {host} {command}", "train.py"]
    assert main(["run", "--dry-run", *words]) == 64
    said = capsys.readouterr().err
    assert "Fix: export CLUSTER_SECRET_FILE" in said and "of some length" not in said


def test_too_few_hosts_are_waited_for_with_a_message(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("TOPO_TIMEOUT", "0.3"), ("NODE_TIMEOUT", "0.3"), ("HEARTBEAT_INTERVAL", "0.1")):
        monkeypatch.setenv(name, text)
    monkeypatch.setattr("samebits.commands.run.command.EVERY_S", 0.01)
    words = ["--host-discovery-script", "printf 'localhost\\nb:4\\n'", "--nnodes", "2:4", "train.py"]
    assert main(["run", "--dry-run", *words]) == 80
    said = capsys.readouterr().err
    waits = "the discovered hosts have 1 of at least 2 slots; 1 more hosts are not this machine, and no --launch"
    assert said.count(f"samebits: {waits} says how to start there; waiting\n") == 1
    assert "for 0.3 s (TOPO_TIMEOUT). Fix: check the output of `printf`" in said


def test_missing_script_is_reported_before_anything_is_started(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "trian.py"]) == 80
    assert "there is no script 'trian.py'" in capsys.readouterr().err
    assert main(["run", "--no-python", "no-such-program"]) == 80
    assert "there is no program 'no-such-program'" in capsys.readouterr().err
    assert main(["run", "-m", "2", "train.py"]) == 80
    assert "-m 2: no module '2' was found in " in capsys.readouterr().err
    assert [entry.name for entry in here.iterdir()] == ["train.py"]


def test_advised_command_is_the_repositorys_script_or_the_installed_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parents[2]
    main_module = str(root / "runtime/samebits/__main__.py")
    for argv in (["train.py"], [main_module, "scheduler"], [main_module, "dashboard", "--port", "0"]):
        monkeypatch.setattr("sys.argv", argv)
        assert spelled("recover").endswith("samebits recover"), "which script started this process is unknown"
    monkeypatch.setattr("sys.argv", [main_module, "recover"])
    assert spelled("recover", "--moved") == f"bash {root}/scripts/recover.sh --moved"
    monkeypatch.chdir(root)
    assert spelled("run", "--fresh", "my train.py") == "bash scripts/run.sh --fresh 'my train.py'"
    monkeypatch.setattr("samebits.spelling._SCRIPTS", here / "scripts")
    monkeypatch.setattr("sys.argv", [str(here / "bin" / "samebits")])
    assert spelled("recover") == f"{here}/bin/samebits recover", "the shell does not find it by its name"
    (here / "bin").mkdir()
    (here / "bin" / "samebits").touch(0o700)
    monkeypatch.setenv("PATH", str(here / "bin"))
    assert spelled("run", "--fresh", "train.py") == "samebits run --fresh train.py"
    monkeypatch.setattr("samebits.spelling._SCRIPTS", root / "scripts")
    assert spelled("recover") == "samebits recover", "as it was typed, also in a checkout"


def test_printed_start_is_the_complete_command_that_was_typed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_DIR", "my logs")
    monkeypatch.setenv("CLUSTER_SECRET", "open sesame, a long one")
    words = ["-n", "2", "--spares", "1", "--dry-run", "train.py", "--name", "a b"]
    start = read_start(parse(words, config.whole_environment())).start
    monkeypatch.setattr("sys.argv", [str(here / "samebits")])
    again = f"LOG_DIR='my logs' {here}/samebits run -n 2 --spares 1 train.py --name 'a b'"
    assert start.command() == again
    assert start.command(fresh=True) == again.replace(" run ", " run --fresh ")
    job_spec.keep(here / "device", start)
    assert (job_spec.read(here / "device") or start).command() == again
    typed_to_script = ["MAX_RESTARTS=0", "--json", "--fresh", "--", "train.py", "-n", "3"]
    monkeypatch.setattr("sys.argv", [samebits.__main__.__file__, "run"])
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert spelled_run(typed_to_script) == "bash scripts/run.sh --json train.py -n 3"
    assert "samebits run -n 2 train.py" in spelled_run(["-n", "2", "train.py"]), "run.sh has no -n"


def test_job_that_dies_with_this_command_cannot_be_left_running(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--die-with-me", "train.py"], {}).environment["DIE_WITH_ME"] == "1"
    with pytest.raises(SystemExit):
        parse(["--die-with-me", "--detach", "train.py"], {})
    assert "--die-with-me and --detach" in capsys.readouterr().err


def test_check_runs_the_requested_job_and_leaves_the_scripts_arguments() -> None:
    words = ["-n", "2", "--check", "train.py", "--check", "--lr", "0.1"]
    request = parse(words, {})
    assert request.check and request.args == ("--check", "--lr", "0.1")
    port_option, port, *rest = words_of_job(words, request)
    assert (port_option, rest) == ("--sched-port", ["-n", "2", "train.py", "--check", "--lr", "0.1"])
    asked_again = parse([port_option, port, *rest], {})
    assert not asked_again.check and asked_again.environment["SCHED_PORT"] == port


def test_torchrun_command_line_is_accepted_unchanged() -> None:
    words = (
        "--nnodes=2 --nproc-per-node=4 --node-rank=1 --rdzv-backend=c10d --rdzv_endpoint=192.0.2.2:29400 --rdzv-id=7"
    )
    found = parse([*words.split(), "--rdzv_conf", "timeout=9", "train.py", "--lr", "0.1"], {})
    assert found.environment["SCHED_HOST"] == "192.0.2.2" and found.environment["SCHED_PORT"] == "29400"
    assert found.environment["JOB_NAME"] == "7" and found.nodes == ("4", "5", "6", "7") and not found.has_scheduler
    for endpoint in ("[::1]", "[::1]:0"):
        one = parse(["--rdzv-endpoint", endpoint, "train.py"], {}).environment
        assert one["SCHED_HOST"] == "::1" and "SCHED_PORT" not in one


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--rdzv-endpoint a:b:1 train.py", "expected HOST or HOST:PORT"),
        ("--nnodes 2 -n 1 --rdzv-endpoint 192.0.2.2:1 train.py", "Fix: --node-rank 0 on the endpoint's host"),
    ],
)
def test_incomplete_endpoint_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words.split(), {})
    assert says in capsys.readouterr().err


SLURM_STEP = {
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "7",
}


def test_inside_srun_hosts_need_no_options() -> None:
    first = asked("-n 2 train.py", SLURM_STEP | {"SLURM_NODEID": "0"})
    second = asked("-n 2 train.py", SLURM_STEP)
    assert (first.nodes, first.has_scheduler) == (("0", "1"), True)
    assert (second.nodes, second.has_scheduler) == (("2", "3"), False)
    for request in (first, second):
        assert {name: request.environment[name] for name in ("WORKER_NUM", "SCHED_HOST", "SCHED_PORT")} == {
            "WORKER_NUM": "4",
            "SCHED_HOST": "n1",
            "SCHED_PORT": "10007",
        }
    assert (first.environment["LOG_DIR"], first.environment.get("RECOVERY_PATH")) == ("device/host0", None)
    assert (second.environment["LOG_DIR"], second.environment["RECOVERY_PATH"]) == (
        "device/host1",
        "device/host1/recovery",
    )


def test_options_precede_slurm() -> None:
    said = {"SCHED_HOST": "10.0.0.1", "SCHED_PORT": "8118", "LOG_DIR": "logs", "RECOVERY_PATH": "journal"}
    request = asked("-n 2 --nnodes 2 --node-rank 0 train.py", SLURM_STEP | said)
    assert request.nodes == ("0", "1")
    assert not set(said) & set(request.environment)
