"""Store how a job was started, so that it can be recovered from its folder alone.

The file ``start.json`` beside the logs contains the folder, the command and the environment variables that a restart
needs. It contains no secret, and nothing that was given to only one process. It also lists the job's nodes on this
machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samebits import config, earlier, strict_json
from samebits.account.job_view import JobView
from samebits.config import Role, Settings
from samebits.errors import ForeignFolderError, SettingsError, StoreError, UsageError
from samebits.launcher.spawning import OF_ONE_PROCESS, Program, StartLock, Way, is_here
from samebits.named_file import read_named_file
from samebits.service import job_journal, log, status
from samebits.spelling import spelled, spelled_run
from samebits.store import durable, private
from samebits.store.journal import JOURNAL_FILE

_MAX_BYTES = 64 << 20  # size limit for a file that is hashed as a script
ON_RAY = ("--on", "ray")
"""The first words of the command of a job on Ray, as each host stores it."""


@dataclass(frozen=True, slots=True)
class ScriptVersion:
    """One version of a script: its content's digest, and its modification time in seconds since 1970."""

    digest: str
    changed_at_s: float


def version_of(script: Path) -> ScriptVersion | None:
    """Return the file's current version, or None if it cannot be read."""
    try:
        content = read_named_file(script, _MAX_BYTES - 1)
        return ScriptVersion(hashlib.sha256(content).hexdigest(), script.stat().st_mtime)
    except OSError:
        return None


def change(script: str, before: ScriptVersion | None, now: ScriptVersion | None, *, others_run: bool) -> str:
    """Return a sentence about how a script has changed since the job's start, or "" if unchanged or unknown.

    Args:
        script: the script's name.
        before, now: the script's version at the job's start, and its current version.
        others_run: whether other workers, which were not restarted, are running.
    """
    if before is None or now is None or before.digest == now.digest:
        return ""
    who = "workers that run already keep the former" if others_run else "all workers start with the new one"
    return (
        f"{script} was edited since the job started: written {_time(before.changed_at_s)} then, "
        f"{_time(now.changed_at_s)} now; {who}. What is restored from a checkpoint, such as an optimizer's lr or a "
        "schedule, stays as it was, whatever the script says"
    )


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


