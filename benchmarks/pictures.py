"""``python -m benchmarks.pictures``: draw bars from measured or simulated figures, and a job that loses a worker.

``figures`` reads the output of the benchmark that the ``--figures`` file names, stores its figures in that file and
redraws the bars in both languages. All bars are of that run: a peer that it did not measure has none. ``bars`` draws
one of them from the stored figures. ``kill`` runs the digits with a spare, kills a worker, and stores the follower's
output with its times in docs/kill.txt. ``play`` draws such a record as an animated terminal (waits of more than two
seconds are cut to two, and of each phase except training only the first line is shown). Every picture is made from a
record and can be reproduced.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.processes import free_port, start

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "until-stepping.json"
RECORD = ROOT / "docs" / "kill.txt"
TITLE = "A worker is killed and the job continues"
DIGITS = ROOT / "examples" / "digits" / "train.py"
MOST_WAIT_S = 2.0
STAYS_S = 4.0
KILL_AT = 200
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
SANS = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'Noto Sans', 'Noto Sans CJK SC', sans-serif"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure, in seconds or in the file's own unit; ``ours`` is drawn in a different colour."""

    name: str
    seconds: float
    ours: bool


@dataclass(frozen=True, slots=True)
class Said:
    """A line of the terminal and its time."""

    at_s: float
    text: str
    is_typed: bool = False


def bars_of(content: str, language: str = "") -> tuple[str, list[Bar]]:
    """Return title and measured bars from the file, in English or, with ``_zh``, in Chinese."""
    told, name = json.loads(content), f"name{language}"
    measured = [one for one in told["bars"] if one["seconds"] is not None]
    bars = [Bar(one[name], float(one["seconds"]), bool(one["ours"])) for one in measured]
    return told[f"title{language}"], bars


def renewed(kept: str, run: str, when: str) -> str:
    """Replace stored figures by those of a run; seconds have two significant digits.

    A peer that the run did not measure gets no figure, so that all bars are of one run.

    Args:
        kept: the stored file.
        run: the output of the file's benchmark; its last line counts.
        when: the day of the run.

    Raises:
        ValueError: the run is of a different benchmark, or has no figure of ours.
    """
    told, found = json.loads(kept), json.loads(run.strip().splitlines()[-1])
    benchmark = told["benchmark"]
    if found.get("benchmark") != benchmark:
        raise ValueError(f"expected the output of benchmarks.{benchmark}, found {found.get('benchmark')!r}")
    missing = []
    for one in told["bars"]:
        place: object = found
        for name in one["of"].split("."):
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, int | float):
            one["seconds"] = float(f"{place:.3g}" if told["unit"] == "%" else f"{place:.2g}")
        else:
            one["seconds"] = None
            missing.append(one["name"])
    if not any(one["ours"] and one["seconds"] is not None for one in told["bars"]):
        raise ValueError("the run has no figure of ours: it was cut short, or measured a part")
    versions, machine = found["versions"], found["machine"]
    measured = f"torch {versions['torch']}, gloo, {machine['cores']} cores: trust the ratios, not the seconds."
    what = "simulated; the peers' figures are published ones." if benchmark == "fleet" else measured
    told["how"] = f"python -m benchmarks.{benchmark}, {when}, {what}"
    told["how"] += "".join(f" {name}: not measured." for name in missing)
    rows = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in told["bars"])
    head = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(told[name], ensure_ascii=False)}" for name in told if name != "bars"
    )
    return f'{{\n{head},\n "bars": [\n{rows}\n ]\n}}\n'


def unit_of(content: str) -> str:
    """Return the unit of the file's figures."""
    return str(json.loads(content)["unit"])


