"""States of a job, and what a person must read on the page in each.

The server runs in this process, over a folder's journal and events and over the scheduler's pushes that a test gives.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from samebits.account.event_log import line_of
from samebits.account.events import EventKind, JobEvent
from samebits.account.job_view import JobView, PresenceState, StandstillView, WorkerView
from samebits.config import Settings
from samebits.core.end_kinds import EndKind
from samebits.core.messages import Process
from samebits.dashboard.command import server_of
from samebits.dashboard.connections import Connections
from samebits.dashboard.guard import Guard
from samebits.dashboard.watching import JobWatch
from samebits.dashboard.web_app import Pages, app_of
from samebits.launcher.scheduler_link import LinkNews, SchedulerLink, Unlinked
from samebits.net.descriptors import raise_descriptor_limit
from samebits.store.process_identity import ProcessIdentity, host_id
from samebits.store.progress_report import ProgressReport, report_file, write_report
from tests.launcher.views import interruption, view, worker

CHROMIUM = shutil.which("chromium")
WAIT_MS = 20_000.0
AGO_S = 40.0  # how long the job has trained
PIDS = {node: 2_345_600 + node for node in range(300)}

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
]


class Link(SchedulerLink):
    """Gives what the test pushes."""

    def __init__(self, *news: LinkNews) -> None:
        self.news = list(news)
        self._readable, self._writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._readable

    def take(self) -> list[LinkNews]:
        news, self.news = self.news, []
        return news

    def ask(self) -> None:
        pass

    def close(self) -> None:
        os.close(self._readable)
        os.close(self._writable)


@dataclass
class State:
    """One state of a job: what its scheduler pushed last, its newest events, and what must be read where."""

    news: list[LinkNews]
    events: list[JobEvent] = field(default_factory=list)
    reads: dict[str, Sequence[str]] = field(default_factory=dict)
    hides: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def ago(kind: EventKind, seconds: float, step: int = 0, node: str = "", text: str = "", **more: object) -> JobEvent:
    return JobEvent(kind, time.time() - seconds, 1, 1, step, node, text, more)


def training_until(seconds: float) -> list[JobEvent]:
    """Return the events of a job that makes ten steps a second until so many seconds ago."""
    began = [
        ago(EventKind.JOB, AGO_S, text="train.py", job="job-1"),
        ago(EventKind.TRAINING, AGO_S, last="1", after_ms=9.0),
    ]
    return began + [
        ago(EventKind.STEP, at, round(10 * (AGO_S - at)))
        for at in (AGO_S - n for n in range(1, int(AGO_S - seconds) + 1))
    ]


def ranks(count: int = 4, lost: dict[int, str] | None = None) -> tuple[WorkerView, ...]:
    lost = lost or {}
    return tuple(
        replace(
            worker(
                node, PresenceState.LOST if node in lost else PresenceState.ALIVE, PIDS[node], f"host-{node // 64}#1"
            ),
            reason=lost.get(node, ""),
            step=400,
        )
        for node in range(count)
    )


KILLED = "was killed by SIGKILL"
JUDGED = f"{KILLED} (node fault; a new process takes its place)"


def lost() -> list[JobEvent]:
    """Return the events of rank 2 being killed."""
    return [
        ago(EventKind.LOST, 5, 350, "2", KILLED, slot=2, silent_ms=2.0),
        ago(EventKind.ROUND, 4.9, 350, text=f"worker 2 (pid 2345602) is lost: {KILLED}", missing="2", gently=False),
    ]


def live(**changes: Any) -> JobView:
    base: dict[str, Any] = {"workers": ranks(), "world_size": 4, "wanted_size": 4, "alive": 4, "step": 400}
    base |= {"min_world_size": 4, "max_world_size": 4, "job": "job-1"}
    return view(**{**base, **changes})


def lost_view(**changes: Any) -> JobView:
    return live(
        **{"workers": ranks(lost={2: KILLED}), "alive": 3, "phase": "forming; waiting for 2", "first_cause": JUDGED}
        | changes
    )


def training() -> State:
    return State(
        [live()],
        training_until(0),
        {
            "#stand": ["training", "Step 400/1000 · 1 min 0 s left"],
            "#loss": ["0.25"],
            "#speed": [r"10\.0"],
            ".rank:nth-child(1)": [rf"pid\s{PIDS[0]}$"],
        },
        "#incident",
    )


def killed_with_a_spare() -> State:
    spare = worker(4, pid=PIDS[4], host="host-0#1", slot=None)
    return State(
        [lost_view(spares=(spare,), spares_alive=1)],
        training_until(5) + lost(),
        {
            "#i-rank": ["rank 2, host-0, pid 2345602"],
            "#i-why": [f"^{KILLED}$"],
            "#i-next": ["^Spare 4 takes its place"],
        },
        "#i-run",
    )


def killed_without_a_spare() -> State:
    here = tuple(replace(one, host=host_id()) for one in ranks(lost={2: KILLED}))
    return State(
        [lost_view(workers=here)],
        [*training_until(5), *lost(), ago(EventKind.CAUSE, 1, 350, "2", JUDGED, slot=2)],
        {
            "#i-title": ["1 of the ranks is lost"],
            "#i-rank": ["rank 2, .*pid 2345602"],
            "#i-why": [f"^{KILLED}$"],
            "#i-next": ["^Nothing starts a new process"],
            "#i-until": ["^the job is given up in 2[89] min"],
            "#i-command": [r"recover(\.sh)?$"],
            "#events": ["✕ lost", "▲ cause"],
        },
        "text=takes its place",
    )


def killed_and_its_seat_cools_down() -> State:
    return State(
        [lost_view(seat_free_in_s=25.0)],
        training_until(5) + lost(),
        {"#i-next": ["^A new process has registered"], "#i-until": [r"seat free in [12]\d s"]},
        "#i-run",
    )


def scheduler_dead() -> State:
    own = ProcessIdentity.of(os.getpid())
    assert own is not None
    return State(
        [live(), Unlinked()],
        training_until(5),
        {
            "#i-title": ["The scheduler does not answer · since"],
            "#i-why": [
                "not answered since",
                "Training continues",
                "4 of 4 worker processes run",
                "reported step 400 at",
            ],
            "#i-next": ["not replaced"],
            "#i-command": [r"recover(\.sh)?$"],
            "#stand": ["no scheduler · Step 2000"],
        },
        settings={"workers": 4, "process": Process(host_id(), own.pid, own.started_at, "cpu")},
    )


def hang() -> State:
    text = "no step for 90 s: worker 1 is in train.py:46 (time.sleep), workers 0, 2 and 3 wait for it in all_reduce 7"
    return State(
        [live(standstill=text, stall=StandstillView(400, ("1",), (), ("0", "2", "3")))],
        training_until(10),
        {
            "#i-title": ["No step is being made · since"],
            "#i-rank": [f"rank 1, host-0, pid {PIDS[1]}"],
            "#i-why": [r"train\.py:46"],
            "#i-next": ["twice the step timeout.*Nothing on this machine"],
            "#i-until": ["process ended in (30|29|2[0-9]) s"],
            "#i-command": ["samebits stack 1"],
            "#stand": ["^no progress · Step 400/1000$"],
            "#speed": ["^–$"],
        },
        settings={"HANG": "end:60"},
    )


def checkpoint_stall() -> State:
    waits = [ago(EventKind.STEP, 9 - n, 390 + n, stalled_ms=3000.0) for n in range(4)]
    return State(
        [live()],
        training_until(10) + waits,
        {
            "#i-title": [r"Steps wait for saves: 12\.?0? s of the last"],
            "#i-rank": ["no single rank"],
            "#i-next": ["Training continues, but more slowly"],
            "#i-command": ["samebits doctor"],
        },
    )


def recovered() -> State:
    back = [
        ago(EventKind.SEATED, 4, 350, "2.1", "pid 7", slot=2),
        ago(EventKind.GENERATION, 3.9, 350, restore=340, members=4, last="2.1", after_ms=1000.0),
        ago(EventKind.TRAINING, 3.8, 340, last="0", after_ms=12_300.0),
    ]
    return State(
        [live()],
        training_until(5) + lost() + back,
        {
            "#i-title": ["Recovered: the job trains again"],
            "#i-rank": ["rank 2"],
            "#i-why": [KILLED],
            "#i-next": [r"from step 340 after 1200 ms\. Steps redone: 10"],
            "#events": [r"\(12\.3 s\)"],
            "#i-command": ["samebits history"],
        },
    )


def finished() -> State:
    return State(
        [live(job_finished=True, training_finished=True, phase="finished", step=1000)],
        [*training_until(5), ago(EventKind.FINISHED, 2, 1000, text="the job is finished")],
        {
            "#i-title": ["The job is finished at step 1000"],
            "#i-next": ["Nothing runs"],
            "#i-command": ["history"],
            "#stand": ["finished"],
        },
    )


def stopped() -> State:
    end = interruption("stopped by Ctrl-C", 400, EndKind.STOPPED)
    return State(
        [live(ended=end, phase="ending")],
        [*training_until(5), ago(EventKind.INTERRUPTED, 2, 400, text="stopped by Ctrl-C", end="stopped")],
        {
            "#i-title": ["Stopped by you at step 400"],
            "#i-why": ["stopped by Ctrl-C"],
            "#i-command": [r"recover(\.sh)?$"],
            "#stand": ["stopped by you"],
            "#events": ["· stopped"],
        },
        "text=interrupted",
    )


def failed() -> State:
    cause = "2 of 4 workers failed; first cause: rank 2 failed first: ValueError: shape (software fault; the job ends)"
    end = interruption(cause, 400, EndKind.SCRIPT_FAILED)
    return State(
        [lost_view(ended=end, phase="ending")],
        [*training_until(5), *lost(), ago(EventKind.INTERRUPTED, 2, 400, text=cause, end="script_failed")],
        {
            "#i-title": ["The job failed at step 400"],
            "#i-rank": ["rank 2"],
            "#i-why": ["ValueError: shape"],
            "#i-next": ["Correct the cause"],
            "#i-command": [r"recover(\.sh)?$"],
        },
    )


def many_ranks() -> State:
    many = ranks(256, {70: KILLED})
    ill = "host host-3: the disk of /logs has 3 MiB left for logs (limit 64 MiB, HEALTH=logs). Fix: free space there"
    return State(
        [lost_view(workers=many, world_size=256, wanted_size=256, alive=255, ailments=(ill,))],
        training_until(5) + lost(),
        {
            "#i-rank": ["rank 70, host-1"],
            "#i-next": ["on host-1"],
            ".host:nth-child(2) .head": ["host host-1 · 64 ranks", "1 lost", "✕ 70"],
            ".rank.lost": ["✕70"],
            "#ailments": ["host-3: the disk of /logs has 3 MiB left"],
        },
    )


STATES = [
    training,
    killed_with_a_spare,
    killed_without_a_spare,
    killed_and_its_seat_cools_down,
    scheduler_dead,
    hang,
    checkpoint_stall,
    recovered,
]
STATES += [finished, stopped, failed, many_ranks]


@pytest.fixture
def serve(make_folder: Callable[..., Settings]) -> Iterator[Callable[[State], str]]:
    """Return a function that serves a state and returns its address."""
    ends: list[Callable[[], object]] = []

    def start(state: State) -> str:
        settings = make_folder(**{"workers": 4, **state.settings})
        for old in settings.recovery_path.glob("events*.jsonl"):
            old.write_text("".join(f"{line_of(event)}\n" for event in state.events))
        link = Link(*state.news)
        watch = JobWatch(settings, link)
        watch.look()
        write_report(settings.log_dir, "0", ProgressReport(400, 1000, {"loss": 0.25}))
        now = time.time()
        os.utime(report_file(settings.log_dir, "0"), (now, now))  # the file's own time is coarse: before that look
        app = app_of(Pages(watch), Guard(frozenset(), None), lambda: "")
        listener = socket.create_server(("127.0.0.1", 0))
        server = server_of(app, Connections(raise_descriptor_limit()))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()

        def end() -> None:
            server.should_exit = True
            thread.join(60)
            listener.close()
            link.close()
            assert not thread.is_alive()

        ends.append(end)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"

    yield start
    for one in ends:
        one()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("make", STATES, ids=lambda make: make.__name__)
def test_page_states_rank_cause_next_step_and_command(
    make: Callable[[], State], serve: Callable[[State], str], chromium: Any
) -> None:
    from playwright.sync_api import expect

    state = make()
    page = chromium.new_page(locale="en-US", viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(WAIT_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(serve(state))
    for place, patterns in state.reads.items():
        for pattern in patterns:
            expect(page.locator(place).first).to_have_text(re.compile(pattern), timeout=WAIT_MS)
    if state.hides:
        expect(page.locator(state.hides).locator("visible=true")).to_have_count(0)
    if folder := os.environ.get("SHOTS"):
        page.screenshot(path=f"{folder}/{make.__name__}-1440.png", full_page=True)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = """[...document.querySelectorAll("#incident *, .rank small, #stand")]
        .filter((node) => node.scrollWidth > node.clientWidth + 1 && getComputedStyle(node).overflow === "hidden")
        .map((node) => node.textContent)"""
    assert page.evaluate(cut) == [], "nothing is clipped"
    if folder:
        page.screenshot(path=f"{folder}/{make.__name__}-390.png", full_page=True)
    page.locator("#language").click()
    if state.reads.get("#i-title"):
        expect(page.locator("#i-title")).to_have_text(re.compile("[\u4e00-\u9fff]"))
    assert not re.search(r"\{\w+\}|undefined", page.inner_text("body")) and complaints == []
    page.close()
