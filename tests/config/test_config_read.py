"""Reading the settings: names, prefixes, defaults, and a message for every wrong value."""

from __future__ import annotations

import dataclasses
import os
import typing
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from samebits import config
from samebits.config import Role, Settings, alone, read
from samebits.errors import SettingsError
from samebits.settings_table import (
    HEALTH_LIMITS,
    VARIABLES,
    ConsistencySetting,
    Dashboard,
    Grace,
    HangSetting,
    Health,
    HostRest,
    RecoverStrategy,
    SignPolicy,
    Straggler,
)

WORKER = {"ROLE": "worker", "WORKER_NUM": "4", "NODE_ID": "0"}
SCHEDULER = {"ROLE": "scheduler", "WORKER_NUM": "4"}


def problems_of(environ: Mapping[str, str], *, role_required: bool = True) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(environ, role_required=role_required)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def the_problem(environ: Mapping[str, str]) -> str:
    problems = problems_of(environ)
    assert len(problems) == 1, problems
    return problems[0]


def health(for_all: str, every_s: float = 10.0, **own: tuple[str, float]) -> Health:
    looks = {sign: SignPolicy(for_all, limit) for sign, limit in HEALTH_LIMITS.items()}
    return Health(every_s, tuple((looks | {sign: SignPolicy(*one) for sign, one in own.items()}).values()))


def test_defaults() -> None:
    settings, warnings = read(WORKER)
    assert warnings == []
    assert settings == Settings(
        role=Role.WORKER,
        worker_num=4,
        sched_host="127.0.0.1",
        sched_port=8118,
        sched_bind=None,
        node_id="0",
        job_id=None,
        enable_recovery=False,
        rebuild=True,
        recovery_path=Path("./recovery"),
        register_cooldown_s=30.0,
        heartbeat_interval_s=1.0,
        node_timeout_s=5.0,
        topo_timeout_s=1800.0,
        hang=HangSetting("end", None),
        cause_table=None,
        loss_anomaly="tell",
        hidden_state="tell",
        consistency=ConsistencySetting("majority", 50),
        audit=0,
        straggler=Straggler("tell", 1.2),
        health=Health(10.0, tuple(SignPolicy("tell", limit) for limit in HEALTH_LIMITS.values())),
        min_worker_num=4,
        max_worker_num=4,
        grace=Grace(30.0, 10.0, 0.5, 10.0, HostRest(10.0, 600.0)),
        reset_limit=0,
        host_discovery_script=None,
        host_launch=None,
        host_slots=1,
        preemption_command=None,
        max_restarts=0,
        recover_strategy=RecoverStrategy({"process": None, "pod": None}),
        process_recover=None,
        pod_rescheduling=None,
        dashboard=Dashboard(None, has_actions=False),
        plain=False,
        die_with_me=False,
        spare_num=0,
        checkpoint_path=Path("./ckpt_of_rank"),
        shard_copy_every="auto",
        compile_cache_path=None,
        op_compile=None,
        log_dir=Path("./device"),
        probe_file=None,
        job_name="",
        cluster_secret=None,
        device=None,
        collective_backend=None,
        cluster_secret_file=None,
        cluster_insecure=False,
    )


