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
from typing import NamedTuple

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
    """A type and its range: a description in both languages, and the parser."""

    expected: str
    expected_zh: str
    parse: Callable[[str], object]


def _whole(low: int, high: int, parse_first: Callable[[str], None] = lambda text: None) -> SettingType:
    def parse(text: str) -> int:
        parse_first(text)
        # int() alone accepts 1_000 and digits of any script, and raises on thousands of digits.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) or not low <= int(text.strip()) <= high:
            raise WrongValueError()
        return int(text.strip())

    return SettingType(f"a whole number from {low} to {high}", f"{low} 到 {high} 的整数", parse)


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

    return SettingType(f"seconds, {low:g} or more", f"秒数，不小于 {low:g}", parse)


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


def _name(longest: int, forbidden: str, expected: str, expected_zh: str) -> SettingType:
    def parse(text: str) -> str:
        if len(text) > longest or not text.isprintable() or any(char in forbidden for char in text):
            raise WrongValueError()
        return text

    return SettingType(expected, expected_zh, parse)


def _one_of(*words: str) -> SettingType:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in words:
            raise WrongValueError()
        return value

    most, last = words[:-1], words[-1]
    if not most:
        return SettingType(last, last, parse)
    return SettingType(f"{', '.join(most)} or {last}", f"{'、'.join(most)} 或 {last}", parse)


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
    return SettingType(
        f"{', '.join(most)} or {last}, optionally with {number.expected}, as in {example}",
        f"{'、'.join(most)} 或 {last}，也可附带{number.expected_zh}，例如 {example}",
        parse,
    )


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


class Grace(NamedTuple):
    """GRACE: the seconds to wait for a first generation, for a lost worker and for a closed connection."""

    start_s: float
    shrink_s: float
    reconnect_s: float

    def __str__(self) -> str:
        return f"start={self.start_s},shrink={self.shrink_s},reconnect={self.reconnect_s}"


def _parse_grace(text: str) -> Grace:
    seconds = {"start": 30.0, "shrink": 10.0, "reconnect": 0.5}
    for item in (part.strip().lower() for part in text.split(",") if part.strip()):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in seconds:
            raise WrongValueError(f"{item[:60]!r} is none of them")
        try:
            seconds[name] = float(str(_seconds(0).parse(value)))
        except WrongValueError as wrong:
            raise WrongValueError(
                f"{name} takes seconds, 0 or more" + (f"; {wrong.why}" if wrong.why else "")
            ) from None
    return Grace(seconds["start"], seconds["shrink"], seconds["reconnect"])


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


class SignPolicy(NamedTuple):
    """The policy for one health check, and its limit.

    Attributes:
        policy: the action when the limit is reached.
        limit: a share of 1; for ``device_heat``, °C; for ``logs``, free MiB.
    """

    policy: str
    limit: float


class Health(NamedTuple):
    """HEALTH: seconds between two checks, and a policy for each check in the order of ``HEALTH_LIMITS``."""

    every_s: float
    looks: tuple[SignPolicy, ...]

    def __str__(self) -> str:
        """Return the text that is parsed to this value."""
        items = [f"every={self.every_s:.6f}"]
        for sign, look in zip(HEALTH_LIMITS, self.looks, strict=True):
            limit = f":{look.limit:.9f}".rstrip("0").rstrip(".") if sign in _MOVABLE else ""
            items.append(f"{sign}={look.policy}{limit}")
        return ",".join(items)

    def of(self, sign: str) -> SignPolicy:
        """Return the policy for one of the checks in ``HEALTH_LIMITS``."""
        return self.looks[list(HEALTH_LIMITS).index(sign)]


def _parse_health(text: str) -> Health:
    every_s, for_all, own = 10.0, "tell", dict[str, SignPolicy]()
    for item in (part.strip().lower() for part in text.split(",") if part.strip()):
        name, _, value = item.partition("=")
        policy, _, limit = value.partition(":")
        if not value and name in _POLICIES:
            for_all = name
        elif name == "every":
            every_s = float(str(_seconds(0.1).parse(value)))
        elif name in HEALTH_LIMITS and policy in _POLICIES:
            own[name] = SignPolicy(policy, _health_limit(name, limit) if limit else HEALTH_LIMITS[name])
        else:
            raise WrongValueError(f"{item[:60]!r} is none of its words")
    return Health(every_s, tuple(own.get(name, SignPolicy(for_all, limit)) for name, limit in HEALTH_LIMITS.items()))


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


