"""The base of all checkers: each observes a world, keeps its own books, and raises if an invariant does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from samebits.core.records import JobRebuilt
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

EPSILON_S = 1e-3


class Checker:
    """Subclasses register their observers in ``watch`` and clear their books in ``begin_job``."""

    name: ClassVar[str]  # of the invariant, in docs/contributors/invariants.md

    def __init__(self, world: World) -> None:
        self.world = world
        self.begin_job()
        self.watch()

    def begin_job(self) -> None:
        """The journal is empty: nothing known before applies to the next job."""

    def rebuilt(self, record: JobRebuilt) -> None:
        """The books are empty, and an earlier job restarts with the content of this record."""

    def watch(self) -> None:
        """Register observers."""
        raise NotImplementedError

    def violated(self, text: str) -> NoReturn:
        """Raise: the invariant does not hold."""
        raise Violation(self.name, text)