GIVEN: list[tuple[str, str, str, object]] = [
    ("ROLE", "scheduler", "role", Role.SCHEDULER),
    ("ROLE", "MS_SCHED", "role", Role.SCHEDULER),
    ("ROLE", "MS_WORKER", "role", Role.WORKER),
    ("WORKER_NUM", "1", "worker_num", 1),
    ("WORKER_NUM", "100000", "worker_num", 100_000),
    ("WORKER_NUM", " 8\r", "worker_num", 8),
    ("SCHED_HOST", "node-0.jobs.svc.cluster.local", "sched_host", "node-0.jobs.svc.cluster.local"),
    ("SCHED_HOST", "my_service", "sched_host", "my_service"),
    ("SCHED_HOST", "localhost", "sched_host", "localhost"),
    ("SCHED_HOST", "10.0.0.1", "sched_host", "10.0.0.1"),
    ("SCHED_HOST", "::1", "sched_host", "::1"),
    ("SCHED_HOST", "[::1]", "sched_host", "::1"),
    ("SCHED_HOST", "fe80::1%eth0", "sched_host", "fe80::1%eth0"),
    ("SCHED_BIND", "[::]", "sched_bind", "::"),
    ("SCHED_PORT", "1", "sched_port", 1),
    ("SCHED_PORT", "65535", "sched_port", 65535),
    ("NODE_ID", "pod-7", "node_id", "pod-7"),
    ("NODE_ID", "节点7", "node_id", "节点7"),
    ("JOB_ID", "5e0a3c4e", "job_id", "5e0a3c4e"),
    ("ENABLE_RECOVERY", "0", "enable_recovery", False),
    ("ENABLE_RECOVERY", "1", "enable_recovery", True),
    ("REBUILD", "0", "rebuild", False),
    ("RECOVERY_PATH", "/jobs/a b/recovery", "recovery_path", Path("/jobs/a b/recovery")),
    ("REGISTER_COOLDOWN", "0", "register_cooldown_s", 0.0),
    ("REGISTER_COOLDOWN", "1e3", "register_cooldown_s", 1000.0),
    ("HEARTBEAT_INTERVAL", "2.5", "heartbeat_interval_s", 2.5),
    ("NODE_TIMEOUT", "2", "node_timeout_s", 2.0),
    ("NODE_TIMEOUT", "1800", "node_timeout_s", 1800.0),
    ("TOPO_TIMEOUT", "5", "topo_timeout_s", 5.0),
    ("CAUSE_TABLE", "causes.toml", "cause_table", Path("causes.toml")),
    ("HANG", " TELL", "hang", ("tell", None)),
    ("HANG", "end:90", "hang", ("end", 90.0)),
    ("LOSS_ANOMALY", "stop", "loss_anomaly", "stop"),
    ("HIDDEN_STATE", "Off", "hidden_state", "off"),
    ("CONSISTENCY", "majority:0", "consistency", ("majority", 0)),
    ("CONSISTENCY", "stop:AUTO", "consistency", ("stop", "auto")),
    ("CONSISTENCY", "Leader", "consistency", ("leader", 50)),
    ("AUDIT", "50", "audit", 50),
    ("SHARD_COPY_EVERY", "off", "shard_copy_every", 0),
    ("SHARD_COPY_EVERY", "Auto", "shard_copy_every", "auto"),
    ("SHARD_COPY_EVERY", "20", "shard_copy_every", 20),
    ("STRAGGLER", "swap", "straggler", ("swap", 1.2)),
    ("STRAGGLER", "tell:1.5", "straggler", ("tell", 1.5)),
    ("HEALTH", "Drain, every=0.5", "health", health("drain", every_s=0.5)),
    ("HEALTH", "Preflight", "health", health("tell")._replace(preflight=True)),
    (
        "HEALTH",
        "off,device_heat=refuse:85,disk=tell:.95",
        "health",
        health("off", device_heat=("refuse", 85.0), disk=("tell", 0.95)),
    ),
    ("MIN_WORKER_NUM", "2", "min_worker_num", 2),
    ("MAX_WORKER_NUM", "8", "max_worker_num", 8),
    ("GRACE", "shrink=0", "grace", Grace(shrink_s=0.0)),
    ("GRACE", "Reconnect=2, start = 1e2", "grace", Grace(100.0, 10.0, 2.0)),
    ("GRACE", "host=2.5:60,shutdown=2.5", "grace", Grace(shutdown_s=2.5, host=HostRest(2.5, 60.0))),
    ("RESET_LIMIT", "3", "reset_limit", 3),
    ("HOST_DISCOVERY_SCRIPT", "./hosts.sh --all", "host_discovery_script", "./hosts.sh --all"),
    ("HOST_LAUNCH", "ssh {host} {command}", "host_launch", "ssh {host} {command}"),
    ("HOST_SLOTS", "8", "host_slots", 8),
    ("PREEMPTION_COMMAND", "test -e '/run/a b'", "preemption_command", "test -e '/run/a b'"),
    ("PLAIN", "1", "plain", True),
    ("DIE_WITH_ME", "1", "die_with_me", True),
    ("MAX_RESTARTS", "3", "max_restarts", 3),
    ("DASHBOARD", "8265", "dashboard", (8265, False)),
    ("DASHBOARD", "actions, 8265", "dashboard", (8265, True)),
    ("DASHBOARD", "Actions", "dashboard", (None, True)),
    ("SPARE_NUM", "1", "spare_num", 1),
    ("CHECKPOINT_PATH", "ckpt", "checkpoint_path", Path("ckpt")),
    ("COMPILE_CACHE_PATH", "cache", "compile_cache_path", Path("cache")),
    ("RECOVER_STRATEGY", "retry:5, exit", "recover_strategy", ({"retry": 5, "exit": None},)),
    ("PROCESS_RECOVER", "pause", "process_recover", False),
    ("POD_RESCHEDULING", "on", "pod_rescheduling", True),
    ("PROBE_FILE", "probe", "probe_file", Path("probe")),
    ("LOG_DIR", "logs", "log_dir", Path("logs")),
    ("JOB_NAME", "my job", "job_name", "my job"),
    ("DEVICE", " CPU", "device", "cpu"),
    ("DEVICE", "npu", "device", "npu"),
    ("OP_COMPILE", "cache", "op_compile", "cache"),
    ("COLLECTIVE_BACKEND", "Gloo", "collective_backend", "gloo"),
    ("CLUSTER_SECRET", "correct horse battery", "cluster_secret", "correct horse battery"),
    ("CLUSTER_SECRET_FILE", "/run/secret", "cluster_secret_file", Path("/run/secret")),
    ("CLUSTER_INSECURE", "1", "cluster_insecure", True),
]


