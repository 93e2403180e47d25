"""What ended a generation: which of its members were lost first, when, at which step and of what.

Here lives what is believed about causes, and their sentence. Never here: what is done about a loss. The one idea: the
first loss is the cause and what comes later follows from it, so the first is written to the journal before anybody is
told, and every later message names it; processes that die within ``AT_ONCE_S`` of it without a word, or of another
error, are causes, too, for nobody can tell which of them was first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from samebits.core.causes.table import Notice, Observation
from samebits.core.hangs import Hang, told_apart
from samebits.core.ledger import Presence
from samebits.core.messages import Process
from samebits.core.records import CauseFound
from samebits.core.values import replace

AT_ONCE_S = 0.5
MOST_CAUSES = 4
NAMED_FOLLOWERS = 8


class Causes:
    """Of generations whose end was not made good yet.

    Args:
        known: what the journal says of the last generation.
    """

    def __init__(self, known: Sequence[CauseFound] = ()) -> None:
        self._of: dict[int, list[CauseFound] | str] = {known[0].generation: list(known)} if known else {}
        self._followers: dict[int, set[int]] = {}  # generation → the ranks that were lost later
        self._made_good: list[CauseFound] = []  # of the generation that was made good last: more may be known of them

    @property
    def first(self) -> str:
        """The first loss since the job trained last, in a sentence; empty where it trains."""
        for generation, found in self._of.items():
            return found if isinstance(found, str) else sentence(found, self._followers.get(generation, ()))
        return ""

    def take(self, cause: CauseFound, *, spoke: bool, is_echo: bool = False) -> bool:
        """A member of a generation is lost, or dies; whether that is to be remembered as a cause.

        Args:
            cause: its loss; once more where it had said that it dies.
            spoke: it has said what error it dies of: where another one has said the same, they met it together.
            is_echo: that error is a broken connection, which behind an earlier loss is its consequence.
        """
        found = self._of.setdefault(cause.generation, [])
        followers = self._followers.setdefault(cause.generation, set())
        if isinstance(found, str) or cause.rank in followers or any(one.node == cause.node for one in found):
            return False
        is_known = is_echo or (spoke and any(_reason(one) == _reason(cause) for one in found))
        is_at_once = bool(found) and cause.at - found[0].at <= AT_ONCE_S and len(found) < MOST_CAUSES and not is_known
        if not found or is_at_once:
            found.append(cause)
            return True
        followers.add(cause.rank)
        return False

    def explain(self, node: str, process: Process, text: str) -> CauseFound | None:
        """More is known of the end of this process: the cause that says so now; None where its end is none."""
        for found in (*self._of.values(), self._made_good):
            if isinstance(found, str):
                continue
            for place, one in enumerate(found):
                if one.node == node and one.process == process:
                    said = text if found is not self._made_good else _as_it_was_made_good(text, one.text)
                    found[place] = replace(one, text=said)
                    return found[place] if said != one.text else None
        return None

    def blame(self, generation: int, text: str) -> None:
        """Something else has ended the generation, or keeps one from forming."""
        self._of.setdefault(generation, text)

    def made_good(self, generation: int) -> None:
        """A member trains in this generation: what ended those before it is over."""
        for earlier in [one for one in self._of if one < generation]:
            found = self._of.pop(earlier)
            self._made_good = found if isinstance(found, list) else []
            self._followers.pop(earlier, None)


def observed(presence: Presence, words: str, lease_s: float) -> Observation:
    """What a scheduler knows of the loss of a process; ``words`` are its own, empty where it has said none."""
    if presence.hang is not None:
        return Observation(hang=presence.hang)
    if words:
        return Observation(error=words, is_failure=True)
    if (ended := presence.ended) is not None:
        return Observation(ended.status, ended.signal, ended.error, ended.is_failure, ended.is_out_of_memory)
    if presence.is_gone:
        return Observation(notice=Notice.GONE)
    if presence.closed_at is not None:
        return Observation(notice=Notice.CLOSED)
    hang = told_apart(presence.sight_now(), lease_s)
    return Observation(notice=Notice.SILENT) if hang is Hang.SILENT else Observation(hang=hang)


def sentence(causes: Sequence[CauseFound], followers: Collection[int] = ()) -> str:
    """``rank 3 (node 3, host a, pid 4711) failed first, at step 412: …; ranks 0–2 followed``."""
    first, *others = causes
    text = f"{_who(first)} failed first{_when(first)}: {first.text}"
    if others:
        parts = [f"{_who(one)}{_when(one)}: {one.text}" for one in causes]
        text = f"{len(parts)} failed at once: {'; '.join(parts)}"
    if followers:
        text += f"; {_ranks(sorted(followers))} followed"
    return text


def _reason(cause: CauseFound) -> str:
    """Without what is done about it, which stands behind it in parentheses."""
    return cause.text.rpartition(" (")[0] or cause.text


def _as_it_was_made_good(text: str, before: str) -> str:
    """Words and class of the one, what was done of the other: it is done, whatever is at hand by now."""
    return f"{text.rpartition('; ')[0]}; {before.rpartition('; ')[2]}"


def _who(cause: CauseFound) -> str:
    host = cause.process.host.partition("#")[0]
    return f"rank {cause.rank} (node {cause.node}, host {host}, pid {cause.process.pid})"


def _when(cause: CauseFound) -> str:
    return f", at step {cause.step}" if cause.step else ""


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 2``, ``ranks 0–2``, ``ranks 0, 2 and 5 more``."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}–{ranks[-1]}"
    shown, more = ranks[:NAMED_FOLLOWERS], len(ranks) - NAMED_FOLLOWERS
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}"
    return f"{text} and {more} more" if more > 0 else text
