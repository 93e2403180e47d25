"""The table of environment variables, from which the settings and docs/reference/variables.md are derived.

A variable is one entry of ``VARIABLES``. The entry determines how the value is parsed and checked, which values are
refused because they are not built yet, whether a restart keeps the variable, whether a job's processes must agree on
it, and its row in the docs. ``samebits.config`` reads the environment, and only it imports this module.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from samebits.doc_tables import chinese, markdown
from samebits.etcd_place import SCHEME, EtcdPlace
from samebits.scheduler_hosts import NotHostsError, canonical, one_host
from samebits.urls import has_password

MOST_WORKERS = 100_000
MOST_RESETS = 1_000_000
LEAST_AUDIT = 50
STRATEGY_WORDS = ("process", "pod", "job", "retry", "recover", "recover-in-place", "exit", "dump", "elastic-training")
"""Our names, then those of Ascend's ``recover-strategy``; ``samebits.core.causes.escalation`` defines them."""
OF_A_SHELL = frozenset(("|", "||", "&", "&&", ";", ">", ">>", "<", "2>&1", "2>"))
"""Words that mean something only to a shell; a command that is run without one would get them as arguments."""
LONGEST_S = 1e9
"""Upper bound of all times, some 31 years; the system's own timers overflow a little above it."""


