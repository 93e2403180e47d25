"""``samebits drill``: run a script without faults, then with faults, and compare the two runs.

This module has the sequence of events and the report. A drill proves only what it has compared, so the report states
what that is.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from samebits import config, strict_json
from samebits.account.events import EventKind
from samebits.account.goodput import Bucket
from samebits.account.history import account, duration
from samebits.commands.drill.advice import UserScript, advise, never_commits
from samebits.commands.drill.compare import Compared, compare
from samebits.commands.drill.faults import BY_LIBRARY
from samebits.commands.drill.orders import NO_COMPILER, compiler_here
from samebits.commands.drill.partition import INSIDE, OUTSIDE
from samebits.commands.drill.plan import DrillFault, DrillOutcome, Planned, drawn, faults_of, steps_of
from samebits.commands.drill.rehearsal import Rehearsal, free_environment
from samebits.errors import UsageError
from samebits.option_types import whole
from samebits.printable import counted
from samebits.store import durable
from samebits.store.retaken_report import read_report

NAMES = ("undisturbed", "disturbed")
MOST_OFF, LEAST_OFF_S = 0.005, 1.0
"""Allowed difference between an account and the measured time: a share of it, but at least the seconds by which the
drill may notice an event late on a busy machine.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand. Return 0 if the script survived every fault with equal bits, otherwise 1."""
    words = list(arguments)
    script = words[words.index("--") + 1 :] if "--" in words else []
    options = _parsed(words[: words.index("--")] if "--" in words else words, script)
    faults = faults_of(options.faults)
    plan = drawn(faults, options.kills, options.seed)
    if options.dry_run:
        print("\n".join(_plan_lines(plan, options, script)))
        return 0
    path = Path(script[0])
    if not path.is_file():
        raise UsageError(f"{path}: no such script. Fix: name an existing file after `--`")
    folder = Path(options.folder).resolve()
    if folder.exists():
        raise UsageError(f"--folder {folder}: this folder already exists. Fix: name another one, or remove it")
    say = _nothing if options.json else _say
    absolute = [str(path.resolve()), *script[1:]]
    say(f"1. {' '.join(script)} undisturbed: {_world(options)}; logs in {folder / 'undisturbed' / 'device'}")
    undisturbed = _rehearsal(folder / "undisturbed", absolute, options, say, HIDDEN_STATE="stop").run()
    undisturbed.retaken = read_report(folder / "undisturbed" / "device").failure
    undisturbed.problem = undisturbed.retaken or undisturbed.problem  # the text in the final event is shortened
    if undisturbed.problem or never_commits(undisturbed):
        disturbed, compared = DrillOutcome(), Compared((), 0, 0)
    else:
        say(f"   it ended at step {undisturbed.last_step} after {duration(undisturbed.wall_s)}")
        steps = steps_of(plan, undisturbed.last_step)
        say(f"2. the same under {counted(len(plan), 'fault')}; logs in {folder / 'disturbed' / 'device'}")
        trained_s = account(undisturbed.events)["buckets_s"][Bucket.PRODUCTIVE]
        step_s = trained_s / undisturbed.last_step
        disturbed = _rehearsal(folder / "disturbed", absolute, options, say).run(plan, steps, step_s)
        ours, theirs = (folder / name / "ckpt_of_rank" for name in NAMES)
        compared = compare(ours, theirs, disturbed.damaged)
    advice = advise(UserScript(path.name, path.read_text(errors="replace")), compared, undisturbed, disturbed)
    told = report(undisturbed, disturbed, compared, options.seed, advice)
    durable.replace_note(folder / "drill.json", f"{strict_json.dumps(told, indent=1)}\n".encode())
    lines = lines_of(told, folder)
    durable.replace_note(folder / "drill.html", html_of(told, lines).encode(errors="backslashreplace"))
    print(strict_json.dumps(told) if options.json else "\n".join(lines))
    return 0 if told["passed"] else 1


def _parsed(words: Sequence[str], script: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="samebits drill",
        usage="%(prog)s [options] -- SCRIPT [ARGUMENTS ...]",
        description="Run the script undisturbed and then with faults, and compare the weights in both jobs' "
        "checkpoints bit by bit. Only processes that the drill has started are signalled.",
        epilog="faults: " + "; ".join(f"{fault}: {fault.text}" for fault in DrillFault),
    )
    parser.add_argument(
        "--faults", default="kill,scheduler", help="kinds of faults, separated by commas (default %(default)s)"
    )
    parser.add_argument("--kills", type=whole(1, 10_000), default=5, help="number of faults (default %(default)s)")
    parser.add_argument("--seed", type=whole(), default=1, help="determines the order, steps and targets of the faults")
    parser.add_argument("-n", "--workers", type=whole(1), default=2, help="workers (default %(default)s)")
    parser.add_argument("--spares", type=whole(), default=1, help="spares (default %(default)s)")
    parser.add_argument("--folder", default="drill", help="new folder for both jobs and the report")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    options = parser.parse_args(words)
    if not script:
        parser.error("no script was given: expected `-- SCRIPT [ARGUMENTS ...]`")
    return options


def _rehearsal(
    folder: Path, script: list[str], options: argparse.Namespace, say: Callable[[str], None], **defaults: str
) -> Rehearsal:
    start = ["-n", str(options.workers), "--spares", str(options.spares), *script]
    environment = defaults | free_environment(config.whole_environment()) | {"ENABLE_RECOVERY": "1"}
    size = options.workers + options.spares
    return Rehearsal(folder, start, environment, size, free_port(), lambda text: say(f"   {text}"))


def _say(text: str) -> None:
    print(text, flush=True)


def _nothing(_: str) -> None:
    """Print nothing, because only the report is wanted."""


def _world(options: argparse.Namespace) -> str:
    return f"{counted(options.workers, 'worker')}, {counted(options.spares, 'spare')}"


def free_port() -> int:
    """Return a port that is free on both loopback addresses that a drill may need.

    The port is below the range for outgoing connections (ip(7)), so that none of them takes it before the scheduler.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as probe, socket.socket() as other, contextlib.suppress(OSError):
            probe.bind((OUTSIDE, port))
            other.bind((INSIDE, port))
            return port


