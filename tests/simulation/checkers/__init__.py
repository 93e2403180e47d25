"""Watchers of the invariants of DESIGN section 9, one small file per group; none takes part in what it watches.

Each keeps its own books from what it sees (``Witness`` holds those that several need), in true time, and raises
:class:`Violation` with the invariant's name. It never asks the code under test what should have happened.
"""

from __future__ import annotations

from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.fencing import Fencing
from tests.simulation.checkers.finish import Finish
from tests.simulation.checkers.generations import Generations
from tests.simulation.checkers.journal import Journal
from tests.simulation.checkers.leases import Leases
from tests.simulation.checkers.liveness import Liveness
from tests.simulation.checkers.restore import Restore
from tests.simulation.checkers.rounds import Rounds
from tests.simulation.checkers.seats import Seats
from tests.simulation.checkers.speech import Speech
from tests.simulation.checkers.waits import Waits

ALL: list[type[Checker]] = [
    Journal,
    Seats,
    Waits,
    Leases,
    Fencing,
    Speech,
    Generations,
    Rounds,
    Restore,
    Finish,
    Liveness,
]

__all__ = ["ALL", "Checker"]
