"""Answer to a client: a head, and behind it a document of XML or some of an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from xml.sax.saxutils import escape

from tests.benchmark.server.objects import Object
from tests.benchmark.server.request import Request, S3Error

_XMLNS = "http://s3.amazonaws.com/doc/2006-03-01/"
_NO_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. Its body is `body`, or `size_bytes` of `content` from `start` on, whose pieces the sender releases."""

    status: int = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    content: Object | None = None
    start: int = 0
    size_bytes: int | None = None

    def body_bytes(self, method: str) -> int:
        """Return the body that follows the head, to a request by this method."""
        return 0 if method == "HEAD" or self.status in _NO_BODY else self._size_bytes()

    def _size_bytes(self) -> int:
        return self.size_bytes if self.size_bytes is not None else len(self.body)

    def head(self, method: str, *, now_seconds: float, close: bool) -> bytes:
        """Up to the empty line, which is included."""
        lines = [
            f"HTTP/1.1 {int(self.status)} {HTTPStatus(self.status).phrase}",
            f"Date: {formatdate(now_seconds, usegmt=True)}",
            "x-amz-request-id: bench",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        if self.status not in _NO_BODY:
            # To a HEAD that found nothing, S3 tells no length of what is not sent.
            told = 0 if method == "HEAD" and self.content is None else self._size_bytes()
            lines.append(f"Content-Length: {told}")
        if close:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def tag(name: str, *inside: str) -> str:
    """An element of others."""
    return f"<{name}>{''.join(inside)}</{name}>"


def leaf(name: str, text: object) -> str:
    """An element of text."""
    return f"<{name}>{escape(str(text))}</{name}>"


def document(name: str, *inside: str) -> Reply:
    """An answer of one element and what is inside it."""
    # An error is in no namespace: botocore finds no code in one that is.
    namespace = "" if name == "Error" else f' xmlns="{_XMLNS}"'
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}{namespace}>{"".join(inside)}</{name}>'
    return Reply(headers={"Content-Type": "application/xml"}, body=text.encode())


def error_reply(error: S3Error, request: Request | None) -> Reply:
    """As S3 tells of an error; the request is None where there was only something that is none."""
    if error.status == HTTPStatus.NOT_MODIFIED:
        return Reply(error.status)
    path = request.path if request is not None else ""
    inside = (leaf("Code", error.code), leaf("Message", error.message), leaf("Resource", path))
    reply = document("Error", *inside, leaf("RequestId", "bench"))
    return replace(reply, status=error.status)


def iso(seconds: float) -> str:
    """A time as S3 writes it in documents."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"
