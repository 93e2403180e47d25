"""kill -9 of the uploader at every change to the bucket, just before and just after the server acts."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from samebits.errors import CheckpointError
from tests.store.checkpoint.conftest import Folder
from tests.store.checkpoint.remote.remote_points import assert_is, points, prune, save
from tests.store.checkpoint.remote.remote_uploader import KEPT
from tests.store.checkpoint.remote.s3_server import S3Server

CHANGES = ["data", "manifest", "manifest", "data"]  # two are written, then the two of the oldest point are deleted


class Uploader:
    """The warm process; ``run`` starts a child and kills it at its n-th change."""

    def __init__(self, url: str, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.store.checkpoint.remote.remote_uploader", url],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, s3: S3Server, step: int, generation: int, kill_at: int | None = None, *, after: bool = False) -> int:
        """Return the child's exit status, negative for a signal."""
        pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        s3.requests.clear()

        def hook(_request: str) -> None:
            if len(changes(s3)) == kill_at:
                os.kill(pids.get(timeout=30), signal.SIGKILL)
                if not after:
                    raise ConnectionAbortedError("killed before the server acts")

        s3.before, s3.after = (s3.before, hook) if after else (hook, s3.after)
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(f"{step} {generation}\n")
            self._process.stdin.flush()
            pids.put(int(self._process.stdout.readline()))
            return int(self._process.stdout.readline())
        finally:
            s3.before = s3.after = lambda request: None

    def close(self) -> None:
        self._process.communicate(timeout=30)


def changes(s3: S3Server) -> list[str]:
    """Return the kinds of objects that were to be written or deleted."""
    kinds = {"safetensors": "data", "msgpack": "manifest", "json": "owner"}
    return [kinds[one.rpartition(".")[2]] for one in s3.requests if one.startswith(("PUT", "DELETE"))]


@pytest.fixture
def uploader(bucket: Folder, s3: S3Server) -> Iterator[Uploader]:
    made = Uploader(bucket.url, s3.environment)
    yield made
    made.close()


def assert_nothing_lost(folder: Folder, before: list[tuple[int, int]]) -> None:
    """Check that every listed point is complete and correct, and that enough points and the newest are there."""
    place = folder.place()
    for found in place.scan():
        try:
            assert_is(place.read(found), found.point.step)
        except CheckpointError as error:
            pytest.fail(f"a kill left a point that cannot be loaded: {error}")
    now = points(place)
    assert len(now) >= KEPT and now[0] >= before[0], f"{before} became {now}"


def settle(folder: Folder, step: int, generation: int) -> list[tuple[int, int]]:
    """Let the next generation continue: two points and nothing else remain."""
    place = folder.place(leftover_age_s=0.0)
    for number in (step, step + 1):
        save(place, number, generation)
    prune(place, KEPT)
    assert len(folder.names()) == 2 * KEPT + 1, "leftovers of the dead are swept once they are old"
    return points(place)


def test_kill_at_any_change_loses_no_point(bucket: Folder, s3: S3Server, uploader: Uploader) -> None:
    known = settle(bucket, 1, 1)
    assert uploader.run(s3, 3, 2) == 0
    assert changes(s3) == CHANGES, "these are all possible times"
    known = settle(bucket, 5, 3)
    kills = [(number, after) for number in range(1, len(CHANGES) + 1) for after in (False, True)]
    for generation, (number, after) in enumerate(kills, start=2):
        assert uploader.run(s3, 10 * generation, 2 * generation, number, after=after) == -signal.SIGKILL
        assert_nothing_lost(bucket, known)
        known = settle(bucket, 10 * generation + 1, 2 * generation + 1)


def test_kill_at_the_claim_leaves_a_claimable_folder(bucket: Folder, s3: S3Server, uploader: Uploader) -> None:
    for after in (False, True):
        assert uploader.run(s3, 1, 1, 1, after=after) == -signal.SIGKILL
        assert changes(s3) == ["owner"]
        assert bucket.place().scan() == []
    assert len(settle(bucket, 1, 2)) == 2
