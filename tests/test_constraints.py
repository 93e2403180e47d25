"""constraints.txt can be installed with every supported Python, from the lowest patch to any later one."""

from __future__ import annotations

import configparser
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MINORS = (11, 12, 13, 14)
PYTHONS = [f"3.{minor}.{patch}" for minor in MINORS for patch in (0, 99)]
"""Each minor's lowest patch, and one above every future patch."""
NOT_LOCKED = "npu"
"""The extra whose one requirement setup.cfg pins itself."""
CUDA = ("nvidia-", "cuda-", "triton")
"""Dependencies of torch's CUDA builds, which torch pins itself."""
TRIES = 3
TRY_S = 80
PAUSE_S = 10
NO_SOLUTION = 1
"""uv's status if versions contradict each other; any other failure concerns the index or uv."""

every_python = pytest.mark.parametrize("python", PYTHONS)


def environment(python: str) -> dict[str, str]:
    """Return the markers of CPython on Linux."""
    return {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }


def wanted(repository: Path, python: str) -> list[Requirement]:
    """Return what setup.cfg requires with all locked extras, for that Python."""
    parser = configparser.ConfigParser()
    parser.read(repository / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].splitlines()
    for extra, requirements in parser["options.extras_require"].items():
        lines += requirements.splitlines() if extra != NOT_LOCKED else []
    return applying([line for line in lines if line], python)


def applying(lines: list[str], python: str) -> list[Requirement]:
    requirements = map(Requirement, lines)
    return [one for one in requirements if one.marker is None or one.marker.evaluate(environment(python))]


def pins(repository: Path, python: str) -> dict[str, str]:
    """Return the version of each package in constraints.txt for that Python; a second one for a package fails."""
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions: dict[str, str] = {}
    for pin in applying([line for line in lines if not line.startswith("#")], python):
        assert not pin.url and not pin.extras, pin
        ((operator, version),) = ((part.operator, part.version) for part in pin.specifier)
        assert operator == "==" and "+" not in version, pin
        assert versions.setdefault(canonicalize_name(pin.name), version) == version, pin
    return versions


@every_python
def test_every_requirement_has_one_version_that_setup_cfg_admits(repository: Path, python: str) -> None:
    pinned = pins(repository, python)
    assert pinned["torch"] == "2.13.0"
    for requirement in wanted(repository, python):
        version = pinned.get(canonicalize_name(requirement.name), "none")
        assert version != "none" and requirement.specifier.contains(version), f"{requirement}: pinned is {version}"


def resolve(repository: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Let uv choose versions for that Python from wheels alone; only metadata is downloaded."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-config"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", "--only-binary", ":all:"]
    command += ["--constraint", str(repository / "constraints.txt"), "-"]
    lines = "\n".join(str(requirement).partition(";")[0] for requirement in wanted(repository, python))
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=TRY_S, check=False)


def resolve_patiently(repository: Path, python: str) -> str:
    """Return what uv chose; a slow index gets three tries."""
    for _ in range(TRIES):
        try:
            done = resolve(repository, python)
        except subprocess.TimeoutExpired:
            said = f"no answer within {TRY_S} s"
        else:
            assert done.returncode != NO_SOLUTION, done.stderr
            if done.returncode == 0:
                return done.stdout
            said = done.stderr.strip()
        time.sleep(PAUSE_S)
    pytest.fail(f"the package index did not answer in {TRIES} tries, so no version was checked. uv said: {said}")


@every_python
def test_index_has_a_wheel_of_every_version(repository: Path, python: str) -> None:
    """Resolve all extras as `pip install --dry-run` does."""
    resolved = applying(resolve_patiently(repository, python).splitlines(), python)
    assert len(resolved) > len(wanted(repository, python))
    pinned = pins(repository, python)
    others = {pin.name for pin in resolved if str(pin.specifier) != f"=={pinned.get(canonicalize_name(pin.name))}"}
    assert not {name for name in others if not name.startswith(CUDA)}
