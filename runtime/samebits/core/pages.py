"""Whose generators can be brought to the newest commit that a memory holds, by the pages that outlive kill -9.

Here lives one decision. Never here: which point that is (``restore``), what a page looks like. The one idea: a rank
that was killed within the step that its peers have committed has taken part in the step's collectives, so its
generators at that commit are those before its last collective, unless something was drawn in between. That is not to be
seen in the page of the dead; it is concluded from the peers, who do the same: all of them launched as many collectives
in that step as the page counts, and none drew after its last one; nor did the page's rank ever before.
"""

from __future__ import annotations

from collections.abc import Collection

from samebits.core.messages import LiveStep, Page
from samebits.core.point import Point

NO_PAGE = "finds no page of its generators in its host's memory"
DREW_LATE = "draws random numbers between a step's last collective and its commit"
PEERS_DREW_LATE = "lacks the commit in its page, and its peers drew between that step's last collective and it"
NO_SUCH_STEP = "has neither this commit nor the same number of collectives before it in its page"


def obstacle(page: Page | None, point: Point, commits: int, steps: Collection[LiveStep | None]) -> str:
    """Why the page cannot bring its rank's generators to a commit; empty where it can.

    Args:
        page: of the rank.
        point: the commit.
        commits: how many lie on the line up to it.
        steps: what those who hold it know of the step that led there.
    """
    if page is None:
        return NO_PAGE
    if any(kept.point == point and kept.commits == commits for kept in page.commits):
        return ""
    known = [step for step in steps if step is not None]
    if page.generation != point.generation or page.next_commit != commits or not known:
        return NO_SUCH_STEP
    if page.draws_late:
        return DREW_LATE
    if any(step.draws_late for step in known):
        return PEERS_DREW_LATE
    return "" if all(step.collectives == page.collectives for step in known) else NO_SUCH_STEP
