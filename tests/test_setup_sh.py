"""setup.sh removes nothing that this user did not create, and announces what it will take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOMEBODY = 54321  # no user has this number


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what setup.sh needs, without the package itself."""
    copy = tmp_path / "repository"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    for name in ("setup.cfg", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def set_up(repository: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run setup.sh without a usable Python by default, so that it installs nothing."""
    return subprocess.run(
        ["bash", str(repository / "scripts" / "setup.sh")],
        env={**os.environ, "PYTHON": "/no/python", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_other_users_folder_is_left_alone_and_its_owner_named(repository: Path) -> None:
    if os.geteuid() == 0:
        others, owner = repository / ".venv", "UNKNOWN"
        (others / "bin").mkdir(parents=True)
        (others / "pyvenv.cfg").touch()
        (others / ".samebits-unfinished").touch()  # as if it had been killed midway
        os.chown(others, SOMEBODY, SOMEBODY)
        settings = {}
    else:
        others, owner, settings = Path("/etc"), "root", {"VENV": "/etc"}
    before = contents(others) if others != Path("/etc") else []
    done = set_up(repository, **settings)
    assert done.returncode == 1
    assert f"{others} is not ready for " in done.stderr
    assert f"it is {owner}'s, so it is left alone. Fix: have that user call setup.sh, or VENV=<a folder" in done.stderr
    assert (contents(others) if before else []) == before


def test_folder_with_other_content_is_left_alone(repository: Path, tmp_path: Path) -> None:
    """For example if VENV names a home folder by mistake."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    done = set_up(repository, VENV=str(home))
    assert done.returncode == 1
    assert f"{home} holds something else than a Python environment, so it is left alone. Fix: " in done.stderr
    assert contents(home) == [home / "thesis.tex"]


@pytest.mark.parametrize("name", ["", "relative"])
def test_first_run_announces_its_cost_before_anything_else(repository: Path, name: str) -> None:
    done = set_up(repository, **({"VENV": name} if name else {}))
    size = "1.2 GB, 40 to 380 s (5 GB and longer with a torch for CUDA)"
    assert done.stdout.splitlines()[0].endswith(f"downloaded and installed: {size}")
    assert "no Python from 3.11 to 3.14 among /no/python" in done.stderr


def test_environment_keeps_its_extras(repository: Path) -> None:
    """For example when run.sh meets new constraints in an environment made with --dev."""
    calls = repository / "calls"
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>{calls}\ncase $1 in -c) exec {sys.executable} "$@" ;; esac\n')
    python.chmod(0o755)
    (repository / ".venv" / "pyvenv.cfg").touch()
    stamp = repository / ".venv" / ".samebits-stamp"
    stamp.write_text("of older constraints\nexamples,dashboard,dev,remote\n")
    done = set_up(repository, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    installed = next(line for line in calls.read_text().splitlines() if "--editable" in line)
    assert installed.endswith("--editable .[examples,dashboard,dev,remote]")
    assert stamp.read_text().splitlines()[1] == "examples,dashboard,dev,remote"
    calls.unlink()
    assert set_up(repository, PYTHON=sys.executable).returncode == 0
    assert not calls.exists()  # nothing is left to do


def test_python_without_ensurepip_gets_debians_package_named(repository: Path, tmp_path: Path) -> None:
    """Debian without python3-venv has no ensurepip; an existing environment does not need it."""
    (tmp_path / "ensurepip.py").write_text("raise ModuleNotFoundError('No module named ensurepip')\n")
    done = set_up(repository, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    minor = sys.version_info.minor
    assert done.returncode == 1
    assert (
        f"has no ensurepip, so it cannot make an environment with pip in it. Fix: apt-get install python3.{minor}-venv"
        in done.stderr
    )
    assert not (repository / ".venv").exists()


@pytest.mark.parametrize(
    ("version", "usable"), [("3.10.99", False), ("3.11.0", True), ("3.14.99", True), ("3.15.0", False)]
)
def test_python_outside_the_lock_is_refused(repository: Path, tmp_path: Path, version: str, usable: bool) -> None:
    """Decided by setup.sh's own expression, in a Python that reports this version."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.version_info = {tuple(map(int, version.split('.')))}\n"
    )
    (tmp_path / "ensurepip.py").write_text("raise ModuleNotFoundError('No module named ensurepip')\n")
    done = set_up(repository, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert ("has no ensurepip" in done.stderr) == usable, done.stderr
    assert ("no Python from 3.11 to 3.14 among" in done.stderr) != usable, done.stderr
