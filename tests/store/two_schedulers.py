"""Model checker: schedulers that share one folder without a lock, in every interleaving of their steps.

The model has the folder (claims, the journal's name, files, temporary names), the atomic steps of each scheduler, and
the invariants. ``test_store_term_claim`` runs the real code on real files. A scheduler that is killed or stopped
forever is one that is never scheduled again.

A user may remove the folder, or the claims in it, at any point; that is one more program (``FOLDER``, ``CLAIMS``).
Records appended before the folder was removed are lost for later schedulers, since nothing on disk shows them.

Invariants:

- the journal, which the next scheduler to claim reads, holds every record that was released and not removed, and no
  scheduler has written to the file of another;
- a scheduler that has released anything knows every record that an earlier one released, even if the earlier one
  released it later, having been stopped between its check and its answer. So no two of them ever decide differently.

Claims are ordered by creation, because in an emptied folder numbers restart at 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Record = tuple[int, int]
"""A record: its writer's claim, in order of creation, and its number."""

CLAIM = ("list", "create", "look", "remove", "sweep", "unlink", "read")
REPLACE = ("temporary", "ask", "publish", "open")
APPEND = ("append", "ask", "release")
OLD = (*APPEND, *REPLACE, *APPEND)
NEW = (*CLAIM, *REPLACE, *APPEND, *REPLACE, *APPEND)
SHORT = (*CLAIM, *REPLACE, *APPEND)
AGAIN = (*CLAIM[:-1], "recognise", *REPLACE)
"""What a scheduler does if its claim is gone and there is no higher one."""
FOLDER = ("remove folder",)
CLAIMS = ("remove claims",)


@dataclass(frozen=True, slots=True)
class File:
    writer: int
    records: tuple[Record, ...]
    term: int = 1  # the number that its writer claimed at its start; the next claim must exceed it
    is_mixed: bool = False  # another scheduler appended to it, at an offset that was not its own


@dataclass(frozen=True, slots=True)
class Scheduler:
    program: tuple[str, ...]
    at: int = 0
    again: tuple[str, ...] = AGAIN
    claim: int = 0  # order of creation, unique
    number: int = 0
    term: int = 0  # its first number
    highest: int = 0
    listed: frozenset[int] = frozenset()  # claims or temporary files that it has listed and is about to remove
    records: tuple[Record, ...] = ()
    made: int = -1  # the file it made last
    target: int = -1  # the file that it appends to
    written: int = 0
    has_released: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    claims: frozenset[tuple[int, int]]  # number and order of creation
    journal: int  # -1: none
    files: tuple[File, ...]
    temporaries: frozenset[int]
    released: frozenset[Record]
    lost: frozenset[Record]  # appended before the folder was removed
    made: int  # number of claims so far
    schedulers: tuple[Scheduler, ...]


def folder_of(*programs: tuple[str, ...], again: tuple[str, ...] = AGAIN) -> Folder:
    """Return the folder in which the first scheduler has claim 1 and serves, and the others have yet to start."""
    first = (1, 0)
    old = Scheduler(programs[0], again=again, claim=1, number=1, term=1, records=(first,), made=0, target=0, written=1)
    others = tuple(Scheduler(program, again=again) for program in programs[1:])
    file, released = File(1, (first,)), frozenset({first})
    return Folder(frozenset({(1, 1)}), 0, (file,), frozenset(), released, frozenset(), 1, (old, *others))


def violation(*programs: tuple[str, ...], again: tuple[str, ...] = AGAIN) -> tuple[str | None, int]:
    """Return what is wrong in the first bad state of any interleaving, and the number of states visited."""
    pending, seen = [folder_of(*programs, again=again)], set()
    while pending:
        folder = pending.pop()
        if folder in seen:
            continue
        seen.add(folder)
        if (what := _wrong(folder)) is not None:
            return what, len(seen)
        for number, scheduler in enumerate(folder.schedulers):
            if scheduler.at < len(scheduler.program):
                pending.append(_step(folder, number))
    return None, len(seen)


def _wrong(folder: Folder) -> str | None:
    kept = folder.files[folder.journal].records if folder.journal >= 0 else ()
    if folder.journal >= 0 and folder.files[folder.journal].is_mixed:
        return "two schedulers have written to the journal's file"
    if not folder.released - folder.lost <= set(kept):
        return f"{folder.released} was released, and the journal holds {kept}"
    for scheduler in folder.schedulers:
        earlier = {record for record in folder.released - folder.lost if record[0] < scheduler.claim}
        if scheduler.has_released and not earlier <= set(scheduler.records):
            return f"claim {scheduler.claim} decides by {scheduler.records}, and {earlier} was released before its time"
    return None


def _step(folder: Folder, number: int) -> Folder:
    me = folder.schedulers[number]
    folder, me = _STEPS[me.program[me.at]](folder, replace(me, at=me.at + 1))
    schedulers = (*folder.schedulers[:number], me, *folder.schedulers[number + 1 :])
    return replace(folder, schedulers=schedulers)


_Both = tuple[Folder, Scheduler]