def chart(title: str, bars: Sequence[Bar], unit: str = "s") -> str:
    """Draw the bars as an SVG, linear and from zero."""
    left, width, high, top = 300, 380, 26, 48
    longest = max(one.seconds for one in bars)
    height = top + len(bars) * (high + 10) + 14
    rows = []
    for number, one in enumerate(bars):
        y, length = top + number * (high + 10), max(1.5, one.seconds / longest * width)
        colour = "#15803d" if one.ours else "#94a3b8"
        weight = ' font-weight="600"' if one.ours else ""
        rows.append(
            f'<text x="{left - 10}" y="{y + 18}" text-anchor="end"{weight}>{escape(one.name)}</text>\n'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{high}" rx="3" fill="{colour}"/>\n'
            f'<text x="{left + length + 8:.1f}" y="{y + 18}"{weight}>{one.seconds:g} {unit}</text>'
        )
    said = "; ".join(f"{one.name}: {one.seconds:g} {unit}" for one in bars)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" role="img" aria-labelledby="title desc" '
        f'font-family="{SANS}" font-size="13" fill="#1f2933">\n<title id="title">{escape(title)}</title>\n'
        f'<desc id="desc">{escape(said)}</desc>\n<rect width="760" height="{height}" rx="8" fill="#ffffff"/>\n'
        f'<text x="20" y="28" font-size="15" font-weight="600">{escape(title)}</text>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def recorded(workers: int, steps: int) -> list[Said]:
    """Run a job of the digits with one spare and kill worker 2 in the middle; return the follower's output."""
    with tempfile.TemporaryDirectory(prefix="samebits-kill-") as folder:
        words = ["run", "-n", str(workers), "--spares", "1", "--sched-port", str(free_port())]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        job = start(
            [sys.executable, "-P", "-m", "samebits", *words, str(DIGITS), "--steps", str(steps)],
            signal.SIGTERM,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        began_s = time.monotonic()
        said = [Said(0.0, f"$ samebits run -n {workers} --spares 1 train.py --steps {steps}", is_typed=True)]
        killed = False
        assert job.stdout is not None
        for line in job.stdout:
            said.append(
                Said(time.monotonic() - began_s, line.rstrip().replace(folder, "…").replace(str(DIGITS), "train.py"))
            )
            step = line.partition("step ")[2].partition(" ")[0]
            if not killed and step.isdecimal() and int(step) >= KILL_AT:
                killed = True
                pid = int((Path(folder) / "device" / "worker_2.pid").read_text().split()[0])
                os.kill(pid, signal.SIGKILL)
                text = f"$ kill -9 {pid}          # worker 2, in another terminal"
                said.append(Said(time.monotonic() - began_s, text, is_typed=True))
        job.wait()
        logs = [path.read_text().splitlines()[-1] for path in sorted((Path(folder) / "device").glob("worker_?.log"))]
        finals = [line for line in logs if line.startswith("final ")]
        said.append(Said(time.monotonic() - began_s, "$ tail -q -n 1 device/worker_?.log", is_typed=True))
        return [*said, *(Said(said[-1].at_s + 0.2, line) for line in finals)]


def as_text(said: Sequence[Said]) -> str:
    """Format the record with one line each: seconds and text."""
    return "".join(f"{one.at_s:7.2f}  {one.text}\n" for one in said)


def from_text(text: str) -> list[Said]:
    """Parse the output of :func:`as_text`."""
    rows = [(line[:7], line[9:]) for line in text.splitlines()]
    return [Said(float(at_s), said, is_typed=said.startswith("$ ")) for at_s, said in rows]


def phase_of(one: Said) -> str:
    """Return ``filling``, ``forming``, …, or an empty string if the line is about training or shows no progress."""
    head, dot, rest = one.text.partition(" · ")
    phase = rest.partition(" · ")[0].partition(";")[0].partition(" for ")[0]
    return phase if dot and head.endswith(".py") and not phase.startswith("step") else ""


def cut(said: Sequence[Said]) -> list[Said]:
    """Shorten long waits, and keep the first of several lines of one phase."""
    found: list[Said] = []
    shown_s = before_s = 0.0
    shown = [
        one
        for before, one in zip(["", *map(phase_of, said)], said, strict=False)
        if phase_of(one) != before or not before
    ]
    for one in shown:
        shown_s += min(max(0.0, one.at_s - before_s), MOST_WAIT_S)
        before_s = one.at_s
        found.append(Said(shown_s, one.text, one.is_typed))
    return found


def terminal(said: Sequence[Said], title: str, columns: int = 104) -> str:
    """Draw the lines as an SVG that shows each at its time in a loop, or all of them if animation is disabled."""
    lines = [one for one in cut(said) if one.text]
    over_s = lines[-1].at_s + STAYS_S
    high, wide = 18, 7.25
    width, height = round(columns * wide) + 32, len(lines) * high + 44
    rows, rules = [], []
    for number, one in enumerate(lines):
        text = one.text if len(one.text) <= columns else f"{one.text[: columns - 1]}…"
        is_good = any(said in text for said in ("took slot", "took the place", "finished"))
        colour = "#fbbf24" if one.is_typed else "#86efac" if is_good else "#e2e8f0"
        share = one.at_s / over_s * 100
        rules.append(f"@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
        rows.append(
            f'<text class="l" x="16" y="{40 + number * high}" fill="{colour}" xml:space="preserve" '
            f'style="animation-name:l{number}">{escape(text)}</text>'
        )
    style = (
        f".l{{animation-duration:{over_s:.2f}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        "@media (prefers-reduced-motion:reduce){.l{animation:none}}" + "".join(rules)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-labelledby="title" font-family="{FONT}" font-size="12">\n<title id="title">{escape(title)}</title>\n'
        f'<style>{style}</style>\n<rect width="{width}" height="{height}" rx="8" fill="#0f172a"/>\n'
        + "\n".join(rows)
        + "\n</svg>\n"
    )


def redraw(figures: Path, run: str, when: str) -> None:
    """Store a run's figures in a file, and draw its bars in both languages; see :func:`renewed`."""
    figures.write_text(renewed(figures.read_text(encoding="utf-8"), run, when), encoding="utf-8")
    for name in (f"{figures.stem}.svg", f"{figures.stem}.zh-CN.svg"):
        _draw_bars(figures, figures.with_name(name))


def _draw_bars(figures: Path, file: Path) -> None:
    language = "_zh" if ".zh-CN." in file.name else ""
    content = figures.read_text(encoding="utf-8")
    file.write_text(chart(*bars_of(content, language), unit_of(content)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("what", choices=["figures", "bars", "kill", "play"])
    parser.add_argument(
        "file",
        type=Path,
        help="the SVG to write; with `kill`, the record to read; with `figures`, the output of a run to read",
    )
    parser.add_argument("--figures", type=Path, default=FIGURES, help="file with the figures of the bars")
    parser.add_argument("--record", type=Path, default=RECORD, help="file with the record that the picture plays")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    figures: Path = options.figures
    if options.what == "figures":
        redraw(figures, options.file.read_text(encoding="utf-8"), time.strftime("%Y-%m-%d"))
        return
    if options.what == "bars":
        _draw_bars(figures, options.file)
        return
    if options.what == "play":
        said = from_text(options.record.read_text(encoding="utf-8"))
        options.file.write_text(terminal(said, TITLE), encoding="utf-8")
        return
    options.file.write_text(as_text(recorded(options.workers, options.steps)), encoding="utf-8")


if __name__ == "__main__":
    main()