_ROLE = SettingType(
    "scheduler or worker (or MS_SCHED, MS_WORKER)", "scheduler 或 worker（或 MS_SCHED、MS_WORKER）", _parse_role
)
_SWITCH = SettingType("0 or 1", "0 或 1", _parse_switch)
_WORKERS = _whole(1, MOST_WORKERS)
_HOST = SettingType("a host name or an IPv4 or IPv6 address", "主机名、IPv4 或 IPv6 地址", _parse_host)
_HOSTS = SettingType(
    "a host name or an IPv4 or IPv6 address, or several separated by commas, each optionally with :port, or "
    "file:/path; relay:on, or relay:off, or relay:host:port, may come first, and an inner relay second",
    "主机名、IPv4 或 IPv6 地址；或以逗号分隔的多个（各可带 :端口）；或 file:/path；前面可加 relay:on, 或 relay:off, "
    "或 relay:主机:端口, 其后可再加内层中继 relay:主机:端口,",
    _parse_hosts,
)
_PORT = _whole(1, 65535, _explain_service_link)
_FOLDER = SettingType("a folder", "目录", _parse_folder)
_FOLDER_OR_URL = SettingType("a folder, or the URL of one", "目录，或目录的 URL", folder_or_url)
_RECOVERY_PLACE = SettingType(
    "a folder, or etcd://host:port,…/prefix", "目录，或 etcd://host:port,…/prefix", _parse_recovery
)
_FILE = SettingType("a file", "文件", _parse_folder)
_DEVICE = SettingType("cpu, cuda or npu", "cpu、cuda 或 npu", _parse_device)
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
_EVERY = SettingType("a whole number of 0 or more, or auto", "不小于 0 的整数，或 auto", _parse_every)
_COPIES = SettingType(
    "auto, off, or a whole number from 1 to 999999", "auto、off，或 1 到 999999 的整数", _parse_copies
)
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
_AUDIT = SettingType("0, or a whole number of 50 or more", "0，或不小于 50 的整数", _parse_audit)
_STRAGGLER = _and_number(
    ("tell", "swap", "off"),
    SettingType("a number above 1 and at most 100", "大于 1 且不超过 100 的数", _parse_factor),
    "swap:1.5",
    lambda word, number: Straggler(word, 1.2 if number is None else float(str(number))),
)
_GRACE = SettingType(
    "start, shrink and reconnect, each as name=seconds, separated by commas",
    "start、shrink、reconnect 中的若干项，写作 名称=秒数，以逗号分隔",
    _parse_grace,
)
_DASHBOARD = SettingType(
    "a whole number from 1 to 65535, actions, or both separated by a comma",
    "1 到 65535 的整数、actions，或以逗号分隔的两者",
    _parse_dashboard,
)
_STRATEGY = SettingType(
    f"any of {', '.join(STRATEGY_WORDS)}, separated by commas, each optionally with attempts as in process:5",
    f"{'、'.join(STRATEGY_WORDS)} 中的若干项，以逗号分隔，各可附带次数，例如 process:5",
    _parse_strategy,
)
_TURN = SettingType("on, off or pause", "on、off 或 pause", _parse_turn)
_SHARE = SettingType("a share, above 0 and at most 1", "大于 0 且不超过 1 的比例", _parse_share)
_HEALTH_WORDS = SettingType(
    "tell, drain, refuse or off for all, or items sign=word or sign=word:limit, separated by commas",
    "tell、drain、refuse 或 off，适用于全部，或写作 项=词、项=词:上限，以逗号分隔",
    _parse_health,
)
_SECRET = SettingType("a secret of 16 bytes or more", "不少于 16 字节的密钥文本", str)
_REST = SettingType("seconds:seconds, as in 10:600", "秒数:秒数，例如 10:600", _parse_rest)
_COMMAND = _name(4096, "", "a command in at most 4096 printable characters", "至多 4096 个可打印字符的命令")
_WORDS = SettingType(_COMMAND.expected, _COMMAND.expected_zh, _parse_words)
_NODE = _name(128, " /", "at most 128 printable characters, no space, no /", "至多 128 个可打印字符，不含空格和 /")
_TITLE = _name(200, "", "at most 200 printable characters", "至多 200 个可打印字符")


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
        shown_default: the text that docs/reference/variables.md shows instead, in both languages.
    """

    name: str
    field: str
    kind: SettingType
    default: str | None
    capability: str
    meaning: str
    meaning_zh: str
    example: str = ""
    shown_default: tuple[str, str] = ("", "")
    scope: Scope = Scope.ANY
    required: bool = False
    secret: bool = False


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "ROLE", "role", _ROLE, None, _JOB,
        "Role of this process.",
        "本进程的角色。",
        example="worker", scope=Scope.PROCESS, required=True,
    ),
    Variable(
        "WORKER_NUM", "worker_num", _WORKERS, None, _JOB,
        "World size (number of workers) to form.",
        "要组成的 world size（worker 数）。",
        example="4", scope=Scope.JOB, required=True,
    ),
    Variable(
        "SCHED_HOST", "sched_host", _HOSTS, "127.0.0.1", _JOB,
        "Address of the scheduler, which listens on the local addresses to which it resolves. If several hosts are "
        "given, directly or in a file, each is tried in turn.",
        "worker 连接 scheduler 的地址；scheduler 监听该地址解析出的本机地址。写多个主机或一个文件时，依次尝试。",
    ),
    Variable(
        "SCHED_PORT", "sched_port", _PORT, "8118", _JOB,
        "Port on which the scheduler listens.",
        "scheduler 监听的端口。",
    ),
    Variable(
        "SCHED_BIND", "sched_bind", _HOST, None, _JOB,
        "Local address on which the scheduler listens if SCHED_HOST is not local to its host (NAT, a Service).",
        "scheduler 监听的本机地址，用于 SCHED_HOST 不是本机地址的情形（NAT、Service）。",
        example="0.0.0.0", shown_default=("SCHED_HOST's addresses", "SCHED_HOST 的地址"),
    ),
    Variable(
        "NODE_ID", "node_id", _NODE, None, _JOB,
        "Name of the worker. A number below MAX_WORKER_NUM is its slot; a higher number names a spare. Ignored in the "
        "scheduler role.",
        "worker 的名字；小于 MAX_WORKER_NUM 的数字即其 slot，更大的数字为热备（spare）。scheduler 角色忽略此变量。",
        example="0", shown_default=("random", "随机"), scope=Scope.PROCESS,
    ),
    Variable(
        "JOB_ID", "job_id", _NODE, None, _JOB,
        "Id of the job to which the process belongs; the scheduler of any other job is refused. `samebits run` sets "
        "it.",
        "进程所属作业的标识；进程拒绝其他作业的 scheduler。由 `samebits run` 设置。",
        example="5e0a3c4e", shown_default=("any", "任意"), scope=Scope.PROCESS,
    ),
    Variable(
        "ENABLE_RECOVERY", "enable_recovery", _SWITCH, "0", _RECOVERY,
        "`1`: killed processes can return, with identical results. `0`: a death ends the job and is reported with its "
        "cause.",
        "`1`：被杀的进程可以恢复，结果逐比特一致。`0`：任一进程死亡即结束作业并给出原因。",
        shown_default=("0 (`run.sh` exports 1 unless set)", "0（未设置时 `run.sh` 导出 1）"), scope=Scope.JOB,
    ),
    Variable(
        "REBUILD", "rebuild", _SWITCH, "1", _RECOVERY,
        "`1`: a scheduler that finds RECOVERY_PATH empty rebuilds the job that most live workers report.",
        "`1`：RECOVERY_PATH 为空时，scheduler 依据多数存活 worker 的一致报告重建作业。",
        shown_default=("1 (`run.sh` exports 0)", "1（`run.sh` 导出 0）"), scope=Scope.PROCESS,
    ),
    Variable(
        "RECOVERY_PATH", "recovery_path", _RECOVERY_PLACE, "./recovery", _RECOVERY,
        "Folder of the scheduler's journal and lock. With `etcd://h1:2379,h2:2379,h3:2379/jobs/name`, the journal is "
        "stored in this etcd, under a prefix used only by the job, and `./recovery` holds a copy.",
        "scheduler 的记录簿（journal）和锁所在目录。`etcd://h1:2379,h2:2379,h3:2379/jobs/name`：记录簿保存在该 etcd 中"
        "作业自己的前缀之下，`./recovery` 保存一份副本。",
    ),
    Variable(
        "REGISTER_COOLDOWN", "register_cooldown_s", _seconds(0), "30", _RECOVERY,
        "Seconds that a new process of a known node waits before it may take its seat again.",
        "已知节点的新进程重新就位前须等待的秒数。",
    ),
    Variable(
        "HEARTBEAT_INTERVAL", "heartbeat_interval_s", _seconds(0.001), "1", _JOB,
        "Seconds between a worker's heartbeats; at most half of NODE_TIMEOUT.",
        "worker 心跳间隔（秒），至多为 NODE_TIMEOUT 的一半。",
    ),
    Variable(
        "NODE_TIMEOUT", "node_timeout_s", _seconds(0.001), "5", _JOB,
        "Seconds of silence after which a node counts as lost; at most TOPO_TIMEOUT.",
        "节点静默多少秒后视为丢失，至多为 TOPO_TIMEOUT。",
    ),
    Variable(
        "TOPO_TIMEOUT", "topo_timeout_s", _seconds(0.001), "1800", _JOB,
        "Seconds that a round waits for members, and that a worker that is not training waits for a scheduler.",
        "一轮组网等待成员的秒数，也是未在训练的 worker 等待 scheduler 的秒数。",
    ),
    Variable(
        "HANG", "hang", _HANG, "end", _WATCH,
        "`end`: a worker that blocks the others for twice the step timeout (at least 30 s if the timeout is learned) "
        "is ended, so that a restart or a spare replaces it. `tell`: the worker is only reported, with its line of the "
        "script, after one step timeout. `off`: no detection. `end:60` sets the step timeout, the seconds without a "
        "step; otherwise the timeout is learned (3 × the longest step so far, at least 5 s). The first steps of a "
        "generation have 600 s.",
        "`end`：某 worker 拖住其他 worker 达两倍步超时（自动学习时至少 30 秒）即被结束，由重启的进程或热备接替。"
        "`tell`：达一倍步超时即指出它和它所在的脚本行，不结束。`off`：不监视。"
        "`end:60` 设置步超时，即没有新的一步的秒数；否则自动学习（迄今最长间隔的 3 倍，不小于 5）。"
        "每一代（generation）最初几步为 600 秒。",
    ),
    Variable(
        "CAUSE_TABLE", "cause_table", _FILE, None, _WATCH,
        "A TOML file with your own rows for the [table of causes](messages.md), which decides what is retried and what "
        "ends a job.",
        "TOML 文件，内含你自己的[原因表](messages.zh-CN.md)条目：哪些要重试、哪些结束作业。",
        example="causes.toml",
    ),
    Variable(
        "LOSS_ANOMALY", "loss_anomaly", _ANOMALY, "tell", _WATCH,
        "What happens if `state.report(loss=…, grad_norm=…)` gets a value that is not a number, or that is far "
        "from the range of the last 64 values: `tell` reports step and rank, `stop` ends the script with an "
        "error, `recompute` makes all ranks return to the last commit and compute the step again, `off` disables "
        "the check.",
        "当 `state.report(loss=…, grad_norm=…)` 得到的不是数，或远离最近 64 个值的范围时：`tell` 指出步和 rank，"
        "`stop` 以错误结束脚本，`recompute` 让所有 worker 回到最近一次提交重新计算，`off` 不查看。",
        scope=Scope.JOB,
    ),
    Variable(
        "HIDDEN_STATE", "hidden_state", _HIDDEN, "tell", _WATCH,
        "`tell`: during the first commits, and after the first epoch, SameBits watches the values outside the state "
        "that the training function reads. It reports those that change, with file and line, because a recovery does "
        "not restore them. `off` disables this. `stop` also runs steps 5 to 8 twice, the second time as after the "
        "loss of a worker, and ends the job if a result differs. `samebits run --check` sets `check` for its own job.",
        "`tell`：在最初几次提交期间以及第一个 epoch 之后，观察训练函数在状态之外读取的值；"
        "恢复不会还原这些值，因此会指出其中发生变化的值及其所在行。`off` 不查看。"
        "`stop` 还会把第 5 至 8 步各执行两次，第二次与丢失进程之后相同；若结果不同则结束作业。"
        "`check` 由 `samebits run --check` 为其自己的作业设置。",
        scope=Scope.JOB,
    ),
    Variable(
        "CONSISTENCY", "consistency", _CONSISTENCY, "majority:50", _EQUAL,
        "What happens if ranks whose states were equal differ. `majority`: if more than half agree, all ranks "
        "return to the point at which all were equal; `leader`: rank 0 counts as correct, and all ranks return; "
        "`stop`: the job ends. The number is the steps between comparisons of all ranks' weights, moments and "
        "positions. These are hashed while the next steps run, and a copy of the last state in which all ranks "
        "were equal is kept in memory. At the same commits, each rank checks that its shards do not change "
        "before the next step. `majority:auto`: comparisons take at most 1 % of training time; `majority:0`: "
        "ranks are compared only at saves and at the end, and nothing is repaired.",
        "曾经相等的 rank 变得不相等时：`majority`：若过半数一致，全体回到相等之处；`leader`：以 rank 0 为准，全体回退；"
        "`stop`：作业结束。数字是相邻两次比较所有 rank 的权重、动量和位置之间的步数；哈希与后续的步并行计算，"
        "内存中保留最近一次全体相等的状态的副本。在这些提交上，每个 rank 还检查自己的分片在下一步之前没有改变。"
        "`majority:auto`：开销不超过训练的 1 %；`majority:0`：只在保存时和结束时比较，不修复。",
        scope=Scope.JOB,
    ),
    Variable(
        "AUDIT", "audit", _AUDIT, "0", _EQUAL,
        "Steps between audits, in which another rank recomputes one rank's gradient before it is used; the ranks "
        "are audited in turn. If the gradients differ, a third rank decides, and the step is repeated. For a "
        "loop with one DistributedDataParallel module.",
        "每隔这么多步，轮流由另一个 rank 在使用之前重新计算某个 rank 的梯度；两者不同时由第三个判定，该步重做。"
        "适用于只有一个 DistributedDataParallel 模块的循环。",
        scope=Scope.JOB,
    ),
    Variable(
        "PREFLIGHT", "preflight", _SWITCH, "0", _HEALTH,
        "`1`: before a worker requests a seat, it checks its device, memory and disk, and exits with an error if a "
        "check fails; this takes a second or two. `samebits doctor --preflight` runs the same checks by hand. The "
        "nodes are compared before the first generation; a node that is slow or computes wrong results gives its seat "
        "to a spare.",
        "`1`：worker 在申请席位之前检查自己的设备、内存和磁盘，有误则报错退出；需一两秒。"
        "`samebits doctor --preflight` 可手动做同样的检查。"
        "第一代形成之前还会比较各节点：过慢或求和出错的节点把席位让给热备。",
    ),
    Variable(
        "STRAGGLER", "straggler", _STRAGGLER, "tell:1.2", _WATCH,
        "What happens if a worker's own part of a step (without waiting for others) takes longer than the median "
        "of all workers times the number, over at least 20 steps and 5 s: `tell` names the worker and the slow "
        "part, `swap` makes the worker leave at a commit once a spare is warm, `off` disables the check.",
        "某 worker 自身在一步中所花的时间（不含等待其他 worker）在至少 20 步且至少 5 秒内"
        "达到所有 worker 中位数的这么多倍时：`tell` 指出它和慢的部分；"
        "`swap` 在有热备时让它于某次提交后离开；`off` 不查看。",
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
        "space on the disk of LOG_DIR, 256 MiB). `every=10`: seconds between two checks.",
        "查看 worker 主机和设备的哪些方面，以及连续两次查看都达到上限时如何处理：`tell` 报告；`drain` 另在有热备时让该 "
        "worker 于某次提交后离开；`refuse` 另使启动时就查到问题的 worker 不申请席位；`off` 不查看。单独一个词适用于"
        "全部；`disk=drain:0.95` 只适用于一项并改变其上限（比例；device_heat 为 °C；logs 为剩余 MiB）：cpu、memory、"
        "disk（CHECKPOINT_PATH、LOG_DIR、RECOVERY_PATH 所在磁盘和 /dev/shm）、device_errors、device_heat、"
        "device_slowed、"
        "device_memory、device_shared（他人占用其内存十分之一以上且使用率达 90 %）、"
        "logs（LOG_DIR 所在磁盘的剩余空间，256 MiB）。`every=10`：两次查看之间的秒数。",
        example="tell,disk=drain:0.95",
        shown_default=("tell", "tell"),
    ),
    Variable(
        "MIN_WORKER_NUM", "min_worker_num", _WORKERS, "WORKER_NUM", _ELASTIC,
        "Smallest number of workers with which training continues; with fewer, all wait.",
        "可继续训练的最小 world size；低于它则全体等待。",
        scope=Scope.JOB,
    ),
    Variable(
        "MAX_WORKER_NUM", "max_worker_num", _WORKERS, "WORKER_NUM", _ELASTIC,
        "Largest number of workers that train; workers that arrive later join at the next commit, up to this "
        "number.",
        "可组成的最大 world size：未达此数时，后到的 worker 在下一次 commit 时加入。",
        scope=Scope.JOB,
    ),
    Variable(
        "GRACE", "grace", _GRACE, "start=30,shrink=10,reconnect=0.5", _ELASTIC,
        "Seconds to wait for workers and connections. `start`: for all of WORKER_NUM, before the first generation "
        "forms with MIN_WORKER_NUM or more; `shrink`: for a lost worker, before the world continues without it if "
        "MIN_WORKER_NUM are left; `reconnect`: for a closed connection to return, before its node is lost.",
        "等待可能还会来的对象的秒数。`start`：等满 WORKER_NUM，之后有 MIN_WORKER_NUM 个即可首次组网；"
        "`shrink`：等丢失的 worker，之后在剩余不少于 MIN_WORKER_NUM 时不再等它；"
        "`reconnect`：等断开的连接恢复，之后其节点视为丢失。",
        example="start=60,shrink=0",
    ),
    Variable(
        "RESET_LIMIT", "reset_limit", _whole(0, MOST_RESETS), "0", _ELASTIC,
        "How often the workers may form a new group, after a loss or to grow, before the job ends; `0`: no limit.",
        "因丢失或扩容而重新组网的次数上限，超过即结束作业；`0` 表示不限。",
    ),
    Variable(
        "HOST_DISCOVERY_SCRIPT", "host_discovery_script", _COMMAND, None, _DISCOVERY,
        "Command that prints the available hosts, one `host` or `host:slots` per line; run every second. Workers are "
        "started and drained as hosts appear and disappear.",
        "打印可用主机的命令，每行一个 `host` 或 `host:slots`；每秒询问一次，随主机增减而启动或撤离 worker。",
        example="./hosts.sh", shown_default=("no discovery", "不发现主机"),
    ),
    Variable(
        "HOST_LAUNCH", "host_launch", _COMMAND, None, _DISCOVERY,
        "Command that starts a worker on another host; {host}, {node} and {command} are filled in. Run without a "
        "shell.",
        "在其他主机上启动 worker 的命令，填入 {host}、{node} 和 {command}；不经过 shell。",
        example="'ssh -o BatchMode=yes {host} {command}'",
        shown_default=("none: only this machine", "无：仅本机"),
    ),
    Variable(
        "HOST_SLOTS", "host_slots", _WORKERS, "1", _DISCOVERY,
        "Number of workers on a host for which the script prints no number.",
        "脚本未给出数目的主机上的 worker 数。",
    ),
    Variable(
        "HOST_REST", "host_rest_s", _REST, "10:600", _DISCOVERY,
        "Seconds for which a failed host gets no new workers: the first value after its first failure, then doubled "
        "each time up to the second value.",
        "失败的主机被搁置的秒数：首次和最长；每次加倍。",
    ),
    Variable(
        "PREEMPTION_COMMAND", "preemption_command", _WORDS, None, _DISCOVERY,
        "Command that each worker runs every 5 s, without a shell. Status 0 means that the worker's machine is about "
        "to be taken away; the worker then leaves at its next commit.",
        "每个 worker 每 5 秒运行一次的命令，不经过 shell：状态码 0 表示所在机器即将被收回，worker 在下一次提交后离开。",
        example="'test -e /run/preempted'",
        shown_default=("none: only SIGTERM", "无：只看 SIGTERM"),
    ),
    Variable(
        "MAX_RESTARTS", "max_restarts", _whole(0, MOST_RESETS), "0", _SUPERVISION,
        "How often in one time window a dead process is restarted automatically; `0`: never.",
        "一个时间窗口内，死亡的进程无需人工即可自动重启的次数上限；`0` 表示从不。",
        shown_default=("0 (`samebits run` exports 32767 unless set)", "0（未设置时 `samebits run` 导出 32767）"),
    ),
    Variable(
        "RECOVER_STRATEGY", "recover_strategy", _STRATEGY, "process,pod", _SUPERVISION,
        "For `samebits keep`: the levels at which a dead process is retried, lowest first. After the given number of "
        "failed attempts (3 by default), the next level follows, as in `process:5,pod` (docs/how-to/kubernetes.md).",
        "在 `samebits keep` 之下：死亡的进程在哪些级别上重试，从最低级开始；每级连续失败若干次（默认 3）后升到下一级，"
        "例如 `process:5,pod`（docs/how-to/kubernetes.zh-CN.md）。",
    ),
    Variable(
        "PROCESS_RECOVER", "process_recover", _TURN, None, _SUPERVISION,
        "Ascend's switch for the process level; takes precedence over RECOVER_STRATEGY.",
        "昇腾的进程级开关；优先于 RECOVER_STRATEGY。",
        shown_default=("as RECOVER_STRATEGY says", "由 RECOVER_STRATEGY 决定"),
    ),
    Variable(
        "POD_RESCHEDULING", "pod_rescheduling", _TURN, None, _SUPERVISION,
        "Ascend's switch for the pod level; takes precedence over RECOVER_STRATEGY.",
        "昇腾的 pod 级开关；优先于 RECOVER_STRATEGY。",
        shown_default=("as RECOVER_STRATEGY says", "由 RECOVER_STRATEGY 决定"),
    ),
    Variable(
        "SHUTDOWN_TIMEOUT", "shutdown_timeout_s", _seconds(0), "10", _SUPERVISION,
        "Seconds between the request to end a process and SIGKILL.",
        "进程被要求结束后，从请求到 SIGKILL 之间允许的秒数。",
    ),
    Variable(
        "PLAIN", "plain", _SWITCH, "0", _PLAIN,
        "`1`: the script runs without changes. Each worker is a small process that runs the script as torchrun "
        "does, and restarts it after a loss.",
        "`1`：脚本未移植：每个席位由一个小进程持有，像 torchrun 一样运行脚本，有成员丢失后重新运行。",
    ),
    Variable(
        "DIE_WITH_ME", "die_with_me", _SWITCH, "0", _SUPERVISION,
        "`1`: started processes are ended with SIGKILL as soon as their starter ends. `0`: the job continues without "
        "the starter.",
        "`1`：启动者一旦结束，由它启动的进程立即被 SIGKILL 结束；否则作业不依赖启动者继续运行。",
    ),
    Variable(
        "SPARE_NUM", "spare_num", _whole(0, MOST_WORKERS), "0", _SPARES,
        "Number of spares in addition to MAX_WORKER_NUM; a spare takes a lost worker's slot at once.",
        "在最大 world size 之外接纳的热备（spare）数；有 worker 丢失时，热备立即接替其 slot。",
        scope=Scope.JOB,
    ),
    Variable(
        "CHECKPOINT_PATH", "checkpoint_path", _FOLDER_OR_URL, "./ckpt_of_rank", _RECOVERY,
        "Folder with one checkpoint directory per rank; may be a URL such as s3://bucket/folder.",
        "检查点目录，每个 rank 一个子目录；也可以是 URL，例如 s3://bucket/folder。",
    ),
    Variable(
        "SHARD_COPY_EVERY", "shard_copy_every", _COPIES, "auto", _RECOVERY,
        "Commits of a sharded state (FSDP2, HSDP) between two copies to the host's shared memory; a killed process "
        "then costs at most this many steps. `auto`: copying takes at most 1 % of training time; `off`: no copies are "
        "made.",
        "分片状态（FSDP2、HSDP）相邻两次复制到本机共享内存之间的提交数；被杀的进程最多使训练退回这么多步。"
        "`auto`：复制最多占训练时间的 1 %；`off`：不复制。",
        scope=Scope.JOB,
    ),
    Variable(
        "COMPILE_CACHE_PATH", "compile_cache_path", _FOLDER, None, _COMPILING,
        "Folder for the output of torch.compile, kept for restarted processes, spares and later jobs.",
        "torch.compile 产物的目录，供重启的进程、热备和以后的作业使用。",
        example="./compile_cache", shown_default=("torch's own, in /tmp", "torch 自己的，在 /tmp"),
    ),
    Variable(
        "OP_COMPILE", "op_compile", _OPERATORS, None, _COMPILING,
        "Ascend: `binary` uses the operators shipped with CANN; `cache` compiles each operator once and keeps it.",
        "昇腾：`binary` 使用 CANN 自带的算子，`cache` 逐个编译一次并保留。",
        example="binary", shown_default=("torch_npu's own", "torch_npu 自己的"),
    ),
    Variable(
        "LOG_DIR", "log_dir", _FOLDER, "./device", _JOB,
        "Folder for logs and pid files.",
        "脚本的日志和 pid 文件目录。",
    ),
    Variable(
        "PROBE_FILE", "probe_file", _FILE, None, _JOB,
        "File to which this process writes its state every second, for `samebits probe`.",
        "本进程每秒在此文件中写明自身状态，供 `samebits probe` 读取。",
        example="/run/probe", scope=Scope.PROCESS,
    ),
    Variable(
        "DASHBOARD", "dashboard", _DASHBOARD, "", _JOB,
        "Loopback port of the page that `samebits run` starts beside the job (docs/how-to/monitor.md). `actions`: with "
        "the page's token, a user can kill a worker from the page or make it leave; otherwise the page is read-only.",
        "`samebits run` 在作业旁启动的页面所用的本机回环端口（docs/how-to/monitor.zh-CN.md）。"
        "`actions`：出示令牌者可在页面上杀死某个 worker 或让其退出；否则页面只供查看。",
        example="8265", shown_default=("no page", "没有页面"),
    ),
    Variable(
        "JOB_NAME", "job_name", _TITLE, "", _JOB,
        "Name of the job; a new worker must have the same name.",
        "作业名，用于核对新加入的 worker。",
        example="digits", shown_default=("the script's file name", "脚本文件名"),
    ),
    Variable(
        "DEVICE", "device", _DEVICE, None, _JOB,
        "Device type for training.",
        "训练所用的设备类型。",
        shown_default=("the accelerator if there is one, else cpu", "有加速器则用之，否则 cpu"),
    ),
    Variable(
        "COLLECTIVE_BACKEND", "collective_backend", _BACKEND, None, _JOB,
        "`gloo`: NVIDIA tensors are transferred through host memory, so that several workers may share one GPU.",
        "`gloo`：NVIDIA 的张量经主机内存传输，因而多个 worker 可共用一块 GPU。",
        example="gloo", shown_default=("the device's: gloo, nccl or hccl", "随设备：gloo、nccl 或 hccl"),
    ),
    Variable(
        "CLUSTER_SECRET", "cluster_secret", _SECRET, None, _AUTHENTICATION,
        "Secret for authentication and encryption, the same for every process; takes precedence over "
        "CLUSTER_SECRET_FILE.",
        "集群密钥：认证与加密，各进程须相同；优先于 CLUSTER_SECRET_FILE。",
        secret=True,
    ),
    Variable(
        "CLUSTER_SECRET_FILE", "cluster_secret_file", _FILE, None, _AUTHENTICATION,
        "File that contains the secret, from which `samebits recover` reads it again.",
        "存放密钥的文件，`samebits recover` 可据此找回密钥。",
    ),
    Variable(
        "CLUSTER_INSECURE", "cluster_insecure", _SWITCH, "0", _INSECURE,
        "`1`: the scheduler may listen beyond loopback without a secret; only for a network you trust.",
        "`1`：允许 scheduler 在无密钥时监听非回环地址（仅限可信网络）。",
    ),
)  # fmt: skip


# --- rows of the docs -------------------------------------------------------------------------------------------------


def environment_table() -> str:
    """Return the table in docs/reference/variables.md: markdown, one row per entry, no trailing newline."""
    rows = [f"| `{name}` | {default} | {value} | {meaning} |" for name, default, value, meaning in environment_rows()]
    return "\n".join(("| name | default | value | meaning |", "|---|---|---|---|", *rows))


def environment_rows() -> list[tuple[str, str, str, str]]:
    """Return each variable's name, default, expected value and meaning, as shown."""
    rows = []
    for variable in VARIABLES:
        default = variable.shown_default[0] or variable.default or "–"
        rows.append((variable.name, default, variable.kind.expected, variable.meaning))
    return rows


