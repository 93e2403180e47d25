"""What a worker reports of itself: one frozen struct per kind, from the sensor that makes it to the screen.

A sensor creates a body once. The worker's agent wraps it in the envelope ``messages.Said`` and repeats it as its class
says (:class:`Delivery`); the scheduler hands it to the judge that is registered for its type. A body is the whole truth
of its kind, so any one of them may be lost, doubled or late. Its bounds are in its fields' types.

A new kind is one class here, its name in :data:`Report`, its sensor, and its judge in ``scheduler.SchedulerCore``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

from samebits.core.point import Point
from samebits.core.values import Count, Finite, Hash, Id, Int, Meta, Seconds, Share, Text, Told, Value, line, replace

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
"""The figures that a worker's process measures by itself."""
OF_A_THREAD = "its thread "
OF_HIDDEN_STATE = "hidden state: "
"""How the text of an anomaly begins that is no number: an exception has ended a thread."""
FINAL = -1
"""In the place of a commit's number: the state with which the training function has returned."""

Microseconds = Annotated[int, Meta(ge=0, le=MAX_STEP_US)]
ReportPlace = Annotated[str, line(MAX_PLACE_CHARS)]


class Delivery(enum.Enum):
    """When an agent sends the newest body of a kind."""

    ONCE = "at once, and never again"
    KEPT = "at once, and again on every connection"
    NEWS = "with the next heartbeat, each body once"
    STATE = "with every heartbeat"


class Body(Value, frozen=True):
    """Base of what is reported.

    Attributes:
        delivery: when it is sent.
        in_training: it is of use only while its sender trains, and of its present generation.
        is_aside: no heartbeat is judged otherwise because of it.
    """

    delivery: ClassVar[Delivery] = Delivery.ONCE
    in_training: ClassVar[bool] = False
    is_aside: ClassVar[bool] = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report, which is sent only to take back an earlier body: no stall, no points."""
        return not getattr(self, self.__struct_fields__[0])


# ---- a standstill


class Phase(enum.IntEnum):
    """What a training process's main thread is in."""

    OUTSIDE = 0  # nothing of the training function
    USER = 1  # the script's own code
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    COMMUNICATION = 5  # it waits in a collective
    OPTIMIZER = 6
    COMMIT = 7
    COMPILING = 8


class Progress(NamedTuple):
    """Where a process stands that makes no step, and launches no collective."""

    phase: Phase
    collectives: Count  # launched in the generation's own group
    steps: Count  # that it has made in this generation
    still_s: Seconds  # since the last of both
    longest_s: Seconds  # that it took from one to the next, but for the first steps
    rests: bool  # it uses no CPU
    place: ReportPlace  # as ``train.py:46 (time.sleep)``


class StallReport(Body, frozen=True, tag=12):
    """The main thread has made no step for longer than it ever took; ``progress`` is None if it does again."""

    progress: Progress | None = None

    delivery: ClassVar[Delivery] = Delivery.STATE
    is_aside: ClassVar[bool] = True
    in_training: ClassVar[bool] = True


# ---- the host's and the device's health


class Sign(enum.IntEnum):
    """What a host may lack, or what is wrong with the device that a worker trains on."""

    CPU = 1
    MEMORY = 2
    DISK = 3
    DESCRIPTORS = 4
    DEVICE_MEMORY = 5
    DEVICE_HEAT = 6  # in hundreds of °C
    DEVICE_ERRORS = 7  # of its memory, that were not corrected: how many
    DEVICE_FAULT = 8  # that its driver tells
    DEVICE_SLOWED = 9  # its clock, for heat or power
    DEVICE_SHARED = 10  # how busy it is, where others use it as well


class Ailment(NamedTuple):
    """Of something that a worker's host or device has, more than the limit is taken."""

    sign: Sign
    where: ReportPlace  # of DISK, the path; of a device, which, and its fault
    share: Share
    limit: Share
    drains: bool  # the worker is to leave for a spare


class HealthReport(Body, frozen=True, tag=42):
    """All that is wrong with the sender's host and device; made at a change, and again while there is any."""

    ailments: Annotated[tuple[Ailment, ...], Meta(max_length=MAX_AILMENTS)] = ()

    delivery: ClassVar[Delivery] = Delivery.KEPT
    is_aside: ClassVar[bool] = True


# ---- how fast it trains, and what it measures


class StepTime(NamedTuple):
    """What a rank's main thread does in one step, in microseconds; together they are the step."""

    data_us: Microseconds  # waits for the loader's next batch
    compute_us: Microseconds  # all else
    communication_us: Microseconds  # waits in collectives
    commit_us: Microseconds  # in ``state.commit()``


