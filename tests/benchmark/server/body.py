"""The body of a request, decoded: plain, in HTTP's chunks, in Amazon's, or in both; where the client waits, welcomed.

It is read where it belongs, without a copy, once its operation asks for it; what none asks for is read and let go.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Protocol

from dcp_remote.common.units import MiB
from tests.benchmark.server.request import Request, S3Error
from tests.benchmark.server.wire import LINE_BYTES_MAX, GoneError, Wire

# What S3 takes: 1,000 keys of 1,024 bytes to delete, 10,000 parts to complete.
_DOCUMENT_BYTES_MAX = 4 * MiB

# Of what nobody asks for, at a time.
_SKIP_BYTES = 64 * 1024


class _Source(Protocol):
    """Source of the bytes of a body: layers, since a chunked body may hold a chunked body of Amazon's kind."""

    def read_into(self, view: memoryview) -> None:
        """Fill the view."""

    def read_line(self) -> bytes:
        """A line of the layer above, with its end."""

    def finish(self) -> dict[str, str]:
        """Read what is left; the trailers, names in lower case."""


def _malformed(message: str) -> S3Error:
    return S3Error(HTTPStatus.BAD_REQUEST, "IncompleteBody", message)


class _Plain:
    """So many bytes."""

    def __init__(self, wire: Wire, size_bytes: int) -> None:
        self._wire = wire
        self._left = size_bytes

    def read_into(self, view: memoryview) -> None:
        if len(view) > self._left:
            raise _malformed("The body is shorter than it says.")
        self._wire.read_into(view)
        self._left -= len(view)

    def read_line(self) -> bytes:
        line = self._wire.read_line()
        if len(line) > self._left:
            raise GoneError("A line of a chunk goes on behind the body.")
        self._left -= len(line)
        return line

    def finish(self) -> dict[str, str]:
        self._wire.skip(self._left)
        self._left = 0
        return {}


class _Unbounded:
    """As much as the layer above wants: chunks say themselves where they end."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def read_into(self, view: memoryview) -> None:
        self._wire.read_into(view)

    def read_line(self) -> bytes:
        return self._wire.read_line()

    def finish(self) -> dict[str, str]:
        return {}


class _Chunks:
    """Chunks of HTTP (RFC 9112, 7.1), and those of Amazon, whose extensions are signatures."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._left = 0
        self._begun = False
        self._ended = False
        self._trailers: dict[str, str] = {}

    def _next(self) -> None:
        if self._begun and self._source.read_line() != b"\r\n":
            raise GoneError("A chunk is longer than it says.")
        self._begun = True
        try:
            self._left = int(self._source.read_line().partition(b";")[0], 16)
        except ValueError as error:
            raise GoneError("A chunk does not begin with its size.") from error
        if self._left:
            return
        self._ended = True
        while (line := self._source.read_line().decode("latin-1").strip()) != "":
            name, _, value = line.partition(":")
            self._trailers[name.strip().lower()] = value.strip()

    def read_into(self, view: memoryview) -> None:
        while view:
            if not self._left:
                if not self._ended:
                    self._next()
                if self._ended:
                    raise _malformed("The chunks end before the length that was announced.")
            size_bytes = min(len(view), self._left)
            self._source.read_into(view[:size_bytes])
            self._left -= size_bytes
            view = view[size_bytes:]

    def read_line(self) -> bytes:
        """Byte by byte: a line may lie across chunks, and those that are read so are a megabyte apart."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if len(line) > LINE_BYTES_MAX:
                raise GoneError("A line of a chunk is too long.")
            one = bytearray(1)
            self.read_into(memoryview(one))
            line += one
        return bytes(line)

    def finish(self) -> dict[str, str]:
        scratch = memoryview(bytearray(_SKIP_BYTES))
        while not self._ended:
            while self._left:
                self.read_into(scratch[: min(self._left, _SKIP_BYTES)])
            self._next()
        return {**self._trailers, **self._source.finish()}


class Body:
    """The body of one request, as its operation reads it.

    Attributes:
        unwanted: Whether the client waits for a word before it sends it, and was given none: it may send it or not, so
            the connection ends with the answer.
    """

    def __init__(self, wire: Wire, request: Request) -> None:
        headers = request.headers
        self._wire = wire
        self._trailers: dict[str, str] | None = None
        self.unwanted = headers.get("expect", "").lower() == "100-continue"
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        length, decoded = headers.get("content-length", "0"), headers.get("x-amz-decoded-content-length")
        if not length.isdecimal() or not (decoded is None or decoded.isdecimal()):
            raise GoneError("The body has no length.")
        self._source: _Source = _Chunks(_Unbounded(wire)) if chunked else _Plain(wire, int(length))
        self._size_bytes: int | None = None if chunked else int(length)
        if "aws-chunked" in headers.get("content-encoding", "") or headers.get("x-amz-content-sha256", "").startswith(
            "STREAMING-"
        ):
            self._source = _Chunks(self._source)
            self._size_bytes = None
        if decoded is not None:
            self._size_bytes = int(decoded)

    def require_size(self) -> int:
        """Its size once it is decoded, which S3 wants to know before the body comes."""
        if self._size_bytes is None:
            raise S3Error(HTTPStatus.LENGTH_REQUIRED, "MissingContentLength", "You must provide a length.")
        return self._size_bytes

    def read_into(self, view: memoryview) -> None:
        """Fill the view."""
        self._welcome()
        self._source.read_into(view)

    def read_document(self) -> bytes:
        """All of it, where it is a document and so a small one."""
        size_bytes = self.require_size()
        if size_bytes > _DOCUMENT_BYTES_MAX:
            raise S3Error(HTTPStatus.BAD_REQUEST, "MalformedXML", f"More than {_DOCUMENT_BYTES_MAX} bytes.")
        document = bytearray(size_bytes)
        self.read_into(memoryview(document))
        return bytes(document)

    def finish(self) -> dict[str, str]:
        """The trailers, after what is left of the body."""
        if self._trailers is None:
            self._welcome()
            self._trailers = self._source.finish()
        return self._trailers

    def _welcome(self) -> None:
        if self.unwanted:
            self.unwanted = False
            self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
