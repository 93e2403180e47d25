"""The main-thread probe, on real frames: calls through torch, a lock, a sleep."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from samebits.core.point import Point
from samebits.core.reports import Phase, Progress
from samebits.store.checkpoint import MemoryRoom, Writer
from samebits.training.group import transfer
from samebits.training.group.calling_place import PACKAGE_FOLDER
from samebits.training.main_thread_time import main_thread
from samebits.training.run import main_thread_probe
from samebits.training.run.main_thread_probe import (
    MainThreadProbe,
    _place_while_forming,
    expect_pause,
    phase_of,
    place_of,
)
from tests.store.points import JOB

HERE = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__).name


def frame_in(call: Callable[[Callable[[], None]], object]) -> tuple[Phase, str]:
    """Return phase and place of a thread that ``call`` has brought to its callback."""
    found: list[tuple[Phase, str]] = []

    def here() -> None:
        frame: FrameType = sys._getframe(1)
        phase = phase_of(frame)
        found.append((phase, place_of(frame, phase)))

    call(here)
    return found[0]


class Module(torch.nn.Module):
    def __init__(self, here: Callable[[], None]) -> None:
        super().__init__()
        self.here = here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.here()
        return x


class Samples(Dataset[int]):
    def __init__(self, here: Callable[[], None]) -> None:
        self.here = here

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.here()
        return index


def backward(here: Callable[[], None]) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: here())
    x.sum().backward()


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        (lambda here: here(), Phase.USER),
        (lambda here: Module(here)(torch.ones(1)), Phase.FORWARD),
        (lambda here: list(DataLoader(Samples(here))), Phase.DATA),
        (backward, Phase.BACKWARD),
    ],
)
def test_scripts_own_code_has_the_phase_in_which_torch_calls_it(
    call: Callable[[Callable[[], None]], object], phase: Phase
) -> None:
    found, place = frame_in(call)
    assert found is phase
    assert place.startswith(f"{HERE}:") and place.endswith("here)")


@pytest.fixture
def waiting() -> Iterator[Callable[[Callable[[], object]], FrameType]]:
    """Bring a thread to its wait and return its innermost frame."""
    threads: list[threading.Thread] = []

    def begin(body: Callable[[], object]) -> FrameType:
        is_there = threading.Event()

        def run() -> None:
            is_there.set()
            body()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        threads.append(thread)
        assert is_there.wait(60.0)
        while True:  # until it stays there
            frame = sys._current_frames()[thread.ident or 0]
            if frame.f_code.co_name not in ("run", "set", "notify_all", "notify"):
                return frame

    yield begin
    for thread in threads:
        thread.join(60.0)


def test_lock_is_seen_in_the_line_that_takes_it(waiting: Callable[[Callable[[], object]], FrameType]) -> None:
    lock = threading.Lock()
    lock.acquire()

    def take() -> None:
        lock.acquire()

    frame = waiting(take)
    try:
        assert phase_of(frame) is Phase.USER
        assert place_of(frame, Phase.USER) == f"{HERE}:{take.__code__.co_firstlineno + 1} (lock.acquire)"
    finally:
        lock.release()


def test_wait_for_the_writer_process_is_a_wait_for_the_disk(
    tmp_path: Path, waiting: Callable[[Callable[[], object]], FrameType]
) -> None:
    writer = Writer(
        tmp_path, MemoryRoom(tmp_path, JOB, 0), 0, command=(sys.executable, "-c", "import time; time.sleep(600)")
    )
    writer.submit("a", 1, Point(1, 1))
    waiting(lambda: writer.outcome(wait=True))
    waits = threading.enumerate()[-1].ident or 0
    give_up_at = time.monotonic() + 60
    while (frame := sys._current_frames()[waits]).f_code.co_name != "_hear":
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert phase_of(frame) is Phase.STORING
    os.kill(writer.pid or 0, signal.SIGKILL)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace ``time.monotonic``."""
    now = [100.0]
    monkeypatch.setattr(main_thread_probe.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(main_thread_probe, "_pause_until", 0.0)
    return now


def look(clock: list[float], after_s: float, seen: MainThreadProbe) -> Progress | None:
    clock[0] += after_s
    return seen.look()


def test_progressing_thread_is_not_reported_and_a_stuck_one_is(clock: list[float]) -> None:
    step = [0]
    seen = MainThreadProbe(lambda: step[0], lambda: 7)
    assert look(clock, 1.9, seen) is None
    still = look(clock, 0.2, seen)
    assert still is not None and still.place.startswith(HERE)
    assert (still.collectives, still.steps) == (7, 0) and still.still_s == pytest.approx(2.1)
    step[0] += 1
    assert look(clock, 0.5, seen) is None


def test_longest_duration_is_remembered_without_the_first_steps(clock: list[float]) -> None:
    step = [0]
    seen = MainThreadProbe(lambda: step[0], lambda: 7)
    for took_s in (100.0, 50.0, 4.0, 3.0):
        step[0] += 1
        look(clock, took_s, seen)
    assert look(clock, 3.5, seen) is None, "it has taken longer before"
    still = look(clock, 1.0, seen)
    assert still is not None and (still.longest_s, still.steps) == (4.0, 4)


def test_steps_are_counted_rather_than_samples(clock: list[float]) -> None:
    """A job that made many fast steps between two samples is past its first ones."""
    step = [3]
    seen = MainThreadProbe(lambda: step[0], lambda: 7)
    step[0] = 20
    assert look(clock, 0.5, seen) is None
    still = look(clock, 3.0, seen)
    assert still is not None and still.steps == 17


def test_short_step_timeout_is_reported_in_time(clock: list[float]) -> None:
    seen = MainThreadProbe(lambda: 1, lambda: 7, 1.0)
    assert look(clock, 0.6, seen) is not None


def test_expected_pause_does_not_count_as_a_standstill(clock: list[float]) -> None:
    seen = MainThreadProbe(lambda: 1, lambda: 1)
    expect_pause(60)
    assert look(clock, 59.0, seen) is None
    assert look(clock, 1.5, seen) is None, "it starts after the pause"
    assert look(clock, 2.0, seen) is not None
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected seconds"):
            expect_pause(wrong)


def passing_on(file: str, name: str = "_passes_on") -> Callable[..., object]:
    """Return a function of this name, as if in a file of this package, that calls its first argument with the rest."""
    found: dict[str, Any] = {}
    exec(compile(f"def {name}(call, *rest): return call(*rest)", f"{PACKAGE_FOLDER}training/{file}", "exec"), found)
    function: Callable[..., object] = found[name]
    return function


def test_place_while_the_group_forms_is_the_innermost_call_that_tells() -> None:
    def place(*calls: Callable[..., object]) -> object:
        return passing_on("run/elastic_run.py")(*calls, lambda: _place_while_forming(sys._getframe(1)))

    form, wait = passing_on("group/meshes.py", "form_all"), passing_on("group/breaker.py", "wait")
    assert place(form, wait) == "group/meshes.py:1 (form_all)"
    assert place(passing_on("group/meshes.py"), wait) == "group/breaker.py:1 (wait)", "better than nothing"

    def of_script(call: Callable[..., object], *rest: object) -> object:
        return call(*rest)

    assert str(place(form, of_script, wait)).startswith(f"{HERE}:")


def test_moving_thread_makes_progress_while_the_group_forms(clock: list[float]) -> None:
    seen = MainThreadProbe(lambda: 1, lambda: 7, forms=True)
    for _ in range(3):
        assert look(clock, 3.0, seen) is None, "it is elsewhere than before"
        assert look(clock, 3.0, seen) is None
    for _ in range(2):
        still = look(clock, 3.0, seen)
    assert still is not None and still.still_s == pytest.approx(3.0)


def test_thread_that_waits_for_one_message_after_another_makes_progress(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large state arrives in many pieces, and the thread waits for each of them at the same place."""
    seen = MainThreadProbe(lambda: 1, lambda: 7, forms=True)
    monkeypatch.setattr(main_thread_probe, "_outwards", lambda _: iter(()))  # always at the same instruction
    look(clock, 3.0, seen)
    for _ in range(3):
        main_thread.waited_for_others(0.0)
        assert look(clock, 3.0, seen) is None


def test_each_piece_of_a_transfer_is_progress() -> None:
    work, before = SimpleNamespace(wait=lambda: True), main_thread.messages
    transfer._arrive([work, work])  # type: ignore[list-item]
    assert main_thread.messages == before + 2
