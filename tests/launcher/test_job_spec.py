"""The job spec: how a job was started, saved in and found from its folder."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from samebits import config
from samebits.commands.recover import environment_change
from samebits.errors import SettingsError, StoreError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.job_spec import JobSpec, keep, nodes_of, read, read_here, settings_here

ENVIRONMENT = {"WORKER_NUM": "3", "ENABLE_RECOVERY": "1", "RECOVERY_PATH": "journal", "SCHED_PORT": "9000"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder of the test, with an environment without job settings."""
    for name in config.kept_environment():
        if name not in ("PATH", "PYTHONPATH"):
            monkeypatch.delenv(name)
    folder = tmp_path / "the job's folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def start(folder: Path, **environment: str) -> JobSpec:
    return JobSpec(folder, "/venv/bin/python", "train.py", ("--name", "a 'b'\nc"), {**ENVIRONMENT, **environment})


def test_saved_spec_is_read_back_and_is_private(here: Path) -> None:
    keep(here / "device", start(here))
    assert read(here / "device") == start(here)
    assert (here / "device" / "start.json").stat().st_mode & 0o777 == 0o600
    assert read(here / "elsewhere") is None
    assert read_here() == (Path("device"), start(here))


def test_variables_that_differ_from_those_of_the_start_are_named_and_their_values_are_not_stored(here: Path) -> None:
    started = {"STEPS": "900", "TOKEN": "s3cret", "TERM": "xterm", "PATH": "/bin", "CLUSTER_SECRET": "open sesame"}
    spec = replace(start(here), other_variables=job_spec.digests_of_others({**started, "ROLE": "worker"}))
    keep(here / "device", spec)
    kept = read(here / "device")
    assert kept == spec and kept.other_variables.keys() == {"STEPS", "TOKEN", "TERM"}
    stored = (here / "device" / "start.json").read_text()
    assert not [value for value in started.values() if f'"{value}"' in stored]
    assert environment_change(kept, {**started, "TERM": "vt", "PATH": "/usr/bin", "CLUSTER_SECRET": "another"}) == ""
    told = environment_change(kept, {"TOKEN": "s3cret", "NEW": "x"})
    assert told.startswith("NEW and STEPS differ from the environment in which the job was started: processes that ")
    assert environment_change(kept, {**started, "STEPS": "60"}).startswith("STEPS differs from ")
    many = environment_change(kept, {f"V{number}": "" for number in range(9)})
    assert many.startswith("STEPS, TOKEN, V0, V1, V2, V3 and 5 more differ")
    for unknown in (start(here), replace(kept, words=("--on", "ray", "train.py"))):
        assert environment_change(unknown, {"NEW": "x"}) == ""


def test_nodes_of_discovered_hosts_are_saved_too(here: Path) -> None:
    placed = replace(start(here), nodes=("0", "1"), hosts={"0": "a", "1": "b", "2.1": "b"}, size=0, drained=("c",))
    keep(here / "device", placed)
    assert read(here / "device") == placed
    keep(here / "device", replace(placed, hosts={}, size=None, drained=()))
    assert not {"hosts", "size", "drained"} & json.loads((here / "device" / "start.json").read_text()).keys()


def test_settings_are_the_schedulers_with_absolute_folders(here: Path) -> None:
    settings = start(here, LOG_DIR="/logs").settings()
    assert settings.role is config.Role.SCHEDULER
    assert (settings.recovery_path, settings.checkpoint_path) == (here / "journal", here / "ckpt_of_rank")
    assert settings.log_dir == Path("/logs")
    with pytest.raises(SettingsError):
        start(here, WORKER_NUM="none").settings()


def test_unwritable_folder_needs_no_pointer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwritable = Path("/proc")  # no user can make a folder there, root included
    kept = start(unwritable, LOG_DIR=str(here / "my logs"))
    said = keep(here / "my logs", kept)
    told = f"LOG_DIR={shlex.quote(f'{here}/my logs')}"
    assert "/proc/device" in said and said.endswith(told)
    assert read(here / "my logs") == kept
    assert kept.finding("samebits recover") == f"{told} samebits recover"
    elsewhere = start(here, LOG_DIR=str(here / "my logs"))
    assert keep(here / "my logs", elsewhere) == ""
    assert elsewhere.finding("samebits recover") == "samebits recover"


