"""Every kind of damage to a rank's newest point is detected and reported, and an older point is used.

The rank's folder has three points. Each case damages one file of the newest (or of more) and then asks what a restarted
process asks: which points are held, what the newest contains, which messages the user gets. Nothing on disk may have
been deleted. The points are tiny and their chunks 100 bytes, so that every chunk, every file length and every file can
be tried.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samebits.core.point import Point
from samebits.errors import CheckpointError, ForeignFolderError
from samebits.store.checkpoint import PointHeader, TensorPart, point_name, rank_directory, scan, write_point
from samebits.store.owner import claim_folder
from samebits.training.checkpoint.rank_checkpoints import RankCheckpoints
from samebits.training.state.checkpoint_config import CheckpointConfig
from tests.store.points import CHUNK_BYTES, JOB

DATA, MANIFEST = "data.safetensors", "manifest.msgpack"
OTHER_JOB = "6a1f0c1e-0000-4000-8000-000000000002"
STEPS = (5, 10, 15)
NEWEST = STEPS[-1]


def weight_of(job: str, rank: int, step: int, generation: int = 1) -> bytes:
    """Return bytes that no other point's tensor has."""
    seed = f"{job} {rank} {step} {generation}".encode()
    return (seed * 220)[:220]


def save(root: Path, step: int, *, generation: int = 1, rank: int = 0, job: str = JOB) -> Path:
    header = PointHeader(job, Point(step, generation), world_size=2, rank=rank, slot=rank, node=str(rank))
    tensors = [
        TensorPart("weight", "F32", (5, 11), weight_of(job, rank, step, generation)),
        TensorPart("bias", "BF16", (3,), bytes(range(6))),
    ]
    return write_point(root, header, tensors, {"steps": step}, {}, chunk_bytes=CHUNK_BYTES)


@dataclass(frozen=True)
class Rank:
    """Rank 0's checkpoint folder below ``root``, as a restarted process sees it."""

    root: Path
    said: pytest.LogCaptureFixture

    @property
    def folder(self) -> Path:
        return rank_directory(self.root, 0)

    def point(self, step: int, generation: int = 1) -> Path:
        return self.folder / point_name(Point(step, generation))

    def restart(self) -> RankCheckpoints:
        self.said.clear()
        return rank_checkpoints(self.root, 0)

    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.said.records if record.levelno >= logging.WARNING]

    def require_falls_back_to(self, steps: tuple[int, ...], case: object) -> list[str]:
        """Check that a restarted process holds exactly these steps, newest first; return the messages on the others."""
        before = contents_of(self.folder)
        checkpoints = self.restart()
        assert [point.step for point in checkpoints.held()] == list(steps), case
        warnings = self.warnings()
        for step in set(STEPS) - set(steps):
            (line,) = [line for line in warnings if f"ignored the restore point of step {step} " in line]
            assert str(self.point(step)) in line, case
        assert len(warnings) == len(STEPS) - len(steps), case
        for step in steps:
            found = checkpoints.load(Point(step, 1))
            assert bytes(found.tensors["weight"].data) == weight_of(JOB, 0, step), case
            assert found.tree == {"steps": step}, case
        assert checkpoints.held() == [Point(step, 1) for step in steps], case
        assert self.warnings() == warnings, "said once"
        assert contents_of(self.folder) == before, "nothing is deleted or changed meanwhile"
        return warnings


def rank_checkpoints(root: Path, slot: int) -> RankCheckpoints:
    """Return the checkpoints as of a fresh process with nothing in memory."""
    memory = root.with_name("memory")
    return RankCheckpoints(
        CheckpointConfig(),
        root,
        job=JOB,
        job_name="matrix",
        slot=slot,
        node=str(slot),
        committed=lambda: None,
        report=lambda points: None,
        memory=memory,
    )


def contents_of(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder: a file's content, None for a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.name != "lock"
    }


@pytest.fixture
def rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Rank]:
    """Return a folder with three complete points."""
    caplog.set_level(logging.INFO)
    (tmp_path / "memory").mkdir()
    whole = Rank(tmp_path / "points", caplog)
    for step in STEPS:
        save(whole.root, step)
    claim_folder(whole.folder, JOB, "matrix")
    whole.require_falls_back_to((15, 10, 5), "undamaged")
    yield whole


