"""What every checker is: it watches a world, keeps its own books, and raises when an invariant does not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from tests.simulation.trace import Violation

if TYPE_CHECKING:
    from tests.simulation.world import World

EPSILON_S = 1e-3


class Checker:
    """Subclasses append their methods to the world's ``watch_…`` lists."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.watch()

    def watch(self) -> None:
        """Take the places to watch from."""
        raise NotImplementedError

    @staticmethod
    def violated(name: str, text: str) -> NoReturn:
        """The invariant of this name does not hold."""
        raise Violation(name, text)
