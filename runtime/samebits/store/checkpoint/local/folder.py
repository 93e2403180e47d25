"""The names in a rank's folder: points, temporary directories, and damaged points moved aside.

::

    <root>/<rank>/step_0000000120_gen_000003/{data.safetensors,manifest.msgpack}    a point
    <root>/<rank>/.tmp-<pid>-<start time>-<n>-step_…                                being written or being removed
    <root>/<rank>/damaged-<n>-step_…                                                a damaged point, kept
    <root>/<prefix>/<rank>/…                                                        the same, for who wants a prefix

Only names, and the moves between them, live here; whether a point is whole does not. The one idea: a directory has a
point's name only while both its files are complete, because it gets and loses that name by one rename.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
from pathlib import Path

from samebits.core.point import Point
from samebits.store import durable
from samebits.store.process_identity import ProcessIdentity

DATA_FILE = "data.safetensors"
MANIFEST_FILE = "manifest.msgpack"

_POINT_NAME = re.compile(r"step_(\d{10,19})_gen_(\d{6,19})", re.ASCII)
_TEMPORARY_NAME = re.compile(r"\.tmp-(\d+)-(\d+)-\d+-(.*)", re.ASCII)
_PREFIX = re.compile(r"[A-Za-z_][\w-]{0,127}", re.ASCII)
_ASIDE_NAME = re.compile(r"damaged-\d+-(.*)", re.ASCII)

_log = logging.getLogger(__name__)
_temporary_numbers = itertools.count()


def rank_directory(root: Path, rank: int) -> Path:
    """Where the points of ``rank`` lie; its live writer holds that folder's lock."""
    return root / str(rank)


def slots_in(root: Path) -> list[int]:
    """The slots that have a folder there, in order.

    Raises:
        StoreError: the folder cannot be looked into.
    """
    with durable.disk_errors(root, "looking for checkpoints"):
        if not root.is_dir():
            return []
        return sorted(int(entry.name) for entry in root.iterdir() if entry.name.isdecimal() and entry.is_dir())


def point_name(point: Point) -> str:
    """The name of the point's directory."""
    return f"step_{point.step:010d}_gen_{point.generation:06d}"


def is_prefix(name: str) -> bool:
    """Whether a folder below the job's may take the ranks' folders under this name: never what has another meaning."""
    return _PREFIX.fullmatch(name) is not None and parse_point_name(name) is None


def parse_point_name(name: str) -> Point | None:
    """The point a directory's name stands for; none for any other name."""
    match = _POINT_NAME.fullmatch(name)
    if match is None:
        return None
    point = Point(int(match[1]), int(match[2]))
    return point if point_name(point) == name and point.generation > 0 else None


def oldest_step_in(directory: Path) -> int:
    """The step of the oldest point in a rank's folder, by the names there; 0 where there is none."""
    with durable.disk_errors(directory, "looking for the oldest point"):
        points = [parse_point_name(entry.name) for entry in directory.iterdir()]
    return min((point.step for point in points if point is not None), default=0)


def parse_temporary_name(name: str) -> tuple[ProcessIdentity, Point | None] | None:
    """Who writes or removes a directory of this name, and which point; none for any other name."""
    match = _TEMPORARY_NAME.fullmatch(name)
    return None if match is None else (ProcessIdentity(int(match[1]), int(match[2])), parse_point_name(match[3]))


def parse_aside_name(name: str) -> Point | None:
    """The damaged point that was moved aside under this name; none for any other name."""
    match = _ASIDE_NAME.fullmatch(name)
    return None if match is None else parse_point_name(match[1])


def temporary_directory(directory: Path, name: str) -> Path:
    """A new name for what this process is writing or removing; it tells a dead writer's from a live one's."""
    identity = ProcessIdentity.current()
    return directory / f".tmp-{identity.pid}-{identity.started_at}-{next(_temporary_numbers)}-{name}"


def sweep_temporaries(directory: Path) -> None:
    """Remove what dead writers left half written or half removed. The caller holds the folder's lock.

    It frees space, no more: temporary names are never reused, so what cannot be removed is in nobody's way.
    """
    for entry in list(directory.iterdir()):
        temporary = parse_temporary_name(entry.name)
        if temporary is None or temporary[0].is_alive():
            continue
        try:
            shutil.rmtree(entry)
        except OSError as error:
            _log.warning("%s: left by a dead process and cannot be removed: %s", entry, error)


def move_damaged_aside(path: Path) -> Path:
    """Rename a damaged point so that its name is free; nothing of it is deleted."""
    for number in itertools.count(1):
        aside = path.with_name(f"damaged-{number}-{path.name}")
        if not os.path.lexists(aside):
            break
    durable.publish(path, aside)
    return aside
