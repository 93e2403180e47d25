"""The first losses of a generation: which members, when, at which step and why.

The first loss is the cause, and later ones follow from it. It is therefore written to the journal before any member is
informed, and every later message names it. Other deaths within ``AT_ONCE_S`` seconds, without an error or with a
different one, count as causes too, because their order is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from samebits.core.causes.table import LossDetection, Observation
from samebits.core.hangs import Hang, classify_hang
from samebits.core.ledger import Liveness
from samebits.core.messages import Process
from samebits.core.records import CauseFound
from samebits.core.values import replace
from samebits.printable import listed

AT_ONCE_S = 0.5
_KILLED = re.compile(r"^global rank \d+ \(pid \d+\) was killed by signal (\d{1,2})\b")
MOST_CAUSES = 4
NAMED_FOLLOWERS = 8


class Causes:
    """Causes for the ends of generations, as long as no later generation trains.

    Args:
        known: the journal's causes of the last generation.
    """

    def __init__(self, known: Sequence[CauseFound] = ()) -> None:
        self._of: dict[int, list[CauseFound] | str] = {known[0].generation: list(known)} if known else {}
        self._followers: dict[int, set[int]] = {}  # generation → ranks lost later
        self._echoes: set[tuple[int, str]] = set()  # generation and node of causes that are broken connections
        self._made_good: list[CauseFound] = []  # of the last replaced generation, for details that arrive late

    @property
    def first(self) -> str:
        """Return a sentence about the first loss since the job last trained, or "" while it trains."""
        return self._first()

    @property
    def first_at_end(self) -> str:
        """Return the first loss without its remedy, for a job that ends before the remedy is carried out."""
        return self._first(_without_remedy)

    def _first(self, shown: Callable[[CauseFound], CauseFound] = lambda one: one) -> str:
        for generation, found in self._of.items():
            if isinstance(found, str):
                return found
            return sentence([shown(one) for one in found], self._followers.get(generation, ()))
        return ""

    def is_named_in(self, text: str) -> bool:
        """Return whether a text, such as a launcher's reason to end the job, already names the first loss."""
        found = next(iter(self._of.values()), [])
        if isinstance(found, str):
            return found in text
        return any(_reason(one) in text for one in found)

    def take(self, cause: CauseFound, *, spoke: bool, is_echo: bool = False) -> bool:
        """Record that a member is lost or dying, and return whether that is a new cause.

        Args:
            cause: the member's loss; recorded again if the member had announced its death.
            spoke: the member itself sent its fatal error. An equal error of another rank means that both met it
                together.
            is_echo: the error is a broken connection. After an earlier loss it is that loss's consequence.
        """
        found = self._of.setdefault(cause.generation, [])
        followers = self._followers.setdefault(cause.generation, set())
        if isinstance(found, str) or cause.rank in followers or any(one.node == cause.node for one in found):
            return False
        is_known = is_echo or (spoke and any(_reason(one) == _reason(cause) for one in found))
        is_at_once = bool(found) and cause.at - found[0].at <= AT_ONCE_S and len(found) < MOST_CAUSES and not is_known
        if found and not is_echo and all((one.generation, one.node) in self._echoes for one in found):
            followers |= {one.rank for one in found}  # their connections broke because of this loss
            found[:] = [cause]
            return True
        if not found or is_at_once:
            found.append(cause)
            if is_echo:
                self._echoes.add((cause.generation, cause.node))
            return True
        followers.add(cause.rank)
        return False

    def explain(self, node: str, process: Process, text: str) -> CauseFound | None:
        """Add details about a process's end, and return the changed cause, or None."""
        for found in (*self._of.values(), self._made_good):
            if isinstance(found, str):
                continue
            for place, one in enumerate(found):
                if one.node == node and one.process == process:
                    is_done = found is self._made_good or "; a spare " in one.text  # the spare has the place by now
                    said = _as_it_was_made_good(text, one.text) if is_done else text
                    found[place] = replace(one, text=said)
                    return found[place] if said != one.text else None
        return None

    def blame(self, generation: int, text: str) -> None:
        """Record a reason other than a loss for which the generation ended or none forms."""
        self._of.setdefault(generation, text)

    def made_good(self, generation: int) -> None:
        """Mark earlier causes as resolved, because a member trains in this generation."""
        for earlier in [one for one in self._of if one < generation]:
            found = self._of.pop(earlier)
            self._made_good = found if isinstance(found, list) else []
            self._followers.pop(earlier, None)


def observed(presence: Liveness, words: str, lease_s: float) -> Observation:
    """Return what the scheduler knows about a lost process. ``words`` is its own error message, or ""."""
    if presence.hang is not None:
        return Observation(hang=presence.hang)
    if (killed := _KILLED.search(words)) is not None:  # a launcher's words about its worker
        return Observation(signal=int(killed[1]), error=words)
    if words:
        return Observation(error=words, is_failure=True)
    if (ended := presence.ended) is not None:
        return Observation(ended.status, ended.signal, ended.error, ended.is_failure, ended.is_out_of_memory)
    if presence.is_gone:
        return Observation(notice=LossDetection.GONE)
    if presence.closed_at is not None:
        return Observation(notice=LossDetection.CLOSED)
    hang = classify_hang(presence.current_process_state(), lease_s)
    return Observation(notice=LossDetection.SILENT) if hang is Hang.SILENT else Observation(hang=hang)


def sentence(causes: Sequence[CauseFound], followers: Collection[int] = ()) -> str:
    """Return a text such as ``rank 3 (node 3, host a, pid 4711) failed first, at step 412: …; ranks 0–2 followed``."""
    first, *others = causes
    text = f"{_who(first)} failed first{_when(first)}: {first.text}"
    if others:
        parts = [f"{_who(one)}{_when(one)}: {one.text}" for one in causes]
        text = f"{len(parts)} failed at once: {'; '.join(parts)}"
    if followers:
        text += f"; {_ranks(sorted(followers))} followed"
    return text


def _reason(cause: CauseFound) -> str:
    """Return the cause without the remedy in parentheses at its end."""
    return cause.text.rpartition(" (")[0] or cause.text


def _without_remedy(cause: CauseFound) -> CauseFound:
    """Return the cause with only its class in parentheses, unless its remedy is to end the job."""
    reason, mark, judgement = cause.text.rpartition(" (")
    kind, has_remedy, remedy = judgement.partition("; ")
    is_undone = bool(mark and has_remedy) and "job ends" not in remedy and "ends the job" not in remedy
    return replace(cause, text=f"{reason}{mark}{kind})") if is_undone else cause


def _as_it_was_made_good(text: str, before: str) -> str:
    """Return ``text`` with the remedy in ``before``, which has already been carried out."""
    return f"{text.rpartition('; ')[0]}; {before.rpartition('; ')[2]}"


def _who(cause: CauseFound) -> str:
    host = cause.process.host.partition("#")[0]
    return f"rank {cause.rank} (node {cause.node}, host {host}, pid {cause.process.pid})"


def _when(cause: CauseFound) -> str:
    return f", at step {cause.step}" if cause.step else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 2``, ``ranks 0–2``, ``ranks 0 and 2`` or ``ranks 0, 2 and 5 more``."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    shown, more = ranks[:NAMED_FOLLOWERS], len(ranks) - NAMED_FOLLOWERS
    named = listed([*shown, f"{more} more"] if more > 0 else shown)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