@pytest.mark.parametrize("prefix", ["", "MS_"])
@pytest.mark.parametrize(("name", "text", "field", "value"), GIVEN)
def test_given_value_is_read_under_both_names(prefix: str, name: str, text: str, field: str, value: object) -> None:
    environ = {key: kept for key, kept in WORKER.items() if key != name}
    settings, warnings = read({**environ, prefix + name: text})
    assert getattr(settings, field) == value
    assert [line for line in warnings if "NODE_ID" not in line] == []


def test_every_variable_of_the_table_is_covered_by_a_value() -> None:
    assert {name for name, *_ in GIVEN} == {variable.name for variable in VARIABLES}


def test_empty_text_counts_as_unset() -> None:
    everything_empty = {prefix + variable.name: "" for variable in VARIABLES for prefix in ("", "MS_")}
    assert read({**everything_empty, **WORKER}) == read(WORKER)
    assert read({**WORKER, "SCHED_PORT": "", "MS_SCHED_PORT": "9000"})[0].sched_port == 9000


def test_settings_are_frozen_and_have_the_declared_types() -> None:
    settings, _ = read({**WORKER, "SCHED_BIND": "::1"})
    declared = typing.get_type_hints(Settings)
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert [
        *(variable.field for variable in VARIABLES),
        "journal_place",
        "relay",
        "starts_relay",
        "inner_relay",
    ] == fields
    for name, expected in declared.items():
        assert isinstance(getattr(settings, name), expected), name
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.worker_num = 5  # type: ignore[misc]
    assert not hasattr(settings, "__dict__")