def report(
    undisturbed: DrillOutcome, disturbed: DrillOutcome, compared: Compared, seed: int, advice: Sequence[str]
) -> dict[str, Any]:
    """Return the verdict as plain values. The drill fails if a planned fault was not injected."""
    survived = not undisturbed.problem and not disturbed.problem
    lacks_commits = never_commits(undisturbed)
    runs = {name: _told_of(one) for name, one in zip(NAMES, (undisturbed, disturbed), strict=True)}
    is_accounted = all(one["is_accounted"] for one in runs.values())
    is_sound = survived and compared.is_equal and not lacks_commits and is_accounted
    verdict = "failed" if not is_sound else "incomplete" if disturbed.not_injected else "passed"
    return {
        "passed": verdict == "passed",
        "verdict": verdict,
        "seed": seed,
        "survived": survived,
        "problem": (undisturbed.problem and f"undisturbed: {undisturbed.problem}") or disturbed.problem,
        "equal_bits": compared.is_equal,
        "commits": not lacks_commits,
        "difference": compared.difference,
        "first_step": compared.first_step,
        "differing": [f"rank {one.slot}: {one.name}" for one in compared.differing[:100]],
        "differing_ranks": sorted({one.slot for one in compared.differing}),
        "compared": {"steps": list(compared.steps), "ranks": compared.slots, "tensors": compared.tensors},
        "faults": [one.plain() for one in disturbed.injected],
        "not_injected": [{"fault": str(one.fault), "why": one.why} for one in disturbed.not_injected],
        "losses_seen": sum(event.kind is EventKind.LOST for event in disturbed.events),
        **runs,
        "advice": list(advice),
    }


def _told_of(outcome: DrillOutcome) -> dict[str, Any]:
    """Describe one run: its account, and whether its time categories add up to the time that the drill measured."""
    found = account(outcome.events)
    told = {"wall_s": round(outcome.wall_s, 3), "seen_s": outcome.seen_s, **found}
    off_s = 0.0 if outcome.seen_s is None else abs(sum(found["buckets_s"].values()) - outcome.seen_s)
    return {**told, "is_accounted": off_s <= max(LEAST_OFF_S, MOST_OFF * (outcome.seen_s or 0.0))}


def lines_of(told: dict[str, Any], folder: Path) -> list[str]:
    """Return the verdict as lines for people."""
    compared, faults = told["compared"], told["faults"]
    lines = [
        _verdict(told),
        f"faults: {len(faults)} ({_counted(faults)}); seed {told['seed']}",
    ]
    if not told["survived"]:
        lines.append(f"survived: no: {told['problem']}")
    lines += [f"not injected: {one['fault']}: {one['why']}" for one in told["not_injected"]]
    if told["equal_bits"]:
        newest = compared["steps"][-1]
        lines.append(
            f"bits: equal in {compared['tensors']} tensors of {compared['ranks']} ranks, steps "
            f"{', '.join(map(str, compared['steps']))}; the last is {newest}"
        )
    elif told["difference"]:
        lines.append(f"bits: {told['difference']}")
    for name in NAMES:
        if not (one := told[name])["is_accounted"]:
            summed_s = sum(one["buckets_s"].values())
            lines.append(
                f"account: {name} took {one['seen_s']:.2f} s, but its time categories add up to {summed_s:.2f} s"
            )
    if not told["commits"] and told["survived"]:
        lines.append("commits: none before the end, so every loss sends the job back to the start")
    for name in NAMES:
        one = told[name]
        if not one["wall_s"]:
            continue  # this run did not take place
        goodput = "" if one["goodput"] is None else f", {one['goodput']:.1%} productive"
        redone = sum(row["steps_lost"] for row in one["recoveries"])
        least = "at least " if any(row["all_lost"] for row in one["recoveries"]) else ""
        lines.append(
            f"{name}: {counted(one['step'], 'step')} in {duration(one['wall_s'])}{goodput}, "
            f"{least}{counted(redone, 'step')} redone"
        )
    lines += [f"look: {text}" for text in told["advice"]]
    last = folder / (NAMES[1] if told[NAMES[1]]["wall_s"] else NAMES[0])
    lines.append(
        f"report: {folder / 'drill.html'}; the logs are in {last / 'device'}, and `samebits history` in {last}"
    )
    if not told["passed"]:
        lines.append(
            f"next: fix the problems listed above, then repeat the drill with --folder and --seed {told['seed']}"
        )
    return lines


