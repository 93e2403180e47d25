"""Both READMEs say what the code says: tables, exit codes, paths, commands, and a recipe that is run as it stands."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import runtime
from runtime import config, errors
from runtime.__main__ import SUBCOMMANDS
from runtime.errors import SameBitsError

ROOT = Path(__file__).resolve().parents[1]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
BOTH = pytest.mark.parametrize("name", [ENGLISH, CHINESE])

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FOLDERS = r"(?:scripts|examples|tests|docs|benchmarks|runtime|\.ci)"
PATH = re.compile(rf"(?<![\w./…-]){FOLDERS}/[\w./-]*\w")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks_of(name: str, language: str | None = None) -> list[str]:
    """The fenced blocks, in order; of one language where it is given."""
    return [block for found, block in FENCED.findall(text_of(name)) if language in (None, found)]


def prose_of(name: str) -> str:
    return FENCED.sub("", text_of(name))


def code_of(name: str) -> str:
    """Everything a reader may take for a path or a command."""
    return "\n".join([*blocks_of(name), *INLINE.findall(prose_of(name))])


def generated(name: str, marker: str) -> str:
    found = re.findall(rf"<!-- {marker}:begin [^\n]*-->\n(.*?)\n<!-- {marker}:end -->", text_of(name), re.DOTALL)
    assert len(found) == 1, f"{name}: {len(found)} parts between the markers {marker}"
    return str(found[0])


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "table"), [(ENGLISH, config.environment_table), (CHINESE, config.environment_table_zh)]
)
def test_the_environment_table_is_the_generated_one(name: str, table: Callable[[], str]) -> None:
    assert generated(name, "environment-table") == table()


def error_classes() -> list[type[SameBitsError]]:
    """Every error a process can leave with, by exit code, then in the order they are defined."""
    order = list(vars(errors))
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SameBitsError)}
    return sorted(classes - {SameBitsError}, key=lambda kind: (kind.exit_code, order.index(kind.__name__)))


def test_the_exit_codes_are_those_of_the_classes() -> None:
    rows = ["| code | error | meaning |", "|---|---|---|"]
    for kind in error_classes():
        meaning = " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")
        rows.append(f"| {kind.exit_code} | `{kind.__name__}` | {meaning} |")
    assert generated(ENGLISH, "exit-codes") == "\n".join(rows)


def test_the_chinese_exit_codes_are_the_same() -> None:
    rows = [row.strip("| ").split(" | ") for row in generated(CHINESE, "exit-codes").splitlines()[2:]]
    expected = [(str(kind.exit_code), f"`{kind.__name__}`") for kind in error_classes()]
    assert [(code, kind) for code, kind, _ in rows] == expected
    assert all(meaning for *_, meaning in rows)


@BOTH
def test_every_dependency_is_named_with_a_reason(name: str) -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].split("\n")
    for extra in parser["options.extras_require"].values():
        lines += extra.split("\n")
    required = {re.split(r"[<>=;]", line)[0].strip() for line in lines if line and not line.startswith("#")}
    first_cells = [line.split("|")[1] for line in prose_of(name).splitlines() if line.startswith("| `")]
    assert required - {package for cell in first_cells for package in INLINE.findall(cell)} == set()


# --- paths, commands, links -------------------------------------------------------------------------------------------


@BOTH
def test_every_path_named_exists(name: str) -> None:
    named = set(PATH.findall(text_of(name)))
    assert len(named) > 8, named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


COMMAND = re.compile(r"(?:bash scripts/[\w.]+|python -m [\w.]+|(?<![\w/])samebits [a-z]+)(?: [\w./=-]+)*")


def commands_of(name: str) -> list[list[str]]:
    """The words of each command of ours; what processes say is left out."""
    lines = "\n".join(blocks_of(name, "")).splitlines() + INLINE.findall(prose_of(name))
    typed = (line for line in lines if not line.startswith(("samebits:", "…")))
    return [command.split() for line in typed for command in COMMAND.findall(line)]


def help_of(words: list[str]) -> str:
    """What the command says of its own options."""
    done = subprocess.run(
        [*words, "--help"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def test_every_command_exists_and_knows_the_options_it_is_shown_with() -> None:
    shown: dict[tuple[str, ...], set[str]] = {}
    for words in (words for name in (ENGLISH, CHINESE) for words in commands_of(name)):
        length = 3 if words[1] == "-m" else 2
        command, rest = tuple(words[:length]), words[length:]
        if words[1] == "-m" and words[2] == "runtime" and rest:
            command, rest = ("samebits", rest[0]), rest[1:]
        before_script = [word for word in rest if word.endswith(".py")]
        own = rest[: rest.index(before_script[0])] if before_script else rest
        shown.setdefault(command, set()).update(word for word in own if word.startswith("--"))
    known = {entry.name for entry in SUBCOMMANDS}
    for command, options in sorted(shown.items()):
        if command[0] == "bash":
            usage = (ROOT / command[1]).read_text(encoding="utf-8")
        elif command[0] == "samebits":
            assert command[1] in known, command
            usage = help_of([sys.executable, "-m", "runtime", command[1]]) if options else ""
        else:
            assert importlib.util.find_spec(command[2]) is not None, command
            usage = help_of([sys.executable, "-m", command[2]]) if command[2] != "runtime" else ""
        assert [option for option in sorted(options) if option not in usage] == [], command
    assert {"run.sh", "recover.sh", "test.sh"} <= {Path(command[1]).name for command in shown}
    assert known - {"prepare", "recover", "add"} == {command[1] for command in shown if command[0] == "samebits"}


def headings_of(name: str) -> list[tuple[int, str]]:
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose_of(name), re.MULTILINE)]


def anchors_of(name: str) -> set[str]:
    """As GitHub makes them: lower case, punctuation gone, blanks to hyphens."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title in headings_of(name)}


