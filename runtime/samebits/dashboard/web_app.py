"""Serve one ``JobWatch`` over a few web routes, with a stream of server-sent events per page.

One task watches the job and creates each message once, however many pages are open. A page that reads too slowly is
disconnected, and reconnects automatically. Messages of the scheduler are forwarded at once; files are polled. ``guard``
decides which requests are answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from samebits import strict_json
from samebits.dashboard.actions import Actions
from samebits.dashboard.connections import TRUST
from samebits.dashboard.guard import ACTION, HEADERS, Guard, cookie_of, uid_of
from samebits.dashboard.watching import JobWatch, shown_events

LOOK_S = 0.25  # how often files are polled while the scheduler sends nothing
REST_S = 0.05  # minimum time between two looks, however much the scheduler sends
STATE_S = 1.0  # how often the state is sent if nothing but the time has changed
MOST_PAGES = 32
MOST_WAITING = 64  # messages that a page has not read yet
MAX_URL = 2048
METRICS = "/metrics"  # shows nothing that a scheduler without a secret would not also send to any client
STATIC = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_NAMES = ("page.js", "words.js", "page.css", "uplot.js", "uplot.css", "icon.svg", "LICENSE-uPlot")
FILES = {"": "index.html", **{name: name for name in _NAMES}}


class Pages:
    """The open pages, and the messages that they have not read yet.

    Args:
        watch: the watch of the job.
        linger_s: seconds with neither a scheduler nor an open page after which ``leave`` is called; None for never.
    """

    def __init__(self, watch: JobWatch, linger_s: float | None = None) -> None:
        self.watch = self._watch = watch
        self._linger_s = linger_s
        self.leave: Callable[[], object] = lambda: None
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    async def run(self) -> None:
        """Watch the job until cancelled."""
        loop = asyncio.get_running_loop()
        told_at, wanted_at = 0.0, loop.time()
        while True:
            changed = await asyncio.to_thread(self._watch.look)
            now = loop.time()
            if self._queues or self._watch.is_linked:
                wanted_at = now
            elif self._linger_s is not None and now - wanted_at > self._linger_s:
                self.leave()
            if changed.is_anew:
                self._tell("anew", [])
            if changed.events and self._queues:
                self._tell("events", shown_events(changed.events))
            if self._queues and (changed.is_told or now - told_at >= STATE_S):
                told_at = now
                self._tell("state", await asyncio.to_thread(self.state))
            await asyncio.sleep(REST_S)
            await self._news()

    def ended(self, run: asyncio.Task[None]) -> None:
        """End the server if ``run`` has failed, because a page with an outdated state is misleading."""
        error = None if run.cancelled() else run.exception()
        if error is not None:
            print(f"samebits: the dashboard ends: {error!r}. Fix: start it again", file=sys.stderr, flush=True)
            self.leave()

    async def _news(self) -> None:
        """Wait until the scheduler sends something, or it is time to poll the files."""
        source = self._watch.source
        if source is None:
            await asyncio.sleep(LOOK_S)
            return
        loop, is_told = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(source, is_told.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_told.wait(), LOOK_S)
        finally:
            loop.remove_reader(source)

    def state(self) -> dict[str, Any]:
        """Return the content of a "state" message."""
        return {**self._watch.state(), "loss": self._watch.losses()[-1:]}

    def everything(self) -> dict[str, Any]:
        """Return the data that a page needs when it is opened."""
        watch = self._watch
        return {
            "state": self.state(),
            "events": shown_events(list(watch.events)),
            "steps": watch.steps(),
            "losses": watch.losses(),
        }

    def _tell(self, name: str, content: object) -> None:
        message = b"event: %b\ndata: %b\n\n" % (name.encode(), _json(content).encode())
        for queue in list(self._queues):
            try:
                queue.put_nowait(message)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the messages for one page until the page or this server is gone."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        self._queues.add(queue)
        try:
            yield b"retry: 1000\n\n"
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._queues.discard(queue)

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of pages is open."""
        return len(self._queues) >= MOST_PAGES


