"""Build the site in both languages: every link and anchor leads somewhere, and nothing is loaded from other sites."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHINESE = ".zh-CN.md"
IN_ONE_LANGUAGE = {"contributors/evidence.md", "contributors/relays.md"}


@pytest.mark.parametrize("is_chinese", [False, True], ids=["en", "zh"])
def test_site_is_built_and_complete(tmp_path: Path, is_chinese: bool) -> None:
    config = "mkdocs.zh-CN.yml" if is_chinese else "mkdocs.yml"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config, "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    here = {page for page in pages if page.endswith(CHINESE) == is_chinese} | IN_ONE_LANGUAGE
    expected = {re.sub(r"(\.zh-CN)?\.md$", ".html", page) for page in here} | {"contributors/contributing.html"}
    built = {page.relative_to(tmp_path).as_posix() for page in tmp_path.rglob("*.html")}
    assert built == expected | {"404.html"}
    for page in sorted(built):
        html = (tmp_path / page).read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*\s(?:src|href)="(https?:[^"]*)"', html)
        assert loaded == [], f"{page} loads something from another site"
    assert (tmp_path / "until-stepping.json").is_file(), "README's chart names it as its source"