WRONG: list[tuple[str, str, tuple[str, ...]]] = [
    ("SHARD_COPY_EVERY", "0", ("auto, off, or a whole number from 1 to 999999",)),
    ("AUDIT", "49", ("0, or a whole number of 50 or more",)),
    ("ROLE", "bogus", ("scheduler or worker", "export ROLE=worker")),
    ("ROLE", "Worker", ("upper and lower case", "export ROLE=worker")),
    ("ROLE", "ms_sched", ("upper and lower case", "export ROLE=scheduler")),
    ("ROLE", "MS_PSERVER", ("no parameter servers", "do not start this process")),
    ("HEALTH", "disk=leave", ("'disk=leave' is none of its words", "tell, drain, refuse or off")),
    ("HEALTH", "disc=tell", ("'disc=tell' is none of its words",)),
    ("HEALTH", "disk=tell:90%", ("disk takes a share, above 0 and at most 1 as its limit",)),
    ("HEALTH", "cpu=tell:nan", ("cpu takes a share",)),
    ("HEALTH", "device_heat=drain:500", ("device_heat takes a whole number from 1 to 200 as its limit",)),
    ("HEALTH", "device_errors=drain:2", ("device_errors has no limit to change",)),
    ("HEALTH", "every=0", ("expected",)),
    ("HEALTH", "logs=tell:0.9", ("logs takes a whole number from 1 to 1000000 as its limit",)),
    ("WORKER_NUM", "0", ("from 1 to 100000", "export WORKER_NUM=4")),
    ("WORKER_NUM", "-1", ("from 1 to 100000",)),
    ("WORKER_NUM", "100001", ("from 1 to 100000",)),
    ("WORKER_NUM", "four", ("from 1 to 100000",)),
    ("WORKER_NUM", "4.0", ("whole number",)),
    ("WORKER_NUM", "1_0", ("whole number",)),
    ("WORKER_NUM", "９", ("whole number",)),
    ("WORKER_NUM", "9" * 5000, ("whole number", "…")),
    ("SCHED_PORT", "0", ("from 1 to 65535", "export SCHED_PORT=8118")),
    ("SCHED_PORT", "99999", ("from 1 to 65535", "export SCHED_PORT=8118")),
    ("SCHED_PORT", "tcp://10.0.0.1:8118", ("Kubernetes", "enableServiceLinks: false", "export SCHED_PORT=8118")),
    ("SCHED_HOST", "10.0.0.1:8118", ("the port goes into SCHED_PORT",)),
    ("SCHED_HOST", "[::1]:8118", ("the port goes into SCHED_PORT",)),
    ("SCHED_HOST", "tcp://10.0.0.1", ("the port goes into SCHED_PORT",)),
    ("SCHED_HOST", "10.0.0.256", ("host name or an IPv4 or IPv6 address", "export SCHED_HOST=127.0.0.1")),
    ("SCHED_HOST", "10.0.0", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "[10.0.0.1]", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "::g", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "-node", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "a..b", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "a" * 64, ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_HOST", "two words", ("host name or an IPv4 or IPv6 address",)),
    ("SCHED_BIND", "*", ("host name or an IPv4 or IPv6 address", "export SCHED_BIND=0.0.0.0")),
    ("NODE_ID", "a b", ("no space", "export NODE_ID=0")),
    ("NODE_ID", "a/b", ("no /",)),
    ("NODE_ID", "a\nb", ("printable", r"'a\nb'")),
    ("NODE_ID", "\udcff", ("printable", r"'\udcff'")),
    ("NODE_ID", "n" * 129, ("at most 128",)),
    ("ENABLE_RECOVERY", "2", ("0 or 1",)),
    ("ENABLE_RECOVERY", "True", ("0 or 1", "export ENABLE_RECOVERY=1")),
    ("ENABLE_RECOVERY", "no", ("0 or 1", "export ENABLE_RECOVERY=0")),
    ("CLUSTER_INSECURE", "yes", ("0 or 1", "export CLUSTER_INSECURE=1")),
    ("RECOVERY_PATH", "~/recovery", ("a shell expands", "$HOME")),
    ("REGISTER_COOLDOWN", "-1", ("seconds, 0 or more", "export REGISTER_COOLDOWN=30")),
    ("REGISTER_COOLDOWN", "nan", ("seconds, 0 or more",)),
    ("REGISTER_COOLDOWN", "inf", ("seconds, 0 or more",)),
    ("REGISTER_COOLDOWN", "1e999", ("no timer goes beyond",)),
    ("REGISTER_COOLDOWN", "30s", ("without a unit",)),
    ("HEARTBEAT_INTERVAL", "0", ("seconds, 0.001 or more",)),
    ("NODE_TIMEOUT", "0", ("seconds, 0.001 or more",)),
    ("TOPO_TIMEOUT", "0", ("seconds, 0.001 or more",)),
    ("GRACE", "reconnect=-0.1", ("reconnect takes seconds, 0 or more", "export GRACE=start=60,shrink=0")),
    ("GRACE", "start=30s", ("start takes seconds, 0 or more; seconds are written without a unit",)),
    ("GRACE", "10", ("'10' is none of them", "start, shrink, reconnect and shutdown")),
    ("HANG", "end:0", ("'0' is not seconds, 0.001 or more", "as in end:60", "export HANG=end")),
    ("HANG", "kill:60", ("end, tell or off",)),
    ("STRAGGLER", "swap:1", ("'1' is not a number above 1",)),
    ("CONSISTENCY", "majority:-1", ("'-1' is not a whole number of 0 or more, or auto",)),
    ("RECOVER_STRATEGY", "process:0", ("'0' is not a number of attempts",)),
    ("RECOVER_STRATEGY", "again", ("'again' is none of them",)),
    ("DASHBOARD", "99999", ("from 1 to 65535", "export DASHBOARD=8265")),
    ("RESET_LIMIT", "-1", ("from 0 to 1000000", "export RESET_LIMIT=0")),
    ("GRACE", "host=60:10", ("host takes seconds:seconds, as in 10:600", "the shorter first")),
    ("GRACE", "host=0:10", ("both above 0",)),
    ("GRACE", "host=10", ("seconds:seconds",)),
    ("HEALTH", "preflight=1", ("'preflight=1' is none of its words",)),
    ("HOST_SLOTS", "0", ("from 1 to 100000", "export HOST_SLOTS=1")),
    ("HOST_LAUNCH", "x" * 4097, ("at most 4096 printable characters", "{command}")),
    ("PREEMPTION_COMMAND", "test -e 'a", ("whose quotes are closed",)),
    (
        "PREEMPTION_COMMAND",
        "curl -sf http://a/{b} | grep -q TRUE",
        ("it runs without a shell, but '|'", "put all of it into sh -c"),
    ),
    ("SPARE_NUM", "-1", ("from 0 to 100000",)),
    ("MIN_WORKER_NUM", "0", ("from 1 to 100000", "unset MIN_WORKER_NUM")),
    ("MAX_WORKER_NUM", "100001", ("from 1 to 100000", "unset MAX_WORKER_NUM")),
    ("JOB_NAME", "a\tb", ("printable", "export JOB_NAME=digits")),
    # Each contradicts a default.
    (
        "HEARTBEAT_INTERVAL",
        "3",
        ("NODE_TIMEOUT=5 (default)", "2 × HEARTBEAT_INTERVAL ≤ NODE_TIMEOUT", "NODE_TIMEOUT=6"),
    ),
    ("NODE_TIMEOUT", "1.5", ("HEARTBEAT_INTERVAL=1 (default)", "HEARTBEAT_INTERVAL=0.75")),
    ("NODE_TIMEOUT", "2000", ("TOPO_TIMEOUT=1800 (default)", "NODE_TIMEOUT ≤ TOPO_TIMEOUT", "TOPO_TIMEOUT=2000")),
    ("TOPO_TIMEOUT", "4", ("NODE_TIMEOUT=5 (default)", "NODE_TIMEOUT=4")),
    ("MAX_WORKER_NUM", "3", ("expected MIN_WORKER_NUM ≤ WORKER_NUM ≤ MAX_WORKER_NUM", "unset MAX_WORKER_NUM")),
    ("MIN_WORKER_NUM", "5", ("expected MIN_WORKER_NUM ≤ WORKER_NUM ≤ MAX_WORKER_NUM", "unset MIN_WORKER_NUM")),
    ("CLUSTER_SECRET_FILE", "~/secret", ("only a shell expands", 'export CLUSTER_SECRET_FILE="$HOME/..."')),
]


@pytest.mark.parametrize("prefix", ["", "MS_"])
@pytest.mark.parametrize(("name", "text", "said"), WRONG)
def test_wrong_value_is_one_problem_with_name_value_expectation_and_fix(
    prefix: str, name: str, text: str, said: tuple[str, ...]
) -> None:
    environ = {key: kept for key, kept in WORKER.items() if key != name}
    problem = the_problem({**environ, prefix + name: text})
    assert f"{prefix}{name}=" in problem
    assert (text if text.isprintable() else ascii(text))[:60] in problem
    assert "expected " in problem
    assert "Fix: " in problem
    assert "\n" not in problem
    for part in said:
        assert (part.replace(name, prefix + name) if part.startswith(("export", "unset")) else part) in problem


def test_settings_stored_by_an_earlier_release_are_read_under_current_names() -> None:
    stored = {"MS_HEALTH_DISK_LIMIT": "0.95", "HEALTH_CPU": "off", "HEALTH_INTERVAL": "2", "WATCHDOG": "0", "PATH": "/"}
    now = config.translated({**stored, "LEASE_DETECTOR": "phi"})
    assert now == {"PATH": "/", "HANG": "off", "HEALTH": "every=2,cpu=off,disk=tell:0.95"}
    assert read({**WORKER, **now})[0].health == health("tell", 2.0, cpu=("off", 0.9), disk=("tell", 0.95))


MOVED: list[tuple[dict[str, str], str, str, object]] = [
    ({"STEP_TIMEOUT": "60"}, "export HANG=end:60", "hang", HangSetting("end", 60.0)),
    ({"STEP_TIMEOUT": "60", "WATCHDOG": "0"}, "export HANG=off:60", "hang", HangSetting("off", 60.0)),
    ({"STEP_TIMEOUT": "60", "MS_HANG": "tell"}, "export HANG=tell:60", "hang", HangSetting("tell", 60.0)),
    (
        {"CONSISTENCY_EVERY": "auto"},
        "export CONSISTENCY=majority:auto",
        "consistency",
        ConsistencySetting("majority", "auto"),
    ),
    ({"STRAGGLER_FACTOR": "2", "STRAGGLER": "swap"}, "export STRAGGLER=swap:2", "straggler", Straggler("swap", 2.0)),
    ({"RECOVER_ATTEMPTS": "1"}, "export RECOVER_STRATEGY=process:1,pod:1", "recover_strategy", None),
    ({"START_GRACE": "5", "RECONNECT_GRACE": "0"}, "export GRACE=start=5,reconnect=0", "grace", Grace(5.0, 10.0, 0.0)),
    (
        {"SHUTDOWN_TIMEOUT": "5", "GRACE": "start=4"},
        "export GRACE=start=4,shutdown=5",
        "grace",
        Grace(4.0, shutdown_s=5),
    ),
    ({"HOST_REST": "1:2"}, "export GRACE=host=1:2", "grace", Grace(host=HostRest(1.0, 2.0))),
    ({"PREFLIGHT": "1"}, "export HEALTH=preflight", "health", health("tell")._replace(preflight=True)),
    (
        {"PREFLIGHT": "1", "HEALTH": "off"},
        "export HEALTH=off,preflight",
        "health",
        health("off")._replace(preflight=True),
    ),
    ({"PREFLIGHT": "0"}, "Fix: unset PREFLIGHT", "health", health("tell")),
    ({"DASHBOARD_PORT": "80", "DASHBOARD_ACTIONS": "1"}, "export DASHBOARD=80,actions", "dashboard", (80, True)),
    ({"DASHBOARD_ACTIONS": "0"}, "unset DASHBOARD_ACTIONS", "dashboard", (None, False)),
    ({"HEALTH_DISK": "drain"}, "export HEALTH=disk=drain", "health", health("tell", disk=("drain", 0.9))),
]


@pytest.mark.parametrize(("given", "line", "field", "value"), MOVED)
def test_variable_that_became_a_part_of_another_is_refused_with_the_new_line(
    given: dict[str, str], line: str, field: str, value: object
) -> None:
    """A stored job that has it is read as the same line says."""
    problems = problems_of({**WORKER, **given})
    assert problems and all(one.endswith(line) or "Fix: unset WATCHDOG" in one for one in problems)
    read_again = getattr(read({**WORKER, **config.translated(given)})[0], field)
    assert read_again == (RecoverStrategy({"process": 1, "pod": 1}) if value is None else value)


def test_variable_that_kubernetes_sets_for_a_service_named_dashboard_is_ignored() -> None:
    assert read({**WORKER, "DASHBOARD_PORT": "tcp://10.0.0.1:80"}) == read(WORKER)


@pytest.mark.parametrize("prefix", ["", "MS_"])
def test_removed_variable_is_refused_with_its_successor(prefix: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{prefix}LEASE_DETECTOR no longer exists: .*Fix: unset {prefix}LEASE"):
        read({"ROLE": "scheduler", "WORKER_NUM": "2", f"{prefix}LEASE_DETECTOR": "phi"})


@pytest.mark.parametrize(("name", "fix"), [("ROLE", "export ROLE=worker"), ("WORKER_NUM", "export WORKER_NUM=4")])
def test_required_variable_is_requested(name: str, fix: str) -> None:
    problem = the_problem({key: text for key, text in WORKER.items() if key != name})
    assert problem.startswith(f"{name} is not set: expected ")
    assert problem.endswith(fix)


def test_script_started_by_hand_gets_one_sentence_on_how_to_start_it() -> None:
    problem = the_problem({"HOME": "/home/me", "WORLD_SIZE": "4"})
    assert "ROLE and WORKER_NUM are not set" in problem
    assert problem.count("Fix: ") == 1
    assert "samebits run train.py`" in problem


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("WORKER_NUMS", "WORKER_NUM"),
        ("WOKRER_NUM", "WORKER_NUM"),
        ("ENABLE_RECOVER", "ENABLE_RECOVERY"),
        ("SCHEDPORT", "SCHED_PORT"),
        ("NODEID", "NODE_ID"),
        ("NODE_TIMOUT", "NODE_TIMEOUT"),
        ("CHECKPOINT_PTH", "CHECKPOINT_PATH"),
        ("MS_WORKER_NUMS", "MS_WORKER_NUM"),
        ("MS_SCHED_PROT", "MS_SCHED_PORT"),
    ],
)
def test_misspelt_name_gets_a_warning_with_a_suggestion(wrong: str, meant: str) -> None:
    settings, warnings = read({**WORKER, wrong: "9"})
    assert settings == read(WORKER)[0]
    assert len(warnings) == 1
    assert warnings[0] == f"{wrong}=9 is not a known variable: did you mean {meant}? Fix: rename it or unset {wrong}"


