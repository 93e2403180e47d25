"""Check README and docs against the code, in both languages: tables, paths, commands, links, and scripts.

A page is named by its path in the repository. Facts may be on any page of a language; links, paths and the twin page
are checked on each.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

import samebits
from samebits import config, errors
from samebits.__main__ import SUBCOMMANDS
from samebits.commands.explain import cause_table, cause_table_zh
from samebits.errors import SameBitsError
from samebits.exit_codes import EXIT_CODES, codes_to_give_up_at, exit_code_table, exit_code_table_zh
from scripts import api_pages
from tests.system.job import Job
from tests.system.processes import Command, WarmStarter, environment_of_tests, free_port

ROOT = Path(__file__).resolve().parents[1]
README, INDEX, TUTORIAL = "README.md", "docs/index.md", "docs/tutorials/recoverable-script.md"
ENGLISH_ONLY = ("docs/contributors/evidence.md", "docs/contributors/relays.md")
MOST_WORDS = 2000


def chinese(page: str) -> str:
    """Return the path of a page's Chinese twin."""
    return page.removesuffix(".md") + ".zh-CN.md"


def found_pages() -> list[str]:
    """Return every page below docs, in both languages."""
    return sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md"))


ENGLISH = (README, *(page for page in found_pages() if not page.endswith(".zh-CN.md") and page not in ENGLISH_ONLY))
CHINESE = tuple(map(chinese, ENGLISH))
EVERY = (*ENGLISH, *CHINESE, *ENGLISH_ONLY)

EVERY_PAGE = pytest.mark.parametrize("page", EVERY)
EVERY_PAIR = pytest.mark.parametrize(("english", "chinese"), list(zip(ENGLISH, CHINESE, strict=True)), ids=ENGLISH)
BOTH_LANGUAGES = pytest.mark.parametrize("pages", [ENGLISH, CHINESE], ids=["en", "zh"])

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
FOLDERS = r"(?:scripts|examples|tests|docs|benchmarks|runtime|\.ci)"
PATH = re.compile(rf"(?<![\w./…-]){FOLDERS}/[\w./-]*\w")


def text_of(*pages: str) -> str:
    return "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)


def blocks_of(*pages: str, language: str | None = None) -> list[str]:
    """Return the fenced blocks in order, of one language if given."""
    fenced = [pair for page in pages for pair in FENCED.findall(text_of(page))]
    return [block for found, block in fenced if language in (None, found)]


def prose_of(*pages: str) -> str:
    return "\n".join(FENCED.sub("", text_of(page)) for page in pages)


def code_of(*pages: str) -> str:
    """Return everything a reader may take for a path or a command."""
    return "\n".join([*blocks_of(*pages), *INLINE.findall(prose_of(*pages))])


def generated(pages: tuple[str, ...], marker: str) -> str:
    """Return the text between these markers, which occur once, on one page."""
    between = re.compile(rf"<!-- {marker}:begin [^\n]*-->\n(.*?)\n<!-- {marker}:end -->", re.DOTALL)
    found = [part for page in pages for part in between.findall(text_of(page))]
    assert len(found) == 1, f"{pages}: {len(found)} parts between the markers {marker}"
    return str(found[0])


# --- the pages --------------------------------------------------------------------------------------------------------


def test_every_page_exists_in_both_languages() -> None:
    assert set(found_pages()) == {page for page in EVERY if page.startswith("docs/")}


@EVERY_PAIR
def test_page_opens_with_its_title_its_twin_and_the_way_back(english: str, chinese: str) -> None:
    for page, twin, index in [(english, chinese, INDEX), (chinese, english, INDEX.replace(".md", ".zh-CN.md"))]:
        title, blank, links = (ROOT / page).read_text(encoding="utf-8").splitlines()[:3]
        assert title.startswith("# ") and blank == ""
        back = [] if page.startswith(("README", "docs/index")) else [index]
        assert [target for target, _ in targets_of(page, links)] == [twin, *back]


