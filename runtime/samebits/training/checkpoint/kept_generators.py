"""This rank's generators in a page of its host's memory: kept at every commit and before every collective, and read.

Here lives when the page is written, what of it is offered when a generation forms, and which entry is taken. Never
here: the page's file (``store``), what a state is made of (``state.generators``), whether a page is good enough (the
core). The one idea: save, then speak. Nobody can have committed a step whose collectives this rank has not launched,
and before it launches one, what its generators stand at is in the page. A process offers what it has read once, so
that what a predecessor that is not quite dead still writes changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samebits.core.messages import KeptCommit, LiveStep, OrphanedPage, Page
from samebits.core.point import Point
from samebits.errors import CheckpointError, StoreError
from samebits.service import log
from samebits.store import checkpoint as checkpoints
from samebits.store.checkpoint import EntryKind, PageContent, PageEntry, PageWriter
from samebits.training.state.generators import Generators, unpack

__all__ = ["KeptGenerators"]


class KeptGenerators:
    """The page of the slot that this process holds.

    Args:
        job: whose.
        memory: the folder in memory; ``checkpoints.SHARED_MEMORY`` but in tests.
    """

    def __init__(self, job: str, *, memory: Path = checkpoints.SHARED_MEMORY) -> None:
        self._job, self._memory = job, memory
        self._slot: int | None = None
        self._page: PageWriter | None = None
        self._generators: Generators | None = None
        self._version = 0  # of the generators, in the page
        self._commit: tuple[Point, int] | None = None  # the last in the page
        self._launched = 0  # collectives, up to that
        self._late_draws = 0
        self._generation = 0  # that the entries are written in
        self._live_step: LiveStep | None = None
        self._offered: PageContent | None = None
        self._lent: dict[int, bytes] = {}  # by slot, of who is gone
        self._failed_before = False

    # ---- keeping

    def committed(self, generators: Generators | None, slot: int, generation: int, point: Point, commits: int) -> None:
        """The state as it stands is a commit, or what a generation begins with."""
        if generators is None or self._failed_before:
            return
        self._generation = generation
        try:
            page = self._page_of(slot)
            if self._commit == (point, commits):  # a generation begins where this process was
                self._write(page, generators, EntryKind.COMMIT, point, commits)
                return
            collectives, draws_late = page.collectives - self._launched, generators.version != self._version
            is_step = self._commit is not None and self._commit[1] + 1 == commits
            self._live_step = LiveStep(collectives, draws_late) if is_step else None
            self._late_draws += is_step and draws_late
            self._write(page, generators, EntryKind.COMMIT, point, commits)
            page.publish()
        except StoreError as error:
            self._failed(error)

    def before_collective(self) -> None:
        """One is launched next: what the generators stand at is kept, where that has changed."""
        page, generators = self._page, self._generators
        if page is None or generators is None or self._commit is None:
            return
        generators.look()
        if generators.version != self._version:
            try:
                self._write(page, generators, EntryKind.BEFORE_COLLECTIVE, *self._commit)
            except StoreError as error:
                self._failed(error)
                return
        page.launching()

    def _page_of(self, slot: int) -> PageWriter:
        if self._page is None or self._slot != slot:
            self.let_go()
            self._slot, self._page = slot, PageWriter(self._memory, self._job, slot)
            entries = self._page.content().entries
            self._late_draws = entries[-1].late_draws if entries else 0
        return self._page

    def _write(self, page: PageWriter, generators: Generators, kind: EntryKind, point: Point, commits: int) -> None:
        page.write(kind, point, commits, self._generation, self._late_draws, generators.packed())
        self._version, self._generators = generators.version, generators
        if kind is EntryKind.COMMIT:
            self._commit, self._launched = (point, commits), page.collectives

    def _failed(self, error: StoreError) -> None:
        """Once, and training goes on."""
        self._failed_before = True
        self.discard()
        log.warn(f"the generators are kept in checkpoints alone, so a loss goes back to one: {error}")

    # ---- offering

    def offer(self, slot: int) -> Page | None:
        """What the slot's page says; it is what :meth:`states_at` takes from."""
        if self._page is not None and self._slot == slot:
            self._offered = self._page.content()
        else:
            self._offered = self._decode(slot, self._read(slot))
        return _described(self._offered)

    def offer_orphaned(self, slot: int) -> tuple[OrphanedPage, ...]:
        """The pages of other slots whose processes are gone: who takes their places may be on another host."""
        pages = []
        for other in checkpoints.orphaned_pages(self._memory, self._job):
            data = self._read(other) if other != slot else None
            page = _described(self._decode(other, data))
            if data is not None and page is not None:
                self._lent[other] = data
                pages.append(OrphanedPage(other, page))
        return tuple(pages)

    def lent(self, slot: int) -> bytes:
        """A page as it was offered."""
        return self._lent[slot]

    def lend_no_more(self) -> None:
        """A generation begins: whoever was lent a page has it."""
        self._lent.clear()

    def borrow(self, slot: int, data: memoryview, whence: str) -> None:
        """Another rank had the page of this process's slot: from now on it is the one that was offered.

        Raises:
            StoreError: it is no page, or another's.
        """
        self._offered = checkpoints.decode_page(data, self._job, slot, whence)

    def live_step(self, point: Point | None, commits: int) -> LiveStep | None:
        """What is known of the step that led to the commit in this process's memory."""
        return self._live_step if self._commit == (point, commits) else None

    def states_at(self, point: Point, commits: int) -> dict[str, Any]:
        """The generators' states at a commit, from the page as it was offered.

        Raises:
            CheckpointError: it has none, or they are no states.
        """
        entry = self._entry_for(point, commits)
        if entry is None:
            raise CheckpointError(f"the page of the generators has nothing of {point}, commit {commits}")
        return unpack(entry.state)

    def _entry_for(self, point: Point, commits: int) -> PageEntry | None:
        """The commit's own; else the last of all, where the commit is the next one."""
        entries = () if self._offered is None else self._offered.entries
        own = [one for one in entries if one.kind is EntryKind.COMMIT]
        for entry in reversed(own):
            if (entry.point, entry.commits) == (point, commits):
                return entry
        return entries[-1] if own and (own[-1].generation, own[-1].commits + 1) == (point.generation, commits) else None

    def _read(self, slot: int) -> bytes | None:
        try:
            return checkpoints.read_page(self._memory, self._job, slot)
        except StoreError as error:
            log.warn(f"passed over the page of the generators of slot {slot}: {error}")
            return None

    def _decode(self, slot: int, data: bytes | None) -> PageContent | None:
        return None if data is None else checkpoints.decode_page(data, self._job, slot, f"the page of slot {slot}")

    # ---- the end

    def discard(self) -> None:
        """The job has ended well: nobody will look for the page."""
        if self._page is not None:
            self._page.discard()
        self._page = self._commit = None

    def let_go(self) -> None:
        """What is in the page stays."""
        if self._page is not None:
            self._page.close()
        self._page = self._commit = None


def _described(content: PageContent | None) -> Page | None:
    """What the scheduler is told of it; nothing where it has no commit."""
    entries = () if content is None else content.entries
    commits = [entry for entry in entries if entry.kind is EntryKind.COMMIT]
    if content is None or not commits:
        return None
    last = commits[-1]
    return Page(
        commits=tuple(KeptCommit(entry.point, entry.commits) for entry in commits),
        generation=last.generation,
        next_commit=last.commits + 1,
        collectives=content.collectives - last.collectives,
        draws_late=entries[-1].late_draws > 0,
    )
