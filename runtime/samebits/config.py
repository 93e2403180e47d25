"""Read settings from the environment; the only module that reads or writes ``os.environ``.

Values, defaults and checks follow from the entries of ``samebits.settings_table``. All problems are collected and
raised at once, and no secret appears in them. Nothing here resolves names, reads files or opens sockets.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
import uuid
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from samebits.errors import SettingsError
from samebits.etcd_place import EtcdAccess, EtcdPlace
from samebits.scheduler_hosts import SchedulerAddress, addresses_in, split_relay
from samebits.settings_table import (
    GRACES,
    HEALTH_LIMITS,
    NUMBER_OF,
    PART_OF,
    REMOVED,
    VARIABLES,
    ConsistencySetting,
    Dashboard,
    Grace,
    HangSetting,
    Health,
    RecoverStrategy,
    Scope,
    Straggler,
    Variable,
)
from samebits.settings_table import OF_A_SHELL as OF_A_SHELL
from samebits.settings_table import Role as Role
from samebits.settings_table import SignPolicy as SignPolicy
from samebits.settings_table import WrongValueError as WrongValueError
from samebits.settings_table import environment_rows as environment_rows
from samebits.settings_table import environment_table as environment_table
from samebits.settings_table import environment_table_zh as environment_table_zh
from samebits.settings_table import folder_or_url as folder_or_url
from samebits.spelling import spelled
from samebits.urls import without_credentials

START_FOLDER = "SAMEBITS_START_FOLDER"
"""The folder in which a launcher started a process; the script may leave that folder before importing the package."""
_WORKER_PID = "SAMEBITS_WORKER_PID"
_AGENT = "SAMEBITS_TORCHRUN_AGENT"
_AGENT_SCHEDULER = "SAMEBITS_TORCHRUN_SCHEDULER"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

PREFIX = "MS_"
_BY_NAME = {variable.name: variable for variable in VARIABLES}
_NEAR = 0.88
"""Similarity (difflib) from which a name counts as misspelt: NODEID and NODE_ID are similar, NODE_IP is not."""
_SHORTEST_UNCLEAR = 6
"""Names up to this length, such as ROLE and DEVICE, are not checked: too many unrelated names are similar."""

FIRST_INHERITED = 3  # SD_LISTEN_FDS_START

ETCD_FILES = ("ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY")
ETCD_SECRETS = ("ETCDCTL_USER", "ETCDCTL_PASSWORD")
"""etcdctl's own variables; the user's may contain the password too."""

_COPY_FOLDER = Path("recovery")

KEPT_NAMES: tuple[str, ...] = (
    *(
        prefix + variable.name
        for variable in VARIABLES
        if not variable.secret and variable.scope is not Scope.PROCESS
        for prefix in ("", PREFIX)
    ),
    *("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "DATA_PATH", "*_VISIBLE_DEVICES"),
    *("OMP_*", "MKL_*", "KMP_*", "ATEN_*", "CUDA_*", "CUBLAS_*", "NCCL_*", "HCCL_*", "TORCH_*", "PYTORCH_*"),
    *("PYTHONHASHSEED", *ETCD_FILES),
)
"""Patterns of the names that a restart keeps: the job's settings, and those that affect libraries' results.