@BOTH_LANGUAGES
def test_readme_leads_to_the_index_and_that_to_every_page(pages: tuple[str, ...]) -> None:
    readme, *others = pages
    (index,) = [page for page in others if page.startswith("docs/index")]
    assert index in {target for target, _ in targets_of(readme, prose_of(readme))}
    assert {*others, *ENGLISH_ONLY} - {index} - {target for target, _ in targets_of(index, prose_of(index))} == set()


@pytest.mark.parametrize("page", [*ENGLISH, *ENGLISH_ONLY])
def test_no_page_is_too_long_to_read(page: str) -> None:
    """Generated parts and code are not counted."""
    written = re.sub(r"<!-- [\w-]+:begin.*?:end -->", "", prose_of(page), flags=re.DOTALL)
    assert len(written.split()) <= MOST_WORDS


def test_every_test_named_as_evidence_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", text_of(*ENGLISH)))
    there = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 10
    assert named <= there, named - there


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "table"), [(ENGLISH, config.environment_table), (CHINESE, config.environment_table_zh)], ids=["en", "zh"]
)
def test_environment_table_is_the_generated_one(pages: tuple[str, ...], table: Callable[[], str]) -> None:
    assert generated(pages, "environment-table") == table()


def error_classes() -> set[type[SameBitsError]]:
    """Return every error a process can exit with."""
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SameBitsError)}
    return classes - {SameBitsError}


@pytest.mark.parametrize(
    ("pages", "table"), [(ENGLISH, exit_code_table), (CHINESE, exit_code_table_zh)], ids=["en", "zh"]
)
def test_exit_codes_are_the_generated_ones(pages: tuple[str, ...], table: Callable[[], str]) -> None:
    assert generated(pages, "exit-codes") == table()


@pytest.mark.parametrize(("pages", "table"), [(ENGLISH, cause_table), (CHINESE, cause_table_zh)], ids=["en", "zh"])
def test_causes_are_the_generated_ones(pages: tuple[str, ...], table: Callable[[], str]) -> None:
    assert generated(pages, "causes") == table()


def test_every_error_has_its_row_and_each_code_one_answer() -> None:
    rows = {(one.code, one.name) for one in EXIT_CODES}
    assert {(kind.exit_code, kind.__name__) for kind in error_classes()} <= rows
    assert [one.code for one in EXIT_CODES] == sorted(one.code for one in EXIT_CODES)
    answers = {(one.code, one.again) for one in EXIT_CODES}
    assert len(answers) == len({code for code, _ in answers}), "one code, two answers"
    assert all(one.meaning for one in EXIT_CODES)


@pytest.mark.parametrize("page", [page for page in EVERY if "exit $status" in text_of(page)])
def test_every_loop_ends_if_a_retry_does_not_help(page: str) -> None:
    for codes in re.findall(r"case \$status in ([0-9|]+)\)", text_of(page)):
        assert tuple(map(int, codes.split("|"))) == codes_to_give_up_at()


@pytest.mark.parametrize("page", ["docs/contributors/dependencies.md", "docs/contributors/dependencies.zh-CN.md"])
def test_every_dependency_is_named_with_a_reason(page: str) -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].split("\n")
    for extra in parser["options.extras_require"].values():
        lines += extra.split("\n")
    required = {re.split(r"[<>=;]", line)[0].strip() for line in lines if line and not line.startswith("#")}
    first_cells = [line.split("|")[1] for line in prose_of(page).splitlines() if line.startswith("| `")]
    assert required - {package for cell in first_cells for package in INLINE.findall(cell)} == set()


