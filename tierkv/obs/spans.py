"""Requests as spans of OpenTelemetry, with their phases as child spans.

Needs the extra ``otel``. Its libraries are imported only where spans are wanted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tierkv.errors import ConfigError
from tierkv.obs.timeline import Timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_S = 1
"""How long a collector may take for a batch, retries included: the end of the process waits for it
once or twice."""


class Spans:
    """Makes spans of a daemon of this ``version``.

    A thread of the library's own hands them to ``exporter``, in batches.

    If they are not taken, its queue is full at 2048 spans, and the oldest are dropped.
    """

    def __init__(self, exporter: SpanExporter, version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "tierkv", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tierkv", version)

    @classmethod
    def sent_to(cls, endpoint: str, version: str) -> Spans:
        """Spans go to a collector, by OTLP over HTTP. Raises ConfigError without the libraries."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                f"otel.endpoint is {endpoint}, but {error.name} is not installed; install tierkvd "
                'with the extra "otel", or set otel.endpoint to ""'
            ) from error
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S), version)

    def add(self, timeline: Timeline) -> None:
        """A request was answered."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        def unix_ns(monotonic_s: float) -> int:
            return now_ns + round(1e9 * (monotonic_s - now_s))

        now_ns, now_s = time.time_ns(), time.monotonic()
        span = self._tracer.start_span(
            f"tierkv.{timeline.verb}",
            Context(),
            SpanKind.SERVER,
            {f"tierkv.{name}": str(value) for name, value in timeline.ids.items()},
            start_time=unix_ns(timeline.began_s),
        )
        inside = set_span_in_context(span, Context())
        for phase in timeline.phases:
            part = self._tracer.start_span(phase.name, inside, start_time=unix_ns(phase.began_s))
            if phase.blocks:
                part.set_attribute("tierkv.blocks", phase.blocks)
            part.end(unix_ns(phase.began_s + phase.seconds))
        if timeline.code != "ok":
            span.set_status(Status(StatusCode.ERROR, timeline.code))
        span.end(unix_ns(timeline.began_s + timeline.seconds))

    def close(self) -> None:
        """Hand over what is left, as far as that is quick, and end the thread."""
        self._provider.shutdown()