def test_log_folder_elsewhere_leaves_a_pointer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = here.parent / "logs"
    keep(elsewhere, start(here, LOG_DIR=str(elsewhere)))
    assert read_here() == (elsewhere, start(here, LOG_DIR=str(elsewhere)))
    keep(here / "device", start(here))  # a later job in the usual place takes precedence
    assert read_here()[0] == Path("device")
    for name in ("LOG_DIR", "MS_LOG_DIR"):
        with monkeypatch.context() as environment:
            environment.setenv(name, str(elsewhere))
            assert read_here()[0] == elsewhere


def test_names_that_are_not_text_are_kept_byte_for_byte(here: Path) -> None:
    latin = os.fsdecode(b"caf\xe9")
    kept = replace(start(here, DATA_PATH=f"/{latin}", LOG_DIR=latin), args=(f"/data/{latin}",))
    keep(here / latin, kept)
    assert read_here() == (Path(latin), kept)
    assert (here / "device" / "elsewhere").read_bytes() == b"caf\xe9\n"
    assert json.loads((here / latin / "start.json").read_bytes())["args"] == ["/data/caf\udce9"]


def test_missing_job_names_the_places_searched(here: Path) -> None:
    with pytest.raises(UsageError, match=r"device/start\.json is not there.*the job's folder.*samebits run"):
        read_here()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"version": 3}', '{"version": 1, "folder": "/x"}', "null"])
def test_invalid_file_is_an_error_with_a_fix(here: Path, content: str) -> None:
    (here / "device").mkdir()
    (here / "device" / "start.json").write_text(content)
    with pytest.raises(StoreError, match=r"start\.json does not describe how a job was started.*samebits run"):
        read(here / "device")


def test_job_of_an_earlier_release_finds_the_package_under_its_earlier_name(here: Path) -> None:
    keep(here / "device", start(here, PYTHONPATH="/data/lib", LEASE_DETECTOR="phi"))
    file = here / "device" / "start.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 1}))
    kept = read(here / "device")
    assert kept is not None
    assert "LEASE_DETECTOR" not in kept.environment  # which no longer exists
    folder, own = kept.environment["PYTHONPATH"].split(":")
    assert own == "/data/lib"
    program = (
        "import runtime, runtime.errors, runtime.core.values, samebits, samebits.errors\n"
        "assert runtime is samebits and runtime.errors is samebits.errors\n"
        "assert samebits.errors.__spec__.name == 'samebits.errors'"
    )
    command, environment = [sys.executable, "-c", program], {"PYTHONPATH": folder}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Fix: change it to `import samebits`") == 1