class Role(Enum):
    """The role of a process in its job."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Scope(Enum):
    """In which processes a variable must have the same value."""

    PROCESS = "process"
    """Set for each process when it is started; never kept for a restart."""
    JOB = "job"
    """The same in every process of a job; compared at registration."""
    ANY = "any"
    """May differ from process to process."""


# --- kinds: how a text becomes a value ------------------------------------------------------------------------------


class WrongValueError(ValueError):
    """A text that cannot be parsed: the reason, and a fix if ``export NAME=<example>`` is not the best one."""

    def __init__(self, why: str = "", fix: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.fix = fix


@dataclass(frozen=True, slots=True)
class SettingType:
    """A type and its range: a description, and the parser."""

    expected: str
    parse: Callable[[str], object]


def _whole(low: int, high: int, parse_first: Callable[[str], None] = lambda text: None) -> SettingType:
    def parse(text: str) -> int:
        parse_first(text)
        # int() alone accepts 1_000 and digits of any script, and raises on thousands of digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text.strip()) <= high:
            raise WrongValueError()
        return int(text.strip())

    return SettingType(f"a whole number from {low} to {high}", parse)


def _explain_service_link(text: str) -> None:
    if "://" in text:
        raise WrongValueError(
            "this is the link that Kubernetes sets for a Service of that name, not a port",
            "set `enableServiceLinks: false` in the pod's spec, or give the port yourself: export {name}=8118",
        )


def _seconds(low: float) -> SettingType:
    def parse(text: str) -> float:
        if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text.strip()):
            unit = re.fullmatch(r"\s*[0-9.]+\s*(ms|s|sec|m|min|h)\s*", text)
            raise WrongValueError("seconds are written without a unit" if unit else "")
        value = float(text.strip())
        if not low <= value <= LONGEST_S:
            raise WrongValueError(f"no timer goes beyond {LONGEST_S:.0f} s" if value > LONGEST_S else "")
        return value

    return SettingType(f"seconds, {low:g} or more", parse)


def _parse_switch(text: str) -> bool:
    value = text.strip()
    if value in ("0", "1"):
        return value == "1"
    meant = {"true": 1, "yes": 1, "on": 1, "false": 0, "no": 0, "off": 0}.get(value.lower())
    raise WrongValueError(fix="" if meant is None else f"export {{name}}={meant}")


def _parse_role(text: str) -> Role:
    value = text.strip()
    if value == "MS_PSERVER":
        why = "there are no parameter servers here, the workers hold the parameters"
        raise WrongValueError(why, "do not start this process; start the scheduler and the workers only")
    names = {"scheduler": Role.SCHEDULER, "MS_SCHED": Role.SCHEDULER, "worker": Role.WORKER, "MS_WORKER": Role.WORKER}
    if value in names:
        return names[value]
    meant = {name.lower(): role.value for name, role in names.items()}.get(value.lower())
    if meant is not None:
        raise WrongValueError("upper and lower case matter", f"export {{name}}={meant}")
    raise WrongValueError()


def _parse_host(text: str) -> str:
    try:
        return one_host(text)
    except NotHostsError as error:
        raise WrongValueError(str(error)) from None


def _parse_hosts(text: str) -> str:
    try:
        return canonical(text)
    except NotHostsError as error:
        raise WrongValueError(str(error)) from None


def _parse_folder(text: str) -> Path:
    if text.startswith("~"):
        raise WrongValueError("only a shell expands `~`, and only unquoted", 'export {name}="$HOME/..."')
    return Path(text)


def folder_or_url(text: str) -> Path | str:
    """Return a folder of this machine (a path or file://…) as a ``Path``, any other URL as text.

    Raises:
        WrongValueError: ``text`` is neither.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*", scheme):
        return _parse_folder(text)
    if "::" in text:
        raise WrongValueError("a chained URL may name a cache whose data is gone")
    if scheme.lower() == "file":
        if not rest.startswith("/"):
            raise WrongValueError("expected an absolute path after file://", "export {name}=file:///…")
        return Path(rest)
    if not rest.strip("/"):
        raise WrongValueError("the URL names no folder", f"export {{name}}={scheme}://bucket/folder")
    if has_password(text):
        raise WrongValueError(
            "credentials do not belong in a URL, which is written to logs; put them where the protocol's "
            "library looks for them, such as ~/.aws/credentials or AWS_ACCESS_KEY_ID"
        )
    return text.rstrip("/")


def _parse_recovery(text: str) -> Path | EtcdPlace:
    if not text.startswith(SCHEME):
        return _parse_folder(text)
    try:
        return EtcdPlace.parse(text)
    except ValueError as error:
        raise WrongValueError(str(error), "export {name}=etcd://host1:2379,host2:2379/jobs/<this job's name>") from None


def _parse_device(text: str) -> str:
    value = text.strip().lower()
    if value not in ("cpu", "cuda", "npu"):
        raise WrongValueError()
    return value


def _name(longest: int, forbidden: str, expected: str) -> SettingType:
    def parse(text: str) -> str:
        if len(text) > longest or not text.isprintable() or any(char in forbidden for char in text):
            raise WrongValueError()
        return text

    return SettingType(expected, parse)


def _one_of(*words: str) -> SettingType:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in words:
            raise WrongValueError()
        return value

    most, last = words[:-1], words[-1]
    return SettingType(f"{', '.join(most)} or {last}" if most else last, parse)


def _and_number(
    words: tuple[str, ...], number: SettingType, example: str, make: Callable[[str, object], object]
) -> SettingType:
    """Return the type of a word, optionally with a number as in ``example``; without one, ``make`` gets None."""

    def parse(text: str) -> object:
        word, colon, behind = (part.strip() for part in text.lower().partition(":"))
        if word not in words:
            raise WrongValueError()
        try:
            return make(word, number.parse(behind) if colon else None)
        except WrongValueError:
            raise WrongValueError(f"{behind[:40]!r} is not {number.expected}") from None

    most, last = words[:-1], words[-1]
    return SettingType(f"{', '.join(most)} or {last}, optionally with {number.expected}, as in {example}", parse)


class HangSetting(NamedTuple):
    """HANG: the action on a worker that blocks the others, and the step timeout (None: learned)."""

    policy: str
    step_timeout_s: float | None

    def __str__(self) -> str:
        return self.policy if self.step_timeout_s is None else f"{self.policy}:{self.step_timeout_s}"


class Straggler(NamedTuple):
    """STRAGGLER: the action on a slow worker, and the multiple of the median that counts as slow."""

    policy: str
    factor: float

    def __str__(self) -> str:
        return f"{self.policy}:{self.factor}"


class ConsistencySetting(NamedTuple):
    """CONSISTENCY: which ranks are trusted if ranks differ, and the steps between two comparisons."""

    trust: str
    every: int | str

    def __str__(self) -> str:
        return f"{self.trust}:{self.every}"


class HostRest(NamedTuple):
    """Seconds for which a failed host is not used: after its first failure, and the maximum."""

    first_s: float
    most_s: float

    def __str__(self) -> str:
        """Return the text that is parsed to this value."""
        return f"{self.first_s:.6f}:{self.most_s:.6f}"


def _parse_rest(text: str) -> HostRest:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?):([0-9]{1,9}(?:\.[0-9]{1,6})?)", text.strip())
    first_s, most_s = (float(found[1]), float(found[2])) if found else (0.0, 0.0)
    if not 0 < first_s <= most_s:
        raise WrongValueError("the first and the longest time, both above 0, the shorter first" if found else "")
    return HostRest(first_s, most_s)


class Grace(NamedTuple):
    """GRACE: the seconds to wait for a first generation, for a lost worker, and so on."""

    start_s: float = 30.0
    shrink_s: float = 10.0
    reconnect_s: float = 0.5
    shutdown_s: float = 10.0
    host: HostRest = HostRest(10.0, 600.0)

    def __str__(self) -> str:
        names = (name.removesuffix("_s") for name in self._fields)
        return ",".join(f"{name}={value}" for name, value in zip(names, self, strict=True))


def _parse_grace(text: str) -> Grace:
    found: dict[str, Any] = {}
    for item in (part.strip().lower() for part in text.split(",") if part.strip()):
        name, _, value = (part.strip() for part in item.partition("="))
        field, kind = (name, _REST) if name == "host" else (f"{name}_s", _seconds(0))
        if field not in Grace._fields:
            raise WrongValueError(f"{item[:60]!r} is none of them")
        try:
            found[field] = kind.parse(value)
        except WrongValueError as wrong:
            raise WrongValueError(f"{name} takes {kind.expected}" + (f"; {wrong.why}" if wrong.why else "")) from None
    return Grace(**found)