def test_misspelt_secret_is_not_shown() -> None:
    (warning,) = read({**WORKER, "CLUSTER_SECRETS": "a secret text of more"})[1]
    assert "CLUSTER_SECRETS=(hidden)" in warning
    assert "a secret text" not in warning


UNRELATED = (
    *("NODE_IP", "NODE_PATH", "NODE_RANK", "NODE_NAME", "MODE_ID", "DEVICE_ID", "DEVICES", "ROLES", "GLOG_DIR"),
    *("NUM_WORKERS", "HOSTNAME", "RANK", "RANK_ID", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_JOB_NAME"),
    *("MS_ENABLE_FORMAT_MODE", "MS_RECOVERY_INTERVAL", "MS_CLUSTER_RETRY_NUM", "MS_RETRY_INTERVAL_LOWER"),
    *("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PYTHONPATH", "SSH_CLIENT", "TORCH_DEVICE_BACKEND_AUTOLOAD", "_"),
)


def test_unrelated_name_is_not_taken_for_a_misspelt_one() -> None:
    assert read({**WORKER, **dict.fromkeys(UNRELATED, "1")})[1] == []


def test_tool_needs_neither_role_nor_worker_num_but_rejects_wrong_values() -> None:
    settings, warnings = read({"SCHED_PORT": "9000"}, role_required=False)
    assert (settings.role, settings.worker_num, settings.min_worker_num, settings.max_worker_num) == (None, 0, 0, 0)
    assert settings.sched_port == 9000
    assert warnings == []
    assert read(WORKER, role_required=False) == read(WORKER)
    assert len(problems_of({"ROLE": "x", "WORKER_NUM": "0", "MIN_WORKER_NUM": "2"}, role_required=False)) == 2


def test_all_problems_are_shown_at_once_in_table_order() -> None:
    problems = problems_of(
        {
            "ROLE": "bogus",
            "MS_WORKER_NUM": "0",
            "SCHED_PORT": "99999",
            "ENABLE_RECOVERY": "maybe",
            "REGISTER_COOLDOWN": "nan",
            "HEARTBEAT_INTERVAL": "3",
            "MIN_WORKER_NUM": "3",
            "MAX_WORKER_NUM": "2",
            "GRACE": "x",
            "SPARE_NUM": "-2",
            "CLUSTER_SECRET_FILE": "~/secret",
        }
    )
    assert [problem.split("=")[0] for problem in problems] == [
        "ROLE",
        "MS_WORKER_NUM",
        "SCHED_PORT",
        "ENABLE_RECOVERY",
        "REGISTER_COOLDOWN",
        "GRACE",
        "SPARE_NUM",
        "CLUSTER_SECRET_FILE",
        "HEARTBEAT_INTERVAL",
        "MIN_WORKER_NUM",
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"MIN_WORKER_NUM": "5", "MAX_WORKER_NUM": "3"}, ("MIN_WORKER_NUM=5", "WORKER_NUM=4", "MAX_WORKER_NUM=3")),
        ({"MIN_WORKER_NUM": "5"}, ("MIN_WORKER_NUM=5", "WORKER_NUM=4", "MAX_WORKER_NUM=4 (default)")),
        ({"MAX_WORKER_NUM": "3"}, ("MIN_WORKER_NUM=4 (default)", "WORKER_NUM=4", "MAX_WORKER_NUM=3")),
    ],
)
def test_contradictory_bounds_show_all_three_values(given: dict[str, str], shown: tuple[str, ...]) -> None:
    last = problems_of({**WORKER, **given})[-1]
    assert "expected MIN_WORKER_NUM ≤ WORKER_NUM ≤ MAX_WORKER_NUM. Fix: " in last
    for part in shown:
        assert part in last