@BOTH
def test_every_relative_link_leads_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(name))
    assert len(links) > 8
    for link in links:
        assert "://" not in link, f"{link}: the page leans on nothing outside the repository"
        path, _, anchor = link.partition("#")
        assert (ROOT / path).is_file() or path == "", link
        assert not anchor or anchor in anchors_of(path or name), link


# --- two languages, one content ---------------------------------------------------------------------------------------


def test_both_pages_have_the_same_headings() -> None:
    levels = [level for level, _ in headings_of(ENGLISH)]
    assert levels == [level for level, _ in headings_of(CHINESE)]
    assert len(levels) > 20


def test_both_pages_show_the_same_commands_and_outputs() -> None:
    def bare(block: str) -> str:
        return re.sub(r"(^|\s+)# [^\n]*", r"\1#", block, flags=re.MULTILINE)

    assert [bare(block) for block in blocks_of(ENGLISH)] == [bare(block) for block in blocks_of(CHINESE)]


def test_both_pages_have_tables_of_the_same_shape() -> None:
    def shape(name: str) -> list[int]:
        return [line.count("|") for line in prose_of(name).splitlines() if line.startswith("|")]

    assert shape(ENGLISH) == shape(CHINESE)


def test_both_drawings_show_the_same() -> None:
    def marks(file: str) -> list[tuple[str, str | None]]:
        return [(element.tag, element.get("d")) for element in ElementTree.parse(ROOT / "docs" / file).iter()]

    assert "docs/recovery.svg" in text_of(ENGLISH)
    assert "docs/recovery.zh-CN.svg" in text_of(CHINESE)
    assert marks("recovery.svg") == marks("recovery.zh-CN.svg")


@BOTH
def test_every_public_name_is_explained(name: str) -> None:
    code = code_of(name)
    assert [public for public in runtime.__all__ if not re.search(rf"\b{public}\b", code)] == []


@BOTH
def test_variables_with_the_prefix_are_variables(name: str) -> None:
    variables = set(re.findall(r"^\| `(\w+)` \|", generated(name, "environment-table"), re.MULTILINE))
    named = set(re.findall(r"\bMS_([A-Z_]+)\b", text_of(name))) - {"SCHED", "WORKER", "PSERVER"}
    assert len(named) > 5
    assert named - variables == set()


@BOTH
def test_nothing_of_the_machine_it_was_written_on(name: str) -> None:
    text = text_of(name)
    assert re.findall(r"(?<![\w.…])/(?:tmp|root|home|work|usr|opt)/", text) == []
    assert "pip install runtime" not in text  # another project's name


