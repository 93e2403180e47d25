"""A job with more ranks than a pushed snapshot lists: the page keeps them and requests changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from samebits.account.job_view import JobView, PresenceState
from samebits.config import Settings
from samebits.dashboard import watching
from samebits.dashboard.watching import NAMES_S, NAMES_SOON_S, JobWatch
from samebits.launcher.scheduler_link import LinkNews, SchedulerLink
from samebits.service.status import LISTED_WORKERS
from tests.launcher.views import view, worker

RANKS = LISTED_WORKERS + 36
WHOLE = view(workers=tuple(worker(node) for node in range(RANKS)), world_size=RANKS, alive=RANKS)
PUSHED = replace(WHOLE, workers=())


class Link(SchedulerLink):
    """Returns what it is given, and counts requests."""

    def __init__(self) -> None:
        self.news: list[LinkNews] = []
        self.asked = 0

    def take(self) -> list[LinkNews]:
        news, self.news = self.news, []
        return news

    def ask(self) -> None:
        self.asked += 1


def test_ranks_of_a_large_job_are_kept_and_a_change_is_requested_soon(
    make_folder: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(watching.time, "monotonic", lambda: now)
    link = Link()
    watch = JobWatch(make_folder(2), link)

    def ranks(told: JobView) -> list[str]:
        link.news.append(told)
        watch.look()
        return [rank["state"] for rank in watch.state()["ranks"]]

    assert len(ranks(WHOLE)) == RANKS and link.asked == 0
    assert len(ranks(replace(PUSHED, step=8))) == RANKS and link.asked == 1, "steps of each, now and then"
    now += NAMES_S - 0.1
    assert len(ranks(replace(PUSHED, step=9))) == RANKS and link.asked == 1
    fewer = {"alive": RANKS - 1, "phase": "forming"}
    assert len(ranks(replace(PUSHED, **fewer))) == RANKS and link.asked == 2, "at once: a worker was lost"
    now += NAMES_SOON_S
    assert len(ranks(replace(PUSHED, **fewer))) == RANKS and link.asked == 3, "until an answer names it"
    lost = (*WHOLE.workers[:-1], replace(WHOLE.workers[-1], presence=PresenceState.LOST))
    assert ranks(replace(WHOLE, workers=lost, **fewer))[-1] == "lost"
    now += NAMES_SOON_S
    assert ranks(replace(PUSHED, **fewer))[-1] == "lost" and link.asked == 3


def test_ranks_of_another_job_are_not_kept(make_folder: Callable[..., Settings]) -> None:
    link = Link()
    watch = JobWatch(make_folder(2), link)
    link.news += [WHOLE, replace(PUSHED, job="another")]
    watch.look()
    assert watch.state()["ranks"] == []
