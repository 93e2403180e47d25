"""A member's report with too many, too long or unprintable digests is rejected, since the log would show them."""

from __future__ import annotations

import pytest

from samebits.core.messages import Credential, ReportEnvelope
from samebits.core.point import Point
from samebits.core.reports import (
    MAX_DIGESTS,
    MAX_PART_CHARS,
    MAX_PARTS,
    MAX_SAVED_POINTS,
    Digest,
    Digests,
    Part,
    PartKind,
    Phase,
    Progress,
    SavedPoints,
    StallReport,
)
from tests.hostile.attackers import objection

SENDER = Credential("job", "1", "session", 1)
POINT = Point(1, 1)


def part(name: str = "model.weight", value: str = "00") -> Part:
    return Part(PartKind.TRAINED, name, value)


def test_valid_report_is_accepted() -> None:
    most = Digest(POINT, 1, bytes(16), bytes(16), True, (part("x" * MAX_PART_CHARS),) * MAX_PARTS)
    few = Digest(POINT, 1, bytes(16))
    assert (
        objection(ReportEnvelope(SENDER, Digests((most, *(few,) * (MAX_DIGESTS - 1))))) is None
    )  # one is explained at a time
    assert objection(ReportEnvelope(SENDER, SavedPoints((POINT,) * MAX_SAVED_POINTS))) is None


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
def test_invalid_report_is_rejected(digests: tuple[Digest, ...]) -> None:
    assert objection(ReportEnvelope(SENDER, Digests(digests))) is not None


def test_too_many_points_are_rejected() -> None:
    assert objection(ReportEnvelope(SENDER, SavedPoints((POINT,) * (MAX_SAVED_POINTS + 1)))) is not None


STILL = Progress(Phase.USER, 1, 1, 2.0, 1.0, rests=True, place="train.py:46 (time.sleep)")


def test_valid_position_is_accepted() -> None:
    assert objection(ReportEnvelope(SENDER, StallReport(STILL), 1, 1)) is None
    assert objection(ReportEnvelope(SENDER, StallReport(None), 1, 1)) is None


@pytest.mark.parametrize(
    "progress",
    [
        STILL._replace(place="x" * 201),
        STILL._replace(place="\x1b[2J"),
        STILL._replace(still_s=float("nan")),
        STILL._replace(still_s=-1.0),
        STILL._replace(longest_s=float("inf")),
        STILL._replace(longest_s=1e300),
        STILL._replace(collectives=-1),
        STILL._replace(steps=-1),
    ],
)
def test_impossible_position_is_rejected(progress: Progress) -> None:
    assert objection(ReportEnvelope(SENDER, StallReport(progress), 1, 1)) is not None