def test_flip_in_every_chunk(rank: Rank) -> None:
    path = rank.point(NEWEST) / DATA
    original = path.read_bytes()
    chunks = -(-len(original) // CHUNK_BYTES)
    assert chunks >= 4
    for chunk in range(chunks):
        end = min((chunk + 1) * CHUNK_BYTES, len(original)) - 1
        for position, mask in itertools.product((chunk * CHUNK_BYTES, end), (0x01, 0x80, 0xFF)):
            flip(path, original, position, mask)
            (line,) = rank.require_falls_back_to((10, 5), (chunk, position, mask))
            assert f"chunk {chunk} of {chunks}" in line
    path.write_bytes(original)
    rank.require_falls_back_to((15, 10, 5), "as it was")


def test_flip_in_every_byte_of_the_manifest(rank: Rank) -> None:
    path = rank.point(NEWEST) / MANIFEST
    original = path.read_bytes()
    for position in range(len(original)):
        flip(path, original, position, 0x20)
        (line,) = rank.require_falls_back_to((10, 5), position)
        assert "hash differs" in line


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_truncation_of_every_file_at_every_length(rank: Rank, name: str) -> None:
    path = rank.point(NEWEST) / name
    original = path.read_bytes()
    for end in range(len(original)):
        path.write_bytes(original[:end])
        rank.require_falls_back_to((10, 5), (name, end))
    for more in (b"\x00", original):
        path.write_bytes(original + more)
        rank.require_falls_back_to((10, 5), (name, len(original) + len(more)))


@pytest.mark.parametrize("name", [DATA, MANIFEST])
@pytest.mark.parametrize("filled", [b"\x00", b"\xff"])
def test_file_of_the_right_size_full_of_zeros(rank: Rank, name: str, filled: bytes) -> None:
    path = rank.point(NEWEST) / name
    path.write_bytes(filled * path.stat().st_size)
    rank.require_falls_back_to((10, 5), name)


@pytest.mark.parametrize("names", [(DATA,), (MANIFEST,), (DATA, MANIFEST)])
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link to nowhere", "an empty file"])
def test_every_missing_file(rank: Rank, names: tuple[str, ...], instead: str) -> None:
    for path in (rank.point(NEWEST) / name for name in names):
        path.unlink()
        if instead == "a folder":
            path.mkdir()
        elif instead == "a link to nowhere":
            path.symlink_to("nowhere")
        elif instead == "an empty file":
            path.touch()
    rank.require_falls_back_to((10, 5), instead)


def test_missing_point_is_not_reported(rank: Rank) -> None:
    shutil.rmtree(rank.point(NEWEST))
    assert rank.restart().held() == [Point(10, 1), Point(5, 1)]
    assert rank.warnings() == []


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another rank": {"rank": 1},
    "an older step": {"step": 10},
    "a step of its own": {"step": 99},
    "another generation": {"generation": 2},
    "another job": {"job": OTHER_JOB},
    "another rank of another job": {"rank": 1, "job": OTHER_JOB},
}


@pytest.mark.parametrize("names", [(DATA,), (MANIFEST,), (DATA, MANIFEST)])
@pytest.mark.parametrize("where", ELSEWHERE)
def test_every_file_replaced_by_that_of_another_point(
    rank: Rank, tmp_path: Path, where: str, names: tuple[str, ...]
) -> None:
    other = save(tmp_path / "elsewhere", **{"step": NEWEST, **ELSEWHERE[where]})
    for name in names:
        shutil.copy(other / name, rank.point(NEWEST) / name)
    rank.require_falls_back_to((10, 5), (where, names))


def test_two_swapped_steps_are_both_refused(rank: Rank) -> None:
    swap(rank.point(15), rank.point(10))
    rank.require_falls_back_to((5,), "swapped")


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_one_file_swapped_between_two_steps(rank: Rank, name: str) -> None:
    swap(rank.point(15) / name, rank.point(10) / name)
    rank.require_falls_back_to((5,), "swapped")


