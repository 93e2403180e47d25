"""Start the long tests first, spread over the processes, so that a run does not end waiting for one of them.

``tests/long_tests.txt`` lists them with their seconds; ``python -m tests.long_first FILE`` rewrites it from the results
of ``pytest --cpu-times FILE``. xdist's worksteal hands every process an equal slice of the list and moves the ends of
these around, so each slice starts with its share of long tests and continues with whole files. A name that is missing
or outdated there only costs time.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pytest

TABLE = Path(__file__).with_name("long_tests.txt")
LONG_S = 10.0
HEAD = f"# Seconds and name of every test of {LONG_S:g} seconds and more: tests/long_first.py lists these first.\n"


def long_tests() -> dict[str, float]:
    """Return seconds by name: the part after the file's path, which may move."""
    rows = (line.split(maxsplit=1) for line in TABLE.read_text().splitlines() if line and not line.startswith("#"))
    return {name: float(seconds) for seconds, name in rows}


def table_from(measured: str) -> str:
    """Return the table, from the lines of ``--cpu-times``: CPU-seconds, seconds, test."""
    rows = [line.split(maxsplit=2) for line in measured.splitlines()]
    long = sorted((-round(float(seconds)), name_of(nodeid)) for _, seconds, nodeid in rows if float(seconds) >= LONG_S)
    return HEAD + "".join(f"{-seconds:3} {name}\n" for seconds, name in long)


def name_of(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def dealt(names: Sequence[str], seconds: Mapping[str, float], processes: int) -> list[int]:
    """Return the order of the tests (by number) for so many processes."""
    longest = sorted(
        (number for number, name in enumerate(names) if name in seconds), key=lambda number: -seconds[names[number]]
    )
    others = iter(number for number, name in enumerate(names) if name not in seconds)
    order: list[int] = []
    for process in range(processes):
        share = (len(names) - len(order)) // (processes - process)
        first = longest[process::processes][:share]
        order += first
        order += islice(others, share - len(first))
    missing = set(range(len(names))) - set(order)  # if a share was too small for its long ones
    return order + sorted(missing)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests, identically in each of xdist's processes."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        order = dealt([name_of(item.nodeid) for item in items], long_tests(), workerinput["workercount"])
        items[:] = [items[number] for number in order]


if __name__ == "__main__":
    TABLE.write_text(table_from(Path(sys.argv[1]).read_text()))
