"""One attempt to save a point in an object store: the names of its two objects, and the point as it was found there.

Only names and values live here; no object is read or written. The one idea: what makes an attempt unique is part of
both names, so that data and manifest of two attempts never meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from samebits.core.point import Point
from samebits.errors import CheckpointError
from samebits.store.checkpoint.format.manifest import Manifest
from samebits.store.checkpoint.local.folder import DATA_FILE, MANIFEST_FILE, parse_point_name, point_name

DATA_SUFFIX = f".{DATA_FILE}"
MANIFEST_SUFFIX = f".{MANIFEST_FILE}"

_ATTEMPT_NAME = re.compile(r"(step_\d+_gen_\d+)\.((\d{4,9})-[0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One attempt to save a point; ``unique`` is part of both its names. The greatest is the newest."""

    point: Point
    number: int
    unique: str

    @property
    def data_name(self) -> str:
        """The data's object, in the rank's folder."""
        return f"{point_name(self.point)}.{self.unique}{DATA_SUFFIX}"

    @property
    def manifest_name(self) -> str:
        """The manifest's object, in the rank's folder."""
        return f"{point_name(self.point)}.{self.unique}{MANIFEST_SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """The attempt that an object belongs to; none for an object of another kind."""
        match = _ATTEMPT_NAME.fullmatch(name.removesuffix(DATA_SUFFIX).removesuffix(MANIFEST_SUFFIX))
        point = None if match is None else parse_point_name(match[1])
        if match is None or point is None:
            return None
        attempt = cls(point, int(match[3]), match[2])
        return attempt if name in (attempt.data_name, attempt.manifest_name) else None


@dataclass(frozen=True, slots=True)
class RemotePoint:
    """One point in the store, by its newest attempt that fits; else ``problem`` says why it cannot be used."""

    where: str
    attempt: Attempt
    manifest: Manifest | None
    problem: str | None

    @property
    def point(self) -> Point:
        """Which point it is."""
        return self.attempt.point

    @property
    def is_usable(self) -> bool:
        """Whether manifest and sizes are as they should be."""
        return self.manifest is not None

    def require_manifest(self) -> Manifest:
        """The manifest; :class:`CheckpointError` with the problem where there is none."""
        if self.manifest is None:
            raise CheckpointError(self.problem or f"{self.where}: cannot be used")
        return self.manifest


def attempts_in(names: Iterable[str], suffix: str = "") -> list[Attempt]:
    """The attempts that objects of this kind (else of any) belong to, each once."""
    found = (Attempt.parse(name) for name in names if name.endswith(suffix))
    return list(dict.fromkeys(attempt for attempt in found if attempt is not None))
