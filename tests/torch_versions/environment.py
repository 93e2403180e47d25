"""An environment with one torch version, for the duration of its test.

The sources are not installed: this checkout runs, which every process finds by its PYTHONPATH.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.system.processes import REPOSITORY

FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "safetensors", "scikit-learn", "psutil")
"""What the tests and the warm starter import besides the package's own requirements."""
TORCHS_OWN_AFFAIR = ("torch", "setuptools")
"""Packages whose version torch chooses: 2.11 and 2.12 want an older setuptools than constraints.txt has."""
SAY_EVERY_S = 15.0
END_S = 60.0
Say = Callable[[str], None]


def constraints_for(lines: Iterable[str]) -> list[str]:
    """Return constraints.txt without the packages that torch pins."""
    return [line for line in lines if line.partition("==")[0].strip() not in TORCHS_OWN_AFFAIR]


def requirements(setup_cfg: str) -> list[str]:
    """Return what the package needs besides torch, and the tests."""
    parser = configparser.ConfigParser()
    parser.read_string(setup_cfg)
    lines = parser["options"]["install_requires"].split("\n")
    needed = [line for line in lines if line and not line.startswith(("#", "torch>"))]
    return [*needed, *FOR_TESTS]


def reason_in(log: str) -> str:
    """Return why pip did not install: what it calls an error, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return " ".join(errors) or (lines[-1] if lines else "pip said nothing")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended, and all of its output."""

    status: int
    output: str


def follow(
    command: Sequence[str | Path], log: Path, environment: Mapping[str, str], say: Say, *, timeout_s: float
) -> Done:
    """Run a command in the checkout; while it runs, its last line is shown every :data:`SAY_EVERY_S` seconds.

    After ``timeout_s`` it is ended, and that is its last line.
    """
    began_s = said_s = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=REPOSITORY,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            while (status := _status(child)) is None:
                if time.monotonic() - began_s > timeout_s:
                    _end(child)
                    out.write(f"\nended after {timeout_s:g} s\n".encode())
                elif time.monotonic() - said_s > SAY_EVERY_S:
                    said_s = time.monotonic()
                    say(f"… {last_line(log)[:100]}")
        finally:
            _end(child)
    return Done(status, log.read_text(errors="replace"))


def _status(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(0.2)
    except subprocess.TimeoutExpired:
        return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End it as Ctrl-C does, so that it ends what it has started."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
    child.kill()
    child.wait()


def last_line(log: Path) -> str:
    """Return the last meaningful line; pip warns of every missing folder."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line and not line.startswith("WARNING:")), "")


class Environment:
    """One version's environment.

    Args:
        folder: its own, empty or not there yet; one that was kept complete is reused.
        version: as pip accepts it, such as ``2.12.1``.
    """

    def __init__(self, folder: Path, version: str) -> None:
        self.folder = folder
        self.version = version
        self.python = folder / "bin" / "python"
        self._stamp = folder / "installed"

    def make(self, say: Say) -> str:
        """Make it; return why that failed, or an empty string."""
        if self._stamp.exists():
            say(f"uses {self.folder} again")
            return ""
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(self.folder.iterdir()):
            return f"{self.folder} holds something else, or half an environment. Fix: remove it"
        say("makes an environment")
        made = follow(
            [sys.executable, "-m", "venv", "--without-pip", self.folder],
            self.folder / "venv.log",
            os.environ,
            say,
            timeout_s=300,
        )
        if made.status:
            return reason_in(made.output)
        constraints = self.folder / "constraints.txt"
        pinned = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints.write_text("\n".join(constraints_for(pinned)) + "\n", encoding="utf-8")
        say(f"installs torch {self.version} and what the package and its tests need")
        installed = follow(
            [
                *(sys.executable, "-m", "pip", "--python", self.python, "install", "--disable-pip-version-check"),
                *("--no-input", "--no-cache-dir", "--no-compile", "--only-binary", ":all:", "--progress-bar", "off"),
                *("--constraint", constraints, f"torch=={self.version}"),
                *requirements((REPOSITORY / "setup.cfg").read_text(encoding="utf-8")),
            ],
            self.folder / "pip.log",
            os.environ,
            say,
            timeout_s=3600,
        )
        if installed.status:
            return reason_in(installed.output)
        self._stamp.touch()
        return ""
