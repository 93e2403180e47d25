"""The zygote: a forked worker equals a plainly started one; anything that prevents a fork starts plainly."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samebits.launcher.processes import Death, is_own_child, reap
from samebits.launcher.spawning import Program, spawn
from samebits.launcher.supervising import Zygote
from samebits.store.process_identity import ProcessIdentity
from tests.launcher.shell_job import WAIT_S

pytestmark = [pytest.mark.system, pytest.mark.thorough]

PROBE = Path(__file__).with_name("forked_probe.py")


class Nursery:
    """A zygote and the results of its starts."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.folder = folder
        self.program = Program(folder, sys.executable, str(PROBE), ("ends", "0"), environment, {})
        self.zygote = Zygote(folder)
        self.plain = 0

    def start(self) -> None:
        self.zygote.start(self.program)
        assert self.zygote._answers(WAIT_S), (self.folder / "zygote.log").read_text()

    def outcome(self, way: Any, program: Program | None = None, name: str = "worker_7") -> tuple[Death, list[str]]:
        """Return how the process ended and the lines of its log."""
        log_path = self.folder / f"{len(list(self.folder.iterdir()))}.log"
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        identity = ProcessIdentity.of_child(way(program or self.program, name, log))
        os.close(log)
        assert is_own_child(identity)
        identity.wait_for_exit(WAIT_S)
        death = reap(identity)
        assert death is not None
        return death, log_path.read_text().splitlines()


@pytest.fixture
def nursery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    found = Nursery(tmp_path)

    def counted(program: Program, name: str, log: int) -> int:
        found.plain += 1
        return spawn(program, name, log)

    monkeypatch.setattr("samebits.launcher.supervising.spawn", counted)
    yield found
    found.zygote.end()


def test_forked_worker_equals_a_plainly_started_one(nursery: Nursery) -> None:
    nursery.start()
    seen: list[dict[str, Any]] = []
    unlike: list[dict[str, Any]] = []
    for way in (spawn, nursery.zygote.spawn, nursery.zygote.spawn):
        death, lines = nursery.outcome(way)
        assert death == Death(status=0), lines
        assert lines[-1] == "at the exit"
        of_all, of_one = json.loads(lines[0])
        of_all["descriptors"] = [Path(one).suffix for one in of_all["descriptors"]]
        seen.append(of_all)
        unlike.append(of_one)
        assert (nursery.folder / "kept_open.txt").read_text() == "flushed by the interpreter's end"
        (nursery.folder / "kept_open.txt").unlink()
    assert nursery.plain == 0
    assert seen[1] == seen[2] == seen[0] and seen[0]["parent"] == os.getpid()
    assert all(len({one[key] for one in unlike}) == 3 for key in unlike[0]), unlike

    raising = replace(nursery.program, args=("raises", "0"))
    plain, forked = (nursery.outcome(way, raising) for way in (spawn, nursery.zygote.spawn))
    assert plain[0] == forked[0] == Death(status=1)
    assert forked[1][1:] == plain[1][1:] and "ValueError: of raises" in forked[1]
    failing = replace(nursery.program, args=("ends", "3"))
    assert nursery.outcome(nursery.zygote.spawn, failing)[0] == Death(status=3)
    assert nursery.plain == 0

    # Anything that differs from the zygote's own start.
    others = {**nursery.program.environment, "MALLOC_ARENA_MAX": "1"}
    shadowing = nursery.folder / "shadowing"
    shadowing.mkdir()
    (shadowing / "json.py").write_text(Path(json.__file__).read_text())
    (shadowing / "train.py").write_text(PROBE.read_text())
    for changed in (
        replace(nursery.program, environment=others),
        replace(nursery.program, folder=shadowing),
        replace(nursery.program, script=str(shadowing / "train.py")),
    ):
        before = nursery.plain
        nursery.outcome(nursery.zygote.spawn, changed)
        assert nursery.plain == before + 1

    os.kill(nursery.zygote._pid, signal.SIGKILL)
    before = nursery.plain
    assert nursery.outcome(nursery.zygote.spawn)[0] == Death(status=0)
    assert nursery.plain == before + 1


def test_plain_script_is_started_by_the_launcher_that_holds_its_seat(nursery: Nursery) -> None:
    nursery.program = replace(nursery.program, environment={**nursery.program.environment, "PLAIN": "1"})
    nursery.zygote.start(nursery.program)
    nursery.zygote._answers(WAIT_S)
    death, lines = nursery.outcome(nursery.zygote.spawn)
    assert (nursery.plain, death.status) == (1, 64), lines  # the launcher refuses to start without its settings