class RecoverStrategy(NamedTuple):
    """RECOVER_STRATEGY: its words, each with its number of attempts; None: the default."""

    attempts: Mapping[str, int | None]

    def __str__(self) -> str:
        return ",".join(word if most is None else f"{word}:{most}" for word, most in self.attempts.items())


class Dashboard(NamedTuple):
    """DASHBOARD: the port of the page beside the job, if any, and whether actions are enabled."""

    port: int | None
    has_actions: bool

    def __str__(self) -> str:
        return ",".join([*([] if self.port is None else [str(self.port)]), *(["actions"] if self.has_actions else [])])


def _parse_dashboard(text: str) -> Dashboard:
    port, has_actions = None, False
    for item in (part.strip().lower() for part in text.split(",") if part.strip()):
        if item == "actions":
            has_actions = True
        else:
            port = int(str(_PORT.parse(item)))
    return Dashboard(port, has_actions)


def _parse_audit(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()) or 0 < int(text.strip()) < LEAST_AUDIT:
        raise WrongValueError()
    return int(text.strip())


def _parse_every(text: str) -> int | str:
    if text.strip().lower() == "auto":
        return "auto"
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise WrongValueError()
    return int(text.strip())


def _parse_copies(text: str) -> int | str:
    if text.strip().lower() in ("auto", "off"):
        return "auto" if text.strip().lower() == "auto" else 0
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text.strip()):
        raise WrongValueError()
    return int(text.strip())


def _parse_factor(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip()):
        raise WrongValueError()
    value = float(text.strip())
    if not 1 < value <= 100:
        raise WrongValueError()
    return value


def _parse_strategy(text: str) -> RecoverStrategy:
    attempts = dict[str, int | None]()
    for item in (part.strip() for part in text.split(",") if part.strip()):
        word, colon, most = (part.strip() for part in item.partition(":"))
        if word not in STRATEGY_WORDS:
            raise WrongValueError(f"{word[:40]!r} is none of them")
        if colon and not re.fullmatch(r"[1-9][0-9]{0,5}", most):
            raise WrongValueError(f"{most[:40]!r} is not a number of attempts from 1 to 999999")
        attempts[word] = int(most) if colon else None
    return RecoverStrategy(attempts)