def environment_table_zh() -> str:
    """Return the same table for docs/reference/variables.zh-CN.md."""
    rows = ["| 名称 | 默认值 | 取值 | 含义 |", "|---|---|---|---|"]
    for variable in VARIABLES:
        default = variable.shown_default[1] or variable.default or "–"
        rows.append(f"| `{variable.name}` | {default} | {variable.kind.expected_zh} | {variable.meaning_zh} |")
    return "\n".join(rows)


_INTO_HEALTH = ("INTERVAL", *(f"{sign.upper()}{end}" for sign in HEALTH_LIMITS for end in ("", "_LIMIT")))
NUMBER_OF = {
    "STEP_TIMEOUT": "HANG",
    "CONSISTENCY_EVERY": "CONSISTENCY",
    "STRAGGLER_FACTOR": "STRAGGLER",
    "RECOVER_ATTEMPTS": "RECOVER_STRATEGY",
}
"""Variables of earlier releases that are now the number after another variable's word."""
GRACES = {f"{name.upper()}_GRACE": name for name in ("start", "shrink", "reconnect")}
"""Variables of earlier releases that are now an item of GRACE."""
PART_OF = {
    **NUMBER_OF,
    **dict.fromkeys(GRACES, "GRACE"),
    **dict.fromkeys(("DASHBOARD_PORT", "DASHBOARD_ACTIONS"), "DASHBOARD"),
    **{f"HEALTH_{name}": "HEALTH" for name in _INTO_HEALTH},
}
REMOVED = {
    "MONITOR_INTERVAL": "the death of a process is an event, so nothing is polled",
    "LEASE_DETECTOR": "a node is lost after NODE_TIMEOUT seconds of silence, or when its connection closes",
    "WATCHDOG": "HANG=off does what WATCHDOG=0 did",
    **{name: f"it is a part of {successor}" for name, successor in PART_OF.items()},
}
"""Variables of earlier releases, each with its replacement."""