def test_tool_uses_the_jobs_settings_before_the_shells(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_here().sched_port == 8118  # no job here
    assert settings_here().recovery_path == here / "recovery"
    keep(here / "device", start(here, MS_NODE_TIMEOUT="7"))
    assert (settings_here().sched_port, settings_here().worker_num) == (9000, 3)
    assert settings_here().node_timeout_s == 7
    assert settings_here().recovery_path == here / "journal"
    monkeypatch.setenv("MS_SCHED_PORT", "9001")
    assert settings_here().sched_port == 9001
    monkeypatch.setenv("SCHED_PORT", "9002")
    assert settings_here().sched_port == 9002


def test_secrets_and_per_process_values_are_not_saved(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLUSTER_SECRET", "MS_CLUSTER_SECRET", "ROLE", "NODE_ID", "MS_NODE_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("DATA_PATH", "/data")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    keep(here / "device", JobSpec(here, "python", "train.py", (), config.kept_environment()))
    text = (here / "device" / "start.json").read_text()
    assert "hush" not in text
    kept = json.loads(text)["environment"]
    assert {"DATA_PATH": "/data", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": os.environ["PATH"]}.items() <= kept.items()


def test_nodes_are_those_that_run_sh_starts_unless_others_are_saved(here: Path) -> None:
    kept = start(here, SPARE_NUM="2", MAX_WORKER_NUM="5")
    settings, log_dir = kept.settings(), here / "device"
    assert nodes_of(log_dir, settings) == ("0", "1", "2", "5", "6")
    keep(log_dir, kept)
    assert nodes_of(log_dir, settings) == ("0", "1", "2", "5", "6")
    keep(log_dir, replace(kept, nodes=("0", "2", "3")))
    assert nodes_of(log_dir, settings) == ("0", "2", "3")
    keep(log_dir, replace(kept, nodes=()))
    assert nodes_of(log_dir, settings) == ()


def test_pointer_is_one_line_with_a_path(here: Path) -> None:
    keep(here.parent / "logs", start(here))
    assert (here / job_spec.USUAL_LOG_DIR / job_spec.POINTER_FILE).read_text() == f"{here.parent / 'logs'}\n"


def test_spec_planted_by_another_user_is_refused(here: Path) -> None:
    """A planted spec would run its interpreter as this user, and its pid files name processes to end."""
    keep(here / "device", start(here))
    (here / "device" / "start.json").chmod(0o666)
    with pytest.raises(StoreError, match=r"start\.json: other users can write to this file"):
        read_here()
    (here / "device" / "start.json").chmod(0o600)
    (here / "device").chmod(0o777)
    with pytest.raises(StoreError, match=r"device: other users can write to this folder"):
        read_here()
    (here / "device").chmod(0o700)
    (here / "device" / "start.json").rename(here / "planted.json")
    (here / "device" / "start.json").symlink_to(here / "planted.json")
    with pytest.raises(StoreError, match=r"start\.json is a link or a pipe"):
        read_here()
    (here / "device" / "start.json").unlink()
    (here / "device" / "elsewhere").symlink_to(here / "planted.json")
    with pytest.raises(StoreError, match=r"elsewhere is a link or a pipe"):
        read_here()


def test_only_valid_shell_names_are_saved_and_accepted(here: Path) -> None:
    odd = {"OMP_X;touch P;Y": "1", "TORCH_A-B": "2", "OMP_ö": "3", "OMP_NUM_THREADS": "1"}
    assert config.kept_environment(odd) == {"OMP_NUM_THREADS": "1"}
    keep(here / "device", start(here, **{"OMP_X;touch P;Y": "1"}))
    with pytest.raises(StoreError, match="'OMP_X;touch P;Y' names no variable"):
        read_here()


IN_ASCII = """
import os, sys
from pathlib import Path
from samebits.launcher import job_spec
from samebits.service import fork_orders
from samebits.store.checkpoint.writer import packed_task, words_in

assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
here = os.getcwd()
assert words_in(packed_task(here, "train.py"))[0] == here
ours, theirs = fork_orders.pair()
fork_orders.send_order(ours, fork_orders.Order(here, sys.executable, "train.py", (here,), {"LOG_DIR": here}), 0)
order, _ = fork_orders.receive_order(theirs)
assert (order.folder, order.args, order.environment) == (here, (here,), {"LOG_DIR": here}), order
kept = job_spec.read(Path("device"))
assert kept.folder.samefile(here) and Path(kept.environment["DATA_PATH"]).is_dir() and Path(kept.args[0]).is_dir()
job_spec.keep(Path("device"), kept)
"""


def test_non_ascii_names_survive_an_ascii_locale(tmp_path: Path) -> None:
    folder = tmp_path / "ü 目录"
    folder.mkdir()
    kept = JobSpec(folder, sys.executable, "train.py", (str(folder),), {"DATA_PATH": str(folder)})
    keep(folder / "device", kept)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", IN_ASCII], cwd=folder, env=environment, check=True, timeout=60)
    assert read(folder / "device") == kept