def _leaves(folder: Folder, me: Scheduler) -> _Both:
    return folder, Scheduler((), claim=me.claim, records=me.records, has_released=me.has_released)


def _list(folder: Folder, me: Scheduler) -> _Both:
    written = folder.files[folder.journal].term if folder.journal >= 0 else 0
    return folder, replace(me, highest=max(me.number, written, *(number for number, _ in folder.claims), 0))


def _create(folder: Folder, me: Scheduler) -> _Both:
    number, made = me.highest + 1, folder.made + 1
    if number in {one for one, _ in folder.claims}:
        return _leaves(folder, me)
    folder = replace(folder, claims=folder.claims | {(number, made)}, made=made)
    records = me.records
    if me.claim and records and records[-1] not in folder.released:  # it is released under this claim, if at all
        records = (*records[:-1], (made, records[-1][1]))
    me = replace(me, claim=made, number=number, term=me.term or number, records=records, has_released=False)
    return folder, me


def _look(folder: Folder, me: Scheduler) -> _Both:
    if max(number for number, _ in (*folder.claims, (0, 0))) > me.number:
        return _leaves(replace(folder, claims=folder.claims - {(me.number, me.claim)}), me)
    return folder, replace(me, listed=frozenset(number for number, _ in folder.claims if number < me.number))


def _remove(folder: Folder, me: Scheduler) -> _Both:
    if not me.listed:
        return folder, me
    number = min(me.listed)
    rest = me.listed - {number}
    claims = frozenset(one for one in folder.claims if one[0] != number)
    return replace(folder, claims=claims), replace(me, listed=rest, at=me.at - bool(rest))


def _sweep(folder: Folder, me: Scheduler) -> _Both:
    return folder, replace(me, listed=folder.temporaries)


def _unlink(folder: Folder, me: Scheduler) -> _Both:
    if not me.listed:
        return folder, me
    file = min(me.listed)
    rest = me.listed - {file}
    return replace(folder, temporaries=folder.temporaries - {file}), replace(me, listed=rest, at=me.at - bool(rest))


def _read(folder: Folder, me: Scheduler) -> _Both:
    records = folder.files[folder.journal].records if folder.journal >= 0 else ()
    return folder, replace(me, records=records)


def _recognise(folder: Folder, me: Scheduler) -> _Both:
    """Recognise a journal that another scheduler wrote."""
    return (folder, me) if folder.journal in (-1, me.target) else _leaves(folder, me)


def _temporary(folder: Folder, me: Scheduler) -> _Both:
    made = len(folder.files)
    files = (*folder.files, File(me.claim, me.records, me.term))
    return replace(folder, files=files, temporaries=folder.temporaries | {made}), replace(me, made=made)


def _ask(folder: Folder, me: Scheduler) -> _Both:
    if (me.number, me.claim) in folder.claims:
        return folder, me
    if max(number for number, _ in (*folder.claims, (0, 0))) >= me.number or me.target < 0:
        return _leaves(folder, me)
    rest = me.program[me.at :]
    if rest[: len(REPLACE) - 2] == REPLACE[2:]:  # it was about to replace the journal, and does so below
        rest = rest[len(REPLACE) - 2 :]
    return folder, replace(me, program=(*me.again, *rest), at=0)


def _remove_folder(folder: Folder, me: Scheduler) -> _Both:
    lost = frozenset(record for file in folder.files for record in file.records)
    return replace(folder, claims=frozenset(), journal=-1, temporaries=frozenset(), lost=lost), me


def _remove_claims(folder: Folder, me: Scheduler) -> _Both:
    return replace(folder, claims=frozenset()), me


def _publish(folder: Folder, me: Scheduler) -> _Both:
    if me.made not in folder.temporaries:
        return _leaves(folder, me)
    return replace(folder, journal=me.made, temporaries=folder.temporaries - {me.made}), me


def _open(folder: Folder, me: Scheduler) -> _Both:
    return folder, replace(me, target=me.made)


def _open_by_name(folder: Folder, me: Scheduler) -> _Both:
    return folder, replace(me, target=folder.journal)


def _append(folder: Folder, me: Scheduler) -> _Both:
    record = (me.claim, me.written)
    file = folder.files[me.target]
    grown = replace(file, records=(*file.records, record), is_mixed=file.is_mixed or file.writer != me.claim)
    files = (*folder.files[: me.target], grown, *folder.files[me.target + 1 :])
    return replace(folder, files=files), replace(me, records=(*me.records, record), written=me.written + 1)


def _release(folder: Folder, me: Scheduler) -> _Both:
    return replace(folder, released=folder.released | {me.records[-1]}), replace(me, has_released=True)


_STEPS = {
    "list": _list,
    "create": _create,
    "look": _look,
    "remove": _remove,
    "sweep": _sweep,
    "unlink": _unlink,
    "read": _read,
    "recognise": _recognise,
    "remove folder": _remove_folder,
    "remove claims": _remove_claims,
    "temporary": _temporary,
    "ask": _ask,
    "publish": _publish,
    "open": _open,
    "open by name": _open_by_name,
    "append": _append,
    "release": _release,
}