def app_of(pages: Pages, guard: Guard, report: Callable[[], str], actions: Actions | None = None) -> Starlette:
    """Return the web application.

    Args:
        pages: the open pages.
        guard: decides which requests are answered.
        report: returns the HTML report.
        actions: runs actions; None to allow none.
    """
    watch = pages.watch

    async def file(request: Request) -> Response:
        name = FILES.get(request.path_params.get("name", ""))
        if name is None:
            return PlainTextResponse("there is no such page\n", 404)
        kind = _TYPES.get(Path(name).suffix, "text/plain")
        return Response(await asyncio.to_thread((STATIC / name).read_bytes), media_type=kind)

    async def everything(_: Request) -> Response:
        return Response(_json(await asyncio.to_thread(pages.everything)), media_type="application/json")

    async def stream(_: Request) -> Response:
        if pages.is_full:
            return PlainTextResponse(f"{MOST_PAGES} pages are open already. Fix: close one\n", 503)
        return StreamingResponse(pages.stream(), media_type="text/event-stream")

    async def log(request: Request) -> Response:
        text = await asyncio.to_thread(watch.log_end, request.query_params.get("name", ""))
        return PlainTextResponse("no process has that name\n", 404) if text is None else PlainTextResponse(text)

    async def metrics(_: Request) -> Response:
        text = await asyncio.to_thread(lambda: exposition(watch.state()))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def mortem(_: Request) -> Response:
        headers = {"content-disposition": 'attachment; filename="samebits-report.html"'}
        return Response(await asyncio.to_thread(report), media_type="text/html", headers=headers)

    async def health(request: Request) -> Response:
        may_act = actions is not None and guard.may_act(dict(request.headers.items()))
        return JSONResponse({"linked": watch.is_linked, "may_act": may_act})

    async def act(request: Request) -> Response:
        assert actions is not None
        done = await actions.take(request)
        return PlainTextResponse(f"{done.text}\n", done.status)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(watch.look)
        task = asyncio.create_task(pages.run())
        task.add_done_callback(pages.ended)
        yield
        task.cancel()

    app = Starlette(
        routes=[
            Route("/api/everything", everything),
            Route("/api/stream", stream),
            Route("/api/log", log),
            Route("/api/health", health),
            *([Route(ACTION, act, methods=["POST"])] if actions is not None else []),
            Route(METRICS, metrics),
            Route("/report", mortem),
            Route("/", file),
            Route("/{name}", file),
        ],
        lifespan=lifespan,
    )
    app.add_middleware(_Guarded, guard=guard)
    return app


class _Guarded:
    """ASGI middleware that checks every request before its route runs, and adds headers to every response."""

    def __init__(self, app: Any, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in given)]
            await send(message)

        await self._answer(scope, await self._is_anothers(scope))(scope, receive, send_with_headers)

    async def _is_anothers(self, scope: Any) -> bool:
        """Return whether the request asks for the owner's data and may come from another user."""
        if self._guard.others_token is None or scope["path"] == METRICS:
            return False
        uid = await asyncio.to_thread(uid_of, scope.get("client"), scope.get("server"))
        return uid not in (0, os.geteuid())

    def _answer(self, scope: Any, is_anothers: bool) -> Any:
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > MAX_URL:
            return PlainTextResponse("that address is too long\n", 414)
        request = Request(scope)
        token = request.query_params.get("token")
        headers = dict(request.headers.items())
        refused = self._guard.judge(scope["method"], headers, token, is_anothers=is_anothers)
        if refused is not None:
            return PlainTextResponse(f"{refused.text}\n", refused.status)
        if self._guard.token is not None or scope["path"] != METRICS:  # content that not every client may read
            scope.get("state", {}).get(TRUST, _no_connection)()
        if token is not None and scope["path"] == "/" and scope["method"] != "POST":
            answer = RedirectResponse("/", 303)  # so that no browser history keeps the token
            if self._guard.knows(token):  # a link with another token must not replace the right one
                answer.set_cookie(cookie_of(headers["host"]), token, httponly=True, samesite="strict")
            return answer
        return self._app


def _no_connection() -> None:
    """Do nothing. Default for the ``trust`` callback if the application runs in another server."""


