"""What every checker is: it watches a world, keeps its own books, and raises when an invariant does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NoReturn

from samebits.core.records import JobRebuilt
from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

EPSILON_S = 1e-3


class Checker:
    """Subclasses take their places to watch from in ``watch`` and empty their books in ``begin_job``."""

    name: ClassVar[str]  # of the invariant, in docs/contributors/invariants.md

    def __init__(self, world: World) -> None:
        self.world = world
        self.begin_job()
        self.watch()

    def begin_job(self) -> None:
        """The journal is empty: nothing of what was known before holds for the job that comes."""

    def rebuilt(self, record: JobRebuilt) -> None:
        """The books are empty, and an earlier job begins anew with what this record says of it."""

    def watch(self) -> None:
        """Take the places to watch from."""
        raise NotImplementedError

    def violated(self, text: str) -> NoReturn:
        """The invariant does not hold."""
        raise Violation(self.name, text)