@pytest.mark.parametrize("page", [page for page in EVERY if "```diff" in text_of(page)])
def test_number_of_lines_to_port_is_correct(page: str) -> None:
    said = re.findall(r"^\| (\d+) \| (\d+) \|\n\n```diff\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    assert len(said) == len(blocks_of(page, language="diff")) > 0
    for goes, comes, block in said:
        firsts = [line[:1] for line in block.splitlines()]
        assert (firsts.count("-"), firsts.count("+")) == (int(goes), int(comes)), block


# --- paths, commands, links -------------------------------------------------------------------------------------------


def paths_of(*pages: str) -> set[str]:
    return set(PATH.findall(text_of(*pages)))


@EVERY_PAGE
def test_every_named_path_exists(page: str) -> None:
    assert sorted(path for path in paths_of(page) if not (ROOT / path).exists()) == []


COMMAND = re.compile(
    r"(?:bash scripts/[\w.]+|python -m [\w.]+|(?<![\w/])(?<!import )samebits [a-z][a-z-]*)(?: (?!-- )[\w./=-]+)*"
)


def commands_of(*pages: str) -> list[list[str]]:
    """Return the words of each of our commands, without the output of processes."""
    lines = "\n".join(blocks_of(*pages, language="")).splitlines() + INLINE.findall(prose_of(*pages))
    typed = (line for line in lines if not line.startswith(("samebits:", "…")))
    return [command.split() for line in typed for command in COMMAND.findall(line)]


def helps_of(starter: WarmStarter, log: Path, commands: Sequence[str]) -> dict[str, str]:
    """Return the own help of each command, which must do nothing else."""
    command = Command(ROOT / "tests" / "helps.py", tuple(commands), environment_of_tests(), ROOT, log)
    assert starter.start(command).wait() == 0, log.read_text()
    helps: dict[str, str] = json.loads(log.read_text().splitlines()[-1])
    for name, usage in helps.items():
        assert usage.lstrip().lower().startswith("usage"), (name, usage)
        assert not usage.splitlines()[-1].startswith("{"), f"{name} ran and printed its figures: {usage}"
    return helps


def test_every_command_exists_and_knows_its_shown_options(warm: WarmStarter, tmp_path: Path) -> None:
    shown: dict[tuple[str, ...], set[str]] = {}
    for words in commands_of(*EVERY):
        length = 3 if words[1] == "-m" else 2
        command, rest = tuple(words[:length]), words[length:]
        if words[1] == "-m" and words[2] == "samebits" and rest:
            command, rest = ("samebits", rest[0]), rest[1:]
        before_script = [word for word in rest if word.endswith(".py")]
        own = rest[: rest.index(before_script[0])] if before_script else rest
        shown.setdefault(command, set()).update(word for word in own if word.startswith("--"))
    known = {entry.name for entry in SUBCOMMANDS}
    scripts = {command for command in shown if command[0] == "bash"}
    modules = {command: command[2] for command in shown if command[1] == "-m" and command[2] != "samebits"}
    ours = {command: " ".join(command) for command, options in shown.items() if command[0] == "samebits" and options}
    assert [module for module in modules.values() if importlib.util.find_spec(module) is None] == []
    assert known == {command[1] for command in shown if command[0] == "samebits"}
    helps = helps_of(warm, tmp_path / "helps", sorted({*modules.values(), *ours.values()}))
    usages = {command: helps[asked] for command, asked in (modules | ours).items()}
    usages |= {command: (ROOT / command[1]).read_text(encoding="utf-8") for command in scripts}
    for command, usage in usages.items():
        assert [option for option in sorted(shown[command]) if option not in usage] == [], command
    assert {"run.sh", "recover.sh", "test.sh"} <= {Path(command[1]).name for command in scripts}


def headings_of(*pages: str) -> list[tuple[int, str]]:
    return [(len(marks), title) for marks, title in re.findall(r"^(#+) (.+)$", prose_of(*pages), re.MULTILINE)]


def anchors_of(page: str) -> list[str]:
    """Make anchors like GitHub: lower case, punctuation removed, blanks to hyphens."""
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title in headings_of(page)]