START_FILE = "start.json"
POINTER_FILE = "elsewhere"
ADDRESS_FILE = "address.json"
"""The file in RECOVERY_PATH for a job whose processes another launcher starts."""
_ADDRESS = (
    *("SCHED_HOST", "SCHED_PORT", "WORKER_NUM", "SPARE_NUM", "JOB_NAME"),
    *("ENABLE_RECOVERY", "CLUSTER_SECRET_FILE", "CLUSTER_INSECURE"),
)
USUAL_LOG_DIR = Path("device")
_VERSION = 2
_EARLIER_VERSION = 1  # written when scripts said `import runtime`
_LATEST_S = 1e11  # latest time, in seconds since 1970, that a clock of this system can show
_MAX_FILE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class JobSpec:
    """How a job was started. ``environment`` was given to all its processes."""

    folder: Path
    interpreter: str
    script: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    needs_secret: bool = False
    """Whether the job was given a secret by value; it is not stored, so a restart must supply it."""
    nodes: tuple[str, ...] | None = None
    """This machine's nodes, if workers were added or removed, or other hosts have some; None: all nodes."""
    script_version: ScriptVersion | None = None
    """The script's version at the start; None if it could not be read."""
    way: Way = Way.SCRIPT
    """How a worker's command is built from ``script``."""
    has_scheduler: bool = True
    """Whether the scheduler belongs to this machine."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """The discovered host of each node; nodes that are no longer in ``nodes`` are leaving."""
    size: int | None = None
    """The wanted number of workers if hosts are discovered; None for as many as fit."""
    drained: tuple[str, ...] = ()
    """Discovered hosts that must not be used."""
    job: str = ""
    """The job's id, which ``run`` chose; empty if another host has the scheduler, or an earlier release wrote it."""
    is_finished: bool = False
    """Whether the job has finished, on a host without the scheduler; elsewhere the journal tells."""
    has_relay: bool = False
    """Whether the launcher keeps a relay, whose address is the first part of SCHED_HOST in ``environment``."""
    words: tuple[str, ...] = ()
    """The command that was typed to start the job, after the exported variables of SameBits; empty in older files."""
    other_variables: Mapping[str, str] = field(default_factory=dict)
    """A digest of each variable that is not stored and that workers take from the current environment, by name."""

    def settings(self, secrets: Mapping[str, str] | None = None) -> Settings:
        """Return the scheduler's settings with absolute folders.

        ``secrets`` are the current ones, from ``secrets_for``.

        Raises:
            SettingsError: this version does not accept the settings.
        """
        settings, _ = config.read({**self.environment, **(secrets or {})}, role_required=False)
        return replace(config.in_folder(self.folder, settings), role=Role.SCHEDULER)

    def command(self, *, fresh: bool = False) -> str:
        """Return the complete command that starts this job again. With ``fresh``, it starts over from step 0."""
        module = ("-m",) if self.way is Way.MODULE else ("--no-python",) if self.way is Way.PROGRAM else ()
        return spelled_run(self.words or (*module, self.script, *self.args), fresh=fresh)

    @property
    def is_on_ray(self) -> bool:
        """Whether an actor in a Ray cluster starts the processes of this host."""
        return self.words[:2] == ON_RAY

    def continuing(self) -> str:
        """Return the command that follows or resumes the job, in the job's folder."""
        return self.command() if self.is_on_ray else self.finding(spelled("recover"))

    def finding(self, command: str) -> str:
        """Return a command that works in the job's folder, with LOG_DIR if nothing in the folder leads to the job."""
        log_dir, usual = self.settings().log_dir, self.folder / USUAL_LOG_DIR
        is_found = log_dir.resolve() == usual.resolve() or (usual / POINTER_FILE).exists()
        return command if is_found else f"LOG_DIR={shlex.quote(str(log_dir))} {command}"

    def moved_to(self, folder: Path) -> JobSpec:
        """Return a copy in which all paths inside the job's folder are changed to the new folder."""
        old, new = str(self.folder), str(folder)

        def moved(text: str) -> str:
            is_below = text == old or text.startswith(f"{old}/")
            return new + text.removeprefix(old) if is_below else text

        def moved_parts(text: str, separator: str) -> str:
            return separator.join(map(moved, text.split(separator)))

        environment = {name: moved_parts(text, ":") for name, text in self.environment.items()}
        args = tuple(moved_parts(arg, "=") for arg in self.args)
        script, interpreter = moved(self.script), moved(self.interpreter)
        return replace(self, folder=folder, interpreter=interpreter, script=script, args=args, environment=environment)


def keep(log_dir: Path, start: JobSpec) -> str:
    """Write the job spec to its log folder, readable only by this user.

    Args:
        log_dir: the log folder.
        start: the start. Unless it is that of a check, a pointer is written to the place where commands look for a
            job's log folder.

    Returns:
        Why there is no pointer, for example because the folder is read-only, and what that means; empty if there is
        one.

    Raises:
        StoreError: the log folder cannot be written.
    """
    content = {
        "version": _VERSION,
        "folder": str(start.folder),
        "interpreter": start.interpreter,
        "script": start.script,
        "args": list(start.args),
        "environment": dict(start.environment),
        "needs_secret": start.needs_secret,
    }
    if start.script_version is not None:
        content["script_sha256"] = start.script_version.digest
        content["script_changed_at"] = start.script_version.changed_at_s
    if start.nodes is not None:
        content["nodes"] = list(start.nodes)
    if start.way is not Way.SCRIPT:
        content["way"] = start.way.value
    if not start.has_scheduler:
        content["has_scheduler"] = False
    if start.is_finished:
        content["finished"] = True
    if start.has_relay:
        content["relay"] = True
    content |= {
        name: value
        for name, value in (
            ("hosts", dict(start.hosts)),
            ("size", start.size),
            ("drained", list(start.drained)),
            ("job", start.job),
            ("words", list(start.words)),
            ("other_variables", dict(start.other_variables)),
        )
        if value or value == 0
    }
    private.make_folder(log_dir)
    text = json.dumps(_recoded(content, _stored), indent=1)
    durable.write_file_atomically(log_dir / START_FILE, f"{text}\n".encode())
    usual = start.folder / USUAL_LOG_DIR
    if start.environment.get("HIDDEN_STATE") == "check" or log_dir.resolve() == usual.resolve():
        return ""
    found, below = log_dir.resolve(), start.folder.resolve()
    led_to = found.relative_to(below) if found.is_relative_to(below) else found  # a relative path survives a move
    try:
        private.make_folder(usual)
        durable.write_file_atomically(usual / POINTER_FILE, os.fsencode(f"{led_to}\n"))
    except StoreError as error:
        return f"{error}; so other commands here need LOG_DIR={shlex.quote(str(log_dir))}"
    return ""


