"""A drill's report as one self-contained HTML file without scripts, to keep or to mail.

Every value is escaped as text, including text from a script, a log or a host's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;padding:.3rem .6rem;"
    "border-bottom:1px solid #8884}td.n{text-align:right;font-variant-numeric:tabular-nums}pre{white-space:pre-wrap}"
    ".passed{color:#15803d}.failed{color:#b91c1c}.incomplete{color:#b45309}.scroll{overflow-x:auto}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def html_of(told: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return the content of the file. ``lines`` are the report's lines for people, the verdict first."""
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
