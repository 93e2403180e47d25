"""Following the events: each event once, whatever happens to the files; output as lines and spans."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from samebits.account.event_log import line_of
from samebits.account.events import EventKind, JobEvent
from samebits.account.history import EventStream
from samebits.account.spans import Spans
from samebits.commands import otel
from samebits.commands.history import main as history_main
from samebits.errors import UsageError
from samebits.store import text_log
from samebits.store.journal import JOURNAL_FILE
from samebits.store.text_log import MOST_PARTS, EventLog

FINISHED = JobEvent(EventKind.FINISHED, 9.0, text="the job is finished")


def step(number: int) -> JobEvent:
    return JobEvent(EventKind.STEP, float(number), 1, 1, number)


def log_in(folder: Path, part_bytes: int = 1 << 20) -> EventLog:
    return EventLog(folder, lambda lines: line_of(JobEvent(EventKind.CARRIED, 1.0)), pytest.fail, part_bytes=part_bytes)


def test_new_events_are_returned_once(tmp_path: Path) -> None:
    log, stream = log_in(tmp_path), EventStream(tmp_path)
    assert stream.new() == []
    log.append([line_of(step(1)), line_of(step(2))])
    assert [event.step for event in stream.new()] == [1, 2]
    assert stream.new() == []
    log.append([line_of(step(3))])
    assert [event.step for event in stream.new()] == [3]


def test_rotated_parts_repeat_nothing_and_lose_nothing(tmp_path: Path) -> None:
    log, stream = log_in(tmp_path, part_bytes=400), EventStream(tmp_path)
    told: list[int] = []
    for number in range(1, 40 * MOST_PARTS):
        log.append([line_of(step(number))])
        if number % 7 == 0:
            told += [event.step for event in stream.new()]
    told += [event.step for event in stream.new()]
    assert told == list(range(1, 40 * MOST_PARTS))


def test_operator_requests_appear_where_they_were_made(tmp_path: Path) -> None:
    log, stream = log_in(tmp_path), EventStream(tmp_path)
    log.append([line_of(step(1)), line_of(step(3))])
    text_log.append_asked(tmp_path, line_of(JobEvent(EventKind.ASKED, 2.0, node="1")))
    assert [event.kind for event in stream.new()] == [EventKind.STEP, EventKind.ASKED, EventKind.STEP]
    assert stream.new() == []
    text_log.append_asked(tmp_path, line_of(JobEvent(EventKind.ASKED, 4.0, node="1")))
    assert [event.at for event in stream.new()] == [4.0]


def test_following_ends_with_a_finished_job_but_not_an_interrupted_one(tmp_path: Path) -> None:
    log, stream = log_in(tmp_path), EventStream(tmp_path)
    log.append([line_of(step(1)), line_of(JobEvent(EventKind.INTERRUPTED, 2.0))])
    looks = itertools.count()

    def sleep(_: float) -> None:
        if next(looks) == 10:
            log.append([line_of(JobEvent(EventKind.SCHEDULER, 3.0)), line_of(FINISHED)])

    told = [event.kind for event in stream.all(follows=True, sleep=sleep)]
    assert told == [EventKind.STEP, EventKind.INTERRUPTED, EventKind.SCHEDULER, EventKind.FINISHED]
    assert next(looks) > 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a finished job that lost worker 1; it is the current folder."""
    recovery = tmp_path / "recovery"
    recovery.mkdir(mode=0o700)
    (recovery / JOURNAL_FILE).touch()
    events = [
        JobEvent(EventKind.JOB, 1.0, text="train.py", more={"job": "job-1"}),
        JobEvent(EventKind.SCHEDULER, 1.0),
        JobEvent(EventKind.ROUND, 2.0, generation=1),
        JobEvent(EventKind.GENERATION, 3.0, generation=1, more={"members": 2}),
        JobEvent(EventKind.TRAINING, 4.0, generation=1),
        JobEvent(EventKind.LOST, 5.0, 1, 1, 70, "1", "killed", {"slot": 1}),
        JobEvent(EventKind.ROUND, 5.001, 1, 1, 70),
        JobEvent(EventKind.GENERATION, 5.02, 1, 2, 70, more={"restore": 70, "members": 2}),
        JobEvent(EventKind.TRAINING, 5.05, 1, 2, 70),
        step(80),
        FINISHED,
    ]
    log = log_in(recovery)
    log.append([line_of(event) for event in events])
    log.close()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENABLE_RECOVERY", "1")
    return tmp_path


