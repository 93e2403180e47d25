"""Reports of a worker: one frozen struct per kind.

A sensor creates a report once. The worker's agent puts it into the envelope ``messages.ReportEnvelope`` and repeats it
as its :class:`Delivery` requires; the scheduler passes it to the handler registered for its type. Each report is
complete, so any of them may be lost, duplicated or late. The field types define the limits.

A new kind needs one class here, its name in :data:`Report`, a sensor, and a handler in ``scheduler.SchedulerCore``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from samebits.core.point import Point
from samebits.core.values import (
    Count,
    Few,
    Finite,
    Hash,
    Id,
    Int,
    Meta,
    Seconds,
    Share,
    Text,
    TextValue,
    Value,
    line,
    replace,
)

MAX_SAVED_POINTS = 8
MAX_DIGESTS = 16
MAX_PARTS = 2000
MAX_PART_CHARS = 200
MAX_PLACE_CHARS = 200
MAX_AILMENTS = 32
MAX_ANOMALY_CHARS = 400
MAX_STEP_US = 10**12  # of one part of one step
MAX_FIGURES = 16
MAX_FIGURE_CHARS = 40
MEASURED = ("cpu", "memory")
"""Figures that a worker's process measures itself."""
OF_A_THREAD = "its thread "
OF_HIDDEN_STATE = "hidden state: "
"""This and ``OF_A_THREAD`` begin the text of an anomaly that is hidden state or a thread's exception, not a number."""
FINAL = -1
"""Replaces a commit's number for the state at the training function's return."""

Microseconds = Annotated[int, Meta(ge=0, le=MAX_STEP_US)]
ReportPlace = Annotated[str, line(MAX_PLACE_CHARS)]


class Delivery(enum.Enum):
    """When an agent sends the newest report of a kind."""

    ONCE = "at once, and never again"
    KEPT = "at once, and again on every connection"
    NEWS = "with the next heartbeat, each body once"
    STATE = "with every heartbeat"


class Body(Value, frozen=True):
    """Base class of all reports.

    Attributes:
        delivery: when it is sent.
        in_training: the body is valid only while its sender forms the present generation's group or trains in it.
        is_aside: its arrival does not change how a heartbeat is judged.
    """

    delivery: ClassVar[Delivery] = Delivery.ONCE
    in_training: ClassVar[bool] = False
    is_aside: ClassVar[bool] = False

    @property
    def is_empty(self) -> bool:
        """Return whether the report is empty and only withdraws an earlier one."""
        return not getattr(self, self.__struct_fields__[0])


class Phase(enum.IntEnum):
    """Activity of a training process's main thread."""

    OUTSIDE = 0  # outside the training function
    USER = 1  # the script's own code
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    COMMUNICATION = 5  # waiting in a collective
    OPTIMIZER = 6
    COMMIT = 7
    COMPILING = 8
    STORING = 9  # waiting until a checkpoint is on disk


class Progress(NamedTuple):
    """What a process that completes no step and calls no collective is doing."""

    phase: Phase
    collectives: Count  # launched in the generation's own group
    steps: Count  # completed in this generation
    still_s: Seconds  # since the last step or collective
    longest_s: Seconds  # the longest time between two of these so far, excluding the first steps
    rests: bool  # it uses no CPU
    place: ReportPlace  # such as ``train.py:46 (time.sleep)``


class StallReport(Body, frozen=True, tag=12):
    """The main thread has made no progress for longer than ever before. None withdraws the report."""

    progress: Progress | None = None

    delivery: ClassVar[Delivery] = Delivery.STATE
    is_aside: ClassVar[bool] = True
    in_training: ClassVar[bool] = True


# ---- the host's and the device's health


class Sign(enum.IntEnum):
    """A resource that a host may run out of, or a fault of the worker's device."""

    CPU = 1
    MEMORY = 2
    DISK = 3
    DESCRIPTORS = 4
    DEVICE_MEMORY = 5
    DEVICE_HEAT = 6  # in hundreds of °C
    DEVICE_ERRORS = 7  # number of uncorrected memory errors
    DEVICE_FAULT = 8  # reported by its driver
    DEVICE_SLOWED = 9  # its clock, because of heat or power
    DEVICE_SHARED = 10  # how busy it is while other processes use it too
    LOGS = 11  # LOG_DIR's disk: 1 / its free GiB, so that more is worse, as with the others


class Ailment(NamedTuple):
    """A reading of a worker's host or device that exceeds its limit."""

    sign: Sign
    where: ReportPlace  # DISK, LOGS: the path; signs of a device: its name and fault
    share: Share
    limit: Share
    drains: bool  # the worker should leave for a spare


class HealthReport(Body, frozen=True, tag=42):
    """All current problems of the sender's host and device; repeated while there are any."""

    ailments: Annotated[tuple[Ailment, ...], Meta(max_length=MAX_AILMENTS)] = ()

    delivery: ClassVar[Delivery] = Delivery.KEPT
    is_aside: ClassVar[bool] = True


# ---- how fast it trains, and what it measures


class StepTime(NamedTuple):
    """How a rank's main thread spends one step, in microseconds. The parts add up to the step."""

    data_us: Microseconds  # waiting for the loader's next batch
    compute_us: Microseconds  # everything else
    communication_us: Microseconds  # waiting in collectives
    commit_us: Microseconds  # in ``state.commit()``