def keep_end(log_dir: Path) -> None:
    """Record that the folder's job has finished, for later commands on hosts without the journal.

    Raises:
        StoreError: the log folder cannot be read or written.
    """
    with StartLock(log_dir):
        kept = read(log_dir)
        if kept is not None:
            keep(log_dir, replace(kept, is_finished=True))


def keep_address(recovery_path: Path, environment: Mapping[str, str]) -> None:
    """Store the scheduler's address of a job without a job spec, for commands in the job's folder.

    Raises:
        StoreError: the folder cannot be written.
    """
    told = {name: environment[name] for name in _ADDRESS if environment.get(name)}
    text = json.dumps(_recoded({**told, "PLAIN": "1"}, _stored), indent=1)
    durable.write_file_atomically(recovery_path / ADDRESS_FILE, f"{text}\n".encode())


def _kept_address(recovery_path: Path) -> dict[str, str]:
    """Return the address that :func:`keep_address` stored, or {} if there is no valid file."""
    data = private.read(recovery_path / ADDRESS_FILE, _MAX_FILE_BYTES) if recovery_path.is_dir() else None
    try:
        content = {} if data is None else _recoded(strict_json.loads(data), _decoded)
        return {name: str(content[name]) for name in (*_ADDRESS, "PLAIN") if name in content}
    except (ValueError, TypeError):
        return {}


