"""``samebits history --otel``: send a job's events as OpenTelemetry spans.

Spans are made from the recorded events and their times, in a separate process. No step waits for them, and a finished
job can be sent as well. Exporter and settings are OpenTelemetry's own (OTEL_EXPORTER_OTLP_ENDPOINT and others).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from samebits import strict_json
from samebits.account.history import EventStream, required_events
from samebits.account.spans import Span, Spans
from samebits.errors import UsageError
from samebits.launcher import job_spec

if TYPE_CHECKING:
    import requests
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult


UNSENT = 1024
"""Limit on spans waiting to be sent; the processor drops those beyond twice as many."""
MOST_BYTES = 1 << 16
_NEEDED = "opentelemetry.exporter.otlp.proto.http"


class CountingExporter:
    """An exporter that counts the spans that the collector has accepted."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send the spans."""
        result = self._exporter.export(spans)
        self.sent += len(spans) if result.name == "SUCCESS" else 0
        return result

    def shutdown(self) -> None:
        """Stop sending."""
        self._exporter.shutdown()


def main(arguments: Sequence[str]) -> int:
    """Run ``history --otel``."""
    parser = argparse.ArgumentParser(
        prog="samebits history --otel",
        description="Send the history of this folder's job as OpenTelemetry spans (OTLP over HTTP) to "
        "OTEL_EXPORTER_OTLP_ENDPOINT, by default http://localhost:4318.",
    )
    parser.add_argument("--otel", action="store_true", help="send spans: what this command does")
    parser.add_argument("--follow", action="store_true", help="keep running until the job is finished")
    parser.add_argument("--json", action="store_true", help="print one JSON object per span instead; needs no library")
    options = parser.parse_args(arguments)
    recovery_path = job_spec.settings_here(only_looks=True).recovery_path
    required_events(recovery_path)
    fold = Spans()
    spans = (span for event in EventStream(recovery_path).all(follows=options.follow) for span in fold.add(event))
    if options.json:
        for span in spans:
            print(strict_json.dumps(asdict(span)), flush=True)
        return 0
    provider, exporter = _provider()
    count = 0
    try:
        for span in spans:
            send([span], provider)
            count += 1 + len(span.parts)
            if not options.follow and count - exporter.sent >= UNSENT:
                provider.force_flush()
                if count > exporter.sent:
                    break  # a collector that is gone accepts no further spans
    finally:
        provider.shutdown()
    if exporter.sent < count:
        raise UsageError(
            f"{count - exporter.sent} of {count} spans were not accepted by the collector (see its responses above). "
            "Fix: set OTEL_EXPORTER_OTLP_ENDPOINT to a collector that accepts OTLP over HTTP, and run this again"
        )
    print(f"samebits: {exporter.sent} spans were sent")
    return 0


def send(spans: Iterable[Span], provider: TracerProvider) -> None:
    """Pass the spans to a tracer with their own times."""
    from opentelemetry import trace

    tracer = provider.get_tracer("samebits")
    for span in spans:
        _send(span, tracer, trace.set_span_in_context(trace.INVALID_SPAN))


def _send(span: Span, tracer: object, context: object) -> None:
    from opentelemetry import trace

    attributes = {name: value for name, value in span.attributes.items() if value != ""}
    sent = tracer.start_span(span.name, context, start_time=_ns(span.began_at), attributes=attributes)  # type: ignore[attr-defined]
    for part in span.parts:
        _send(part, tracer, trace.set_span_in_context(sent))
    sent.end(_ns(span.ended_at))


def _provider() -> tuple[TracerProvider, CountingExporter]:
    try:
        is_there = importlib.util.find_spec(_NEEDED) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise UsageError(
            "traces need opentelemetry's exporter, which this Python does not have. Fix: pip install 'samebits[otel]', "
            "or --json"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "samebits"}))
    exporter = CountingExporter(OTLPSpanExporter(session=_bounded_session()))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter


def _bounded_session() -> requests.Session:
    """Return a session that reads only a limited part of a response, which is enough for an OTLP collector's."""
    import requests
    from requests.adapters import HTTPAdapter

    class Bounded(HTTPAdapter):
        def send(self, *request: Any, **options: Any) -> requests.Response:
            answer = super().send(*request, **{**options, "stream": True})
            body = answer.raw.read(MOST_BYTES)
            answer.raw.close()
            if answer.is_redirect:  # the exporter would take a redirect for success
                raise requests.exceptions.InvalidURL(f"{answer.url} answers with a redirection")
            answer.raw = io.BytesIO(body)
            return answer

    session = requests.Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, Bounded())
    return session


def _ns(at: float) -> int:
    return round(at * 1e9)