ROLE and NODE_ID are not among them: they are set for each process when it is started.
"""


_NAMES_OF_A_JOB = ("ROLE", "WORKER_NUM", "SCHED_HOST", "SCHED_PORT", "SCHED_BIND", "NODE_ID")
_NOTHING_SAID = (
    "ROLE and WORKER_NUM are not set, so nothing says what this process is in which job. Fix: start the script with "
    f"`{spelled('run', 'train.py')}`, which sets both in every process of the job"
)
_PLAIN_SCRIPT = (
    "ROLE is not set: PLAIN=1 is for a script that is not ported, whose launcher holds the seat, and this one calls "
    "samebits.init(). Fix: start the job without --plain and PLAIN=1, or take samebits' calls out of the script"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of ``VARIABLES``, typed. Relative folders are relative to the current folder.

    ``checkpoint_path`` is a ``str`` if it is a URL. ``journal_place`` is set if RECOVERY_PATH is an etcd URL;
    ``recovery_path`` is then the folder of the journal's copy. ``relay`` is the relay that SCHED_HOST names before the
    scheduler's hosts, and ``starts_relay`` whether SCHED_HOST asks this host's launcher to start one; ``inner_relay``
    is the relay to which that relay connects. ``sched_host`` contains none of them. ``role`` is None, and
    ``worker_num`` and its bounds are 0, only if a tool read the settings with ``role_required=False``.
    """

    role: Role | None
    worker_num: int
    sched_host: str
    sched_port: int
    sched_bind: str | None
    node_id: str | None
    job_id: str | None
    enable_recovery: bool
    rebuild: bool
    recovery_path: Path
    register_cooldown_s: float
    heartbeat_interval_s: float
    node_timeout_s: float
    topo_timeout_s: float
    hang: HangSetting
    cause_table: Path | None
    loss_anomaly: str
    hidden_state: str
    consistency: ConsistencySetting
    audit: int
    straggler: Straggler
    health: Health
    min_worker_num: int
    max_worker_num: int
    grace: Grace
    reset_limit: int
    host_discovery_script: str | None
    host_launch: str | None
    host_slots: int
    preemption_command: str | None
    max_restarts: int
    recover_strategy: RecoverStrategy
    process_recover: bool | None
    pod_rescheduling: bool | None
    plain: bool
    die_with_me: bool
    spare_num: int
    checkpoint_path: Path | str
    shard_copy_every: int | str
    compile_cache_path: Path | None
    op_compile: str | None
    log_dir: Path
    probe_file: Path | None
    dashboard: Dashboard
    job_name: str
    device: str | None
    collective_backend: str | None
    cluster_secret: str | None = field(repr=False)
    cluster_secret_file: Path | None
    cluster_insecure: bool
    journal_place: EtcdPlace | None = None
    relay: SchedulerAddress | None = None
    starts_relay: bool | None = None
    inner_relay: SchedulerAddress | None = None


# --- reading ----------------------------------------------------------------------------------------------------------


def read(environ: Mapping[str, str] = os.environ, *, role_required: bool = True) -> tuple[Settings, list[str]]:
    """Return the settings in ``environ``, and warnings to show once; depends only on its arguments.

    ``role_required=False`` is for tools such as ``status``: ROLE and WORKER_NUM may then be absent.

    Raises:
        SettingsError: with every problem found, in the table's order, then the relations between values.
    """
    reading = _Reading(environ, role_required)
    for variable in VARIABLES:
        reading.take(variable)
    if (hosts := reading.values.get("sched_host")) is not None:
        parts = split_relay(hosts)
        reading.values |= {"relay": parts.relay, "starts_relay": parts.starts_relay, "sched_host": parts.hosts}
        reading.values["inner_relay"] = parts.inner_relay
    reading.refuse_removed()
    reading.check_relations()
    if reading.problems:
        raise SettingsError(reading.problems)
    if isinstance(place := reading.values["recovery_path"], EtcdPlace):
        reading.values |= {"recovery_path": _COPY_FOLDER, "journal_place": place}
    return Settings(**reading.values), [*reading.warnings, *_misspelt(environ)]