class StepTiming(Body, frozen=True, tag=46):
    """How long the last steps took: one body for each window of steps."""

    steps: Annotated[int, Meta(ge=1, le=10**9)]  # of the window
    time: StepTime  # of one of them

    delivery: ClassVar[Delivery] = Delivery.NEWS
    is_aside: ClassVar[bool] = True
    in_training: ClassVar[bool] = True


class Figure(NamedTuple):
    """A number that a worker measures: its script's own, or ``cpu`` and ``memory``, which its process measures."""

    name: Annotated[str, line(MAX_FIGURE_CHARS, least=1)]
    value: Finite


class Figures(Body, frozen=True, tag=47):
    """What the sender measures: the newest figure of each name."""

    figures: Annotated[tuple[Figure, ...], Meta(max_length=MAX_FIGURES)] = ()

    delivery: ClassVar[Delivery] = Delivery.NEWS
    is_aside: ClassVar[bool] = True

    @classmethod
    def of(cls, figures: Sequence[Figure]) -> Figures:
        """Return the report on these figures, as many as it may have."""
        return cls(tuple(figures[:MAX_FIGURES]))


# ---- what it saved, and whether its state is that of the others


class SavedPoints(Body, frozen=True, tag=9):
    """The newest points that the sender's disk holds, verified, rising."""

    points: Annotated[tuple[Point, ...], Meta(max_length=MAX_SAVED_POINTS)]
    stalled_s: Seconds = 0.0  # that the sender's steps have waited for saves, since its process began

    delivery: ClassVar[Delivery] = Delivery.KEPT

    @classmethod
    def of(cls, points: Sequence[Point], stalled_s: float = 0.0) -> SavedPoints:
        """Return the report on these points, rising: the newest of them."""
        return cls(tuple(points[-MAX_SAVED_POINTS:]), stalled_s)


class PartKind(enum.IntEnum):
    """What a part of a rank's state is; the lower come first where the first difference is named."""

    STEPS = 1  # completed steps, or averages
    SAMPLER = 2  # an ElasticSampler's position
    TRAINED = 3  # a parameter of an optimizer, or one of its moments
    UNTRAINED = 4  # a parameter that no optimizer has
    SHARED = 5  # what a state of the user's own marks as shared
    LOOSE = 6  # all else: it may differ
    SETTING = 7  # of an optimizer's parameter group, such as its learning rate


class Part(NamedTuple):
    """One part of a rank's state; ``value`` is text that can be shown, or, of a tensor, its hash in hex."""

    kind: PartKind
    name: Annotated[str, line(MAX_PART_CHARS)]
    value: Annotated[str, line(MAX_PART_CHARS)]


class Digest(Value, frozen=True):
    """What a rank's state was at one of its commits, in a few bytes."""

    point: Point
    commits: Int  # of the line, up to this one: there may be several after one step; FINAL: see there
    shared: Hash  # of what must be equal on every rank
    loose: Hash = b""  # of what may differ; b"": it was not looked at
    averages: bool = True  # a wrapper that averages gradients is in use
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)] = ()  # only where they were asked for
    is_kept: bool = False  # the rank holds a copy of the state as it was then


class Digests(Body, frozen=True, tag=11):
    """What the sender's state was at its newest commits. Repeated with every heartbeat while the sender is done."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_DIGESTS)]

    delivery: ClassVar[Delivery] = Delivery.KEPT

    @classmethod
    def of(cls, digests: Sequence[Digest]) -> Digests:
        """Return the report on these commits, rising: the newest of them, each with as many parts as it may have."""
        newest = digests[-MAX_DIGESTS:]
        return cls(
            tuple(one if len(one.parts) <= MAX_PARTS else replace(one, parts=one.parts[:MAX_PARTS]) for one in newest)
        )

    def explaining(self, commit: tuple[Point, int] | None) -> Digests:
        """Return the same without parts, but for those of the commit that is asked for: its point and number."""
        return Digests(
            tuple(one if (one.point, one.commits) == commit else replace(one, parts=()) for one in self.digests)
        )


# ---- events


class Anomaly(Body, frozen=True, tag=44):
    """A number that training cannot have, once for a row of them; or what was at fault, once that is known."""

    step: Count
    text: Annotated[str, line(MAX_ANOMALY_CHARS)]  # which number, and what is wrong with it
    is_verdict: bool = False  # the step was computed again, and the text says what was at fault
    comes_again: bool = False  # no rank commits the step: all go back, and compute it again

    is_aside: ClassVar[bool] = True


class LastWords(Body, Told, frozen=True, tag=5):
    """Why the sender is about to die: the cause that everybody else is shown."""

    text: Text


class PeerGone(Body, frozen=True, tag=10):
    """The process of another session, on the sender's host, is dead, whatever its connection says."""

    session: Id


Report = StallReport | HealthReport | StepTiming | Figures | SavedPoints | Digests | Anomaly | LastWords | PeerGone
