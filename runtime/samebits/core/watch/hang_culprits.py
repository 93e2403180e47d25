"""Determine which ranks block the others in a standstill. Pure functions of the ranks' positions.

Ranks that train together wait for each other, so the rank that is *not* waiting is the one that blocks all others.
``hang_judge`` decides when a standstill has lasted too long, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samebits.core.hangs import SILENT_KINDS, Hang, ProcessState, classify_hang
from samebits.core.ledger import NAMED
from samebits.core.reports import MAX_PLACE_CHARS, Phase, Progress
from samebits.printable import printable

_BY_PHASE = {
    Phase.DATA: Hang.LOADING,
    Phase.COMMIT: Hang.SAVING,
    Phase.STORING: Hang.SAVING,
    Phase.COMPILING: Hang.COMPILING,
}
_BETWEEN_TWO = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})
"""Calls that match calls with different names on other ranks."""


@dataclass(frozen=True, slots=True)
class Member:
    """What one rank is doing. ``progress`` is None if its training function has returned.

    Attributes:
        forms: the rank has not begun to train in its generation; it builds the groups or restores the state.
    """

    node: str
    step: int
    progress: Progress | None
    silent_s: float = 0.0  # not 0: the rank has been silent for too long, and its report is old
    process_state: ProcessState | None = None  # the process's state, if it is silent
    forms: bool = False

    @property
    def waits(self) -> bool:
        """Return whether the rank waits for the others."""
        return self.progress is None or self.progress.phase is Phase.COMMUNICATION


@dataclass(frozen=True, slots=True)
class Standstill:
    """The ranks that block the others, with the kind of hang; there are none if all hang alike (``common``)."""

    culprits: tuple[tuple[Member, Hang], ...]
    waiting: tuple[Member, ...]
    common: Hang | None = None

    @property
    def held_by(self) -> tuple[Hang | None, frozenset[str]]:
        """Return what identifies the standstill: the common kind of hang, and the ranks that block."""
        return self.common, frozenset(member.node for member, _ in self.culprits)


def find_culprits(members: Sequence[Member]) -> Standstill:
    """Return which ranks block the others, given that no rank has made progress for a while."""
    silent = [(member, classify_hang(member.process_state, member.silent_s)) for member in members if member.silent_s]
    heard = [member for member in members if not member.silent_s]
    waiting = tuple(member for member in heard if member.waits)
    holding = [(member, hang_of(member.progress)) for member in heard if member.progress and not member.waits]
    if silent or (holding and waiting):
        return Standstill((*silent, *(holding if waiting else ())), waiting)
    if holding:
        return Standstill(tuple(holding), (), Hang.NOBODY_WAITS)
    if any(member.forms for member in waiting):
        return _find_in_formation(waiting)
    numbers = [member.progress.collectives for member in waiting if member.progress]
    if len(set(numbers)) > 1:
        usual = max(sorted(set(numbers), reverse=True), key=numbers.count)
        apart = tuple(
            (member, Hang.APART) for member in waiting if member.progress and member.progress.collectives != usual
        )
        return Standstill(apart, tuple(member for member in waiting if (member, Hang.APART) not in apart))
    if odd := _in_another_collective(waiting):
        return Standstill(
            tuple((one, Hang.APART) for one in odd), tuple(one for one in waiting if one.progress and one not in odd)
        )
    if len(numbers) < len(waiting):  # some have returned; others wait in a collective that the former never enter
        apart = tuple((member, Hang.APART) for member in waiting if member.progress is None)
        return Standstill(apart, tuple(member for member in waiting if member.progress))
    return Standstill((), waiting, Hang.LINK)


def _find_in_formation(waiting: Sequence[Member]) -> Standstill:
    """Return the ranks that still form the group, or, if all do, those that are elsewhere than most."""
    odd = [member for member in waiting if member.forms]
    if len(odd) == len(waiting):
        places = [_place(member) for member in waiting]
        usual = max(dict.fromkeys(places), key=places.count)
        is_majority = 2 * places.count(usual) > len(places)
        odd = [one for one, place in zip(waiting, places, strict=True) if not is_majority or place != usual]
    if not odd:
        return Standstill((), tuple(waiting), Hang.LINK)
    return Standstill(tuple((one, Hang.APART) for one in odd), tuple(one for one in waiting if one not in odd))


def _in_another_collective(waiting: Sequence[Member]) -> list[Member]:
    """Return the members that wait in a different collective than most others, although it has the same number."""
    named = [(member, _collective_name(member.progress)) for member in waiting if member.progress]
    names = [name for _, name in named]
    if len(set(names)) < 2 or "" in names or _BETWEEN_TWO.intersection(names):
        return []
    usual = max(dict.fromkeys(names), key=names.count)
    return [member for member, name in named if name != usual]


def different_collectives(found: Standstill) -> str:
    """Return a text such as ``worker 0 is in barrier at train.py:8, worker 1 in broadcast at train.py:9``, or ""."""
    if not found.culprits or any(
        hang is not Hang.APART or member.progress is None or member.forms for member, hang in found.culprits
    ):
        return ""
    members = sorted((*(one for one, _ in found.culprits), *found.waiting), key=lambda one: one.node)
    places: dict[str, Member] = {}
    for member in members:
        if member.progress:
            places.setdefault(shown_place(member.progress), member)
    if len(places) < 2:
        return ""
    shown = [
        f"worker {member.node} {'in' if n else 'is in'} {place}" for n, (place, member) in enumerate(places.items())
    ]
    return ", ".join(shown[:NAMED])


def hang_of(progress: Progress) -> Hang:
    """Return the kind of hang of a rank that does not wait for other ranks."""
    if progress.phase in _BY_PHASE:
        return _BY_PHASE[progress.phase]
    return Hang.STUCK if progress.rests else Hang.BUSY


def sentence(found: Standstill, still_s: float) -> str:
    """Return a text such as ``no step for 12 s: worker 2 is in train.py:46 (time.sleep), workers 0 and 1 wait …``."""
    begin = f"no step for {still_s:.0f} s: "
    if found.common is Hang.LINK and found.waiting[0].forms:
        return f"{begin}all workers form the generation's group at {_place(found.waiting[0])}, and none continues"
    if found.common is Hang.LINK:
        return f"{begin}all workers wait in the same collective, {_collective(found.waiting)}, and none leaves it"
    if found.common is Hang.NOBODY_WAITS:
        where = ", ".join(standing(member, hang) for member, hang in found.culprits[:NAMED])
        return f"{begin}{where}, and no rank waits for another"
    parts = [standing(member, hang) for member, hang in found.culprits[:NAMED]]
    if len(found.culprits) > NAMED:
        parts.append(f"{len(found.culprits) - NAMED} more workers hold the others up, too")
    waiting = [member for member in found.waiting if member.progress]
    through = [member for member in found.waiting if not member.progress]
    it = "it" if len(found.culprits) == 1 else "them"
    if waiting:
        place = f"at {_place(waiting[0])}" if waiting[0].forms else f"in {_collective(waiting)}"
        parts.append(f"{_workers(waiting)} for {it} {place}")
    if through:
        parts.append(f"{_workers(through)} for {it} at the end of training")
    return begin + ", ".join(parts)


def standing(member: Member, hang: Hang) -> str:
    """Return ``worker 2 is in train.py:46 (time.sleep)``."""
    who, progress = f"worker {member.node}", member.progress
    if hang in SILENT_KINDS:
        silent = f"{who} has not been heard from for {member.silent_s:.0f} s"
        return silent if hang is Hang.SILENT else f"{silent}: it {hang.value}"
    if progress is None:
        return f"{who} has returned from the training function"
    if hang is Hang.APART and member.forms:
        return f"{who} still forms the generation's group at {_place(member)}"
    if hang is Hang.APART:
        return f"{who} is in another collective, {_collective([member])}"
    return f"{who} is in {where(progress, hang)}"


def where(progress: Progress, hang: Hang) -> str:
    """Return ``train.py:46 (time.sleep) and computes``."""
    if progress.phase is Phase.STORING:
        return f"{shown_place(progress)} and waits for the disk of CHECKPOINT_PATH"
    doing = {
        Hang.BUSY: " and computes",
        Hang.LOADING: " and waits for data",
        Hang.SAVING: " and commits",
        Hang.COMPILING: " and compiles",
    }.get(hang, "")
    return f"{shown_place(progress)}{doing}"


def shown_place(progress: Progress) -> str:
    """Return the place where the main thread is, as reported, in one line."""
    return printable(progress.place, MAX_PLACE_CHARS) or "code that is not the script's"


def _place(member: Member) -> str:
    return "" if member.progress is None else shown_place(member.progress)


def _workers(members: Sequence[Member]) -> str:
    names = [member.node for member in members]
    if len(names) == 1:
        return f"worker {names[0]} waits"
    if len(names) > NAMED:
        return f"{len(names)} workers wait"
    return f"workers {', '.join(names[:-1])} and {names[-1]} wait"


def _collective(members: Sequence[Member]) -> str:
    progress = next(member.progress for member in members if member.progress)
    return f"{_collective_name(progress) or 'a collective'} #{progress.collectives}"


def _collective_name(progress: Progress) -> str:
    """Return the collective from a place such as ``all_reduce at train.py:50``, or "" if the place is unknown."""
    return shown_place(progress).partition(" ")[0] if progress.place else ""