def test_two_heartbeats_just_fit() -> None:
    assert read({**WORKER, "HEARTBEAT_INTERVAL": "2.5"})[0].heartbeat_interval_s == 2.5
    assert read({**WORKER, "NODE_TIMEOUT": "3", "TOPO_TIMEOUT": "3"})[0].topo_timeout_s == 3.0
    # Nothing else is checked: a cool-down may be shorter than the lease, a grace longer.
    assert read({**WORKER, "REGISTER_COOLDOWN": "0", "GRACE": "reconnect=60"})[1] == []


def test_script_in_plain_mode_is_not_asked_for_a_role() -> None:
    told = the_problem({"PLAIN": "1", "RANK": "0", "WORKER_NUM": "2"})
    assert "whose launcher holds the seat" in told and "Fix: start the job without --plain" in told
    assert the_problem({"PLAIN": "1", "WORKER_NUM": "2"}).endswith("export ROLE=worker"), "its launcher, by hand"


UNDER_TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "digits",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}


def test_rank_under_torchrun_is_a_seat_until_a_keeper_has_started_it() -> None:
    seat = config.torchrun_seat(UNDER_TORCHRUN)
    assert seat == config.TorchrunSeat(3, 4, 2, "digits", has_our_rendezvous=False, scheduler=None)
    environment = dict(UNDER_TORCHRUN)
    config.mark_agent("session", environment)
    config.offer_scheduler("node0", 8119, environment)
    seat = config.torchrun_seat(environment)
    assert seat is not None and seat.has_our_rendezvous and seat.scheduler == ("node0", 8119)
    config.offer_scheduler("", 0, environment)
    seat = config.torchrun_seat(environment)
    assert seat is not None and seat.scheduler is None
    for other in ({"ROLE": "worker"}, {"MS_ROLE": "MS_WORKER"}, {"TORCHELASTIC_MAX_RESTARTS": ""}):
        assert config.torchrun_seat(UNDER_TORCHRUN | other) is None