def links_of(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def targets_of(page: str, text: str) -> list[tuple[str, str]]:
    """Return the path in the repository, and the anchor or "", of each link in this text of the page."""
    targets = []
    for link in links_of(text):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_relative_to(ROOT), f"{link}: leads out of the repository"
        targets.append((target.relative_to(ROOT).as_posix(), anchor))
    return targets


@EVERY_PAGE
def test_every_relative_link_leads_somewhere(page: str) -> None:
    for link in links_of(prose_of(page)):
        assert "://" not in link, f"{link}: the page depends on something outside the repository"
    for target, anchor in targets_of(page, prose_of(page)):
        assert (ROOT / target).is_file(), target
        assert not anchor or anchor in anchors_of(target), f"{target}#{anchor}"


@BOTH_LANGUAGES
def test_patterns_match_something(pages: tuple[str, ...]) -> None:
    """No test here passes because its pattern finds nothing."""
    assert len(paths_of(*pages)) > 8
    assert len(links_of(prose_of(*pages))) > 8
    assert len(headings_of(*pages)) > 20


# --- two languages, one content ---------------------------------------------------------------------------------------


@EVERY_PAIR
def test_both_pages_have_the_same_headings(english: str, chinese: str) -> None:
    assert [level for level, _ in headings_of(english)] == [level for level, _ in headings_of(chinese)]


@EVERY_PAIR
def test_both_pages_show_the_same_commands_and_outputs(english: str, chinese: str) -> None:
    def bare(block: str) -> str:
        return re.sub(r"(^|\s+)# [^\n]*", r"\1#", block, flags=re.MULTILINE)

    assert [bare(block) for block in blocks_of(english)] == [bare(block) for block in blocks_of(chinese)]


@EVERY_PAIR
def test_both_pages_have_tables_of_the_same_shape(english: str, chinese: str) -> None:
    def shape(page: str) -> list[int]:
        return [line.count("|") for line in prose_of(page).splitlines() if line.startswith("|")]

    assert shape(english) == shape(chinese)


def twin_of(file: str) -> str:
    """Return the same file in the other language, or the file itself if there is only one."""
    twin = file.replace(".zh-CN.", ".") if ".zh-CN." in file else re.sub(r"\.(\w+)$", r".zh-CN.\1", file)
    return twin if (ROOT / twin).exists() else file


@EVERY_PAIR
def test_both_pages_lead_to_the_same_places_in_their_own_language(english: str, chinese: str) -> None:
    def places(page: str) -> list[tuple[str, int]]:
        """Return each file, and which of its headings."""
        return [
            (target, anchors_of(target).index(anchor) if anchor else -1)
            for target, anchor in targets_of(page, prose_of(page))
        ]

    assert sorted((twin_of(file), heading) for file, heading in places(english)) == sorted(places(chinese))


def test_both_drawings_show_the_same() -> None:
    def marks(file: str) -> list[tuple[str, str | None]]:
        return [(element.tag, element.get("d")) for element in ElementTree.parse(ROOT / "docs" / file).iter()]

    page = "docs/explanation/how-recovery-works.md"
    assert "](../recovery.svg)" in text_of(page)
    assert "](../recovery.zh-CN.svg)" in text_of(chinese(page))
    assert marks("recovery.svg") == marks("recovery.zh-CN.svg")


def test_api_pages_are_the_generated_ones() -> None:
    fix = "run `python scripts/api_pages.py`"
    assert api_pages.ENGLISH.read_text(encoding="utf-8") == api_pages.english_page(), fix
    assert api_pages.CHINESE.read_text(encoding="utf-8") == api_pages.chinese_page(api_pages.chinese_texts()), fix


def test_api_page_has_every_public_name() -> None:
    modules = {"samebits": samebits, "samebits.elastic": samebits.elastic, "samebits.kv": samebits.kv}
    public = {f"{module}.{name}" for module, value in modules.items() for name in value.__all__}
    here = {name for name in api_pages.all_names() if name.count(".") == 1 or name.rpartition(".")[0] in modules}
    assert public - here == {"samebits.elastic", "samebits.kv", "samebits.elastic.ElasticSampler"}
    assert here <= public
    assert len(api_pages.all_names()) == len(set(api_pages.all_names()))


EXAMPLES = {name: api_pages.example(name) for name in api_pages.all_names() if api_pages.example(name)}
TRAINING = [name for name, code in EXAMPLES.items() if "train(" in code]


@pytest.mark.system
@pytest.mark.parametrize("name", TRAINING)
def test_examples_of_the_api_page_run(name: str, tmp_path: Path, warm: WarmStarter) -> None:
    """A job trains once, so each example that trains has a job; those that do not run before the first of them."""
    before = [code for one, code in EXAMPLES.items() if one not in TRAINING] if name == TRAINING[0] else []
    script = "\n".join([api_pages.PRELUDE, *before, EXAMPLES[name]])
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    log = tmp_path / "log"
    status = warm.start(Command(tmp_path / "train.py", (), environment_of_tests(), tmp_path, log)).wait()
    assert status == 0, log.read_text()


@BOTH_LANGUAGES
def test_variables_with_the_prefix_are_variables(pages: tuple[str, ...]) -> None:
    variables = set(re.findall(r"^\| `(\w+)` \|", generated(pages, "environment-table"), re.MULTILINE))
    named = set(re.findall(r"\bMS_([A-Z_]+)\b", text_of(*pages))) - {"SCHED", "WORKER", "PSERVER"}
    assert len(named) > 5
    assert named - variables == set()


@EVERY_PAGE
def test_pages_contain_nothing_of_the_machine_they_were_written_on(page: str) -> None:
    text = text_of(page)
    assert re.findall(r"(?<![\w.…])/(?:tmp|root|home|work|usr|opt)/", text) == []
    assert "pip install runtime" not in text  # another project's name


# --- the recipe -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recipe_job(folder: Path, warm: WarmStarter, *, spares: int = 0) -> Iterator[Job]:
    """The recipe as two workers and a scheduler, not yet started; cleaned up afterwards."""
    folder.mkdir()
    (recipe,) = blocks_of(TUTORIAL, language="python")
    (folder / "train.py").write_text(recipe, encoding="utf-8")
    settings = {"REGISTER_COOLDOWN": "0", "SPARE_NUM": str(spares)}
    job = Job(folder, warm, script=folder / "train.py", workers=2, settings=settings)
    try:
        yield job
    finally:
        job.end()


def result_of(job: Job, *ranks: int, but: tuple[int, ...] = ()) -> str:
    """Return the common last line of all these, once all have exited with status 0 (``but`` those killed)."""
    statuses = job.wait_ended()
    assert {status for name, status in statuses.items() if name not in but} == {0}, f"{statuses}\n{job.tails()}"
    lasts = {job.lines(rank)[-1] for rank in ranks}
    assert len(lasts) == 1, job.tails()
    return lasts.pop()


@pytest.mark.system
def test_readmes_script_trains_to_its_end(tmp_path: Path, warm: WarmStarter) -> None:
    """Run it as a job of one process; the job of several is the tutorial's, whose script prints its weights."""
    (script,) = blocks_of(README, language="python")
    assert script == blocks_of(chinese(README), language="python")[0] and script.count("3000") == 2
    (tmp_path / "train.py").write_text(script.replace("3000", "30"), encoding="utf-8")
    log, elsewhere = tmp_path / "log", {"SCHED_PORT": str(free_port())}  # else a job beside this test may answer
    for train, words, more in [(tmp_path / "train.py", (), {}), (None, ("status",), elsewhere)]:
        command = Command(train, words, environment_of_tests() | more, tmp_path, log)
        assert warm.start(command).wait() == 0, log.read_text()
    assert "finished · step 30 " in log.read_text()


def undisturbed_recipe(folder: Path, warm: WarmStarter) -> str:
    with recipe_job(folder, warm) as job:
        job.start()
        return result_of(job, 0, 1)


@pytest.mark.system
def test_recipe_survives_kills_with_the_same_bits_with_and_without_spares(tmp_path: Path, warm: WarmStarter) -> None:
    """Worker 1 is killed, and its spare takes its place for good; then worker 0, which is restarted."""
    with recipe_job(tmp_path / "spared", warm, spares=1) as job:
        job.start_scheduler()
        job.start_worker(2)
        job.wait_for(2, "this spare is warm")
        for rank in job.ranks:
            job.start_worker(rank)
        job.wait_for(0, "^epoch 1 ")
        job.kill(1)
        job.wait_for(2, "generation 2: rank 1 of 2 continues from step")
        job.kill(0)
        job.start_worker(0)
        killed = result_of(job, 0, 2, but=(1,))
        assert job.matches(0, "generation 3: rank 0 of 2 continues from step")
    assert re.fullmatch(r"sha256 [0-9a-f]{64}", killed)
    assert killed == undisturbed_recipe(tmp_path / "undisturbed", warm)