# --- the recipe -------------------------------------------------------------------------------------------------------


class RecipeJob:
    """The recipe as two workers and a scheduler; ends only what it has started."""

    def __init__(self, folder: Path, *, spares: int = 0) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        ours = {variable for name in config.KEPT_NAMES for variable in (name, f"MS_{name}")} - {"PATH", "MS_PATH"}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._environment = {name: value for name, value in os.environ.items() if name not in ours} | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORKER_NUM": "2",
            "SCHED_PORT": str(port),
            "ENABLE_RECOVERY": "1",
            "REGISTER_COOLDOWN": "0",
            "SPARE_NUM": str(spares),
        }
        (recipe,) = blocks_of(ENGLISH, "python")
        (folder / "train.py").write_text(recipe, encoding="utf-8")

    def start(self, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=self._folder,
            env=self._environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self._folder / f"{environment.get('NODE_ID', 'scheduler')}.log").open("a"),
            text=True,
        )
        self._processes.append(process)
        return process

    def start_all(self) -> list[subprocess.Popen[str]]:
        workers = [self.start(ROLE="worker", NODE_ID=str(node)) for node in range(2)]
        return [*workers, self.start(ROLE="scheduler")]

    def __enter__(self) -> RecipeJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def run_recipe(folder: Path, *, kill: bool) -> str:
    """The sha256 that both workers print; with ``kill`` worker 1 is killed in the middle and started again."""
    folder.mkdir()
    with RecipeJob(folder) as job:
        first, second, scheduler = job.start_all()
        if kill:
            assert first.stdout is not None
            assert any(line.startswith("epoch 3 ") for line in first.stdout), (folder / "0.log").read_text()
            assert second.poll() is None
            second.send_signal(signal.SIGKILL)
            second.wait()
            second = job.start(ROLE="worker", NODE_ID="1")
        lasts = [process.communicate(timeout=120)[0].splitlines()[-1:] for process in (first, second)]
        assert [process.wait(timeout=60) for process in (first, second, scheduler)] == [0, 0, 0], lasts
        assert lasts[0] == lasts[1]
        return lasts[0][0]


def run_recipe_with_a_spare(folder: Path) -> str:
    """The sha256 that worker 0 and the spare print: worker 1 is killed in the middle and never started again."""
    folder.mkdir()
    with RecipeJob(folder, spares=1) as job:
        scheduler, spare = job.start(ROLE="scheduler"), job.start(ROLE="worker", NODE_ID="2")
        deadline = time.monotonic() + 60
        while "this spare is warm" not in (folder / "2.log").read_text(encoding="utf-8"):
            assert time.monotonic() < deadline and spare.poll() is None, (folder / "2.log").read_text()
            time.sleep(0.01)
        first, second = (job.start(ROLE="worker", NODE_ID=str(node)) for node in range(2))
        assert first.stdout is not None
        assert any(line.startswith("epoch 3 ") for line in first.stdout), (folder / "0.log").read_text()
        second.send_signal(signal.SIGKILL)
        lasts = [process.communicate(timeout=120)[0].splitlines()[-1:] for process in (first, spare)]
        assert [process.wait(timeout=60) for process in (first, spare, scheduler)] == [0, 0, 0], lasts
        assert lasts[0] == lasts[1]
        return lasts[0][0]


@pytest.mark.system
def test_the_recipe_need_not_know_of_spares(tmp_path: Path) -> None:
    spared = run_recipe_with_a_spare(tmp_path / "spared")
    assert "generation 2: rank 1 of 2 goes on from step" in (tmp_path / "spared" / "2.log").read_text(encoding="utf-8")
    assert spared == run_recipe(tmp_path / "undisturbed", kill=False)


@pytest.mark.system
def test_the_recipe_survives_a_kill_with_the_same_bits(tmp_path: Path) -> None:
    killed = run_recipe(tmp_path / "killed", kill=True)
    assert re.fullmatch(r"sha256 [0-9a-f]{64}", killed)
    assert "goes on from step" in (tmp_path / "killed" / "1.log").read_text(encoding="utf-8")
    assert killed == run_recipe(tmp_path / "undisturbed", kill=False)
