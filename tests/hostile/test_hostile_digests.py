"""A member whose digests are too many, too long or not printable is not believed: the log would show them."""

from __future__ import annotations

import pytest

from runtime.core.messages import (
    MAX_DIGESTS,
    MAX_PART_CHARS,
    MAX_PARTS,
    MAX_SAVED_POINTS,
    Credential,
    Digest,
    Digests,
    Part,
    PartKind,
    SavedPoints,
)
from runtime.core.point import Point
from tests.hostile.attackers import objection

SENDER = Credential("job", "1", "session", 1)
POINT = Point(1, 1)


def part(name: str = "model.weight", value: str = "00") -> Part:
    return Part(PartKind.TRAINED, name, value)


def test_what_a_worker_says_is_believed() -> None:
    most = Digest(POINT, 1, bytes(16), bytes(16), True, (part("x" * MAX_PART_CHARS),) * MAX_PARTS)
    few = Digest(POINT, 1, bytes(16))
    assert objection(Digests(SENDER, (most, *(few,) * (MAX_DIGESTS - 1)))) is None  # one is explained at a time
    assert objection(SavedPoints(SENDER, (POINT,) * MAX_SAVED_POINTS)) is None


@pytest.mark.parametrize(
    "digests",
    [
        (Digest(POINT, 1, b""),) * (MAX_DIGESTS + 1),
        (Digest(POINT, 1, bytes(1000)),),
        (Digest(POINT, 1, b"", bytes(1000)),),
        (Digest(POINT, 1, b"", parts=(part(),) * (MAX_PARTS + 1)),),
        (Digest(POINT, 1, b"", parts=(part("x" * (MAX_PART_CHARS + 1)),)),),
        (Digest(POINT, 1, b"", parts=(part("\x1b[2J"),)),),
        (Digest(POINT, 1, b"", parts=(part(value="a\nb"),)),),
    ],
    ids=["many", "long", "long loose", "parts", "long name", "escape", "lines"],
)
def test_what_none_says_is_not(digests: tuple[Digest, ...]) -> None:
    assert objection(Digests(SENDER, digests)) is not None


def test_more_points_than_are_said_are_not_believed() -> None:
    assert objection(SavedPoints(SENDER, (POINT,) * (MAX_SAVED_POINTS + 1))) is not None