def test_environment_of_a_torchrun_seat_has_what_torchrun_says_and_no_guard_of_its_own() -> None:
    given = {"WORKER_NUM": "9", "MS_SPARE_NUM": "1", "MIN_WORKER_NUM": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    told = {"ROLE": "worker", "WORKER_NUM": "4", "SPARE_NUM": "0"}
    assert config.environment_of_seat(told, given) == told
    assert config.environment_of_seat(told, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}).keys() > told.keys()


def test_plain_name_overrides_a_different_prefixed_one_with_one_warning() -> None:
    settings, warnings = read({**WORKER, "SCHED_PORT": "9000", "MS_SCHED_PORT": "9001"})
    assert settings.sched_port == 9000
    assert len(warnings) == 1
    assert "SCHED_PORT=9000 is used" in warnings[0]
    assert "MS_SCHED_PORT=9001" in warnings[0]


def test_equal_prefixed_name_is_silent_and_an_invalid_one_only_warns() -> None:
    assert read({**WORKER, "MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "04", "MS_SCHED_PORT": "8118"})[1] == []
    settings, warnings = read({**WORKER, "SCHED_PORT": "9000", "MS_SCHED_PORT": "tcp://10.0.0.1:8118"})
    assert settings.sched_port == 9000
    assert len(warnings) == 1


def test_invalid_plain_name_is_a_problem_beside_a_valid_prefixed_one() -> None:
    assert the_problem({**WORKER, "SCHED_PORT": "99999", "MS_SCHED_PORT": "9000"}).startswith("SCHED_PORT=99999: ")


def test_original_start_script_works() -> None:
    shared = {"MS_WORKER_NUM": "8", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": "8118", "MS_NODE_ID": "7"}
    shared |= {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": "/jobs/recovery/", "MS_TOPO_TIMEOUT": "600"}
    worker, warnings = read({**shared, "MS_ROLE": "MS_WORKER"})
    assert (worker.role, worker.worker_num, worker.node_id, worker.enable_recovery) == (Role.WORKER, 8, "7", True)
    assert (worker.recovery_path, worker.topo_timeout_s) == (Path("/jobs/recovery"), 600.0)
    assert warnings == []
    scheduler, warnings = read({**shared, "MS_ROLE": "MS_SCHED"})
    assert (scheduler.role, scheduler.node_id) == (Role.SCHEDULER, None)
    assert warnings == []


@pytest.mark.parametrize("leak", ["7", "sched", "not / a name", "x" * 500])
def test_node_id_inherited_by_the_scheduler_is_ignored(leak: str) -> None:
    assert read({**SCHEDULER, "NODE_ID": "1", "MS_NODE_ID": leak}) == read(SCHEDULER)
    assert read({**SCHEDULER, "NODE_ID": leak}) == read(SCHEDULER)


def test_recovery_without_a_node_id_warns_only_the_worker() -> None:
    nameless = {"ROLE": "worker", "WORKER_NUM": "4"}
    (warning,) = read({**nameless, "ENABLE_RECOVERY": "1"})[1]
    assert warning.startswith("NODE_ID is not set although ENABLE_RECOVERY=1")
    assert "export NODE_ID=" in warning
    assert read(nameless)[1] == []
    assert read({**nameless, "ENABLE_RECOVERY": "1", "NODE_ID": "0"})[1] == []
    assert read({**SCHEDULER, "ENABLE_RECOVERY": "1"})[1] == []


def test_bounds_and_secrets_are_read_together() -> None:
    asked = {"MIN_WORKER_NUM": "2", "MAX_WORKER_NUM": "8", "GRACE": "start=5", "SPARE_NUM": "1"}
    settings, _ = read({**WORKER, **asked})
    assert (settings.min_worker_num, settings.max_worker_num) == (2, 8)
    assert (settings.grace.start_s, settings.spare_num) == (5.0, 1)
    settings, _ = read({**WORKER, "CLUSTER_SECRET_FILE": "/run/secret"})
    assert settings.cluster_secret_file == Path("/run/secret")
    settings, _ = read({**WORKER, "CLUSTER_SECRET": "hunter2", "CLUSTER_SECRET_FILE": "/run/secret"})
    assert (settings.cluster_secret, settings.cluster_secret_file) == ("hunter2", None)
    (bounds,) = problems_of({**WORKER, "MIN_WORKER_NUM": "8", "MAX_WORKER_NUM": "2"})
    assert bounds.startswith("MIN_WORKER_NUM=8, WORKER_NUM=4, MAX_WORKER_NUM=2: ")


def test_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.removeprefix("MS_") in {variable.name for variable in VARIABLES}:
            monkeypatch.delenv(name)
    for name, text in WORKER.items():
        monkeypatch.setenv(name, text)
    assert read() == read(WORKER)


def test_every_field_and_name_is_unique() -> None:
    for column in ("name", "field"):
        names = [getattr(variable, column) for variable in VARIABLES]
        assert len(names) == len(set(names))


# ---- a world of one


@pytest.mark.parametrize(
    "said",
    [
        *({prefix + name: "1"} for name in ("ROLE", "WORKER_NUM", "NODE_ID", "SCHED_PORT") for prefix in ("", "MS_")),
        {"SCHED_HOST": "127.0.0.1"},
        {"SCHED_BIND": "127.0.0.1"},
        {"RANK": "0"},
    ],
)
def test_any_setting_of_a_job_rules_out_a_world_of_one(said: dict[str, str]) -> None:
    assert alone({"PATH": "/bin", **said}) is None


def test_script_without_settings_is_a_world_of_one_that_recovers() -> None:
    told = alone({"PATH": "/bin", "CHECKPOINT_PATH": "points", "WORLD_SIZE": "1", "ROLE": ""})
    assert told is not None
    settings, warnings = read(told)
    assert (settings.role, settings.worker_num, settings.node_id) == (Role.WORKER, 1, "0")
    assert (settings.enable_recovery, settings.register_cooldown_s, settings.rebuild) == (True, 0.0, False)
    assert settings.checkpoint_path == Path("points")
    assert (told["PATH"], warnings) == ("/bin", [])
    for name in ("ENABLE_RECOVERY", "MS_ENABLE_RECOVERY"):
        without = alone({name: "0"})
        assert without is not None and not read(without)[0].enable_recovery


def test_our_own_variables_are_at_most_fifty() -> None:
    """A value that belongs to another variable is a part of that one's, as in HANG=end:60."""
    ascends = {"PROCESS_RECOVER", "POD_RESCHEDULING"}
    later = {"SHARD_COPY_EVERY"}
    assert len({variable.name for variable in VARIABLES} - ascends - later) <= 50


def test_random_node_id_names_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))  # its hexadecimal digits are all decimal
    assert not config.random_node_id().isdigit()
