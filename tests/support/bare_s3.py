"""A server with as much of S3 as a store uses. A test sees how many reads it has at once, and says whether it
knows conditions.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch

from store_servers import S3_CREDENTIALS

_NOT_IMPLEMENTED = (
    b"<Error><Code>NotImplemented</Code><Message>A header you provided implies functionality that is not implemented."
    b"</Message></Error>"
)


class BareS3(ThreadingHTTPServer):
    """Objects by path. A read is answered when `reads_at_once` of them wait, or after `wait_s`."""

    def __init__(self, *, has_conditions: bool = True, reads_at_once: int = 1, wait_s: float = 50.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.has_conditions = has_conditions
        self.objects: dict[str, bytes] = {}
        self.num_refused = 0
        self.most_reads = 0
        self._num_reads = 0
        self._wanted, self._wait_s = reads_at_once, wait_s
        self._changed = threading.Condition()

    @property
    def url(self) -> str:
        """For `open_store`."""
        return f"s3://bucket?endpoint=http://127.0.0.1:{self.server_port}&region=us-east-1"

    def wait_for_reads(self) -> None:
        """One more read is here."""
        with self._changed:
            self._num_reads += 1
            self.most_reads = max(self.most_reads, self._num_reads)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most_reads >= self._wanted, self._wait_s)
            self._num_reads -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BareS3

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["If-None-Match"] and not self.server.has_conditions:
            self.server.num_refused += 1
            self._answer(501, _NOT_IMPLEMENTED)
        elif self.headers["If-None-Match"] and self.path in self.server.objects:
            self._answer(412)
        else:
            self.server.objects[self.path] = body
            self._answer(200)

    def do_GET(self) -> None:
        self.server.wait_for_reads()
        found = self.server.objects.get(self.path)
        self._answer(404 if found is None else 200, found or b"")

    def do_HEAD(self) -> None:
        found = self.server.objects.get(self.path)
        self._answer(404 if found is None else 200, found or b"", has_body=False)

    def _answer(self, status: int, body: bytes = b"", *, has_body: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the tests' output."""


@contextmanager
def bare_s3(*, has_conditions: bool = True, reads_at_once: int = 1) -> Iterator[BareS3]:
    """A running one; within its block the environment has credentials."""
    with BareS3(has_conditions=has_conditions, reads_at_once=reads_at_once) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with patch.dict(os.environ, S3_CREDENTIALS):
                yield server
        finally:
            server.shutdown()
            thread.join()
