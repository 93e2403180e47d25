"""Adapt the pages for mkdocs: addresses without the language, links into the sources as plain words, coloured commands.

The pages are written to be read in the repository; the site is built from them as they are, in two builds, one for each
language.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES_OF_THE_ROOT = {"CONTRIBUTING.md": "contributors/contributing.md"}
"""Pages that lie above docs/, and their place in the site."""

READMES = {"README.md": "index.md", "README.zh-CN.md": "index.zh-CN.md"}
CHINESE = ".zh-CN"
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\]|!\[[^\]]*\]\([^)]*\))*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_HEADER = re.compile(r"\A(# [^\n]+\n\n)\[[^\n]+\n\n")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"[A-Z_]+=|(?:samebits|bash|python3?|kill|export|sbatch|podman|until|torchfrtrace) |\.venv/")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie above docs/, and give both languages the same addresses."""
    for name, page in PAGES_OF_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for file in files:
        if file.is_documentation_page() and CHINESE in file.dest_uri:
            file.dest_uri = file.dest_uri.replace(CHINESE, "")
            file.url = file.url.replace(CHINESE, "")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate links and fences; the line below the title makes way for the site's own menus."""
    source = page.file.src_uri
    here = posixpath.dirname(source)
    folder = "" if source in PAGES_OF_THE_ROOT.values() else posixpath.join("docs", here)

    def translated(found: re.Match[str]) -> str:
        image, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path = {**PAGES_OF_THE_ROOT, **READMES}.get(path, path)
        if path.startswith("docs/") or path in (*PAGES_OF_THE_ROOT.values(), *READMES.values()):
            inside = posixpath.relpath(path.removeprefix("docs/"), here or ".")
            return f"{image}[{text}]({inside}{anchor})"
        return text  # a file of the sources

    return _FENCE.sub(_coloured, _LINK.sub(translated, _HEADER.sub(r"\1", markdown, count=1)))


def _coloured(fence: re.Match[str]) -> str:
    """Colour commands as a shell's; output stays plain."""
    language, code = fence[1], fence[2]
    if not language:
        language = "console" if code.startswith("$ ") else "shell" if _COMMAND.match(code) else "text"
    return f"```{language}\n{code}```"
