"""Checkers of docs/contributors/invariants.md, one file for each; none affects what it checks.

Each keeps its own books from what it sees (``Witness`` and ``Line`` hold those that several need), in true time or, for
what the scheduler measures, by the clock of its machine, and raises :class:`Violation` with the invariant's name. It
never asks the code under test what should have happened.
"""

from __future__ import annotations

from tests.simulation.checkers.base import Checker
from tests.simulation.checkers.l1_together import Together
from tests.simulation.checkers.l2_let_in import LetIn
from tests.simulation.checkers.l3_progress import Progress
from tests.simulation.checkers.l4_no_dead_rounds import NoDeadRounds
from tests.simulation.checkers.l5_end import TheEnd
from tests.simulation.checkers.l6_held import Held
from tests.simulation.checkers.s01_one_holder import OneHolder
from tests.simulation.checkers.s02_fixed_slots import FixedSlots
from tests.simulation.checkers.s03_cool_down import CoolDown
from tests.simulation.checkers.s04_journal import Journal
from tests.simulation.checkers.s05_incarnations import Incarnations
from tests.simulation.checkers.s06_fencing import Fencing
from tests.simulation.checkers.s07_save_then_speak import SaveThenSpeak
from tests.simulation.checkers.s08_one_view import OneView
from tests.simulation.checkers.s09_restore_point import RestorePoint
from tests.simulation.checkers.s10_kept_line import KeptLine
from tests.simulation.checkers.s11_no_way_back import NoWayBack
from tests.simulation.checkers.s12_round_ids import RoundIds
from tests.simulation.checkers.s13_one_writer import OneWriter
from tests.simulation.checkers.s14_world_size import WorldSize
from tests.simulation.checkers.s15_other_jobs import OtherJobs
from tests.simulation.checkers.s16_bounds import Bounds
from tests.simulation.checkers.s17_no_extra_transition import NoExtraTransition
from tests.simulation.checkers.s18_own_pauses import OwnPauses
from tests.simulation.checkers.s19_finish import Finish
from tests.simulation.checkers.s20_committed_points import CommittedPoints
from tests.simulation.checkers.s21_equal import Equal
from tests.simulation.checkers.s22_no_false_alarm import NoFalseAlarm
from tests.simulation.checkers.s23_no_storm import NoStorm
from tests.simulation.checkers.s24_drained import Drained
from tests.simulation.checkers.s25_keys import KeysInOrder
from tests.simulation.checkers.s26_joint_stop import JointlyStopped

ALL: tuple[type[Checker], ...] = (
    OneHolder,
    FixedSlots,
    CoolDown,
    Journal,
    Incarnations,
    Fencing,
    SaveThenSpeak,
    OneView,
    KeptLine,  # before S9, which a point of an abandoned line violates too
    RestorePoint,
    NoWayBack,
    RoundIds,
    OneWriter,
    WorldSize,
    OtherJobs,
    Bounds,
    NoExtraTransition,
    OwnPauses,
    Finish,
    CommittedPoints,
    Equal,
    NoFalseAlarm,
    NoStorm,
    Drained,
    KeysInOrder,
    JointlyStopped,
    Together,
    LetIn,
    Progress,
    NoDeadRounds,
    TheEnd,
    Held,
)

__all__ = ["ALL", "Checker"]
