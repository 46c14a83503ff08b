"""A collector: takes OTLP over HTTP with protobuf, as OpenTelemetry's own definitions have it."""

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OtlpReceiver:
    """Spans that came in, by name; `status` is what it answers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self.path, dict(self.headers), self.rfile.read(int(self.headers["content-length"])))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """One request of an exporter."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        names = {name.lower(): value for name, value in headers.items()}
        assert names["content-type"] == "application/x-protobuf"
        request = ExportTraceServiceRequest.FromString(gzip.decompress(body) if "content-encoding" in names else body)
        self.paths.append(path)
        self.headers.append(names)
        for group in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes_of(span: Any) -> dict[str, Any]:
    """A span's attributes as Python values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
