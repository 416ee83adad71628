"""Requests become spans that a collector gets: a small one that takes OTLP over HTTP."""

from __future__ import annotations

import http.server
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.service.blocks import SPEC, store, tokens
from tests.service.running import running, until
from tierkv.errors import ConfigError
from tierkv.obs.spans import Spans
from tierkv.obs.timeline import Phase, Timeline


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans, and keeps them with their server."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Quietly."""


@contextmanager
def collector() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def timeline(code: str = "ok") -> Timeline:
    began_s = time.monotonic() - 1.0
    return Timeline(
        verb="acquire",
        code=code,
        began_s=began_s,
        seconds=0.75,
        phases=[
            Phase("disk_to_device", began_s + 0.25, 0.25, 7),
            Phase("log", began_s + 0.5, 0.125),
        ],
        ids={"lease": 3, "worker": "w"},
    )


def test_a_request_is_a_span_and_its_phases_are_inside() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, "1.2.3")
    spans.add(timeline())
    spans.close()
    moved, log, request = exporter.get_finished_spans()
    assert (request.name, moved.name, log.name) == ("tierkv.acquire", "disk_to_device", "log")
    assert request.parent is None
    assert moved.parent.span_id == log.parent.span_id == request.context.span_id
    assert request.attributes == {"tierkv.lease": "3", "tierkv.worker": "w"}
    assert moved.attributes == {"tierkv.blocks": 7}
    assert request.status.is_unset
    assert request.end_time - request.start_time == pytest.approx(0.75e9, abs=1000)
    assert moved.start_time - request.start_time == pytest.approx(0.25e9, abs=1000)
    assert moved.end_time - moved.start_time == pytest.approx(0.25e9, abs=1000)
    assert abs(request.start_time / 1e9 - (time.time() - 1.0)) < 1
    assert request.resource.attributes["service.name"] == "tierkv"


def test_a_refused_request_is_an_error() -> None:
    exporter = InMemorySpanExporter()
    spans = Spans(exporter, "1.2.3")
    spans.add(timeline("pool_exhausted"))
    spans.close()
    request = exporter.get_finished_spans()[-1]
    assert not request.status.is_ok
    assert request.status.description == "pool_exhausted"


def test_a_daemon_sends_them_to_a_collector_and_ends_without_one() -> None:
    with collector() as server:
        settings = {
            "otel.endpoint": f"http://127.0.0.1:{server.server_port}/v1/traces",
            "otel.sample_every": "1",
        }
        with running(settings) as daemon:
            with daemon.connect("traced") as client:
                store(client.namespace(SPEC), tokens(4, seed=1))
                client.flush()
            daemon.stop()
    spans = [
        span
        for request in server.requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    names = {span.name for span in spans}
    assert {"tierkv.hello", "tierkv.acquire", "tierkv.seal", "tierkv.flush"} <= names
    (flush,) = [span for span in spans if span.name == "tierkv.flush"]
    inside = {span.name for span in spans if span.parent_span_id == flush.span_id}
    assert inside == {"queued", "write_behind", "checkpoint", "log", "reply"}
    given = {one.key: one.value.string_value for one in flush.attributes}
    assert given["tierkv.worker"] == "traced"


def test_a_collector_that_is_not_there_harms_nobody() -> None:
    settings = {"otel.endpoint": "http://127.0.0.1:9/v1/traces", "otel.sample_every": "1"}
    with running(settings) as daemon:
        with daemon.connect() as client:
            store(client.namespace(SPEC), tokens(4, seed=1))
        until(lambda: daemon.status()["sequences"] == 0)
        began_s = time.monotonic()
        assert daemon.stop() == 0, daemon.said()
        assert time.monotonic() - began_s < 8


def test_without_the_libraries_the_daemon_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry.exporter")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)
    with pytest.raises(ConfigError, match=r"install tierkvd with the extra \"otel\""):
        Spans.sent_to("http://127.0.0.1:4318/v1/traces", "1.2.3")