def _json(content: object) -> str:
    return strict_json.dumps(content, is_compact=True)


# ---- the job's metrics as Prometheus text
#
# Nothing is counted here: all numbers are sums over the events, so they survive a restart of this server. The names
# follow prometheus.io/docs/practices/naming and instrumenting/exposition_formats.


def exposition(state: Mapping[str, Any]) -> str:
    """Return the complete text for a ``JobWatch.state``."""
    return "".join(f"{line}\n" for line in _lines(state))


def _lines(state: Mapping[str, Any]) -> Iterable[str]:
    job = state["job"] or {}
    yield from _metric("samebits_up", "gauge", "Whether the job's scheduler answers.", [({}, int(state["linked"]))])
    if job:
        labels = {"job_id": job["id"], "name": job["name"]}
        yield from _metric("samebits_job_info", "gauge", "The job, in its labels.", [(labels, 1)])
        for name, kind, text, value in (
            ("step", "gauge", "Completed optimizer steps.", job["step"]),
            ("generation", "gauge", "Number of the last committed membership.", job["generation"]),
            ("scheduler_starts_total", "counter", "Scheduler starts.", job["term"]),
            ("world_size", "gauge", "Workers in the current world.", job["world_size"]),
            ("workers_alive", "gauge", "Workers of the world that hold their lease.", job["alive"]),
            ("spares_alive", "gauge", "Spares that hold their lease.", job["spares_alive"]),
            ("finished", "gauge", "Whether the job is finished.", int(job["finished"])),
        ):
            yield from _metric(f"samebits_{name}", kind, text, [({}, value)])
    yield from _metric("samebits_recoveries_total", "counter", "Recoveries.", [({}, state["recovery_count"])])
    yield from _metric("samebits_losses_total", "counter", "Processes that were lost.", [({}, state["losses"])])
    spent = [({"bucket": bucket}, seconds) for bucket, seconds in state["buckets_s"].items()]
    yield from _metric("samebits_time_seconds_total", "counter", "Wall time by use.", spent)
    if state["goodput"] is not None:
        yield from _metric("samebits_goodput_ratio", "gauge", "Share of productive time.", [({}, state["goodput"])])
    if state["committed_step"] is not None:
        text = "Step of the newest point on every member's disk."
        yield from _metric("samebits_committed_step", "gauge", text, [({}, state["committed_step"])])
        text = "Time of that commit, in seconds since 1970."
        yield from _metric("samebits_committed_timestamp_seconds", "gauge", text, [({}, state["committed_at"])])
    last = next((row for row in reversed(state["recoveries"]) if row["total_ms"] is not None), None)
    if last is not None:
        seconds = [({"phase": phase}, ms / 1000) for phase, ms in last["phases_ms"].items()]
        yield from _metric("samebits_last_recovery_seconds", "gauge", "The last recovery, by phase.", seconds)
    hosts = sorted({rank["host"] for rank in state["ranks"]})
    ill = [({"host": host}, sum(one.startswith(f"host {host}: ") for one in state["ailments"])) for host in hosts]
    text = "Health warnings of the host and its devices."
    yield from _metric("samebits_host_ailments", "gauge", text, ill if state["linked"] else [])
    ranks = [
        ({"node": rank["node"], "slot": str(rank["slot"])}, rank) for rank in state["ranks"] if rank["role"] == "worker"
    ]
    steps = [(labels, rank["step"]) for labels, rank in ranks]
    yield from _metric("samebits_worker_step", "gauge", "Steps that the worker has reported.", steps)
    figures = [({**labels, "figure": name}, value) for labels, rank in ranks for name, value in rank["figures"].items()]
    yield from _metric("samebits_worker_figure", "gauge", "Values that the worker measures, by name.", figures)
    alive = [(labels, int(rank["state"] == "alive")) for labels, rank in ranks]
    yield from _metric("samebits_worker_alive", "gauge", "Whether the worker holds its lease.", alive)


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterable[str]:
    told = list(samples)
    if not told:
        return
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in told:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value!r}" if inside else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
