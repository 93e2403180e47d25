"""Write everything known about a job to one self-contained HTML file, for ``history --html``.

The report is the page with its data embedded, so both show the same content. It needs neither starlette nor a
scheduler. It contains no secret: the settings are those that a job's processes compare, and the logs are copied
unchanged.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samebits import strict_json
from samebits.account.history import account, required_events
from samebits.config import Settings, fixed_settings
from samebits.dashboard.watching import JobWatch, shown_events
from samebits.errors import StoreError, UsageError
from samebits.launcher import job_spec
from samebits.launcher.processes import process_names, replaced_names
from samebits.store import durable

FILE = "samebits-report.html"
LOG_CHARACTERS = 8000  # per process
MOST_LOGS = 64
_STATIC = Path(__file__).parent / "static"
_VERSIONS = ("samebits", "torch", "pyzmq", "numpy")


def main(arguments: Sequence[str]) -> int:
    """Run ``history --html``."""
    parser = argparse.ArgumentParser(
        prog="samebits history --html",
        description="Write everything known about this folder's job, running or not, to one self-contained HTML file: "
        "history, recoveries, plots, where the time went, and the ends of the logs.",
    )
    parser.add_argument(
        "--html",
        nargs="?",
        const=FILE,
        default=FILE,
        metavar="FILE",
        help=f"the file to write or replace (default {FILE})",
    )
    parser.add_argument("--json", action="store_true", help="print the same data as one JSON object instead")
    options = parser.parse_args(arguments)
    settings = job_spec.settings_here(only_looks=True)
    required_events(settings.recovery_path)
    if options.json:
        print(strict_json.dumps(gathered(settings)))
        return 0
    path = Path(options.html)
    try:
        durable.require_replaceable(path)
        durable.replace_note(path, html_of_folder(settings).encode())
    except StoreError as error:
        raise UsageError(f"{path} cannot be written ({error}). Fix: name another file") from None
    print(f"samebits: {path} ({path.stat().st_size // 1024} kB)")
    return 0


def gathered(settings: Settings) -> dict[str, Any]:
    """Return the report's data as plain values."""
    watch = JobWatch(settings, None)
    watch.look()
    nodes = job_spec.nodes_of(settings.log_dir, settings)
    names = [*process_names(nodes), *replaced_names(settings.log_dir, nodes)][: MOST_LOGS + 1]
    return {
        "state": watch.state(),
        "account": account(list(watch.events)),
        "events": shown_events(watch.events),
        "steps": watch.steps(),
        "losses": watch.losses(),
        "logs": {name: (watch.log_end(name) or "")[-LOG_CHARACTERS:] for name in names},
        "about": {
            "written": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "settings": dict(fixed_settings(settings)),
            "versions": {name: version for name in _VERSIONS if (version := _version(name))},
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    }


def html_of_folder(settings: Settings) -> str:
    """Return the page with the job's data, styles and scripts embedded."""
    # A "<" in a script's text could end the script; JSON can escape it.
    data = strict_json.dumps(gathered(settings)).replace("<", "\\u003c")
    page = _read("index.html")
    for name in ("uplot.css", "page.css"):
        page = page.replace(f'<link rel="stylesheet" href="{name}">', f"<style>\n{_read(name)}</style>")
    for name in ("uplot.js", "words.js", "page.js"):
        page = page.replace(f'<script src="{name}"></script>', f"<script>\n{_read(name)}</script>")
    page = page.replace('<link rel="icon" href="icon.svg">\n', _POLICY)
    return page.replace("<script>\n", f'<script type="application/json" id="data">{data}</script>\n<script>\n', 1)


_POLICY = (
    "<meta http-equiv=\"content-security-policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; img-src data:\">\n"
)


def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
