"""Hooks of mkdocs: the repository's own pages become pages of the site, and links into the sources plain words.

Only paths are translated here; what a page says is the page's. The one idea: the pages are written for whoever reads
them in the repository, so the site is made from them as they stand.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
OF_THE_ROOT = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie above docs/."""
    for name, page in OF_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Have the page's links lead to pages of the site."""
    folder = "" if page.file.src_uri in OF_THE_ROOT.values() else "docs"

    def translated(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in OF_THE_ROOT:
            return f"[{text}]({OF_THE_ROOT[path]}{anchor})"
        if path.startswith("docs/"):
            return f"{image}[{text}]({path.removeprefix('docs/')}{anchor})"
        return text  # a file of the sources

    return _LINK.sub(translated, markdown)
