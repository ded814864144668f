"""Stores of S3 on scripted servers: their options, every verb, and plain answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from s3fs import S3FileSystem

from dcp_remote.storage import open_fsspec_store
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.cloud.bucket import Timeouts
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.store_suite import StoreSuite
from tests.support.scripted_server import HttpAnswer, HttpRequest

CREDENTIALS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
OBJECT_HEADERS = {"ETag": '"abc"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}

# So long that a test which waits for the end of a request does not end.
FOREVER = Timeouts(floor_seconds=1e5, silence_seconds=1e5)


def _delete(store: ObjectStore) -> None:
    for error in store.delete(["key"]).values():
        raise error


VERBS: dict[str, Callable[[ObjectStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=1000),
    "get_into": lambda store: store.get_into("key", 0, memoryview(bytearray(4))),
    "put": lambda store: store.put("key", [b"x"]),
    "create": lambda store: store.put("key", [b"x"], condition="absent"),
    "swap": lambda store: store.put("key", [b"x"], condition=Version('"abc"')),
    "list": lambda store: list(store.list()),
    "delete": _delete,
}


def open_s3(
    endpoint_url: str, url: str = "s3://bucket/run", *, timeouts: Timeouts | None = None, **options: object
) -> CloudStore:
    """Open a store of S3, or of another cloud without credentials, on a server of the test."""
    given = {"endpoint_url": endpoint_url, **options}
    if url.startswith("s3:"):
        given = CREDENTIALS | given
    return open_cloud_store(parse_url(url), given, timeouts=timeouts)


def open_s3fs(endpoint_url: str | None, path: str = "bucket/run", **options: object) -> ObjectStore:
    """Open a store on a file system of s3fs that is made as a user does, and not reused from an earlier test."""
    given = {"key": "testing", "secret": "testing", "endpoint_url": endpoint_url, **options}
    return open_fsspec_store(S3FileSystem(**given, skip_instance_cache=True), path)


class S3Suite(StoreSuite):
    """The shipped suite on a server of S3, with a client of botocore to read and write past the store."""

    version_is_digest = True

    @pytest.fixture(autouse=True)
    def _look_past(self, raw_s3: Any) -> None:
        self.client = raw_s3

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        """Implement `StoreSuite.raw_write`."""
        place = parse_url(store.url)
        self.client.put_object(Bucket=place.bucket, Key=place.key(key), Body=data)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        """Implement `StoreSuite.raw_read`."""
        place = parse_url(store.url)
        return bytes(self.client.get_object(Bucket=place.bucket, Key=place.key(key))["Body"].read())


def error_body(code: str, more: str = "") -> bytes:
    """Return S3's document of an error."""
    return f"<Error><Code>{code}</Code><Message>because</Message>{more}</Error>".encode()


def always(
    status: int, code: str = "", headers: dict[str, str] | None = None, more: str = ""
) -> Callable[[HttpRequest], HttpAnswer]:
    """Return a server that answers every request with one error."""
    return lambda _: HttpAnswer(status, error_body(code, more), headers or {})


def listing(*keys: str, etag: str = "&quot;abc&quot;", **fields: str) -> bytes:
    """Return a page of S3's listing; a key that ends with a slash is the marker of a folder."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>{etag}</ETag>"
        f"<Size>{0 if key.endswith('/') else 1}</Size></Contents>"
        for key in keys
    )
    others = "".join(f"<{name}>{value}</{name}>" for name, value in ({"IsTruncated": "false"} | fields).items())
    return f"<ListBucketResult>{others}{entries}</ListBucketResult>".encode()


def answer_range(request: HttpRequest, data: bytes) -> HttpAnswer:
    """Return the bytes of an object that a request asks for."""
    if "range" not in request.headers:
        return HttpAnswer(200, data, OBJECT_HEADERS)
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    part = data[first : last + 1]
    content_range = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
    return HttpAnswer(206, part, {**OBJECT_HEADERS, "Content-Range": content_range})


def is_direct(target: str) -> bool:
    """Return whether a request is signed in its URL, and not in a header as obstore signs."""
    return "X-Amz-Signature" in target