def test_followed_history_is_one_object_per_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert history_main(["--follow", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["kind"] for one in told][-2:] == ["step", "finished"]
    assert len(told) == 11 and told[5]["text"] == "killed"
    assert history_main(["--follow"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and "worker 1: killed" in lines[5]


def test_spans_have_their_own_times_and_children(folder: Path) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    fold = Spans()
    otel.send([span for event in EventStream(folder / "recovery").new() for span in fold.add(event)], provider)
    found = {span.name: span for span in exporter.get_finished_spans()}
    recover, decide = found["recover"], found["recover.decide"]
    assert recover.context is not None and decide.parent is not None and recover.attributes is not None
    assert (recover.start_time, recover.end_time) == (5_000_000_000, 5_050_000_000)
    assert decide.parent.span_id == recover.context.span_id
    assert found["register"].parent is None and found["register"].context.trace_id != recover.context.trace_id
    assert recover.attributes["samebits.cause"] == "worker 1: killed"


class Collector(http.server.BaseHTTPRequestHandler):
    """Receive what an OTLP exporter sends; ``names`` are all spans so far."""

    names: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        sent = ExportTraceServiceRequest.FromString(
            gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        )
        for resource in sent.resource_spans:
            self.names.extend(span.name for scope in resource.scope_spans for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def test_spans_reach_a_collector_through_the_real_exporter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert otel.main([]) == 0
        server.shutdown()
    assert capsys.readouterr().out == "samebits: 8 spans were sent\n"
    parts = ["recover.decide", "recover.wait_for_seats", "recover.meet", "recover.restore"]
    assert sorted(Collector.names) == sorted(["register", "form", "form", "recover", *parts])


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 500 no\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 301 no\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n",
        b"nonsense\r\n",
        b"",  # it hangs
        None,  # there is none
    ],
)
def test_spans_that_were_not_delivered_are_not_reported_as_sent(
    answer: bytes | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with collecting(answer) as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(UsageError, match=r"^8 of 8 spans were not accepted.*Fix: "):
            otel.main([])


def test_endless_answer_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(b"HTTP/1.1 200 ok\r\n\r\n", endless=True) as port:
        with otel._bounded_session() as session:
            answer = session.post(f"http://127.0.0.1:{port}", b"x", timeout=60)
            assert len(answer.content) <= otel.MOST_BYTES
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        assert otel.main([]) == 0


@contextlib.contextmanager
def collecting(answer: bytes | None, *, endless: bool = False) -> Iterator[int]:
    """Return a port where every connection gets this answer, endlessly if requested."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as held:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(listener.accept()[0])
                    threading.Thread(target=answer_over, args=(connection,), daemon=True).start()

        def answer_over(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(answer or b"")
                while endless:
                    connection.sendall(bytes(1 << 16))
                if answer:
                    connection.shutdown(socket.SHUT_WR)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        port = listener.getsockname()[1]
        if answer is None:
            listener.close()
        yield port
        listener.close()


def test_spans_are_printed_without_any_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert otel.main(["--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in told] == ["register", "form", "form", "recover"]
    parts = ["recover.decide", "recover.wait_for_seats", "recover.meet", "recover.restore"]
    assert [part["name"] for part in told[-1]["parts"]] == parts


def test_missing_exporter_is_named_with_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, find_nothing: Callable[[str], None]
) -> None:
    find_nothing("opentelemetry")
    with pytest.raises(UsageError, match=r"pip install 'samebits\[otel\]'"):
        otel.main([])


@pytest.fixture
def find_nothing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package appear uninstalled."""

    def hide(name: str) -> None:
        def find_spec(asked: str) -> None:
            assert asked.partition(".")[0] == name
            raise ModuleNotFoundError(name)

        monkeypatch.setattr(otel.importlib.util, "find_spec", find_spec)

    return hide
