"""One option for this folder: write the golden scenarios anew instead of comparing with them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write the expected traces of tests/core/scenarios/ anew, after a deliberate change",
    )
