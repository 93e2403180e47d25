"""A seed determines a run, down to each event, in this process and in another one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.trace import Violation
from tests.simulation.world import World

PROGRAM = """
from tests.simulation.test_simulation_repeats import digest
print(digest({seed}))
"""


def digest(seed: int) -> str:
    """Return a digest of everything that happened in the run."""
    world = World(seed, traced=True)
    world.run()
    return hashlib.sha256("\n".join(world.trace.lines()).encode()).hexdigest()


@pytest.mark.parametrize("seed", [3, 14, 15, 92])
def test_seed_repeats(seed: int) -> None:
    assert digest(seed) == digest(seed)


@pytest.mark.parametrize("seed", [3, 14, 15, 92])
def test_tracing_changes_nothing(seed: int) -> None:
    assert World(seed, traced=True).run() == World(seed).run()


def test_two_seeds_differ() -> None:
    assert digest(3) != digest(4)


def test_seed_repeats_in_another_process_with_other_hashes(repository: Path) -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM.format(seed=65)],
            cwd=repository,
            env={"PYTHONPATH": str(repository), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert printed[0].strip() == digest(65)


def test_crash_of_the_core_is_a_violation() -> None:
    world = World(1)

    def break_down(*_: object) -> None:
        raise KeyError("a decision that cannot be made")

    world.watch_decided.append(break_down)
    with pytest.raises(Violation) as caught:
        world.run()
    assert caught.value.name == "crash"
    assert "a decision that cannot be made" in str(caught.value)
