"""Counts the input of a request as it is parsed, and says what exceeds a limit or lacks a host."""

import re
from collections.abc import Sequence

from pdkv.config import HttpLimits

Refusal = tuple[int, str]
"""HTTP status and reason."""

PARSED_BYTES = 16 * 1024
"""Bytes given to the parser at once while it reads headers: they may exceed a limit by this much before the check."""


class RequestSize:
    """The size of the request that a connection's parser is reading."""

    __slots__ = (
        *("_began", "_body_bytes_before", "_extra_bytes", "_header_bytes", "_limits", "_num_headers", "_url_bytes"),
        *("body_bytes",),
    )

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._num_headers = 0
        self._url_bytes = 0
        self._header_bytes = 0  # bytes of the URL and of whole headers
        self.body_bytes = 0
        self._extra_bytes = 0  # bytes received outside of its body
        self._began = False  # the same in the piece being parsed
        self._body_bytes_before = 0  # that piece

    def begin(self) -> None:
        """Start the next request."""
        self._began = True
        self._num_headers = self._url_bytes = self._header_bytes = self.body_bytes = self._extra_bytes = 0

    def begin_piece(self) -> None:
        """Start a piece of received input; the methods below are called while it is parsed."""
        self._began = False
        self._body_bytes_before = self.body_bytes

    def add_url(self, size: int) -> Refusal | None:
        """Add a part of the URL."""
        self._url_bytes += size
        self._header_bytes += size
        if self._url_bytes > self._limits.max_url_bytes:
            return 414, f"the URL must have at most {self._limits.max_url_bytes} bytes (--max-url-bytes)"
        return None

    def add_header(self, name: bytes, value: bytes) -> Refusal | None:
        """Add a header or a trailer."""
        self._num_headers += 1
        self._header_bytes += len(name) + len(value) + 4
        if self._num_headers > self._limits.max_headers or self._header_bytes > self._limits.max_header_bytes:
            return self._headers_too_large()
        return None

    def add_body(self, size: int) -> None:
        """Add a part of the body, whose size is limited elsewhere."""
        self.body_bytes += size

    def end_piece(self, size: int) -> None:
        """End a piece of this many bytes."""
        if self._began:
            self._extra_bytes = self._header_bytes
        else:
            self._extra_bytes += size - (self.body_bytes - self._body_bytes_before)

    def too_much_head(self) -> Refusal | None:
        """The error for the part of the head that is too large; parts of an incomplete header count, too."""
        return self._headers_too_large() if self._extra_bytes > self._limits.max_header_bytes else None

    def too_small_chunks(self) -> Refusal | None:
        """The error for tiny chunks while the body is read."""
        if self._extra_bytes <= self._limits.max_header_bytes + PARSED_BYTES + self.body_bytes:
            return None
        return 400, "the chunks of the body are smaller than their own headers: send larger ones"

    def _headers_too_large(self) -> Refusal:
        limits = self._limits
        return 431, (
            f"the headers must have at most {limits.max_header_bytes} bytes (--max-header-bytes) and be at most "
            f"{limits.max_headers} (--max-headers)"
        )


_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


def host_refusal(headers: Sequence[tuple[bytes, bytes]], version: str) -> Refusal | None:
    """The error for a request that does not name its host as RFC 9112, section 3.2, demands, else None."""
    hosts = [value.strip() for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        return 400, f"the request must have one Host header, got {len(hosts)}"
    if hosts and not _HOST.fullmatch(hosts[0]):
        return 400, "the Host header is not a host, with or without a port"
    return None