class StepTiming(Body, frozen=True, tag=46):
    """Mean step time over one window of steps."""

    steps: Annotated[int, Meta(ge=1, le=10**9)]  # in the window
    time: StepTime  # of one step

    delivery: ClassVar[Delivery] = Delivery.NEWS
    is_aside: ClassVar[bool] = True
    in_training: ClassVar[bool] = True


class Figure(NamedTuple):
    """A number that a worker reports: from its script, or ``cpu`` and ``memory`` of its process."""

    name: Annotated[str, line(MAX_FIGURE_CHARS, least=1)]
    value: Finite


class Figures(Body, frozen=True, tag=47):
    """The newest value of each number that the sender reports."""

    figures: Annotated[tuple[Figure, ...], Meta(max_length=MAX_FIGURES)] = ()

    delivery: ClassVar[Delivery] = Delivery.NEWS
    is_aside: ClassVar[bool] = True

    @classmethod
    def of(cls, figures: Sequence[Figure]) -> Figures:
        """Return the report with these numbers, cut to MAX_FIGURES."""
        return cls(tuple(figures[:MAX_FIGURES]))


class SavedPoints(Body, frozen=True, tag=9):
    """The newest verified points on the sender's disk, ascending."""

    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_SAVED_POINTS)]
    stalled_s: Seconds = 0.0  # total time that the sender's steps have waited for saves

    delivery: ClassVar[Delivery] = Delivery.KEPT

    @classmethod
    def of(cls, points: Sequence[Point], stalled_s: float = 0.0) -> SavedPoints:
        """Return the report with these ascending points, cut to the newest ones."""
        return cls(tuple(points[-MAX_SAVED_POINTS:]), stalled_s)


class PartKind(enum.IntEnum):
    """Kinds of parts of a rank's state."""

    STEPS = 1  # completed steps, or averages
    SAMPLER = 2  # an ElasticSampler's position
    TRAINED = 3  # a parameter of an optimizer, or one of its moments
    UNTRAINED = 4  # a parameter in no optimizer
    SHARED = 5  # marked as shared by a user-defined state
    LOOSE = 6  # everything else, which may differ
    SETTING = 7  # of an optimizer's parameter group, such as its learning rate
    SHARD = 8  # a shard, or one of its moments, that other ranks hold too


class Part(NamedTuple):
    """One part of a rank's state. ``value`` is printable text, or a tensor's hash in hex."""

    kind: PartKind
    name: Annotated[str, line(MAX_PART_CHARS)]
    value: Annotated[str, line(MAX_PART_CHARS)]


class Digest(Value, frozen=True):
    """A short fingerprint of a rank's state at one of its commits."""

    point: Point
    commits: Int  # commits on the line up to this one, since several may follow one step; or FINAL
    shared: Hash  # of the parts that must be equal on all ranks
    loose: Hash = b""  # of the parts that may differ; b"": not computed
    averages: bool = True  # a wrapper that averages gradients is in use
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()  # only if they were requested
    is_kept: bool = False  # the rank keeps a copy of that state
    key: Few[Count] = ()  # the rank's replica key: ranks with an equal one hold the same shards
    held: Hash = b""  # of these shards; b"": it has none, or no other rank holds them


class Digests(Body, frozen=True, tag=11):
    """The digests of the sender's newest commits, repeated with each heartbeat once the sender is done."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_DIGESTS)]

    delivery: ClassVar[Delivery] = Delivery.KEPT

    @classmethod
    def of(cls, digests: Sequence[Digest]) -> Digests:
        """Return the report with these ascending commits, cut to the newest ones and to MAX_PARTS parts each."""
        newest = digests[-MAX_DIGESTS:]
        return cls(
            tuple(one if len(one.parts) <= MAX_PARTS else replace(one, parts=one.parts[:MAX_PARTS]) for one in newest)
        )

    def explaining(self, commit: tuple[Point, int] | None) -> Digests:
        """Return the same digests, with parts only for the requested commit (point and number)."""
        return Digests(
            tuple(one if (one.point, one.commits) == commit else replace(one, parts=()) for one in self.digests)
        )


# ---- events


class Anomaly(Body, frozen=True, tag=44):
    """An implausible number, reported once per series, or the fault that caused it once that is known."""

    step: Count
    text: Annotated[str, line(MAX_ANOMALY_CHARS)]  # the number and what is wrong with it
    is_verdict: bool = False  # the step was recomputed, and the text names the fault
    comes_again: bool = False  # no rank commits the step: all ranks roll back and recompute it

    is_aside: ClassVar[bool] = True


class StopsAfter(Body, frozen=True, tag=49):
    """The commit after which the sender stops, counted from 1 in its generation.

    Until all members have agreed on a commit, the sender names its next one and does not train past it.
    """

    commits: Count = 0
    is_there: bool = False  # the members have agreed, and the sender waits after that commit

    delivery: ClassVar[Delivery] = Delivery.KEPT
    in_training: ClassVar[bool] = True


class LastWords(Body, TextValue, frozen=True, tag=5):
    """The fatal error of a sender that is about to exit, shown to everyone as the cause.

    Attributes:
        text: the error.
        status: the exit code of an error of this package; 0 for other errors and from earlier releases.
    """

    text: Text
    status: Annotated[int, Meta(ge=0, le=255)] = 0


class PeerGone(Body, frozen=True, tag=10):
    """The process of another session on the sender's host is dead."""

    session: Id


Report = (
    StallReport
    | HealthReport
    | StepTiming
    | Figures
    | SavedPoints
    | Digests
    | Anomaly
    | LastWords
    | PeerGone
    | StopsAfter
)
