"""The progress line, the screen it is drawn on, and the loss read from a log."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from samebits.launcher.progress_line import JsonScreen, LossTail, ProgressFacts, Screen, world_text
from tests.launcher.views import view, worker


def at(step: int) -> ProgressFacts:
    return ProgressFacts("", "4/4", step=step)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"spares_alive": 1}, "3/3 workers, 1 spare"),
        ({"spares_alive": 2, "alive": 2}, "2/3 workers, 2 spares"),
        ({"wanted_size": 4}, "3/3 workers (4 wanted)"),
        ({"wanted_size": 2, "joining": 1}, "3/3 workers, 1 joining"),
        ({"wanted_size": 5, "joining": 1, "spares_alive": 1}, "3/3 workers (5 wanted), 1 joining, 1 spare"),
    ],
)
def test_world_in_words(changes: dict[str, int], text: str) -> None:
    seen = replace(view(), **changes)  # type: ignore[arg-type]
    assert world_text(seen, seen.alive) == text


def test_worker_that_waits_for_its_shard_group_is_not_joining() -> None:
    waits = replace(worker(2, joining=True), waits_for=("slot 3 is filled",))
    seen = replace(view(), world_size=2, wanted_size=4, alive=2, joining=1, workers=(worker(0), worker(1), waits))
    assert world_text(seen, seen.alive) == "2/2 workers (4 wanted), 1 waiting"
    both = replace(seen, joining=2, workers=(*seen.workers, worker(3, joining=True)))
    assert world_text(both, both.alive) == "2/2 workers (4 wanted), 1 joining, 1 waiting"


def test_progress_on_a_terminal_is_redrawn_and_events_stay() -> None:
    stream = Terminal()
    screen = Screen(stream)
    screen.progress(at(1), "training", 0.0)
    screen.progress(at(1), "training", 0.1)
    screen.progress(at(2), "training", 0.2)
    screen.say("worker 2 is gone")
    screen.close()
    erase = "\r\x1b[K"
    assert stream.getvalue() == f"step 1 · 4/4{erase}step 2 · 4/4{erase}samebits: worker 2 is gone\nstep 2 · 4/4\n"


def test_without_a_terminal_changes_are_printed_and_steps_every_few_seconds() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    for now, (step, key) in enumerate([(1, 4), (2, 4), (3, 3), (4, 3), (5, 3), (6, 3), (7, 3)]):
        screen.progress(at(step), key, now * 1.1)
    screen.progress(at(8), 3, 7.8)
    screen.say("over")
    screen.close()
    assert stream.getvalue() == "step 1 · 4/4\nstep 3 · 4/4\nstep 8 · 4/4\nsamebits: over\n"


def test_json_output_is_one_object_per_line() -> None:
    stream = Terminal()
    screen = JsonScreen(stream)
    for now in (0.0, 0.5, 1.1):
        screen.progress(at(3), "training", now)
    screen.progress(at(3), "forming", 1.2)
    screen.say("worker 2 is gone")
    screen.raw("[worker_0]: text")
    screen.close()
    screen.end("stopped", 78, 3, "Ctrl-C")
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [next(iter(one)) for one in told] == ["progress"] * 3 + ["event", "log", "end"]
    assert told[0]["progress"]["step"] == 3
    assert told[-1] == {"end": "stopped", "status": 78, "step": 3, "cause": "Ctrl-C"}


def test_closed_pipe_does_not_stop_the_command() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w") as stream:
        screen = Screen(stream)
        screen.say("one")
        screen.say("two")  # and closing the stream does not fail either


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_closed_terminal_or_full_disk_does_not_stop_the_command(number: int, tmp_path: Path) -> None:
    def refuse(text: str) -> int:
        raise OSError(number, os.strerror(number))

    with (tmp_path / "file").open("w") as stream:
        shown = SimpleNamespace(isatty=stream.isatty, fileno=stream.fileno, flush=stream.flush, write=refuse)
        screen = Screen(shown)  # type: ignore[arg-type]
        screen.say("one")
        screen.say("two")


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        ("epoch 0 step 20 loss 1.2345", "1.2345"),
        ("epoch: 1 step: 1875, loss is 0.0023026", "0.0023026"),
        ("epoch: 1 step: 20, loss: 1e-05", "1e-05"),
        ("2026-11-21 10:00:00 epoch 3 step 40 loss nan", "nan"),
        ("epoch 0 step 20 lossy 1.2", ""),
        ("final step=600 loss=0.1 accuracy=0.97", ""),
    ],
)
def test_loss_in_a_line(tmp_path: Path, line: str, loss: str) -> None:
    log = tmp_path / "worker_0.log"
    tail = LossTail(log)
    log.write_text(f"something else\n{line}\nsomething else\n")
    assert tail.read() == loss


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("epoch 0 step 20 loss 1.2345", 20),
        ("[rank 0] Step [40/300]: loss 0.5", 40),
        ("step=7", 7),
        ("footstep 9", None),
        ("2026-11-21 10:00:00 samebits worker 0: generation 2: begins at step 8", None),
    ],
)
def test_step_printed_by_a_script_is_its_own(tmp_path: Path, line: str, step: int | None) -> None:
    log = tmp_path / "worker_0.log"
    tail = LossTail(log)
    log.write_text(f"something else\n{line}\nsomething else\n")
    tail.read()
    assert tail.step == step


def test_only_appended_text_counts_and_a_line_may_arrive_in_pieces(tmp_path: Path) -> None:
    log = tmp_path / "worker_0.log"
    log.write_text("epoch 0 step 600 loss 0.0001\n")
    tail = LossTail(log)
    assert tail.read() == ""
    with log.open("a") as file:
        for piece, expected in (
            ("epoch 0 step 1 lo", ""),
            ("ss 2.5", ""),
            ("\nepoch 0 step 2 loss 2.25\n", "2.25"),
            ("noise without end " * 10_000 + "\nepoch 0 step 3 loss 2.0\n", "2.0"),
        ):
            file.write(piece)
            file.flush()
            assert tail.read() == expected
    log.write_text("epoch 0 step 4 loss 1.5\n")  # truncated by another process
    assert tail.read() == "1.5"


def test_loss_of_an_earlier_log_is_kept_until_this_one_has_one(tmp_path: Path) -> None:
    tail = LossTail(tmp_path / "worker_4.log", "0.75")
    assert tail.read() == "0.75"
    tail.log.write_text("epoch 0 step 9 loss 0.5\n")
    assert tail.read() == "0.5"