def _parse_turn(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("on", "off", "pause"):
        raise WrongValueError()
    return value == "on"


def _parse_share(text: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip()):
        percent = re.fullmatch(r"\s*([0-9]{1,3})\s*%\s*", text)
        raise WrongValueError(fix=f"export {{name}}={int(percent[1]) / 100:g}" if percent else "")
    value = float(text.strip())
    if not 0 < value <= 1:
        raise WrongValueError()
    return value


class SignPolicy(NamedTuple):
    """The policy for one health check, and its limit.

    Attributes:
        policy: the action when the limit is reached.
        limit: a share of 1; for ``device_heat``, °C; for ``logs``, free MiB.
    """

    policy: str
    limit: float


class Health(NamedTuple):
    """HEALTH: seconds between two checks, and a policy for each check in the order of ``HEALTH_LIMITS``.

    Attributes:
        preflight: whether a worker also checks its device, memory and disk before it requests a seat.
    """

    every_s: float
    looks: tuple[SignPolicy, ...]
    preflight: bool = False

    def __str__(self) -> str:
        """Return the text that is parsed to this value."""
        items = [f"every={self.every_s:.6f}"]
        for sign, look in zip(HEALTH_LIMITS, self.looks, strict=True):
            limit = f":{look.limit:.9f}".rstrip("0").rstrip(".") if sign in _MOVABLE else ""
            items.append(f"{sign}={look.policy}{limit}")
        return ",".join([*items, *(["preflight"] if self.preflight else [])])

    def of(self, sign: str) -> SignPolicy:
        """Return the policy for one of the checks in ``HEALTH_LIMITS``."""
        return self.looks[list(HEALTH_LIMITS).index(sign)]


def _parse_health(text: str) -> Health:
    every_s, for_all, own, preflight = 10.0, "tell", dict[str, SignPolicy](), False
    for item in (part.strip().lower() for part in text.split(",") if part.strip()):
        name, _, value = item.partition("=")
        policy, _, limit = value.partition(":")
        if not value and name in _POLICIES:
            for_all = name
        elif item == "preflight":
            preflight = True
        elif name == "every":
            every_s = float(str(_seconds(0.1).parse(value)))
        elif name in HEALTH_LIMITS and policy in _POLICIES:
            own[name] = SignPolicy(policy, _health_limit(name, limit) if limit else HEALTH_LIMITS[name])
        else:
            raise WrongValueError(f"{item[:60]!r} is none of its words")
    looks = tuple(own.get(name, SignPolicy(for_all, limit)) for name, limit in HEALTH_LIMITS.items())
    return Health(every_s, looks, preflight)


def _health_limit(name: str, text: str) -> float:
    if name not in _MOVABLE:
        raise WrongValueError(f"{name} has no limit to change")
    kind = {"device_heat": _whole(1, 200), "logs": _whole(1, 1_000_000)}.get(name, _SHARE)
    try:
        return float(str(kind.parse(text)))
    except WrongValueError:
        raise WrongValueError(f"{name} takes {kind.expected} as its limit") from None


def _parse_words(text: str) -> object:
    try:
        words = shlex.split(text)
    except ValueError:
        raise WrongValueError("one whose quotes are closed") from None
    if shell := next((word for word in words if word in OF_A_SHELL), None):
        raise WrongValueError(
            f"it runs without a shell, but {shell!r} needs one",
            "put all of it into sh -c, as in export {name}=\"sh -c '…'\"",
        )
    return _COMMAND.parse(text)


_ROLE = SettingType("scheduler or worker (or MS_SCHED, MS_WORKER)", _parse_role)
_SWITCH = SettingType("0 or 1", _parse_switch)
_WORKERS = _whole(1, MOST_WORKERS)
_HOST = SettingType("a host name or an IPv4 or IPv6 address", _parse_host)
_HOSTS = SettingType(
    "a host name or an IPv4 or IPv6 address, or several separated by commas, each optionally with :port, or "
    "file:/path; relay:on, or relay:off, or relay:host:port, may come first, and an inner relay second",
    _parse_hosts,
)
_PORT = _whole(1, 65535, _explain_service_link)
_FOLDER = SettingType("a folder", _parse_folder)
_FOLDER_OR_URL = SettingType("a folder, or the URL of one", folder_or_url)
_RECOVERY_PLACE = SettingType("a folder, or etcd://host:port,…/prefix", _parse_recovery)
_FILE = SettingType("a file", _parse_folder)
_DEVICE = SettingType("cpu, cuda or npu", _parse_device)
_BACKEND = _one_of("gloo")
_OPERATORS = _one_of("binary", "cache")
_POLICIES = ("tell", "drain", "refuse", "off")
_MOVABLE = ("cpu", "memory", "disk", "device_memory", "device_heat", "logs")
HEALTH_LIMITS = {
    "cpu": 0.9,
    "memory": 0.9,
    "disk": 0.9,
    "device_errors": 1.0,
    "device_heat": 90.0,
    "device_slowed": 1.0,
    "device_memory": 0.9,
    "device_shared": 0.9,
    "logs": 256.0,
}
"""The signs of bad health, by the names of ``core.watch.health_limits.Sign``, and their default limits."""
_ANOMALY = _one_of("tell", "stop", "recompute", "off")
_HIDDEN = _one_of("tell", "off", "stop", "check")
_EVERY = SettingType("a whole number of 0 or more, or auto", _parse_every)
_COPIES = SettingType("auto, off, or a whole number from 1 to 999999", _parse_copies)
_HANG = _and_number(
    ("end", "tell", "off"),
    _seconds(0.001),
    "end:60",
    lambda word, number: HangSetting(word, None if number is None else float(str(number))),
)
_CONSISTENCY = _and_number(
    ("majority", "leader", "stop"),
    _EVERY,
    "majority:50",
    lambda word, number: ConsistencySetting(word, number if isinstance(number, int | str) else 50),
)
_AUDIT = SettingType("0, or a whole number of 50 or more", _parse_audit)
_STRAGGLER = _and_number(
    ("tell", "swap", "off"),
    SettingType("a number above 1 and at most 100", _parse_factor),
    "swap:1.5",
    lambda word, number: Straggler(word, 1.2 if number is None else float(str(number))),
)
_GRACE = SettingType(
    "start, shrink, reconnect and shutdown, each as name=seconds, and host=seconds:seconds, separated by commas",
    _parse_grace,
)
_DASHBOARD = SettingType(
    "a whole number from 1 to 65535, actions, or both separated by a comma",
    _parse_dashboard,
)
_STRATEGY = SettingType(
    f"any of {', '.join(STRATEGY_WORDS)}, separated by commas, each optionally with attempts as in process:5",
    _parse_strategy,
)
_TURN = SettingType("on, off or pause", _parse_turn)
_SHARE = SettingType("a share, above 0 and at most 1", _parse_share)
_HEALTH_WORDS = SettingType(
    "tell, drain, refuse or off for all, or items sign=word or sign=word:limit, and preflight, separated by commas",
    _parse_health,
)
_SECRET = SettingType("a secret of 16 bytes or more", str)
_REST = SettingType("seconds:seconds, as in 10:600", _parse_rest)
_COMMAND = _name(4096, "", "a command in at most 4096 printable characters")
_WORDS = SettingType(_COMMAND.expected, _parse_words)
_NODE = _name(128, " /", "at most 128 printable characters, no space, no /")
_TITLE = _name(200, "", "at most 200 printable characters")


# --- the table --------------------------------------------------------------------------------------------------------


_JOB = "a job"
_RECOVERY = "recovery"
_INSECURE = "listening without authentication"
_ELASTIC = "a world that shrinks and grows"
_DISCOVERY = "hosts that come and go"
_SPARES = "spares"
_AUTHENTICATION = "authentication"
_PLAIN = "plain mode"
_SUPERVISION = "supervision"
_COMPILING = "compiled code that is kept"
_WATCH = "the watch over progress"
_HEALTH = "the watch over hosts"
_EQUAL = "the comparison of the ranks"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable.

    Attributes:
        capability: the feature that the variable belongs to.
        default: parsed like a value. The name of an earlier variable stands for that variable's value; None: no value.
        shown_default: the text that docs/reference/variables.md shows instead.
    """

    name: str
    field: str
    kind: SettingType
    default: str | None
    capability: str
    meaning: str
    example: str = ""
    shown_default: str = ""
    scope: Scope = Scope.ANY
    required: bool = False
    secret: bool = False


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "ROLE", "role", _ROLE, None, _JOB,
        "Role of this process.",
        example="worker", scope=Scope.PROCESS, required=True,
    ),
    Variable(
        "WORKER_NUM", "worker_num", _WORKERS, None, _JOB,
        "World size (number of workers) to form.",
        example="4", scope=Scope.JOB, required=True,
    ),
    Variable(
        "SCHED_HOST", "sched_host", _HOSTS, "127.0.0.1", _JOB,
        "Address of the scheduler, which listens on the local addresses to which it resolves. If several hosts are "
        "given, directly or in a file, each is tried in turn.",
    ),
    Variable(
        "SCHED_PORT", "sched_port", _PORT, "8118", _JOB,
        "Port on which the scheduler listens.",
    ),
    Variable(
        "SCHED_BIND", "sched_bind", _HOST, None, _JOB,
        "Local address on which the scheduler listens if SCHED_HOST is not local to its host (NAT, a Service).",
        example="0.0.0.0", shown_default="SCHED_HOST's addresses",
    ),
    Variable(
        "NODE_ID", "node_id", _NODE, None, _JOB,
        "Name of the worker. A number below MAX_WORKER_NUM is its slot; a higher number names a spare. Ignored in the "
        "scheduler role.",
        example="0", shown_default="random", scope=Scope.PROCESS,
    ),
    Variable(
        "JOB_ID", "job_id", _NODE, None, _JOB,
        "Id of the job to which the process belongs; the scheduler of any other job is refused. `samebits run` sets "
        "it.",
        example="5e0a3c4e", shown_default="any", scope=Scope.PROCESS,
    ),
    Variable(
        "ENABLE_RECOVERY", "enable_recovery", _SWITCH, "0", _RECOVERY,
        "`1`: killed processes can return, with identical results. `0`: a death ends the job and is reported with its "
        "cause.",
        shown_default="0 (`run.sh` exports 1 unless set)", scope=Scope.JOB,
    ),
    Variable(
        "REBUILD", "rebuild", _SWITCH, "1", _RECOVERY,
        "`1`: a scheduler that finds RECOVERY_PATH empty rebuilds the job that most live workers report.",
        shown_default="1 (`run.sh` exports 0)", scope=Scope.PROCESS,
    ),
    Variable(
        "RECOVERY_PATH", "recovery_path", _RECOVERY_PLACE, "./recovery", _RECOVERY,
        "Folder of the scheduler's journal and lock. With `etcd://h1:2379,h2:2379,h3:2379/jobs/name`, the journal is "
        "stored in this etcd, under a prefix used only by the job, and `./recovery` holds a copy.",
    ),
    Variable(
        "REGISTER_COOLDOWN", "register_cooldown_s", _seconds(0), "30", _RECOVERY,
        "Seconds that a new process of a known node waits before it may take its seat again.",
    ),
    Variable(
        "HEARTBEAT_INTERVAL", "heartbeat_interval_s", _seconds(0.001), "1", _JOB,
        "Seconds between a worker's heartbeats; at most half of NODE_TIMEOUT.",
    ),
    Variable(
        "NODE_TIMEOUT", "node_timeout_s", _seconds(0.001), "5", _JOB,
        "Seconds of silence after which a node counts as lost; at most TOPO_TIMEOUT.",
    ),
    Variable(
        "TOPO_TIMEOUT", "topo_timeout_s", _seconds(0.001), "1800", _JOB,
        "Seconds that a round waits for members, and that a worker that is not training waits for a scheduler.",
    ),
    Variable(
        "HANG", "hang", _HANG, "end", _WATCH,
        "`end`: a worker that blocks the others for twice the step timeout (at least 30 s if the timeout is learned) "
        "is ended, so that a restart or a spare replaces it. `tell`: the worker is only reported, with its line of the "
        "script, after one step timeout. `off`: no detection. `end:60` sets the step timeout, the seconds without a "
        "step; otherwise the timeout is learned (3 × the longest step so far, at least 5 s). The first steps of a "
        "generation have 600 s.",
    ),
    Variable(
        "CAUSE_TABLE", "cause_table", _FILE, None, _WATCH,
        "A TOML file with your own rows for the [table of causes](messages.md), which decides what is retried and what "
        "ends a job.",
        example="causes.toml",
    ),
    Variable(
        "LOSS_ANOMALY", "loss_anomaly", _ANOMALY, "tell", _WATCH,
        "What happens if `state.report(loss=…, grad_norm=…)` gets a value that is not a number, or that is far "
        "from the range of the last 64 values: `tell` reports step and rank, `stop` ends the script with an "
        "error, `recompute` makes all ranks return to the last commit and compute the step again, `off` disables "
        "the check.",
        scope=Scope.JOB,
    ),
    Variable(
        "HIDDEN_STATE", "hidden_state", _HIDDEN, "tell", _WATCH,
        "`tell`: during the first commits, and after the first epoch, SameBits watches the values outside the state "
        "that the training function reads. It reports those that change, with file and line, because a recovery does "
        "not restore them. `off` disables this. `stop` also runs steps 5 to 8 twice, the second time as after the "
        "loss of a worker, and ends the job if a result differs. `samebits run --check` sets `check` for its own job.",
        scope=Scope.JOB,
    ),
    Variable(
        "CONSISTENCY", "consistency", _CONSISTENCY, "majority:50", _EQUAL,
        "What happens if ranks whose states were equal differ. `majority`: all ranks return to the point at which "
        "all were equal, and a rank that differs from more than half of them is blamed; `leader`: the same, but "
        "rank 0 counts as correct; `stop`: the job ends. The number is the steps between comparisons of all ranks' "
        "weights, moments and positions. These are hashed while the next steps run, and a copy of the last state "
        "in which all ranks were equal is kept in memory. At the same commits, each rank checks that its shards do "
        "not change before the next step. `majority:auto`: comparisons take at most 1 % of training time; "
        "`majority:0`: ranks are compared only at saves and at the end, and nothing is repaired.",
        scope=Scope.JOB,
    ),
    Variable(
        "AUDIT", "audit", _AUDIT, "0", _EQUAL,
        "Steps between audits, in which another rank recomputes one rank's gradient before it is used; the ranks "
        "are audited in turn. If the gradients differ, a third rank decides, and the step is repeated. For a "
        "loop with one DistributedDataParallel module.",
        scope=Scope.JOB,
    ),
    Variable(
        "STRAGGLER", "straggler", _STRAGGLER, "tell:1.2", _WATCH,
        "What happens if a worker's own part of a step (without waiting for others) takes longer than the median "
        "of all workers times the number, over at least 20 steps and 5 s: `tell` names the worker and the slow "
        "part, `swap` makes the worker leave at a commit once a spare is warm, `off` disables the check.",
    ),
    Variable(
        "HEALTH", "health", _HEALTH_WORDS, "tell,every=10", _HEALTH,
        "Checks of a worker's host and device, and what happens if two consecutive checks find a limit reached: "
        "`tell` reports it, `drain` also makes the worker leave at a commit once a spare is warm, `refuse` also "
        "prevents a worker with this problem at its start from requesting a seat, `off` disables the check. A "
        "single word applies to all checks; `disk=drain:0.95` applies to one check and sets its limit (a share; "
        "device_heat: °C; logs: free MiB). The checks are cpu, memory, disk (the disks of CHECKPOINT_PATH, "
        "LOG_DIR and RECOVERY_PATH, and /dev/shm), device_errors, device_heat, device_slowed, device_memory, "
        "device_shared (others use a tenth of the device's memory, and the device is 90 % busy) and logs (free "
        "space on the disk of LOG_DIR, 256 MiB). `every=10`: seconds between two checks. `preflight`: before a worker "
        "requests a seat, it checks its device, memory and disk, and exits with an error if a check fails; this takes "
        "a second or two. `samebits doctor --preflight` runs the same checks by hand. The nodes are compared before "
        "the first generation; a node that is slow or computes wrong results gives its seat to a spare.",
        example="tell,disk=drain:0.95",
        shown_default="tell",
    ),
    Variable(
        "MIN_WORKER_NUM", "min_worker_num", _WORKERS, "WORKER_NUM", _ELASTIC,
        "Smallest number of workers with which training continues; with fewer, all wait.",
        scope=Scope.JOB,
    ),
    Variable(
        "MAX_WORKER_NUM", "max_worker_num", _WORKERS, "WORKER_NUM", _ELASTIC,
        "Largest number of workers that train; workers that arrive later join at the next commit, up to this "
        "number.",
        scope=Scope.JOB,
    ),
    Variable(
        "GRACE", "grace", _GRACE, "start=30,shrink=10,reconnect=0.5,shutdown=10,host=10:600", _ELASTIC,
        "Seconds to wait. `start`: for all of WORKER_NUM, before the first generation "
        "forms with MIN_WORKER_NUM or more; `shrink`: for a lost worker, before the world continues without it if "
        "MIN_WORKER_NUM are left; `reconnect`: for a closed connection to return, before its node is lost; `shutdown`: "
        "from the request to end a process until SIGKILL; `host`: before a failed host gets new workers, after its "
        "first failure, then doubled each time up to the second number.",
        example="start=60,shrink=0",
    ),
    Variable(
        "RESET_LIMIT", "reset_limit", _whole(0, MOST_RESETS), "0", _ELASTIC,
        "How often the workers may form a new group, after a loss or to grow, before the job ends; `0`: no limit.",
    ),
    Variable(
        "HOST_DISCOVERY_SCRIPT", "host_discovery_script", _COMMAND, None, _DISCOVERY,
        "Command that prints the available hosts, one `host` or `host:slots` per line; run every second. Workers are "
        "started and drained as hosts appear and disappear.",
        example="./hosts.sh", shown_default="no discovery",
    ),
    Variable(
        "HOST_LAUNCH", "host_launch", _COMMAND, None, _DISCOVERY,
        "Command that starts a worker on another host; {host}, {node} and {command} are filled in. Run without a "
        "shell.",
        example="'ssh -o BatchMode=yes {host} {command}'",
        shown_default="none: only this machine",
    ),
    Variable(
        "HOST_SLOTS", "host_slots", _WORKERS, "1", _DISCOVERY,
        "Number of workers on a host for which the script prints no number.",
    ),
    Variable(
        "PREEMPTION_COMMAND", "preemption_command", _WORDS, None, _DISCOVERY,
        "Command that each worker runs every 5 s, without a shell. Status 0 means that the worker's machine is about "
        "to be taken away; the worker then leaves at its next commit.",
        example="'test -e /run/preempted'",
        shown_default="none: only SIGTERM",
    ),
    Variable(
        "MAX_RESTARTS", "max_restarts", _whole(0, MOST_RESETS), "0", _SUPERVISION,
        "How often in one time window a dead process is restarted automatically; `0`: never.",
        shown_default="0 (`samebits run` exports 32767 unless set)",
    ),
    Variable(
        "RECOVER_STRATEGY", "recover_strategy", _STRATEGY, "process,pod", _SUPERVISION,
        "For `samebits keep`: the levels at which a dead process is retried, lowest first. After the given number of "
        "failed attempts (3 by default), the next level follows, as in `process:5,pod` (docs/how-to/kubernetes.md).",
    ),
    Variable(
        "PROCESS_RECOVER", "process_recover", _TURN, None, _SUPERVISION,
        "Ascend's switch for the process level; takes precedence over RECOVER_STRATEGY.",
        shown_default="as RECOVER_STRATEGY says",
    ),
    Variable(
        "POD_RESCHEDULING", "pod_rescheduling", _TURN, None, _SUPERVISION,
        "Ascend's switch for the pod level; takes precedence over RECOVER_STRATEGY.",
        shown_default="as RECOVER_STRATEGY says",
    ),
    Variable(
        "PLAIN", "plain", _SWITCH, "0", _PLAIN,
        "`1`: the script runs without changes. Each worker is a small process that runs the script as torchrun "
        "does, and restarts it after a loss.",
    ),
    Variable(
        "DIE_WITH_ME", "die_with_me", _SWITCH, "0", _SUPERVISION,
        "`1`: started processes are ended with SIGKILL as soon as their starter ends. `0`: the job continues without "
        "the starter.",
    ),
    Variable(
        "SPARE_NUM", "spare_num", _whole(0, MOST_WORKERS), "0", _SPARES,
        "Number of spares in addition to MAX_WORKER_NUM; a spare takes a lost worker's slot at once.",
        scope=Scope.JOB,
    ),
    Variable(
        "CHECKPOINT_PATH", "checkpoint_path", _FOLDER_OR_URL, "./ckpt_of_rank", _RECOVERY,
        "Folder with one checkpoint directory per rank; may be a URL such as s3://bucket/folder.",
    ),
    Variable(
        "SHARD_COPY_EVERY", "shard_copy_every", _COPIES, "auto", _RECOVERY,
        "Commits of a sharded state (FSDP2, HSDP) between two copies to the host's shared memory; a killed process "
        "then costs at most this many steps. `auto`: copying takes at most 1 % of training time; `off`: no copies are "
        "made.",
        scope=Scope.JOB,
    ),
    Variable(
        "COMPILE_CACHE_PATH", "compile_cache_path", _FOLDER, None, _COMPILING,
        "Folder for the output of torch.compile, kept for restarted processes, spares and later jobs.",
        example="./compile_cache", shown_default="torch's own, in /tmp",
    ),
    Variable(
        "OP_COMPILE", "op_compile", _OPERATORS, None, _COMPILING,
        "Ascend: `binary` uses the operators shipped with CANN; `cache` compiles each operator once and keeps it.",
        example="binary", shown_default="torch_npu's own",
    ),
    Variable(
        "LOG_DIR", "log_dir", _FOLDER, "./device", _JOB,
        "Folder for logs and pid files.",
    ),
    Variable(
        "PROBE_FILE", "probe_file", _FILE, None, _JOB,
        "File to which this process writes its state every second, for `samebits probe`.",
        example="/run/probe", scope=Scope.PROCESS,
    ),
    Variable(
        "DASHBOARD", "dashboard", _DASHBOARD, "", _JOB,
        "Loopback port of the page that `samebits run` starts beside the job (docs/how-to/monitor.md). `actions`: with "
        "the page's token, a user can kill a worker from the page or make it leave; otherwise the page is read-only.",
        example="8265", shown_default="no page",
    ),
    Variable(
        "JOB_NAME", "job_name", _TITLE, "", _JOB,
        "Name of the job; a new worker must have the same name.",
        example="digits", shown_default="the script's file name",
    ),
    Variable(
        "DEVICE", "device", _DEVICE, None, _JOB,
        "Device type for training.",
        shown_default="the accelerator if there is one, else cpu",
    ),
    Variable(
        "COLLECTIVE_BACKEND", "collective_backend", _BACKEND, None, _JOB,
        "`gloo`: NVIDIA tensors are transferred through host memory, so that several workers may share one GPU.",
        example="gloo", shown_default="the device's: gloo, nccl or hccl",
    ),
    Variable(
        "CLUSTER_SECRET", "cluster_secret", _SECRET, None, _AUTHENTICATION,
        "Secret for authentication and encryption, the same for every process; takes precedence over "
        "CLUSTER_SECRET_FILE.",
        secret=True,
    ),
    Variable(
        "CLUSTER_SECRET_FILE", "cluster_secret_file", _FILE, None, _AUTHENTICATION,
        "File that contains the secret, from which `samebits recover` reads it again.",
    ),
    Variable(
        "CLUSTER_INSECURE", "cluster_insecure", _SWITCH, "0", _INSECURE,
        "`1`: the scheduler may listen beyond loopback without a secret; only for a network you trust.",
    ),
)  # fmt: skip


# --- rows of the docs -------------------------------------------------------------------------------------------------


def environment_table() -> str:
    """Return the table in docs/reference/variables.md, one row per entry."""
    rows = [(f"`{name}`", *rest) for name, *rest in environment_rows()]
    return markdown(("name", "default", "value", "meaning"), rows)


def environment_rows() -> list[tuple[str, str, str, str]]:
    """Return each variable's name, default, expected value and meaning, as shown."""
    return [(one.name, one.shown_default or one.default or "–", one.kind.expected, one.meaning) for one in VARIABLES]


def environment_table_zh() -> str:
    """Return the same table for docs/reference/variables.zh-CN.md."""
    rows = []
    for variable in VARIABLES:
        texts = chinese("variables")[variable.name]
        default = texts.get("default") or variable.default or "–"
        rows.append((f"`{variable.name}`", default, texts["expected"], texts["meaning"]))
    return markdown(chinese("heads")["variables"], rows)


_INTO_HEALTH = ("INTERVAL", *(f"{sign.upper()}{end}" for sign in HEALTH_LIMITS for end in ("", "_LIMIT")))
NUMBER_OF = {
    "STEP_TIMEOUT": "HANG",
    "CONSISTENCY_EVERY": "CONSISTENCY",
    "STRAGGLER_FACTOR": "STRAGGLER",
    "RECOVER_ATTEMPTS": "RECOVER_STRATEGY",
}
"""Variables of earlier releases that are now the number after another variable's word."""
GRACES = {
    **{f"{name.upper()}_GRACE": name for name in ("start", "shrink", "reconnect")},
    "SHUTDOWN_TIMEOUT": "shutdown",
    "HOST_REST": "host",
}
"""Variables of earlier releases that are now an item of GRACE."""
PART_OF = {
    **NUMBER_OF,
    **dict.fromkeys(GRACES, "GRACE"),
    **dict.fromkeys(("DASHBOARD_PORT", "DASHBOARD_ACTIONS"), "DASHBOARD"),
    **dict.fromkeys(("PREFLIGHT", *(f"HEALTH_{name}" for name in _INTO_HEALTH)), "HEALTH"),
}
REMOVED = {
    "MONITOR_INTERVAL": "the death of a process is an event, so nothing is polled",
    "LEASE_DETECTOR": "a node is lost after NODE_TIMEOUT seconds of silence, or when its connection closes",
    "WATCHDOG": "HANG=off does what WATCHDOG=0 did",
    **{name: f"it is a part of {successor}" for name, successor in PART_OF.items()},
}
"""Variables of earlier releases, each with its replacement."""