def test_points_swapped_between_ranks_are_refused_by_both(rank: Rank, caplog: pytest.LogCaptureFixture) -> None:
    save(rank.root, NEWEST, rank=1)
    swap(rank.point(NEWEST), rank_directory(rank.root, 1) / rank.point(NEWEST).name)
    rank.require_falls_back_to((10, 5), "swapped")
    other = rank_checkpoints(rank.root, 1)
    assert other.held() == []


def test_folder_of_another_job_is_refused_with_both_names(rank: Rank) -> None:
    shutil.rmtree(rank.folder)
    save(rank.root, NEWEST, job=OTHER_JOB)
    claim_folder(rank.folder, OTHER_JOB, "the other one")
    with pytest.raises(ForeignFolderError) as caught:
        rank.restart()
    assert OTHER_JOB in str(caught.value)
    assert JOB in str(caught.value)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_damaged_points_are_skipped(rank: Rank, count: int) -> None:
    for step in STEPS[-count:]:
        path = rank.point(step) / DATA
        flip(path, path.read_bytes(), -1, 0x01)
    rank.require_falls_back_to(tuple(reversed(STEPS[:-count])), count)


@pytest.mark.parametrize("name", [DATA, MANIFEST])
def test_damage_after_verification_is_found_on_loading(rank: Rank, name: str) -> None:
    checkpoints = rank.restart()
    (newest, *older) = checkpoints.held()
    path = rank.point(NEWEST) / name
    flip(path, path.read_bytes(), -1, 0x01)
    with pytest.raises(CheckpointError, match=rank.point(NEWEST).name) as caught:
        checkpoints.load(newest)
    with pytest.raises(CheckpointError, match=rank.point(NEWEST).name):
        checkpoints.load(newest, to_send=True)
    checkpoints.reject(newest, str(caught.value))
    assert checkpoints.held() == older
    (line,) = rank.warnings()
    assert rank.point(NEWEST).name in line


def test_damaged_point_is_saved_again_and_kept(rank: Rank) -> None:
    path = rank.point(NEWEST) / DATA
    flip(path, path.read_bytes(), 0, 0x01)
    rank.require_falls_back_to((10, 5), "damaged")
    damaged = contents_of(rank.point(NEWEST))
    save(rank.root, NEWEST)
    rank.require_falls_back_to((15, 10, 5), "saved again")
    assert contents_of(rank.folder / f"damaged-1-{rank.point(NEWEST).name}") == damaged


flips = st.dictionaries(st.integers(0, 2**16), st.integers(1, 255), min_size=1, max_size=6)
damages = st.dictionaries(st.tuples(st.sampled_from(STEPS), st.sampled_from([DATA, MANIFEST])), flips, min_size=1)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=damages)
def test_random_flips_in_random_files(rank: Rank, damage: dict[tuple[int, str], dict[int, int]]) -> None:
    originals: dict[Path, bytes] = {}
    for (step, name), masks in damage.items():
        path = rank.point(step) / name
        original = originals[path] = path.read_bytes()
        data = bytearray(original)
        for position, mask in {drawn % len(data): mask for drawn, mask in masks.items()}.items():
            data[position] ^= mask
        path.write_bytes(data)
    damaged = {step for step, _ in damage}
    try:
        rank.require_falls_back_to(tuple(step for step in reversed(STEPS) if step not in damaged), damage)
    finally:
        for path, original in originals.items():
            path.write_bytes(original)


def flip(path: Path, original: bytes, position: int, mask: int) -> None:
    data = bytearray(original)
    data[position] ^= mask
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def test_points_differ() -> None:
    """If a swap changed no byte it could not be detected, and the tests above would prove nothing."""
    weights = [weight_of(**{"job": JOB, "rank": 0, "step": NEWEST, **kind}) for kind in ({}, *ELSEWHERE.values())]
    assert len(set(weights)) == len(weights)


def test_scanning_alone_names_every_damaged_manifest(rank: Rank) -> None:
    (rank.point(NEWEST) / MANIFEST).unlink()
    (problem,) = [found.problem for found in scan(rank.folder, JOB) if not found.is_usable]
    assert problem is not None
    assert MANIFEST in problem
