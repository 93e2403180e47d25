"""The README's pictures agree with the stored figures and the recorded output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.pictures import (
    FIGURES,
    MOST_WAIT_S,
    RECORD,
    TITLE,
    Bar,
    Said,
    as_text,
    bars_of,
    chart,
    cut,
    from_text,
    main,
    renewed,
    terminal,
    unit_of,
)

ROOT = Path(__file__).resolve().parents[2]
SAID = [
    Said(0.0, "$ samebits run -n 4 train.py", is_typed=True),
    Said(0.5, "train.py · step 1 <b>"),
    Said(9.0, ""),
    Said(9.5, "x" * 300),
]


@pytest.mark.parametrize("stem", ["until-stepping", "effective-time"])
@pytest.mark.parametrize(("suffix", "language"), [(".svg", ""), (".zh-CN.svg", "_zh")])
def test_bars_in_the_docs_match_the_figures(stem: str, suffix: str, language: str) -> None:
    content = (ROOT / "docs" / f"{stem}.json").read_text(encoding="utf-8")
    drawn = chart(*bars_of(content, language), unit_of(content))
    assert (ROOT / "docs" / f"{stem}{suffix}").read_text(encoding="utf-8") == drawn


def test_every_drawn_figure_is_in_the_comparison() -> None:
    _, bars = bars_of(FIGURES.read_text(encoding="utf-8"))
    page = ROOT / "docs" / "explanation" / "comparison.md"
    table = page.read_text(encoding="utf-8").partition("## Recovery time")[2].partition("\n## ")[0]
    shown = {f"{float(one):.2g}" for one in re.findall(r"(\d+(?:\.\d+)?) s", table)}
    assert {f"{one.seconds:.2g}" for one in bars} <= shown


RUN = {
    "benchmark": "launchers",
    "machine": {"cores": 64},
    "versions": {"torch": "9.9"},
    "peers": {"torchrun c10d": {"recovered_s": 7.777}, "torchft": "missing"},
    "ours": {"samebits run": {"recovered_s": 0.05432}, "samebits run --spares 0": {"recovered_s": 1.2345}},
}


def test_one_command_stores_a_runs_figures_and_draws_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, run = tmp_path / "until-stepping.json", tmp_path / "run.txt"
    kept.write_text(FIGURES.read_text(encoding="utf-8"), encoding="utf-8")
    run.write_text(f"a table\n\n{json.dumps(RUN)}\n")
    monkeypatch.setattr("sys.argv", ["pictures", "figures", str(run), "--figures", str(kept)])
    main()
    content = kept.read_text(encoding="utf-8")
    title, bars = bars_of(content)
    assert [one.seconds for one in bars] == [0.054, 1.2, 7.8], "a peer that was not measured has no bar"
    assert "torchft (restarts the one): not measured." in json.loads(content)["how"]
    assert (tmp_path / "until-stepping.svg").read_text(encoding="utf-8") == chart(title, bars)
    chinese = (tmp_path / "until-stepping.zh-CN.svg").read_text(encoding="utf-8")
    assert chinese == chart(*bars_of(content, "_zh")) and "7.8 s" in chinese
    run.write_text(json.dumps({**RUN, "peers": {"torchft": {"recovered_s": 3.0}}}))
    main()
    assert [one.seconds for one in bars_of(kept.read_text(encoding="utf-8"))[1]] == [0.054, 1.2, 3.0]


@pytest.mark.parametrize("run", [{**RUN, "benchmark": "goodput"}, {**RUN, "ours": {}}])
def test_incomplete_run_changes_no_figure(run: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"output of benchmarks\.launchers|has no figure of ours"):
        renewed(FIGURES.read_text(encoding="utf-8"), json.dumps(run), "2026-11-26")


def test_bars_are_proportional_to_their_figures() -> None:
    drawn = ElementTree.fromstring(chart("a < b", [Bar("one & two", 1.0, True), Bar("other", 4.0, False)]))
    widths = [float(one.get("width", "")) for one in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] == pytest.approx(4 * widths[0])


def test_terminal_in_the_readme_plays_its_record() -> None:
    record = RECORD.read_text(encoding="utf-8")
    assert (ROOT / "docs/kill.svg").read_text(encoding="utf-8") == terminal(from_text(record), TITLE)
    assert as_text(from_text(record)) == record
    killed, taken = record.index("$ kill -9"), record.index("took the place of worker 2")
    assert killed < taken < record.index("job finished at step 600")
    finals = {line.split("sha256=")[1] for line in record.splitlines() if "  final step=600" in line}
    assert len(finals) == 1, "all ranks end with the same bits"


def test_first_line_of_a_phase_is_shown() -> None:
    texts = [
        "a.py · filling; waiting for 0, 1 · step 0",
        "a.py · filling; waiting for 1 · step 0",
        "a.py · step 1 · loss 2",
    ]
    texts += ["a.py · step 2 · loss 1", "samebits: one", "samebits: two", "a.py · filling; waiting for 1 · step 0"]
    shown = [one.text for one in cut([Said(number, text) for number, text in enumerate(texts)])]
    assert shown == [text for number, text in enumerate(texts) if number != 1]


def test_long_waits_are_cut_and_the_order_stays() -> None:
    assert [round(one.at_s, 3) for one in cut(SAID)] == [0, 0.5, 0.5 + MOST_WAIT_S, 1 + MOST_WAIT_S]


def test_terminal_shows_each_line_at_its_time_or_all_without_animation() -> None:
    drawn = terminal(SAID, "a < b", columns=40)
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["$ samebits run -n 4 train.py", "train.py · step 1 <b>", "x" * 39 + "…"]
    assert "prefers-reduced-motion" in drawn and drawn.count("@keyframes") == 3


@pytest.mark.parametrize("file", ["kill.svg", "until-stepping.svg", "until-stepping.zh-CN.svg"])
def test_pictures_are_small_and_reference_nothing_external(file: str) -> None:
    content = (ROOT / "docs" / file).read_text(encoding="utf-8")
    ElementTree.fromstring(content)
    assert len(content) < 60_000
    assert content.count("http") == content.count("http://www.w3.org/2000/svg")
