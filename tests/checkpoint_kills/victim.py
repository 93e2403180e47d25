"""The process that is killed: a rank without a job that loads its newest point and then saves repeatedly.

It reports its actions through a pipe, one per line: ``load``, ``save N``, ``delete``, ``durable N`` once the point of
step N is on disk, and ``global N`` once every rank of its job, which is this one, has reported it. A point's content
follows from its step alone, so that any reader can check it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from samebits.core.point import Point
from samebits.service.copies.buddy import CopyListener, brief_of
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import Writer, pruning
from samebits.training.checkpoint.rank_checkpoints import RankCheckpoints
from samebits.training.state import snapshot
from samebits.training.state.checkpoint_config import CheckpointConfig

JOB = "6a1f0c1e-0000-4000-8000-00000000dead"
SLOT = 0
KEEP = 2
LOOK_EVERY = 4
WAIT_S = 60.0


class Committed:
    """The scheduler of a world of one: what the rank reports is what every rank holds, while the scheduler is there.

    Args:
        is_there: whether it answers.
        say: takes a line.
    """

    def __init__(self, *, is_there: bool = True, say: Callable[[str], None] = str) -> None:
        self.point: Point | None = None
        self._is_there = is_there
        self._say = say

    def report(self, points: Sequence[Point]) -> None:
        if self._is_there and points:
            self._say(f"global {max(points).step}")
            self.point = max(points)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the points of the one rank are.

    Attributes:
        root: the checkpoint folder.
        memory: the folder of the memory slots.
        elsewhere: that of another host, where copies are kept.
    """

    root: Path
    memory: Path
    elsewhere: Path

    @property
    def rank_folder(self) -> Path:
        return checkpoints.rank_directory(self.root, SLOT)

    def open(self, committed: Committed | None = None, *, is_async: bool = True, buddy: str = "") -> RankCheckpoints:
        """Open the checkpoints. ``buddy``: where a keeper listens."""
        committed, listener = committed or Committed(), CopyListener("127.0.0.1") if buddy else None
        checkpoints = RankCheckpoints(
            CheckpointConfig(keep_checkpoint_max=KEEP, async_save=is_async),
            self.root,
            job=JOB,
            job_name="kills",
            slot=SLOT,
            node="0",
            committed=lambda: committed.point,
            report=committed.report,
            memory=self.memory,
            listener=listener,
        )
        if listener is not None:
            ticket = listener.keeper.ticket
            checkpoints.exchange_copies(brief_of(None, str(self.memory), JOB, buddy, "the keeper", (), ticket))
        return checkpoints

    def newest_on_disk(self) -> int:
        """Return the step of the newest directory with a point's name, or 0."""
        return max((found.point.step for found in checkpoints.scan(self.rank_folder, JOB)), default=0)


def state_of(step: int, elements: int) -> dict[str, object]:
    """Return the content of that step's point."""
    return {
        "steps": step,
        "weight": torch.arange(elements, dtype=torch.float32) + step,
        "moments": [torch.full((elements // 2,), step, dtype=torch.int64), torch.tensor(float(step))],
    }


def is_right(checkpoint: checkpoints.LoadedPoint) -> bool:
    """Return whether every value is that of the point's step."""
    saved = snapshot.join(checkpoint.tree, checkpoint.tensors)
    expected = state_of(checkpoint.header.point.step, saved["weight"].numel())
    moments = zip(saved["moments"], expected["moments"], strict=True)  # type: ignore[call-overload]
    return (
        saved["steps"] == expected["steps"]
        and torch.equal(saved["weight"], expected["weight"])  # type: ignore[arg-type]
        and all(torch.equal(one, other) for one, other in moments)
    )


@dataclass(frozen=True, slots=True)
class Life:
    """How one victim lives.

    Attributes:
        elements: the number of elements of its largest tensor.
        is_async: whether a writer process writes.
        is_heard: whether its scheduler is there; without it nothing may be deleted.
        buddy: where its copies go; empty: nowhere.
    """

    elements: int
    is_async: bool
    is_heard: bool
    buddy: str = ""


def live(place: Place, life: Life, say: Callable[[str], None]) -> None:
    """Load, then save until killed.

    Args:
        place: where.
        life: how.
        say: takes a line.
    """
    for owner in (pruning, Writer):  # both that delete beside the training are hooked
        owner.prune = _told(say, owner.prune)  # type: ignore[attr-defined]
    checkpoints = place.open(Committed(is_there=life.is_heard, say=say), is_async=life.is_async, buddy=life.buddy)
    step = load(checkpoints, say)
    while True:
        step += 1
        say(f"save {step}")
        tree, tensors = snapshot.take_apart(state_of(step, life.elements), "state")
        checkpoints.save(checkpoints.header(Point(step, 1), 0, 1), tensors, tree, {}, wait_s=WAIT_S)
        say(f"durable {place.newest_on_disk()}")
        if step % LOOK_EVERY == 0:
            load(checkpoints, say)


def _told(say: Callable[[str], None], prune: Callable[..., object]) -> Callable[..., object]:
    def told(*arguments: object, **options: object) -> object:
        say("delete")
        return prune(*arguments, **options)

    return told


def load(checkpoints: RankCheckpoints, say: Callable[[str], None]) -> int:
    """Load the newest point and check it; return its step, or 0 if there is none."""
    say("load")
    held = checkpoints.held()
    if not held:
        return 0
    if not is_right(checkpoints.load(held[0])):
        raise AssertionError(f"the point of {held[0]} is loaded without an error, and is wrong")
    return held[0].step


def start(place: Place, life: Life) -> tuple[int, int]:
    """Start a victim; return its pid and the reading end of its pipe."""
    listen, speak = os.pipe()
    pid = os.fork()
    if pid:
        os.close(speak)
        return pid, listen
    try:
        os.close(listen)
        live(place, life, lambda line: _write(speak, line))
    except BaseException as error:
        _write(speak, f"error {error!r}")
    os._exit(1)


def _write(descriptor: int, line: str) -> None:
    os.write(descriptor, f"{line}\n".encode())
