"""The sdist and its wheel: built from a copy of the sources, opened, and run outside the repository."""

from __future__ import annotations

import ast
import configparser
import email.message
import email.parser
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.system.processes import free_port

SOURCES = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "runtime")
IMPORTED_AS = {"scikit-learn": "sklearn", "pyzmq": "zmq", "opentelemetry-sdk": "opentelemetry"}
IMPORTED_AS |= {"torchx-nightly": "torchx"}


def run(*command: str | Path, cwd: Path, timeout_s: float = 120) -> str:
    """Run a command to its end and return its output; a failure shows all of it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{command} left with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="session")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from the sdist of a copy, so that no other file of the checkout gets in."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (repository / name).is_dir():
            shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (repository / name).exists():
            shutil.copy(repository / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=source)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_no_remains_of_an_earlier_build(repository: Path, tmp_path: Path) -> None:
    for name in SOURCES:
        if (repository / name).is_file():
            shutil.copy(repository / name, tmp_path)
    (tmp_path / "runtime/samebits").mkdir(parents=True)
    (tmp_path / "runtime/samebits/__init__.py").write_text('__version__ = "0.1.0"\n')
    for stale in ("runtime", "samebits/gone"):
        (tmp_path / "build/lib" / stale).mkdir(parents=True)
        (tmp_path / "build/lib" / stale / "__init__.py").write_text("")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path / "dist", cwd=tmp_path)
    (built,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        assert [name for name in archive.namelist() if name.endswith(".py")] == ["samebits/__init__.py"]


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.parser.Parser().parsestr(archive.read("samebits-0.1.0.dist-info/METADATA").decode())


def test_wheel_holds_exactly_the_package(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("samebits-0.1.0.dist-info/")}
        folded = archive.read("samebits-0.1.0.dist-info/licenses/LICENSE").decode()
    root = repository / "runtime"
    files = [*(root / "samebits").rglob("*.py"), *(root / "samebits/dashboard/static").iterdir()]
    files += [
        root / "samebits/commands/drill/libc_faults.c",
        root / "samebits/py.typed",
        root / "samebits/doc_tables.zh-CN.toml",
    ]
    assert names == {file.relative_to(root).as_posix() for file in files}
    assert wheel.name == "samebits-0.1.0-py3-none-any.whl"
    assert "Apache License" in folded


def test_every_folder_of_the_package_is_a_package(repository: Path) -> None:
    folders = {file.parent for file in (repository / "runtime").rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


EXTRAS = ["npu", "examples", "accelerate", "lightning", "transformers", "frameworks", "dashboard", "ray", "torchx"]
EXTRAS += ["otel", "tracking", "fuzz", "remote", "hdfs", "dev"]


def test_metadata_has_name_and_requirements(metadata: email.message.Message) -> None:
    assert metadata["Name"] == "samebits"
    assert metadata["Version"] == "0.1.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Provides-Extra") == EXTRAS
    required = metadata.get_all("Requires-Dist") or []
    assert {'torch_npu==2.13.0; extra == "npu"', 'scikit-learn>=1.5; extra == "examples"'} <= set(required)
    assert any(line.startswith("torch>=") for line in required)
    assert not any(line.startswith("samebits") for line in required)


def test_console_command_is_samebits(wheel: Path) -> None:
    entry_points = configparser.ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        entry_points.read_string(archive.read("samebits-0.1.0.dist-info/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == {"samebits": "samebits.__main__:main"}


LAZY_EXTRAS = ("npu", "remote", "frameworks", "dashboard", "ray", "torchx", "otel", "tracking")
"""Packages that are imported only by modules for their users."""


def declared(repository: Path, *extras: str) -> set[str]:
    """Return the import names of the requirements in setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(repository / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].split("\n")
    for extra in extras:
        lines += parser["options.extras_require"][extra].split("\n")
    names = (line.split(";")[0].split(">")[0].split("=")[0].strip() for line in lines)
    return {IMPORTED_AS.get(name, name) for name in names if name and not name.startswith("#")}


def test_every_import_of_the_package_is_a_declared_requirement(repository: Path) -> None:
    imported: set[str] = set()
    for file in (repository / "runtime").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    assert imported - set(sys.stdlib_module_names) - {"samebits"} - declared(repository, *LAZY_EXTRAS) == set()


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; heavy packages are borrowed from the tests' own environment."""
    environment = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=environment)
    # Written after the installation: pip must not see the editable samebits beside the borrowed packages.
    (site_packages,) = (environment / "lib").glob("python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n", encoding="utf-8")
    return environment


@pytest.mark.system
def test_installed_wheel_runs_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    python = installed / "bin" / "python"
    place = Path(run(python, "-c", "import samebits; print(samebits.__file__)", cwd=tmp_path).strip())
    assert place.is_relative_to(installed)
    assert "usage" in run(python, "-m", "samebits", "--help", cwd=tmp_path).lower()
    assert "usage" in run(installed / "bin" / "samebits", "--help", cwd=tmp_path).lower()
    assert list(tmp_path.iterdir()) == []


PRINT_WEIGHTS = """
import hashlib
weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
print("final step", state.completed_steps, hashlib.sha256(weights).hexdigest())
"""


@pytest.mark.system
def test_job_of_the_installed_wheel_ends_with_the_same_bits_on_every_rank(
    installed: Path, metadata: email.message.Message, tmp_path: Path
) -> None:
    """The script is the one that the wheel's own description shows."""
    (script,) = re.findall(r"```python\n(.*?)```", str(metadata.get_payload()), re.DOTALL)
    (tmp_path / "train.py").write_text(script.replace("3000", "30") + PRINT_WEIGHTS, encoding="utf-8")
    environ = {
        "PATH": os.environ["PATH"],
        "WORKER_NUM": "2",
        "SCHED_PORT": str(free_port()),
        "ENABLE_RECOVERY": "1",
        "OMP_NUM_THREADS": "1",
    }
    train = [installed / "bin" / "python", "train.py"]
    processes = [
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environ | role,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words, role in [
            ([installed / "bin" / "samebits", "scheduler"], {"ROLE": "scheduler"}),
            *((train, {"ROLE": "worker", "NODE_ID": str(rank)}) for rank in range(2)),
        ]
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(printed)
    finals = {text.splitlines()[-1] for text in printed[1:]}
    assert len(finals) == 1
    assert "final step 30 " in finals.pop()


@pytest.mark.system
@pytest.mark.thorough
def test_samebits_run_of_the_installed_wheel_needs_no_repository(
    installed: Path, repository: Path, tmp_path: Path
) -> None:
    """No checkout and no bash script: the user's own Python, the wheel and a train.py."""
    shutil.copytree(repository / "examples" / "digits", tmp_path / "digits")
    environ = {"PATH": f"{installed / 'bin'}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [installed / "bin" / "samebits", "run", "-n", "2", "digits/train.py", "--steps", "20"],
        cwd=tmp_path,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "job finished at step 20" in done.stdout
    finals = {(tmp_path / "device" / f"worker_{rank}.log").read_text().splitlines()[-1] for rank in range(2)}
    assert len(finals) == 1 and "final step=20 " in finals.pop()
    told = subprocess.run(
        [installed / "bin" / "samebits", "--help"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "A job is started with samebits run." in told.stdout
    assert str(repository) not in done.stdout + told.stdout
