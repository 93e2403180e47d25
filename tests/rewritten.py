"""``python -m tests.rewritten``: cache the test modules with their asserts rewritten, as pytest would.

Rewriting takes half of a collection's CPU time. Without the cache, each process of a run does it again. pytest itself
writes no cache if PYTHONDONTWRITEBYTECODE is set, as in containers, but reads one.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

ROOT = Path(__file__).parent
PATTERNS = ("test_*.py", "conftest.py")
"""The files that pytest rewrites in this repository."""


def cache(path: Path) -> None:
    """Write pytest's own cache file of this module, unless it is there and up to date."""
    pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
    if rewrite._read_pyc(path, pyc) is None:
        pyc.parent.mkdir(parents=True, exist_ok=True)
        private: Any = rewrite
        source_hash, code = private._rewrite_test(path, None)
        private._write_pyc(SimpleNamespace(trace=sys.exit), code, source_hash, pyc)


if __name__ == "__main__":
    with multiprocessing.Pool() as processes:
        processes.map(cache, sorted(path for pattern in PATTERNS for path in ROOT.rglob(pattern)), chunksize=8)
