"""The pages as a site: every link and anchor of them leads somewhere, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_site_is_built_and_complete(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = {"index.html", "index.zh-CN.html", *(page.name.replace(".md", ".html") for page in ROOT.glob("docs/*.md"))}
    assert pages <= {page.name for page in tmp_path.glob("*.html")}
    for page in pages:
        loaded = re.findall(
            r'<(?:script|img|link|iframe)[^>]*\s(?:src|href)="(https?:[^"]*)"', (tmp_path / page).read_text()
        )
        assert loaded == [], f"{page} loads something from elsewhere"
