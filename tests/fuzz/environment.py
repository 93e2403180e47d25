"""Target: an environment, read into settings.

An input is a sequence of (name, text) choices, over every name of the table, plain and prefixed, and some unknown ones.
The reader returns settings, or a ``SettingsError`` with all problems. Neither shows a secret, and settings written as
an environment are read back unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from samebits import config
from samebits.config import Settings
from samebits.errors import SettingsError
from samebits.settings_table import VARIABLES
from tests.fuzz.draws import Draws

MARK = "kept-from-everybody-"
NAMES = [prefix + variable.name for variable in VARIABLES for prefix in ("", config.PREFIX)] + ["PATH", "HOME"]
VARIABLE_OF = {prefix + variable.name: variable for variable in VARIABLES for prefix in ("", config.PREFIX)}
PLAUSIBLE = ["0", "1", "2", "4", "30", "0.5", "scheduler", "worker", "127.0.0.1", "0.0.0.0", "::1", "8118", "tcp://a:1"]


def check(data: bytes) -> None:
    draws = Draws(data)
    environ: dict[str, str] = {}
    role_required = bool(draws.below(2))
    while not draws.is_used_up:
        name = NAMES[draws.below(len(NAMES))]
        choice = draws.below(len(PLAUSIBLE) * 2)
        environ[name] = PLAUSIBLE[choice] if choice < len(PLAUSIBLE) else draws.text(300)
    check_environment(environ, role_required)


def check_environment(environ: dict[str, str], role_required: bool) -> None:
    for name, text in environ.items():
        is_secret = name in VARIABLE_OF and VARIABLE_OF[name].secret
        environ[name] = MARK + text if text and is_secret else text.replace(MARK[:4], "")
    try:
        settings, warnings = config.read(environ, role_required=role_required)
    except SettingsError as error:
        assert error.problems
        for problem in error.problems:
            _check_line(problem)
        return
    for warning in warnings:
        _check_line(warning)
    assert MARK not in repr(settings)
    assert all(MARK not in text for text in config.kept_environment(environ).values())
    config.fixed_settings(settings)
    again, _ = config.read(as_environment(settings), role_required=role_required)
    assert again == settings, "settings do not read back unchanged"


def as_environment(settings: Settings) -> dict[str, str]:
    """Return the plain names and texts that give these settings."""
    environ = {}
    for variable in VARIABLES:
        value = getattr(settings, variable.field)
        if variable.name == "RECOVERY_PATH":
            value = settings.journal_place or value
        is_size = variable.name in ("WORKER_NUM", "MIN_WORKER_NUM", "MAX_WORKER_NUM")
        if value is not None and not (is_size and value == 0):
            environ[variable.name] = _text_of(value)  # a tool's settings may have no size; 0 stands for that
    return environ


def _text_of(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return str(int(value)) if isinstance(value, bool) else str(value)


def _check_line(line: str) -> None:
    assert line.isprintable(), f"a line with a terminal control sequence: {line!r}"
    assert MARK not in line, "a secret is shown"
    assert len(line) < 2000


def seeds() -> Iterator[bytes]:
    def choose(name: str, text: str) -> bytes:
        at = NAMES.index(name)
        if text in PLAUSIBLE:
            return bytes([at, PLAUSIBLE.index(text)])
        raw = text.encode()
        return bytes([at, len(PLAUSIBLE)]) + len(raw).to_bytes(2, "little") + raw

    worker = choose("ROLE", "worker") + choose("WORKER_NUM", "4")
    yield b"\1" + worker
    yield b"\1" + worker + choose("MS_NODE_ID", "2") + choose("ENABLE_RECOVERY", "1") + choose("SCHED_PORT", "8118")
    yield b"\1" + choose("ROLE", "scheduler") + choose("WORKER_NUM", "4") + choose("SCHED_HOST", "0.0.0.0")
    yield b"\0" + choose("CLUSTER_SECRET", "a secret of somebody") + choose("CLUSTER_INSECURE", "1")
    yield b"\0" + choose("RECOVERY_PATH", "/tmp/here\n") + choose("NODE_TIMEOUT", "0.5") + choose("JOB_NAME", "\x1b[1m")
