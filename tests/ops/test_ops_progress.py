"""The progress line, the screen it is drawn on, and the loss that is read from a log."""

from __future__ import annotations

import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime.ops.progress import LossTail, Screen, progress_line
from tests.ops.views import view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_says_phase_step_loss_and_workers() -> None:
    assert progress_line(view(), "0.5", is_linked=True, running=3) == "training · step 7 · loss 0.5 · 3/3 workers"
    assert progress_line(view(), "", is_linked=True, running=3) == "training · step 7 · 3/3 workers"
    assert progress_line(view(), "", is_linked=False, running=2) == "scheduler away · step 7 · 2/3 workers"
    assert progress_line(view(), "", is_linked=False, running=0) == "training · step 7 · 0/3 workers", "none misses it"
    waiting = replace(view(), seat_free_in_s=24.2)
    assert progress_line(waiting, "", is_linked=True, running=3).endswith("3/3 workers · seat free in 25 s")
    assert progress_line(None, "", is_linked=False, running=4) == "waiting for the scheduler · 4 workers started"


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
def test_the_world_in_words(changes: dict[str, int], text: str) -> None:
    seen = replace(view(), **changes)  # type: ignore[arg-type]
    assert progress_line(seen, "", is_linked=True, running=3) == f"training · step 7 · {text}"


def test_on_a_terminal_progress_is_drawn_over_and_events_stay() -> None:
    stream = Terminal()
    screen = Screen(stream)
    screen.progress("step 1", "training", 0.0)
    screen.progress("step 1", "training", 0.1)
    screen.progress("step 2", "training", 0.2)
    screen.say("worker 2 is gone")
    screen.close()
    erase = "\r\x1b[K"
    assert stream.getvalue() == f"step 1{erase}step 2{erase}samebits: worker 2 is gone\nstep 2\n"


def test_elsewhere_a_line_is_said_on_change_and_steps_every_few_seconds() -> None:
    stream = io.StringIO()
    screen = Screen(stream)
    for now, (text, key) in enumerate(
        [("step 1", 4), ("step 2", 4), ("lost", 3), ("step 3", 3), ("step 4", 3), ("step 5", 3), ("step 6", 3)]
    ):
        screen.progress(text, key, now * 1.1)
    screen.progress("step 7", 3, 7.8)
    screen.say("over")
    screen.close()
    assert stream.getvalue() == "step 1\nlost\nstep 7\nsamebits: over\n"


def test_a_reader_who_has_gone_away_is_no_reason_to_stop() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with os.fdopen(writable, "w") as stream:
        screen = Screen(stream)
        screen.say("one")
        screen.say("two")  # and closing the stream does not fail either


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_neither_is_a_terminal_that_was_closed_or_a_disk_that_is_full(number: int, tmp_path: Path) -> None:
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
def test_the_loss_of_a_line(tmp_path: Path, line: str, loss: str) -> None:
    log = tmp_path / "worker_0.log"
    tail = LossTail(log)
    log.write_text(f"something else\n{line}\nsomething else\n")
    assert tail.read() == loss


def test_only_what_is_appended_counts_and_a_line_may_come_in_pieces(tmp_path: Path) -> None:
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
    log.write_text("epoch 0 step 4 loss 1.5\n")  # cut back by somebody
    assert tail.read() == "1.5"


def test_the_loss_of_an_earlier_log_holds_until_this_one_tells_another(tmp_path: Path) -> None:
    tail = LossTail(tmp_path / "worker_4.log", "0.75")
    assert tail.read() == "0.75"
    tail.log.write_text("epoch 0 step 9 loss 0.5\n")
    assert tail.read() == "0.5"