def _verdict(told: dict[str, Any]) -> str:
    given = counted(len(told["faults"]), "fault")
    match told["verdict"]:
        case "passed":
            return f"drill PASSED: {given}, and every weight that was compared has the bits of the undisturbed run"
        case "incomplete":
            missing = counted(len(told["not_injected"]), "fault")
            return f"drill INCOMPLETE: {given} survived with equal bits, but {missing} could not be given"
        case _ if told["problem"].startswith(NAMES[0]):
            return "drill FAILED: the script does not finish, although no fault was given"
        case _ if not told["survived"]:
            return f"drill FAILED: the job did not survive {given}"
        case _ if not told["commits"]:
            return "drill FAILED: the script commits no step before its end, so there is nothing to resume from"
        case _ if not told["equal_bits"]:
            return f"drill FAILED: after {given} the bits are others than those of the undisturbed run"
        case _:
            return "drill FAILED: the account of where the time went is wrong, which is a mistake of SameBits"


def _counted(faults: Sequence[dict[str, Any]]) -> str:
    kinds = sorted({one["fault"] for one in faults})
    return ", ".join(f"{kind} {sum(one['fault'] == kind for one in faults)}" for kind in kinds) or "none"


def _plan_lines(plan: Sequence[Planned], options: argparse.Namespace, script: Sequence[str]) -> list[str]:
    lines = [
        f"1. {' '.join(script)} undisturbed, in {options.folder}/undisturbed: {_world(options)}",
        f"2. the same in {options.folder}/disturbed, with {counted(len(plan), 'fault')}:",
    ]
    lines += [
        f"   {number}. after {one.share:.0%} of its steps: {one.fault.text}" for number, one in enumerate(plan, 1)
    ]
    if compiler_here() is None and (lacking := sorted({one.fault for one in plan} & BY_LIBRARY)):
        lines.append(f"   not possible here: {', '.join(lacking)}: {NO_COMPILER}")
    return [*lines, "3. the weights in both jobs' checkpoints are compared, bit by bit"]


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;"
    "border-bottom:1px solid #8884}td.n{text-align:right;font-variant-numeric:tabular-nums}pre{white-space:pre-wrap}"
    ".passed{color:#15803d}.failed{color:#b91c1c}.incomplete{color:#b45309}.scroll{overflow-x:auto}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_of(told: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return the report as one self-contained HTML file without scripts, to keep or to mail.

    Every value is escaped as text, including text from a script, a log or a host's name. ``lines`` are the report's
    lines for people, the verdict first.
    """
    verdict, *rest = lines
    faults = [
        (one["fault"], one["node"], one["step"], one["did"], "never" if (s := one["recovered_s"]) is None else f"{s:g}")
        for one in told["faults"]
    ]
    missing = [(one["fault"], one["why"]) for one in told["not_injected"]]
    rows = [
        (
            row["number"],
            row["step"],
            row["cause"],
            "" if row["total_ms"] is None else f"{row['total_ms']:.0f}",
            ", ".join(f"{name.replace('_', ' ')} {ms:.0f}" for name, ms in row["phases_ms"].items() if ms >= 0.5),
        )
        for row in told["disturbed"]["recoveries"]
    ]
    spent = [
        (name.replace("_", " "), *(f"{told[job]['buckets_s'][name]:.2f}" for job in ("undisturbed", "disturbed")))
        for name in told["disturbed"]["buckets_s"]
    ]
    parts = [
        f'<h1 class="{escape(told["verdict"])}">{escape(verdict)}</h1>',
        f"<pre>{escape(chr(10).join(rest))}</pre>",
        _table("Faults", ("fault", "on", "step", "what was done", "trained again after, s"), faults),
        _table("Not injected", ("fault", "why"), missing),
        _table("Recoveries", ("#", "step", "cause", "ms", "of which"), rows),
        _table("Where the time went, s", ("", "undisturbed", "disturbed"), spent),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="content-security-policy" content="{_POLICY}">'
        f"<title>{escape(verdict)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    told = list(rows)
    if not told:
        return ""
    heads = "".join(f'<th scope="col">{escape(one)}</th>' for one in head)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in told)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'<h2>{escape(title)}</h2><div class="scroll">{table}</div>'


def _cell(value: object) -> str:
    text = str(value)
    is_number = text.replace(".", "", 1).isdecimal()
    return f'<td class="n">{text}</td>' if is_number else f"<td>{escape(text)}</td>"
