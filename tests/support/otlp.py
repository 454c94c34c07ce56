"""OTLP receivers: the collector's side of the protocol, over gRPC and over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived; times in seconds of Unix time."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: float
    end: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    is_error: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Receiver:
    """Keeps the spans that arrive."""

    def __init__(self) -> None:
        self._spans: list[ReceivedSpan] = []
        self._arrived = threading.Condition()
        self.endpoint = ""

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Store an export request's spans."""
        with self._arrived:
            for group in request.resource_spans:
                resource = {item.key: _value(item.value) for item in group.resource.attributes}
                for scope in group.scope_spans:
                    self._spans += [_received(span, resource) for span in scope.spans]
            self._arrived.notify_all()

    def trace(self, trace_id: str, *names: str, timeout_s: float = 20.0) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once those in `names` have arrived."""
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                found = {span.name: span for span in self._spans if span.trace_id == trace_id}
                if set(names) <= set(found):
                    return found
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise AssertionError(f"of {names} only {sorted(found)} arrived within {timeout_s} s")

    def spans(self) -> list[ReceivedSpan]:
        """All that has arrived."""
        with self._arrived:
            return list(self._spans)


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes={item.key: _value(item.value) for item in span.attributes},
        resource=resource,
        is_error=span.status.code == 2,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)


class _Service(TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self._receiver.take(request)
        return ExportTraceServiceResponse()


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """An OTLP/gRPC receiver on a free port of this machine."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    add_TraceServiceServicer_to_server(_Service(receiver), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        server.stop(grace=1).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """An OTLP/HTTP receiver (protobuf) on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest()
            request.ParseFromString(body)
            receiver.take(request)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
