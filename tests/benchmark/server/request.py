"""Request of a client: the head of a request, S3's name for it, its conditions and its range. Pure.

No signature is checked, and versions, grants and regions are unknown. What this server does not know has the name
"NotImplemented", and is answered 501.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

# Other questions are refused: to pass them by would answer another question.
_LISTING = {"list-type", "prefix", "delimiter", "max-keys", "start-after", "continuation-token", "encoding-type"}
_SIGNATURE = {"AWSAccessKeyId", "Signature", "Expires"}  # and names that begin with X-Amz-
_KNOWN_QUERIES = _LISTING | _SIGNATURE | {"delete", "location", "uploads", "uploadId", "partNumber", "x-id"}


class S3Error(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def no_such_key(key: str) -> S3Error:
    """Condition that nothing lies under a key."""
    return S3Error(HTTPStatus.NOT_FOUND, "NoSuchKey", f"The specified key does not exist: {key}")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a request, ETags without their quotes; None where nothing is asked."""

    match: str | None
    none_match: str | None

    def require_for_put(self, key: str, etag: str | None) -> None:
        """Refuse to put over the object with this ETag, None for an absent one."""
        if self.match is not None and etag is None:
            raise no_such_key(key)
        if self.match is not None and self.match not in ("*", etag):
            raise S3Error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", "If-Match names another version.")
        if self.none_match is not None and etag is not None and self.none_match in ("*", etag):
            raise S3Error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", "If-None-Match: it is there.")

    def require_for_get(self, etag: str) -> None:
        """Refuse to send the object with this ETag."""
        if self.match is not None and self.match not in ("*", etag):
            raise S3Error(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed", "If-Match names another version.")
        if self.none_match is not None and self.none_match in ("*", etag):
            raise S3Error(HTTPStatus.NOT_MODIFIED, "NotModified", "It is the version that you have.")


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request; names of headers in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    bucket: str
    key: str
    keep_alive: bool

    @property
    def conditions(self) -> Conditions:
        """Conditions of its headers If-Match and If-None-Match."""
        match, none_match = self.headers.get("if-match"), self.headers.get("if-none-match")
        return Conditions(
            match.strip().strip('"') if match is not None else None,
            none_match.strip().strip('"') if none_match is not None else None,
        )


def parse_head(head: bytes) -> Request:
    """Read a head, without the empty line at its end. The bucket is that of the path."""
    lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, protocol = lines[0].split(" ")
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise ValueError(line)
            headers[name.lower()] = value.strip()
        # Not urlsplit: it would take `//key` for a host.
        path, _, query = target.partition("?")
        decoded = unquote(path, errors="strict")
        asked = dict(parse_qsl(query, keep_blank_values=True))
    except ValueError as error:
        raise S3Error(HTTPStatus.BAD_REQUEST, "BadRequest", f"This is no request: {lines[0][:200]!r}") from error
    bucket, _, key = decoded[1:].partition("/")
    connection = headers.get("connection", "keep-alive" if protocol == "HTTP/1.1" else "close").lower()
    return Request(method, decoded, asked, headers, bucket, key, keep_alive="close" not in connection)


def operation_of(request: Request) -> str:
    """S3's name for what is asked, or "NotImplemented"."""
    query = request.query
    unknown = [name for name in query if name not in _KNOWN_QUERIES and not name.lower().startswith("x-amz-")]
    if unknown or ("uploads" in query and request.method != "POST"):
        return "NotImplemented"
    if not request.bucket:
        return "NotImplemented"
    if not request.key:
        return _bucket_operation(request.method, query)
    if request.method == "PUT":
        if "uploadId" in query:
            return "NotImplemented" if "x-amz-copy-source" in request.headers else "UploadPart"
        return "CopyObject" if "x-amz-copy-source" in request.headers else "PutObject"
    if request.method == "DELETE" and "if-match" in request.headers:
        return "NotImplemented"
    of_upload = {"DELETE": "AbortMultipartUpload", "POST": "CompleteMultipartUpload"}
    if "uploadId" in query:
        return of_upload.get(request.method, "NotImplemented")
    if request.method == "POST":
        return "CreateMultipartUpload" if "uploads" in query else "NotImplemented"
    of_object = {"GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}
    return of_object.get(request.method, "NotImplemented")


def _bucket_operation(method: str, query: Mapping[str, str]) -> str:
    if method == "GET":
        if "location" in query:
            return "GetBucketLocation"
        return "ListObjectsV2" if query.get("list-type") == "2" else "NotImplemented"
    if method == "POST":
        return "DeleteObjects" if "delete" in query else "NotImplemented"
    return {"PUT": "CreateBucket", "HEAD": "HeadBucket"}.get(method, "NotImplemented")


_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def asked_range(header: str | None, size_bytes: int) -> range | None:
    """The bytes that a Range asks for; None for all (as also where the header is not understood)."""
    found = _RANGE.fullmatch(header.strip()) if header is not None else None
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if not first:
        start, stop = max(0, size_bytes - int(last)), size_bytes
    else:
        start, stop = int(first), min(size_bytes, int(last) + 1 if last else size_bytes)
    if start >= stop:
        raise S3Error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange", f"It has {size_bytes} bytes.")
    return range(start, stop)