class _Reading:
    """One pass over the table: the values read so far, how they were found, and the problems."""

    def __init__(self, environ: Mapping[str, str], role_required: bool) -> None:
        self.environ = environ
        self.role_required = role_required
        self.values: dict[str, Any] = {}
        self.shown: dict[str, str] = {}
        """``NAME=value`` by variable name, as found or by default; only of variables that could be read."""
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def take(self, variable: Variable) -> None:
        plain, prefixed = self.environ.get(variable.name, ""), self.environ.get(PREFIX + variable.name, "")
        if variable.name == "NODE_ID" and self.values.get("role") is Role.SCHEDULER:
            # scripts leak a worker's MS_NODE_ID into the scheduler, which is identified by its lock
            plain = prefixed = ""
        name, text = (variable.name, plain) if plain else (PREFIX + variable.name, prefixed)
        if not text:
            self._take_default(variable)
            return
        found = _shown(variable, name, text)
        try:
            value = variable.kind.parse(text)
        except WrongValueError as wrong:
            why = f"{wrong.why}; " if wrong.why else ""
            fix = wrong.fix.format(name=name) or _fix(variable, name)
            self.problems.append(f"{found}: {why}expected {variable.kind.expected}. Fix: {fix}")
            return
        if plain and prefixed and not _reads_as(variable, prefixed, value):
            other = _shown(variable, PREFIX + variable.name, prefixed)
            self.warnings.append(f"{found} is used; {other} differs and is ignored. Fix: unset one of the two")
        self.values[variable.field] = value
        self.shown[variable.name] = found

    def _take_default(self, variable: Variable) -> None:
        if variable.required:
            if self.role_required and self._says_nothing():
                self.problems += [_NOTHING_SAID] if variable.name == "ROLE" else []
            elif self.role_required and self._is_in_a_plain_script():
                self.problems += [_PLAIN_SCRIPT] if variable.name == "ROLE" else []
            elif self.role_required:
                fix = _fix(variable, variable.name)
                self.problems.append(f"{variable.name} is not set: expected {variable.kind.expected}. Fix: {fix}")
            else:
                self.values[variable.field] = None if variable.name == "ROLE" else 0
        elif variable.default is None:
            self.values[variable.field] = None
        elif (same_as := _BY_NAME.get(variable.default)) is not None:
            if same_as.field in self.values:
                self.values[variable.field] = self.values[same_as.field]
                self.shown[variable.name] = f"{variable.name}={self.values[same_as.field]} (default)"
        else:
            self.values[variable.field] = variable.kind.parse(variable.default)
            self.shown[variable.name] = f"{variable.name}={variable.default} (default)"

    def _says_nothing(self) -> bool:
        """Return whether no required variable is set, so that the script was started without a launcher."""
        names = [prefix + one.name for one in VARIABLES if one.required for prefix in ("", PREFIX)]
        return not any(self.environ.get(name) for name in names)

    def _is_in_a_plain_script(self) -> bool:
        """Return whether the launcher of a script in plain mode made this environment.

        Such an environment has a rank, and no role of its own.
        """
        return is_plain(self.environ) and bool(self.environ.get("RANK"))

    def refuse_removed(self) -> None:
        """Refuse a variable that this release has removed, unless its value is empty."""
        names = [prefix + bare for bare in REMOVED for prefix in ("", PREFIX) if self.environ.get(prefix + bare)]
        now = translated(self.environ) if names else {}
        for name in names:
            bare = name.removeprefix(PREFIX)
            if "://" in self.environ[name]:  # the link that Kubernetes sets for a Service named "dashboard"
                continue
            successor = PART_OF.get(bare, "")
            export = f" and export {successor}={_quoted(now[successor])}" if successor in now else ""
            self.problems.append(f"{name} no longer exists: {REMOVED[bare]}. Fix: unset {name}{export}")

    def check_relations(self) -> None:
        """Check relations between values, except those with an invalid value."""
        self._check_times()
        self._check_bounds()
        self._check_listening()
        values = self.values
        if values.get("role") is Role.WORKER and values.get("enable_recovery") and values.get("node_id", "") is None:
            self.warnings.append(
                "NODE_ID is not set although ENABLE_RECOVERY=1, so the scheduler could not give this process its "
                "rank back after a restart. Fix: export NODE_ID=<0 to WORKER_NUM - 1>, a different one in each "
                "worker"
            )
        if values.get("cluster_secret") is not None:
            values["cluster_secret_file"] = None

    def _check_times(self) -> None:
        values, shown = self.values, self.shown
        interval_s, timeout_s = values.get("heartbeat_interval_s"), values.get("node_timeout_s")
        topo_timeout_s = values.get("topo_timeout_s")
        if interval_s is not None and timeout_s is not None and 2 * interval_s > timeout_s:
            self.problems.append(
                f"{shown['HEARTBEAT_INTERVAL']}, {shown['NODE_TIMEOUT']}: one late heartbeat would lose a node; "
                f"expected 2 × HEARTBEAT_INTERVAL ≤ NODE_TIMEOUT. Fix: export NODE_TIMEOUT={2 * interval_s:.15g} or "
                f"export HEARTBEAT_INTERVAL={timeout_s / 2:.15g}"
            )
        if timeout_s is not None and topo_timeout_s is not None and timeout_s > topo_timeout_s:
            self.problems.append(
                f"{shown['NODE_TIMEOUT']}, {shown['TOPO_TIMEOUT']}: a round would give up before a loss is noticed; "
                f"expected NODE_TIMEOUT ≤ TOPO_TIMEOUT. Fix: export TOPO_TIMEOUT={timeout_s:.15g} or "
                f"export NODE_TIMEOUT={topo_timeout_s:.15g}"
            )

    def _check_bounds(self) -> None:
        names = [name for name in ("MIN_WORKER_NUM", "WORKER_NUM", "MAX_WORKER_NUM") if name in self.shown]
        sizes = [self.values[_BY_NAME[name].field] for name in names]
        if sizes != sorted(sizes):
            given = [self.shown[name] for name in names if name != "WORKER_NUM"]
            bounds = [found.partition("=")[0] for found in given if not found.endswith(" (default)")]
            self.problems.append(
                f"{', '.join(self.shown[name] for name in names)}: expected {' ≤ '.join(names)}. "
                f"Fix: unset {' '.join(bounds)}, or put them in this order"
            )

    def _check_listening(self) -> None:
        name = "SCHED_HOST" if self.values.get("sched_bind", "") is None else "SCHED_BIND"
        address = self.values.get(_BY_NAME[name].field)
        if self.values.get("role") is not Role.SCHEDULER or address is None or "cluster_insecure" not in self.values:
            return
        protected = self.values.get("cluster_secret") or self.values.get("cluster_secret_file")
        # addresses in a file are checked when the scheduler binds
        named = [one.host for one in addresses_in(address, 1)]
        beyond = any(is_literal(host) and not is_loopback(host) for host in named)
        if beyond and not (protected or self.values["cluster_insecure"]):
            self.problems.append(_listening_problem(self.shown[name]))