def read(log_dir: Path) -> JobSpec | None:
    """Return the job spec of this folder, or None.

    Raises:
        StoreError: ``keep`` has not written the file, or another user may have written it.
    """
    path = log_dir / START_FILE
    private.check_folder(log_dir)
    data = private.read(path, _MAX_FILE_BYTES)
    if data is None:
        return None
    try:
        content = _recoded(strict_json.loads(data), _decoded)
        if content["version"] not in (_EARLIER_VERSION, _VERSION):
            raise ValueError(f"version {content['version']}, this release reads up to version {_VERSION}")
        environment = {str(name): str(value) for name, value in content["environment"].items()}
        environment = config.translated(environment)
        if content["version"] == _EARLIER_VERSION:
            paths = (str(Path(earlier.__file__).parent), environment.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if odd := [name for name in environment if not config.is_shell_name(name)]:
            raise ValueError(f"{odd[0]!r} names no variable")
        args = tuple(str(arg) for arg in content["args"])
        needs_secret = bool(content.get("needs_secret", False))
        nodes = None if "nodes" not in content else tuple(str(node) for node in content["nodes"])
        digest, changed_at_s = content.get("script_sha256"), content.get("script_changed_at", 0.0)
        version = None if digest is None else ScriptVersion(str(digest), min(max(0.0, float(changed_at_s)), _LATEST_S))
        way, has_scheduler = Way(content.get("way", "script")), bool(content.get("has_scheduler", True))
        hosts = {str(node): str(host) for node, host in content.get("hosts", {}).items()}
        size = content.get("size")
        if size is not None and type(size) is not int:
            raise ValueError(f"size is {str(size)[:40]!r}")
        drained = tuple(str(host) for host in content.get("drained", ()))
        job, is_finished = str(content.get("job", "")), bool(content.get("finished", False))
        has_relay = bool(content.get("relay", False))
        typed = tuple(str(word) for word in content.get("words", ()))
        other_variables = {str(name): str(mark) for name, mark in content.get("other_variables", {}).items()}
        words = (str(content[key]) for key in ("folder", "interpreter", "script"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} does not describe how a job was started ({type(error).__name__}: {error}). Fix: move it away, "
            "then start "
            f"the job again with `{spelled('run')}` and its script"
        ) from None
    folder, interpreter, script = words
    return JobSpec(
        folder=Path(folder),
        interpreter=interpreter,
        script=script,
        args=args,
        environment=environment,
        needs_secret=needs_secret,
        nodes=nodes,
        script_version=version,
        way=way,
        has_scheduler=has_scheduler,
        hosts=hosts,
        size=size,
        drained=drained,
        job=job,
        is_finished=is_finished,
        has_relay=has_relay,
        words=typed,
        other_variables=other_variables,
    )


def _stored(text: str) -> str:
    """Convert a path or variable to its stored form, which does not depend on the locale."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def _decoded(text: str) -> str:
    """Convert a result of :func:`_stored` back, with this process's locale."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def _recoded(value: Any, recode: Callable[[str], str]) -> Any:
    match value:
        case str():
            return recode(value)
        case list():
            return [_recoded(one, recode) for one in value]
        case dict():
            return {recode(name): _recoded(one, recode) for name, one in value.items()}
    return value


def digests_of_others(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a digest of each variable that a job spec does not store, by name.

    A digest has 16 bits, which show most changes, but not the value, which may be a secret.
    """
    stored = {*config.kept_environment(environ), *config.secret_environment(environ), *OF_ONE_PROCESS}
    names = [name for name in environ if name not in stored and config.is_shell_name(name)]
    return {name: hashlib.blake2b(os.fsencode(environ[name]), digest_size=2).hexdigest() for name in names}


def first_nodes(settings: Settings) -> tuple[str, ...]:
    """Return the node IDs that a new job starts with: the workers', then the spares'."""
    spares = range(settings.max_worker_num, settings.max_worker_num + settings.spare_num)
    return tuple(str(number) for number in (*range(settings.worker_num), *spares))


def nodes_of(log_dir: Path, settings: Settings) -> tuple[str, ...]:
    """Return the node ids of the job's workers and spares on this machine; ``settings`` are the job's."""
    kept = read(log_dir)
    return first_nodes(settings) if kept is None or kept.nodes is None else kept.nodes


def secrets_for(start: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environ`` that supply the job's secret for a restart.

    They contain the secret itself or the path of a file with it. The result is empty if the job has no secret, so that
    a restart never adds one.
    """
    if not start.needs_secret:
        return {}
    names = [f"{prefix}CLUSTER_SECRET_FILE" for prefix in ("", config.PREFIX)]
    files = {name: str(Path.cwd() / environ[name]) for name in names if environ.get(name)}
    return config.secret_environment(environ) or files


def require_secrets(start: JobSpec, secrets: Mapping[str, str]) -> None:
    """Raise if the job was started with a secret in a variable that is missing now.

    Raises:
        SettingsError: the current environment has no secret.
    """
    if start.needs_secret and not secrets:
        raise SettingsError(
            [
                "this job was started with CLUSTER_SECRET, which is never stored. Fix: export the same CLUSTER_SECRET, "
                "or CLUSTER_SECRET_FILE=<a file with it>, and run this command again"
            ]
        )


def _find(present: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the log folder of the job started in the current folder, and whether a pointer led to it.

    A LOG_DIR in the environment ``present`` comes first, then the usual place, then the place to which the pointer
    there leads.
    """
    if present.get("LOG_DIR") or present.get(f"{config.PREFIX}LOG_DIR"):
        return config.read(present, role_required=False)[0].log_dir, False
    private.check_folder(USUAL_LOG_DIR)
    if (USUAL_LOG_DIR / START_FILE).exists():
        return USUAL_LOG_DIR, False
    pointer = private.read(USUAL_LOG_DIR / POINTER_FILE, _MAX_FILE_BYTES)
    log_dir = USUAL_LOG_DIR if pointer is None else Path(os.fsdecode(pointer).rstrip("\n"))
    return log_dir, log_dir.is_absolute()


def is_at_home(log_dir: Path, kept: JobSpec, *, is_pointed_at: bool = False) -> bool:
    """Return whether the job spec is in the folder where the job was started, so neither moved nor copied.

    If ``is_pointed_at``, a pointer in the current folder led to a log folder elsewhere, so the current folder is
    compared instead.
    """
    lies_in = USUAL_LOG_DIR if is_pointed_at else log_dir
    was_in = kept.folder / USUAL_LOG_DIR if is_pointed_at else kept.settings().log_dir
    return lies_in.resolve() == was_in.resolve() or (was_in.exists() and lies_in.samefile(was_in))


def is_copied(kept: JobSpec) -> bool:
    """Return whether the original of a moved or copied job folder still contains the job."""
    with durable.disk_errors(kept.folder, "looking for the folder the job was started in"):
        try:
            homes = (kept.settings().log_dir / START_FILE, kept.folder / USUAL_LOG_DIR / POINTER_FILE)
            return any(home.exists() for home in homes)
        except PermissionError:
            return True  # the folder exists, and belongs to another user


def read_here() -> tuple[Path, JobSpec]:
    """Return the log folder and the job spec of the job that was started in the current folder.

    Raises:
        UsageError: no job was started here, or it was started in another folder.
    """
    log_dir, kept, is_home = find_here()
    if not is_home:
        raise UsageError(_not_at_home(kept))
    return log_dir, kept


def command_to_continue(log_dir: Path) -> str:
    """Return the command that follows or resumes the job with this log folder."""
    kept = read(log_dir)
    return spelled("recover") if kept is None else kept.continuing()


def stored_job(kept: JobSpec) -> JobView | None:
    """Return the job's state from its journal, or None if it has none. A copy of a journal in etcd is updated first.

    Raises:
        StoreError: the journal cannot be read, or etcd does not answer.
    """
    settings = kept.settings()
    if not settings.enable_recovery:
        return None
    job_journal.refresh(settings, log.warn)
    return status.stored_view(settings.recovery_path)


def is_job_named(settings: Settings) -> bool:
    """Return whether this folder contains a job, or the environment names a scheduler."""
    named = config.whole_environment()
    has_address = any(
        named.get(prefix + name) for name in ("SCHED_HOST", "SCHED_PORT") for prefix in ("", config.PREFIX)
    )
    return has_address or is_job_here(settings)


def is_job_here(settings: Settings) -> bool:
    """Return whether these folders contain a job spec or a journal."""
    return read(settings.log_dir) is not None or (settings.recovery_path / JOURNAL_FILE).exists()


def require_job(settings: Settings) -> None:
    """Raise if it is unclear which job is meant.

    The scheduler at the default port may belong to another folder's job.

    Raises:
        UsageError: this folder contains no job, and no variable names a scheduler.
    """
    if is_job_named(settings):
        return
    raise UsageError(
        f"no job was started in {Path.cwd()}: neither {settings.log_dir / START_FILE} nor a journal is there. Fix: "
        "change to the folder the job was started in, or name its scheduler with SCHED_HOST and SCHED_PORT"
    )


def find_here() -> tuple[Path, JobSpec, bool]:
    """Return the same as :func:`read_here`, and whether the job was started in this folder.

    Raises:
        UsageError: there is no job here.
    """
    log_dir, is_pointed_at = _find(config.kept_environment())
    kept = read(log_dir)
    if kept is None:
        raise UsageError(
            f"{log_dir / START_FILE} is not there: no job was started in {Path.cwd()}. Fix: change to the folder it "
            f"was started in, or export LOG_DIR=<its log folder>, or start one with `{spelled('run')}`"
        )
    return log_dir, kept, is_at_home(log_dir, kept, is_pointed_at=is_pointed_at)


def _not_at_home(kept: JobSpec) -> str:
    moved, fresh = spelled("recover", "--moved"), kept.command(fresh=True)
    if not is_copied(kept):
        return (
            f"the job in {Path.cwd()} was started in {kept.folder}, which is gone: this folder was moved. "
            f"Fix: `{moved}` continues it here; `{fresh}` starts over"
        )
    return (
        f"the job in {Path.cwd()} was started in {kept.folder} and still lies there: this folder is a copy, and one "
        f"job cannot continue in two. Fix: `cd {shlex.quote(str(kept.folder))}` returns to it; `{fresh}` starts over "
        f"here; `{moved}` continues here once the other folder is removed, or its {START_FILE} is renamed"
    )


def require_moved(kept: JobSpec) -> None:
    """Raise unless a job whose folder was moved may continue there.

    Raises:
        UsageError: the job is still in its original folder.
    """
    if is_copied(kept):
        raise UsageError(_not_at_home(kept))


def settings_here(*, only_looks: bool = False) -> Settings:
    """Return the settings of the current folder's job; the current environment overrides the stored one.

    If the job's journal is in etcd, this updates the journal's copy in RECOVERY_PATH, unless etcd cannot be
    reached. With ``only_looks``, the contents of this folder are read even if it is a copy.

    Raises:
        SettingsError: a setting is invalid.
        UsageError: the job was started in another folder.
        ForeignFolderError: the journals in this folder and in etcd belong to different jobs.
    """
    settings = _settings_here(only_looks=only_looks)
    try:
        job_journal.refresh(settings, log.warn)
    except ForeignFolderError:
        raise
    except StoreError as error:
        log.warn(f"{error}. This shows what {settings.recovery_path} holds about the job")
    return settings


def _settings_here(*, only_looks: bool) -> Settings:
    present = config.kept_environment()
    log_dir, is_pointed_at = _find(present)
    kept = read(log_dir)
    if kept is None:
        recovery_path = config.read(present, role_required=False)[0].recovery_path
        address = {
            name: text for name, text in _kept_address(recovery_path).items() if config.PREFIX + name not in present
        }
        found = {**address, **present, **config.secret_environment()}
        return config.in_folder(Path.cwd(), config.read(found, role_required=False)[0])
    if not is_at_home(log_dir, kept, is_pointed_at=is_pointed_at):
        if not only_looks:
            raise UsageError(_not_at_home(kept))
        kept = kept.moved_to(Path.cwd())
    absolute = kept.settings()
    folders = {
        "RECOVERY_PATH": str(absolute.journal_place or absolute.recovery_path),
        "CHECKPOINT_PATH": str(absolute.checkpoint_path),
        "LOG_DIR": str(absolute.log_dir),
    }
    if absolute.cause_table is not None:
        folders["CAUSE_TABLE"] = str(absolute.cause_table)
    if absolute.cluster_secret_file is not None:
        folders["CLUSTER_SECRET_FILE"] = str(absolute.cluster_secret_file)
    older = {**kept.environment, **folders}
    for name in present:  # a stored plain name must not hide a prefixed name of the current environment
        older.pop(name.removeprefix(config.PREFIX), None)
    found = {**older, **present, **config.secret_environment()}
    return config.in_folder(Path.cwd(), config.read(found, role_required=False)[0])


def program_of(kept: JobSpec, present: Mapping[str, str], secrets: Mapping[str, str]) -> Program:
    """Return the program that runs the job's processes.

    The environment of the job's start takes precedence over the current one (``present``). ``secrets`` are the current
    variables that supply the job's secret; any other secret is removed.
    """
    surplus = {**config.kept_environment(present), **config.secret_environment(present)}.keys()
    others = {name: text for name, text in present.items() if name not in surplus}
    environment = {**others, **kept.environment, **secrets}
    elsewhere = {node: host for node, host in kept.hosts.items() if not is_here(host)}
    return Program(
        kept.folder, kept.interpreter, kept.script, kept.args, environment, {}, kept.way, elsewhere, job=kept.job
    )
