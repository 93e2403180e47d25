"""Add an option that rewrites the golden scenarios instead of comparing with them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-scenarios",
        action="store_true",
        help="write the expected traces of tests/core/scenarios/ anew, after a deliberate change",
    )