def _misspelt(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each name in the environment that is similar to a variable's name."""
    warnings = []
    for name, text in environ.items():
        prefix = PREFIX if name.startswith(PREFIX) else ""
        bare = name.removeprefix(prefix)
        if bare in _BY_NAME:
            continue
        ours = [one for one in _BY_NAME if len(one) > _SHORTEST_UNCLEAR and one[0] == bare[:1]]
        near = difflib.get_close_matches(bare, ours, n=1, cutoff=_NEAR)
        if near:
            found, meant = _shown(_BY_NAME[near[0]], name, text), prefix + near[0]
            warnings.append(f"{found} is not a known variable: did you mean {meant}? Fix: rename it or unset {name}")
    return warnings


def _reads_as(variable: Variable, text: str, value: object) -> bool:
    try:
        return variable.kind.parse(text) == value
    except WrongValueError:
        return False


def _shown(variable: Variable, name: str, text: str) -> str:
    if variable.secret:
        return f"{name}=(hidden)"
    text = without_credentials(text)
    if not text.isprintable() or text != text.strip():
        text = ascii(text)
    return f"{name}={text if len(text) <= 80 else text[:79] + '…'}"


def _quoted(text: str) -> str:
    return shlex.quote(text) if text.isprintable() else ascii(text)


def _fix(variable: Variable, name: str) -> str:
    if variable.example:
        return f"export {name}={variable.example}"
    if variable.default is None or variable.default in _BY_NAME:
        return f"unset {name}"
    return f"export {name}={variable.default}, which is its default"


# --- listening --------------------------------------------------------------------------------------------------------


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a literal loopback address or ``localhost``. No name is resolved."""
    if address.lower().removesuffix(".") == "localhost":
        return True
    if not is_literal(address):
        return False
    literal = ipaddress.ip_address(address)
    mapped = literal.ipv4_mapped if isinstance(literal, ipaddress.IPv6Address) else None
    return (mapped or literal).is_loopback


def require_secret(bind_addresses: Iterable[str], settings: Settings) -> None:
    """Refuse to listen beyond loopback without authentication.

    ``read`` has checked literal addresses; names are resolved only when binding.

    Args:
        bind_addresses: resolved, without port.
        settings: this process's settings.

    Raises:
        SettingsError: naming the addresses and the settings that allow them.
    """
    beyond = [address for address in bind_addresses if not is_loopback(address)]
    protected = settings.cluster_secret or settings.cluster_secret_file or settings.cluster_insecure
    if beyond and not protected:
        asked = f"SCHED_BIND={settings.sched_bind}" if settings.sched_bind else f"SCHED_HOST={settings.sched_host}"
        raise SettingsError([_listening_problem(f"{asked} (listening on {', '.join(beyond)})")])


def is_literal(address: str) -> bool:
    """Return whether this is an IP address, and no name."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _listening_problem(found: str) -> str:
    return (
        f"{found}: anyone who reaches a scheduler beyond loopback could join or end its job; expected CLUSTER_SECRET "
        "or CLUSTER_SECRET_FILE, or CLUSTER_INSECURE=1 on a network you trust. Fix: export CLUSTER_SECRET_FILE=<a "
        "file with the same secret for every process>, or export CLUSTER_INSECURE=1, or export SCHED_HOST=127.0.0.1 "
        "and unset SCHED_BIND"
    )


# --- values for other processes ---------------------------------------------------------------------------------------


def fixed_settings(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return names and values that must be the same in every process of a job, in the table's order.

    The values are compared at registration, and with the journal's. Both use the name of earlier releases for
    CONSISTENCY's interval.
    """
    pairs = []
    for variable in (one for one in VARIABLES if one.scope is Scope.JOB):
        name, value = variable.name, getattr(settings, variable.field)
        if isinstance(value, ConsistencySetting):
            name, value = "CONSISTENCY_EVERY", value.every
        pairs.append((name, value if isinstance(value, str) else str(int(value))))
    return tuple(pairs)


def in_folder(folder: Path, settings: Settings) -> Settings:
    """Return the settings with paths that do not depend on the current folder; URLs are unchanged."""

    def placed(path: Path | None) -> Path | None:
        return None if path is None else folder / path

    return replace(
        settings,
        cause_table=placed(settings.cause_table),
        cluster_secret_file=placed(settings.cluster_secret_file),
        compile_cache_path=placed(settings.compile_cache_path),
        probe_file=placed(settings.probe_file),
        recovery_path=folder / settings.recovery_path,
        checkpoint_path=path if isinstance(path := settings.checkpoint_path, str) else folder / path,
        log_dir=folder / settings.log_dir,
    )


def alone(environ: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """Return the environment of a script that was started without a job: a job with a single process.

    Return None if a variable shows that it belongs to a job: a role, size, scheduler or node, or another launcher's
    rank.
    """
    if any(environ.get(prefix + name) for name in _NAMES_OF_A_JOB for prefix in ("", PREFIX)) or environ.get("RANK"):
        return None
    told = {"ROLE": "worker", "WORKER_NUM": "1", "NODE_ID": "0", "REBUILD": "0", "REGISTER_COOLDOWN": "0"}
    if not (environ.get("ENABLE_RECOVERY") or environ.get(f"{PREFIX}ENABLE_RECOVERY")):
        told["ENABLE_RECOVERY"] = "1"
    return {**environ, **told}


def kept_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a restart needs, without secrets and values that belong to a single process."""
    return {
        name: text
        for name, text in environ.items()
        if is_shell_name(name) and any(fnmatchcase(name, kept) for kept in KEPT_NAMES)
    }


def translated(stored: Mapping[str, str]) -> dict[str, str]:
    """Convert variables stored by an earlier release to this release's names."""
    given = {name.removeprefix(PREFIX): text for name, text in stored.items() if name.removeprefix(PREFIX) in REMOVED}
    kept = {name: text for name, text in stored.items() if name.removeprefix(PREFIX) not in REMOVED}
    new = {"HANG": "off"} if given.get("WATCHDOG") == "0" else {}
    for old, name in NUMBER_OF.items():
        if number := given.get(old):
            words = new.get(name) or kept.get(name) or kept.get(PREFIX + name) or _BY_NAME[name].default or ""
            new[name] = ",".join(f"{word.partition(':')[0]}:{number}" for word in words.split(","))
    if grace := [f"{name}={given[old]}" for old, name in GRACES.items() if given.get(old)]:
        new["GRACE"] = _added_to("GRACE", kept, grace)
    actions = "actions" if given.get("DASHBOARD_ACTIONS", "").strip() == "1" else ""
    if page := [text for text in (given.get("DASHBOARD_PORT", ""), actions) if text]:
        new["DASHBOARD"] = ",".join(page)
    items = [f"every={given['HEALTH_INTERVAL']}"] if given.get("HEALTH_INTERVAL") else []
    for sign in HEALTH_LIMITS:
        policy, limit = (given.get(f"HEALTH_{sign.upper()}{end}", "") for end in ("", "_LIMIT"))
        if policy or limit:
            items.append(f"{sign}={policy or 'tell'}" + (f":{limit}" if limit else ""))
    items += ["preflight"] if given.get("PREFLIGHT", "").strip() == "1" else []
    if items:
        new["HEALTH"] = _added_to("HEALTH", kept, items)
    return {**{name: text for name, text in kept.items() if name.removeprefix(PREFIX) not in new}, **new}


def _added_to(name: str, kept: Mapping[str, str], items: Iterable[str]) -> str:
    """Return a list variable's value with these items, which take precedence, added at its end."""
    return ",".join(filter(None, [kept.get(name) or kept.get(PREFIX + name), *items]))


_OF_A_TERMINAL = (
    *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERM_*", "COLORTERM", "COLUMNS", "LINES", "LS_COLORS", "PS1", "HIST*"),
    *("SSH_*", "XDG_*", "DBUS_*", "DISPLAY", "WAYLAND_DISPLAY", "WINDOWID", "TMUX", "TMUX_*", "STY", "VSCODE_*"),
    *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "VIRTUAL_ENV_PROMPT"),
)
"""Patterns of variables that differ between two terminals of one user."""


MOST_NAMED = 6
"""The most variables that a message names."""


def changed_names(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of variables that differ between two environments, without those of a terminal."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [name for name in names if not any(fnmatchcase(name, one) for one in _OF_A_TERMINAL)]


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the job's settings in ``environ`` unchanged, without secrets and values of a single process."""
    shared = (one for one in VARIABLES if not one.secret and one.scope is not Scope.PROCESS)
    names = [prefix + one.name for one in shared for prefix in ("", PREFIX)]
    return {name: environ[name] for name in names if name in environ}


def random_node_id() -> str:
    """Return a random name for a worker without a NODE_ID. It is no number, which would name a slot or a spare."""
    return f"n{uuid.uuid4().hex[:11]}"


def environment_of_job(told: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environ`` with these variables of a job, for a launcher whose options give its size and address.

    Variables that would contradict them, or that belong to a single process, are left out.
    """
    left_out = {*told, "ROLE", "JOB_ID", "MIN_WORKER_NUM", "MAX_WORKER_NUM", "DIE_WITH_ME"}
    kept = {name: text for name, text in environ.items() if name.removeprefix(PREFIX) not in left_out}
    return {**kept, **told}


def inherited_sockets() -> range:
    """Return the descriptors of listening sockets inherited from the parent, as in sd_listen_fds(3)."""
    count = os.environ.get("LISTEN_FDS", "")
    is_ours = os.environ.get("LISTEN_PID") == str(os.getpid()) and re.fullmatch("[0-9]{1,2}", count)
    return range(FIRST_INHERITED, FIRST_INHERITED + int(count)) if is_ours else range(0)


def is_plain(environment: Mapping[str, str]) -> bool:
    """Return whether a job with this environment runs its script in plain mode (PLAIN)."""
    return _is_on("PLAIN", environment)


def dies_with_starter(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment ends when its starter ends (DIE_WITH_ME)."""
    return _is_on("DIE_WITH_ME", environment)


def _is_on(switch: str, environment: Mapping[str, str]) -> bool:
    return (environment.get(switch) or environment.get(f"{PREFIX}{switch}") or "").strip() == "1"


def host_launch(environment: Mapping[str, str]) -> str:
    """Return the command by which a job with this environment starts workers on other hosts (HOST_LAUNCH)."""
    return environment.get("HOST_LAUNCH") or environment.get(f"{PREFIX}HOST_LAUNCH") or ""


def is_shell_name(name: str) -> bool:
    """Return whether ``name`` is valid for a shell variable (POSIX, 3.235).

    It consists of letters, digits and ``_``, and does not begin with a digit.
    """
    return name.isascii() and name.isidentifier()


def whole_environment() -> dict[str, str]:
    """Return the complete environment, for a child process."""
    return dict(os.environ)


def secret_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the secrets in ``environ`` unchanged, for this process only. Never store them."""
    names = [prefix + variable.name for variable in VARIABLES if variable.secret for prefix in ("", PREFIX)]
    names += ETCD_SECRETS
    return {name: environ[name] for name in names if environ.get(name)}


def etcd_access() -> EtcdAccess:
    """Return the credentials and TLS files for etcd from etcdctl's environment variables."""
    authority, certificate, key = (Path(text) if (text := os.environ.get(name)) else None for name in ETCD_FILES)
    user, colon, password = os.environ.get("ETCDCTL_USER", "").partition(":")
    return EtcdAccess(authority, certificate, key, user, password if colon else os.environ.get("ETCDCTL_PASSWORD", ""))


def replace_environment(wanted: Mapping[str, str]) -> None:
    """Replace the environment of this forked process by the one that its parent has requested."""
    os.environ.clear()
    os.environ.update(wanted)


_OF_HCCL = ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "HCCL_ASYNC_ERROR_HANDLING")
_USE_NCCL2 = "TORCH_DIST_USE_NCCL2"


@dataclass(frozen=True, slots=True)
class _Guard:
    """A protection mechanism of NCCL or torch: the value that SameBits sets, and what any other value means.

    Attributes:
        names: the variable, then names of older releases.
        wanted: the value.
        otherwise: completes "with another value ...".
    """

    names: tuple[str, ...]
    wanted: str
    otherwise: str


_NCCL_GUARDS = (
    _Guard(
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "0",
        "torch ends the process when a collective fails, so no rank survives a lost peer",
    ),
    _Guard(("TORCH_NCCL_RETHROW_CUDA_ERRORS",), "0", "torch's watchdog ends the process on a CUDA error"),
    _Guard(("TORCH_NCCL_ENABLE_MONITORING",), "0", "torch's heartbeat monitor may end a process that recovers"),
    _Guard(("TORCH_NCCL_PROPAGATE_ERROR",), "0", "torch carries one rank's error to ranks that recover"),
    _Guard(("TORCH_NCCL_USE_COMM_NONBLOCKING",), "1", "a communicator whose peer dies while it forms hangs"),
    _Guard(("NCCL_NVLS_ENABLE",), "0", "forming a communicator again in the same process may fail or leak"),
)


def leave_failures_to_us(environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Let an abandoned collective over NCCL or HCCL fail instead of ending the process, unless the user decided.

    By default, torch ends the process (ProcessGroupNCCL.hpp). Older releases of torch_npu read only the older name of
    Ascend's variable, so both names are set.

    Returns:
        A sentence for each value set by the user under which recovery in the process cannot work as promised.
    """
    if not any(name in environ for name in _OF_HCCL):
        environ.update(dict.fromkeys(_OF_HCCL, "0"))
    broken = []
    for guard in _NCCL_GUARDS:
        given = next((name for name in guard.names if name in environ), None)
        if given is None:
            environ[guard.names[0]] = guard.wanted
        elif environ[given] != guard.wanted:
            broken.append(f"{given}={environ[given]}: {guard.otherwise}. Fix: unset it, or set it to {guard.wanted}")
    return broken


def wants_nccl2() -> bool | None:
    """Return which of torch's two NCCL backends the user has chosen, or None if there is no choice."""
    return None if _USE_NCCL2 not in os.environ else os.environ[_USE_NCCL2] != "0"


def default_to_one_thread(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Set OMP_NUM_THREADS to 1 unless the user has set it, and return whether it was set."""
    if environ.get("OMP_NUM_THREADS") or environ.get("MKL_NUM_THREADS"):
        return False
    environ["OMP_NUM_THREADS"] = "1"
    return True


def keep_compiled_in(folder: Path) -> None:
    """Make torch.compile, inductor and triton use ``folder`` as their cache, unless the user has set a folder."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def keep_operators_in(folder: Path) -> None:
    """Make CANN store the operators that it compiles in ``folder``, unless the user has set a folder.

    CANN must not remove any itself (-1), so that nodes sharing the folder do not contend for it. The parent folder is
    pruned when a job starts (``training.process.compiled_code``).
    """
    os.environ.setdefault("ASCEND_CACHE_PATH", str(folder))
    os.environ.setdefault("ASCEND_MAX_OP_CACHE_SIZE", "-1")


def visible_devices(device_type: str) -> str | None:
    """Return which devices of this type the process may use, or None for all."""
    return os.environ.get({"npu": "ASCEND_RT_VISIBLE_DEVICES", "cuda": "CUDA_VISIBLE_DEVICES"}.get(device_type, ""))


def take_start_folder() -> Path | None:
    """Return and unset the folder in which a launcher started this process.

    It is unset so that children do not inherit it.
    """
    folder = os.environ.pop(START_FOLDER, "")
    return Path(folder) if folder else None


def mark_worker() -> None:
    """Set a variable to this worker's pid, which the processes that it starts inherit."""
    os.environ[_WORKER_PID] = str(os.getpid())


# --- torchrun ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchrunSeat:
    """The rank that torchrun has assigned to a process of a ported script.

    Attributes:
        nodes: the number of torchrun's agents.
        has_our_rendezvous: whether the agents meet with ``--rdzv-backend=samebits``.
        scheduler: SCHED_HOST and SCHED_PORT of the ranks' job, as the agents have agreed; None without an agent of
            ours, or if none of them is on the endpoint's machine.
    """

    rank: int
    world_size: int
    nodes: int
    run_id: str
    has_our_rendezvous: bool
    scheduler: tuple[str, int] | None


def torchrun_seat(environ: Mapping[str, str] = os.environ) -> TorchrunSeat | None:
    """Return this process's rank if torchrun has started it, otherwise None.

    A process that was started by a keeper of this package also gets None.
    """
    if not environ.get("TORCHELASTIC_MAX_RESTARTS") or environ.get("ROLE") or environ.get(f"{PREFIX}ROLE"):
        return None
    host, _, port = environ.get(_AGENT_SCHEDULER, "").rpartition(" ")
    return TorchrunSeat(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        nodes=int(environ["GROUP_WORLD_SIZE"]),
        run_id=environ["TORCHELASTIC_RUN_ID"],
        has_our_rendezvous=_AGENT in environ,
        scheduler=(host, int(port)) if host else None,
    )


def environment_of_seat(told: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a torchrun rank that joins a job with these variables."""
    environment = environment_of_job(told, environ)
    if environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "1":  # torchrun sets it if the user does not
        del environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    return environment


def scheduler_environment() -> dict[str, str]:
    """Return the environment of a scheduler that a job's process starts, without that process's own variables."""
    of_the_process = (*("ROLE", "NODE_ID", "JOB_ID", "PROBE_FILE"), _AGENT, _AGENT_SCHEDULER, _ERROR_FILE)
    kept = {name: text for name, text in os.environ.items() if name.removeprefix(PREFIX) not in of_the_process}
    return {**kept, "ROLE": "scheduler"}


def is_restarted_by_torchrun() -> bool:
    """Return whether a torchrun agent started this process again after a failure."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def torchrun_store() -> tuple[str, int] | None:
    """Return the address of the store that torchrun's agent serves, or None if it serves none."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def torchrun_error_file() -> Path | None:
    """Return the file from which torchrun reads the error of this rank, or None."""
    path = os.environ.get(_ERROR_FILE)
    return Path(path) if path else None


def mark_agent(session: str, environ: MutableMapping[str, str] = os.environ) -> str:
    """Store the agent's name in a variable that torchrun's workers inherit, and return the variable's name."""
    environ[_AGENT] = session
    return _AGENT


def offer_scheduler(host: str, port: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Pass the address of a ported script's scheduler to torchrun's workers; host "" means that there is none."""
    environ[_AGENT_SCHEDULER] = f"{host} {port}" if host else ""


def parent_worker(parents: Collection[int]) -> int | None:
    """Return the pid of the worker that started this process, if it is among ``parents``."""
    marked = os.environ.get(_WORKER_PID, "")
    return int(marked) if marked.isdecimal() and int(marked) in parents else None


def publish_place(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set this process's rank and world size under torchrun's names, which scripts and libraries read."""
    for name, value in zip(_PLACE, (rank, local_rank, world_size, local_world_size), strict=True):
        environ[name] = str(value)


def withdraw_place() -> None:
    """Unset the variables of ``publish_place``, because a spare has no rank."""
    for name in _PLACE:
        os.environ.pop(name, None)


def publish(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    master_addr: str,
    master_port: int,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set the variables from which ``torch.distributed.init_process_group("env://")`` forms its group.

    The two TORCHELASTIC names make every rank, 0 included, a client of the TCPStore that already listens on
    ``master_addr``:``master_port`` (torch/distributed/rendezvous.py, ``_create_c10d_store``). Without them rank 0 would
    try to open that port.
    """
    publish_place(rank, local_rank, world_size, local_world_size, environ)
    environ["MASTER_ADDR"] = master_addr
    environ["MASTER_PORT"] = str(master_port)
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    environ["TORCHELASTIC_RESTART_COUNT"] = "0"
