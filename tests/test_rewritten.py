"""The cache of rewritten test modules: pytest reads it instead of rewriting a module again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.rewritten import cache


def is_read_from_the_cache(folder: Path) -> bool:
    """Collect the tests in ``folder``, and search pytest's own trace."""
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "--debug=trace", "-p", "no:cacheprovider"],
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
    )
    return f"found cached rewritten pyc for {folder / 'test_one.py'}" in (folder / "trace").read_text()


def test_pytest_reads_the_cache_of_a_module_until_the_module_changes(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "test_one.py"
    path.write_text("def test_one():\n    assert 1 == 1\n")
    assert not is_read_from_the_cache(tmp_path)
    cache(path)
    assert is_read_from_the_cache(tmp_path)
    path.write_text("def test_one():\n    assert 2 == 2\n")
    assert not is_read_from_the_cache(tmp_path)
    cache(path)
    assert is_read_from_the_cache(tmp_path)
