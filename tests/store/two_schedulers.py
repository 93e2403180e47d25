"""Schedulers over one folder without a lock, as a small model: every interleaving of their steps is looked at.

Here are the folder (claims, the journal's name, files, temporary names), what each scheduler does there in atomic
steps, and what must hold after every one of them. Never here: the real files; ``test_store_term_claim`` runs the code
over those. A scheduler that is killed or stopped for ever is one that is never given another step, so it needs no step
of its own. What must hold:

- the journal, which whoever claims next reads, holds every record that was ever released, and nobody has written to the
  file of another;
- a scheduler that has released anything knows every record that an earlier one released, also if that one released it
  later, as one does that is stopped between its question and its answer: so no two of them ever decide apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Record = tuple[int, int]
"""Its writer's claim, and which of its records."""

CLAIM = ("list", "create", "look", "remove", "sweep", "unlink", "read")
REPLACE = ("temporary", "ask", "publish", "open")
APPEND = ("append", "ask", "release")
OLD = (*APPEND, *REPLACE, *APPEND)
NEW = (*CLAIM, *REPLACE, *APPEND, *REPLACE, *APPEND)
SHORT = (*CLAIM, *REPLACE, *APPEND)


@dataclass(frozen=True, slots=True)
class File:
    writer: int
    records: tuple[Record, ...]
    is_mixed: bool = False  # somebody else has appended to it, at an offset that was not its own


@dataclass(frozen=True, slots=True)
class Scheduler:
    program: tuple[str, ...]
    at: int = 0
    claim: int = 0
    highest: int = 0
    listed: frozenset[int] = frozenset()  # what it has seen and is about to remove: claims, or temporary files
    records: tuple[Record, ...] = ()
    made: int = -1  # the file it made last
    target: int = -1  # the file that it appends to
    written: int = 0
    has_released: bool = False


@dataclass(frozen=True, slots=True)
class Folder:
    claims: frozenset[int]
    journal: int
    files: tuple[File, ...]
    temporaries: frozenset[int]
    released: frozenset[Record]
    schedulers: tuple[Scheduler, ...]


def folder_of(*programs: tuple[str, ...]) -> Folder:
    """The first has the claim 1 and serves; the others are yet to begin."""
    first = (1, 0)
    old = Scheduler(programs[0], claim=1, records=(first,), made=0, target=0, written=1)
    others = tuple(map(Scheduler, programs[1:]))
    return Folder(frozenset({1}), 0, (File(1, (first,)),), frozenset(), frozenset({first}), (old, *others))


def violation(*programs: tuple[str, ...]) -> tuple[str | None, int]:
    """What is wrong in the first bad state that any interleaving leads to, and how many states were looked at."""
    pending, seen = [folder_of(*programs)], set()
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
    file = folder.files[folder.journal]
    if file.is_mixed:
        return "two schedulers have written to the journal's file"
    if not folder.released <= set(file.records):
        return f"{folder.released} was released, and the journal holds {file.records}"
    for scheduler in folder.schedulers:
        earlier = {record for record in folder.released if record[0] < scheduler.claim}
        if scheduler.has_released and not earlier <= set(scheduler.records):
            return f"term {scheduler.claim} decides by {scheduler.records}, and {earlier} was released before its time"
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
    return folder, replace(me, highest=max(folder.claims))


def _create(folder: Folder, me: Scheduler) -> _Both:
    claim = me.highest + 1
    if claim in folder.claims:
        return _leaves(folder, me)
    return replace(folder, claims=folder.claims | {claim}), replace(me, claim=claim)


def _look(folder: Folder, me: Scheduler) -> _Both:
    if max(folder.claims) > me.claim:
        return _leaves(replace(folder, claims=folder.claims - {me.claim}), me)
    return folder, replace(me, listed=frozenset(claim for claim in folder.claims if claim < me.claim))


def _remove(folder: Folder, me: Scheduler) -> _Both:
    if not me.listed:
        return folder, me
    claim = min(me.listed)
    rest = me.listed - {claim}
    return replace(folder, claims=folder.claims - {claim}), replace(me, listed=rest, at=me.at - bool(rest))


def _sweep(folder: Folder, me: Scheduler) -> _Both:
    return folder, replace(me, listed=folder.temporaries)


def _unlink(folder: Folder, me: Scheduler) -> _Both:
    if not me.listed:
        return folder, me
    file = min(me.listed)
    rest = me.listed - {file}
    return replace(folder, temporaries=folder.temporaries - {file}), replace(me, listed=rest, at=me.at - bool(rest))


def _read(folder: Folder, me: Scheduler) -> _Both:
    return folder, replace(me, records=folder.files[folder.journal].records)


def _temporary(folder: Folder, me: Scheduler) -> _Both:
    made = len(folder.files)
    files = (*folder.files, File(me.claim, me.records))
    return replace(folder, files=files, temporaries=folder.temporaries | {made}), replace(me, made=made)


def _ask(folder: Folder, me: Scheduler) -> _Both:
    return (folder, me) if me.claim in folder.claims else _leaves(folder, me)


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
    grown = File(file.writer, (*file.records, record), file.is_mixed or file.writer != me.claim)
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
    "temporary": _temporary,
    "ask": _ask,
    "publish": _publish,
    "open": _open,
    "open by name": _open_by_name,
    "append": _append,
    "release": _release,
}
