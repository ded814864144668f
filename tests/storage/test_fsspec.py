"""Stores on s3fs: the shipped suite, servers that record their requests, and file systems that are not written to."""

from __future__ import annotations

import http.client
import io
import os
import pickle
import random
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from zipfile import ZipFile

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiobotocore.session import AioSession
from fsspec import AbstractFileSystem
from fsspec.implementations.cached import CachingFileSystem, SimpleCacheFileSystem, WholeFileCacheFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.implementations.zip import ZipFileSystem
from s3fs import S3FileSystem

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import LocalStore, open_fsspec_store, open_store
from dcp_remote.storage.base import Condition, ObjectStore, Version
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.fsspec_s3 import Body
from dcp_remote.storage.request_context import limit_requests
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, S3Server, ScriptedServer, scripted_server
from dcp_remote.testing.store_suite import StoreSuite

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
MODIFIED = "Mon, 01 Jan 2024 00:00:00 GMT"
OBJECT_HEADERS = {"ETag": '"abc"', "Last-Modified": MODIFIED}


def file_system(server: S3Server | ScriptedServer, **options: object) -> S3FileSystem:
    """Make a file system as a user does, not reused from an earlier test."""
    given = {"key": "testing", "secret": SECRET, "endpoint_url": server.endpoint_url, **options}
    return S3FileSystem(**given, skip_instance_cache=True)


def open_on(server: ScriptedServer, path: str = "bucket/prefix", **options: object) -> ObjectStore:
    return open_fsspec_store(file_system(server, **options), path)


def error_answer(status: int, code: str) -> HttpAnswer:
    return HttpAnswer(status, f"<Error><Code>{code}</Code><Message>No: {SECRET}</Message></Error>".encode())


@pytest.fixture(scope="module")
def raw_s3(s3_server: S3Server) -> Any:
    """Make boto3's client of the same server."""
    return boto3.client("s3", **s3_server.storage_options)  # type: ignore[call-overload]  # its arguments by name


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> ObjectStore:
    """Make one client for the whole suite, since botocore needs a fifth of a second for one."""
    s3_server.create_bucket("suite-s3fs")
    return open_fsspec_store(file_system(s3_server), "suite-s3fs")


class TestS3fsOnMoto(StoreSuite):
    """The contract, below a new prefix for each test, with boto3 to read and write past the store."""

    version_is_digest = True

    @pytest.fixture
    def store(self, bucket: ObjectStore) -> ObjectStore:
        return bucket.child(uuid.uuid4().hex)

    @pytest.fixture(autouse=True)
    def _look_past(self, raw_s3: Any) -> None:
        self.client = raw_s3

    def raw_write(self, store: ObjectStore, key: str, data: bytes) -> None:
        place = parse_url(store.url)
        self.client.put_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}", Body=data)

    def raw_read(self, store: ObjectStore, key: str) -> bytes:
        place = parse_url(store.url)
        return bytes(self.client.get_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}")["Body"].read())


def test_one_of_eight_file_systems_creates(s3_server: S3Server) -> None:
    """Create one key in eight threads, each with a client of its own: one wins, and its bytes are there."""
    s3_server.create_bucket("eight-creators")
    stores = [
        open_fsspec_store(file_system(s3_server, max_concurrency=number + 1), "eight-creators") for number in range(8)
    ]

    def create(number: int) -> bool:
        try:
            stores[number].put("key", [b"%d" % number], condition="absent")
        except ConditionFailedError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert sum(won) == 1
    assert stores[0].get("key", limit_bytes=1).data == b"%d" % won.index(True)


def test_caches_of_s3fs_are_not_used(s3_server: S3Server, raw_s3: Any) -> None:
    """Fill s3fs's caches, then put an object by boto3: the store sees it."""
    s3_server.create_bucket("cached-listing")
    filesystem = file_system(s3_server)
    store = open_fsspec_store(filesystem, "cached-listing/run")
    raw_s3.put_object(Bucket="cached-listing", Key="run/a", Body=b"1")
    assert filesystem.ls("cached-listing/run") == ["cached-listing/run/a"]
    assert not filesystem.exists("cached-listing/run/b")
    raw_s3.put_object(Bucket="cached-listing", Key="run/b", Body=b"2")
    assert filesystem.ls("cached-listing/run") == ["cached-listing/run/a"], "the cache is not there: nothing is shown"
    assert [info.key for info in store.list()] == ["a", "b"]
    assert store.head("b").size_bytes == 1
    with pytest.raises(ConditionFailedError):
        store.put("b", [b"3"], condition="absent")


def test_a_put_is_one_request() -> None:
    """Record the requests of puts with all conditions and kinds of bodies: one PUT each, with its checksum."""
    big = bytes(range(256)) * 10_000
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        store = open_on(server, s3_additional_kwargs={"ServerSideEncryption": "AES256", "IfMatch": '"theirs"'})
        assert store.put("any", [big, memoryview(big)[1:], b"end"]) == Version(etag='"abc"')
        store.put("absent", [b"12", b"", memoryview(bytearray(b"34"))], condition="absent")
        store.put("swap", [b"12"], condition=Version(etag='"old"', generation="v1"))
        store.put("empty", [], condition="absent")
    any_, absent, swap, empty = server.requests
    assert [request.method for request in server.requests] == ["PUT"] * 4
    assert any_.path.partition("?")[0] == "/bucket/prefix/any"
    assert any_.body == big + big[1:] + b"end"
    assert "if-match" not in any_.headers
    assert "if-none-match" not in any_.headers
    assert (absent.body, absent.headers["if-none-match"]) == (b"1234", "*")
    assert (swap.headers["if-match"], empty.body) == ('"old"', b"")
    for request in server.requests:
        assert request.headers["x-amz-checksum-crc32"]
        assert request.headers["content-length"] == str(len(request.body))
        assert request.headers["x-amz-server-side-encryption"] == "AES256"
    assert empty.headers["x-amz-checksum-crc32"] == "AAAAAA=="  # the CRC-32 of nothing is 0


def test_reads_are_one_request() -> None:
    """Record the requests of head, get and get_into: one each; get_into requests exactly its range."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if "range" in request.headers:
            return HttpAnswer(206, b"2345", {**OBJECT_HEADERS, "Content-Range": "bytes 2-5/10"})
        return HttpAnswer(200, b"0123456789", OBJECT_HEADERS)

    with scripted_server(answer) as server:
        store = open_on(server)
        assert store.head("key").version == Version(etag='"abc"')
        assert store.get("key", limit_bytes=10).data == b"0123456789"
        buffer = bytearray(4)
        store.get_into("key", 2, memoryview(buffer))
        assert buffer == b"2345"
    assert [request.method for request in server.requests] == ["HEAD", "GET", "GET"]
    assert server.requests[2].headers["range"] == "bytes=2-5"


# Status, code, and what a put under this condition makes of it.
REFUSED = [
    (403, "AccessDenied", "any", PermissionDeniedError),
    (403, "SignatureDoesNotMatch", "absent", PermissionDeniedError),
    (400, "ExpiredToken", "any", PermissionDeniedError),
    (404, "NoSuchBucket", "any", BucketNotFoundError),
    (404, "NoSuchBucket", "swap", BucketNotFoundError),
    (404, "NoSuchKey", "swap", ConditionFailedError),
    (412, "PreconditionFailed", "absent", ConditionFailedError),
    (409, "ConditionalRequestConflict", "absent", ConditionFailedError),
    (409, "OperationAborted", "any", TransientStorageError),
    (400, "RequestTimeout", "any", TransientStorageError),
    (400, "BadDigest", "absent", TransientStorageError),
    (400, "EntityTooLarge", "any", StorageError),
    (403, "QuotaExceeded", "any", StorageError),
    (507, "XMinioStorageFull", "absent", StorageError),
    (429, "TooManyRequests", "any", TransientStorageError),
    (500, "InternalError", "absent", TransientStorageError),
    (501, "NotImplemented", "absent", StorageError),
    (503, "SlowDown", "absent", TransientStorageError),
]


def test_errors_of_s3() -> None:
    """Refuse a put of two megabytes in each way: one request, without any retry, and an error of the right class.

    The store quotes a secret, which is neither in the error nor in its chain of causes.
    """
    conditions: dict[str, Condition] = {"any": "any", "absent": "absent", "swap": Version(etag='"old"')}
    answers = [error_answer(status, code) for status, code, *_ in REFUSED]
    with scripted_server(lambda _: answers[len(server.requests) - 1]) as server:
        store = open_on(server)
        for number, (status, code, condition, kind) in enumerate(REFUSED):
            with pytest.raises(StorageError) as caught:
                store.put("key", [b"x" * 2_000_000], condition=conditions[condition])
            assert len(server.requests) == number + 1, (status, code)
            assert type(caught.value) is kind, (status, code)
            if kind is BucketNotFoundError:
                assert caught.value.details["bucket"] == "bucket"
            else:
                assert caught.value.details["code"] == code
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_answers_that_are_not_s3() -> None:
    """Answer with a proxy's page instead of XML, and without the headers that S3 always sends."""
    page = HttpAnswer(200, b"<html><p>busy", OBJECT_HEADERS)
    with scripted_server(lambda _: page) as server, pytest.raises(TransientStorageError):
        next(open_on(server).list())
    with scripted_server(lambda _: HttpAnswer(200, b"0123")) as server, pytest.raises(StorageError):
        open_on(server).head("key")


def listing(keys: list[str], **more: str) -> bytes:
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>&quot;abc&quot;</ETag>"
        f"<Size>{0 if key.endswith('/') else 1}</Size></Contents>"
        for key in keys
    )
    others = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    return f"<ListBucketResult>{others}{entries}</ListBucketResult>".encode()


def test_listing_by_pages() -> None:
    """List two pages, the second with the marker of a folder, which is left out.

    The first request has the key to begin after, the second the token.
    """

    def answer(request: HttpRequest) -> HttpAnswer:
        if "continuation-token=next" in request.path:
            return HttpAnswer(200, listing(["prefix/d/", "prefix/e"], IsTruncated="false"))
        return HttpAnswer(200, listing(["prefix/b", "prefix/c"], IsTruncated="true", NextContinuationToken="next"))

    with scripted_server(answer) as server:
        store = open_on(server)
        assert [info.key for info in store.list(after="a")] == ["b", "c", "e"]
        first, second = server.requests
    assert "start-after=prefix%2Fa" in first.path
    assert "start-after" not in second.path


def test_wrong_listings_are_refused() -> None:
    """Refuse each wrong listing, since objects missing in it could be deleted by mistake, or kept for ever."""
    pages = [
        (listing(["prefix/b", "prefix/a"]), "in order"),
        (listing(["prefix/a", "prefix/a"]), "in order"),
        (listing(["elsewhere/a"]), "in order"),
        (listing(["prefix/a/../b"]), "no checkpoint has"),
        (listing(["prefix/a"], IsTruncated="true"), "NextContinuationToken"),
        (listing([], IsTruncated="true", NextContinuationToken="same"), "does not go on"),
    ]
    answers: list[bytes] = []
    with scripted_server(lambda _: HttpAnswer(200, answers[-1])) as server:
        store = open_on(server)
        for page, problem in pages:
            answers.append(page)
            with pytest.raises(StorageError, match=problem):
                list(store.list("a" if b"elsewhere" in page else ""))


def test_each_failed_delete_is_reported() -> None:
    """Delete four keys in one request: deleted, denied, failed for now, and missing."""
    codes = {"denied": "AccessDenied", "later": "InternalError", "gone": "NoSuchKey"}
    errors = "".join(f"<Error><Key>prefix/{key}</Key><Code>{code}</Code></Error>" for key, code in codes.items())
    body = f"<DeleteResult>{errors}</DeleteResult>".encode()
    with scripted_server(lambda _: HttpAnswer(200, body)) as server:
        failed = open_on(server).delete(["deleted", *codes])
        assert len(server.requests) == 1
    assert {key: type(error) for key, error in failed.items()} == {
        "denied": PermissionDeniedError,
        "later": TransientStorageError,
    }


def test_a_delete_that_fails_whole_is_reported_for_every_key() -> None:
    """Delete 1,001 keys in two requests, of which the first fails: the second is still sent."""
    keys = [f"{number:04}" for number in range(1001)]

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, b"<DeleteResult/>") if b"1000" in request.body else error_answer(503, "SlowDown")

    with scripted_server(answer) as server:
        failed = open_on(server).delete(keys)
        assert len(server.requests) == 2
    assert list(failed) == keys[:1000]
    assert {type(error) for error in failed.values()} == {TransientStorageError}


def test_a_large_object_is_refused_before_its_body() -> None:
    """Announce a long body that never comes: refused by its length."""
    headers = {**OBJECT_HEADERS, "Content-Length": "1000000000"}
    with scripted_server(lambda _: HttpAnswer(200, b"", headers, cut_bytes=0)) as server:
        with pytest.raises(CorruptCheckpointError, match="size_bytes=1000000000"):
            open_on(server).get("key", limit_bytes=100)
        assert len(server.requests) == 1


def test_wrong_answers_to_a_range() -> None:
    """Answer a read of four bytes with a shorter, longer, shifted, unranged or broken answer."""

    def part(body: bytes, content_range: str, cut_bytes: int | None = None) -> HttpAnswer:
        return HttpAnswer(206, body, {**OBJECT_HEADERS, "Content-Range": content_range}, cut_bytes=cut_bytes)

    cases: list[tuple[HttpAnswer, type[DcpRemoteError]]] = [
        (part(b"01", "bytes 0-1/2"), CorruptCheckpointError),
        (part(b"012345678", "bytes 0-8/9"), StorageError),
        (part(b"0123", "bytes 4-7/8"), StorageError),
        (HttpAnswer(200, b"0123", OBJECT_HEADERS), StorageError),
        (part(b"0123", "bytes 0-3/4", cut_bytes=2), TransientStorageError),
    ]
    with scripted_server(lambda _: cases[len(server.requests) - 1][0]) as server:
        store = open_on(server)
        for number, (answer, kind) in enumerate(cases):
            with pytest.raises(DcpRemoteError) as caught:
                store.get_into("key", 0, memoryview(bytearray(4)))
            assert type(caught.value) is kind, answer
            assert len(server.requests) == number + 1


def test_stalled_requests_end() -> None:
    """Send each verb to a silent server, with s3fs's own limit set to a tenth of a second."""
    calls: list[Callable[[ObjectStore], object]] = [
        lambda store: store.get("key", limit_bytes=10),
        lambda store: store.get_into("key", 0, memoryview(bytearray(4))),
        lambda store: store.head("key"),
        lambda store: store.put("key", [b"x" * 100_000], condition="absent"),
        lambda store: next(store.list()),
    ]
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        store = open_on(server, config_kwargs={"read_timeout": 0.1})
        for call in calls:
            with pytest.raises(TransientStorageError):
                call(store)
        assert isinstance(store.delete(["key"])["key"], TransientStorageError)


def test_a_body_that_stalls_ends_at_the_deadline() -> None:
    """Send half of each body, and no more: the reads end at the deadline, long before s3fs's own limit."""
    stalled = {**OBJECT_HEADERS, "Content-Length": "8", "Content-Range": "bytes 0-7/8"}
    with scripted_server(lambda _: HttpAnswer(206, b"0123", stalled)) as server, limit_requests(lambda: 0.1):
        store = open_on(server, config_kwargs={"read_timeout": 1e5})
        with pytest.raises(TransientStorageError):
            store.get("key", limit_bytes=8)
        with pytest.raises(TransientStorageError):
            store.get_into("key", 0, memoryview(bytearray(8)))


def test_a_botocore_without_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the parameters of conditions, as in an older botocore: s3fs would drop them, so nothing is sent."""
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        store: Any = open_on(server)
        model = store._connection.filesystem().connect().meta.service_model.operation_model("PutObject")
        for name in ("IfMatch", "IfNoneMatch"):
            monkeypatch.delitem(model.input_shape.members, name)
        for condition in ("absent", Version(etag='"old"')):
            with pytest.raises(InvalidArgumentError, match="no conditional writes"):
                store.put("key", [b"x"], condition=condition)
        assert server.requests == []
        store.put("key", [b"x"])
        assert len(server.requests) == 1


def test_a_dead_endpoint_is_transient() -> None:
    """Connect to a closed port: transient, since a server may be restarting."""
    with scripted_server(lambda _: HttpAnswer()) as server:
        store = open_on(server)
    with pytest.raises(TransientStorageError) as caught:
        store.put("key", [b"x"], condition="absent")
    assert SECRET not in str(caught.value)


def test_a_missing_bucket_is_named(s3_server: S3Server) -> None:
    """Use a bucket that does not exist, by each verb and by a load: each error says so."""
    store = open_fsspec_store(file_system(s3_server), "no-such-bucket/run")
    for call in (lambda: store.put("key", [b"x"]), lambda: store.get("key", limit_bytes=1), lambda: next(store.list())):
        with pytest.raises(BucketNotFoundError, match="The bucket does not exist") as caught:
            call()
        assert caught.value.details["endpoint"] == s3_server.endpoint_url
    with pytest.raises(BucketNotFoundError, match="The bucket does not exist"):
        read_manifest(store)
    s3_server.create_bucket("a-bucket-without-run")
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        read_manifest(open_fsspec_store(file_system(s3_server), "a-bucket-without-run"))


def test_missing_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clear the environment: refused before a request is sent; `anon` needs no credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        with pytest.raises(PermissionDeniedError, match="credentials"):
            open_on(server, key=None, secret=None).put("key", [b"x"])
        assert server.requests == []
        open_on(server, key=None, secret=None, anon=True).put("key", [b"x"])
        assert "authorization" not in server.requests[0].headers


def test_found_credentials_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take credentials from the environment, and quote them in a refusal: the error does not show them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-session-token")
    body = f"<Error><Code>AccessDenied</Code><Message>{SECRET} a-session-token</Message></Error>".encode()
    with scripted_server(lambda _: HttpAnswer(403, body)) as server:
        with pytest.raises(PermissionDeniedError) as caught:
            open_on(server, key=None, secret=None).put("key", [b"x"])
        assert server.requests[0].headers["x-amz-security-token"] == "a-session-token"
    assert SECRET not in str(caught.value)
    assert "a-session-token" not in str(caught.value)


def test_credentials_that_are_given_by_position_are_not_shown() -> None:
    """Give a session token in `client_kwargs`, by position, and quote it in a refusal."""
    body = b"<Error><Code>AccessDenied</Code><Message>a-session-token</Message></Error>"
    given = {"aws_session_token": "a-session-token", "aws_access_key_id": "testing", "aws_secret_access_key": SECRET}
    with scripted_server(lambda _: HttpAnswer(403, body)) as server:
        filesystem = S3FileSystem(
            False,
            server.endpoint_url,
            None,
            None,
            None,
            True,
            given,
            skip_instance_cache=True,
        )
        with pytest.raises(PermissionDeniedError) as caught:
            open_fsspec_store(filesystem, "bucket/prefix").put("key", [b"x"])
        assert server.requests[0].headers["x-amz-security-token"] == "a-session-token"
    assert "a-session-token" not in str(caught.value)


def test_secrets_are_in_no_repr(s3_server: S3Server) -> None:
    """Check the repr of the store and of its configuration."""
    store: Any = open_fsspec_store(file_system(s3_server), "bucket/p")
    assert repr(store) == "FsspecStore('s3://bucket/p')"
    assert SECRET not in repr(store._connection)


@pytest.mark.parametrize("endpoint_url", ["http://alice:a-password@127.0.0.1:9", "http://127.0.0.1:9/?sig=a-password"])
@pytest.mark.parametrize("where", ["endpoint_url", "client_kwargs"])
def test_no_secret_in_an_endpoint(where: str, endpoint_url: str) -> None:
    """Pass an endpoint with a secret: refused when the store is opened, and not shown."""
    given: dict[str, Any] = {"endpoint_url": endpoint_url}
    arguments = given if where == "endpoint_url" else {"client_kwargs": given}
    with pytest.raises(InvalidArgumentError, match="file system") as info:
        open_fsspec_store(S3FileSystem(**arguments, anon=True, skip_instance_cache=True), "bucket/prefix")
    assert "a-password" not in str(info.value)


def test_no_secret_in_an_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set an endpoint with a secret in the environment: refused before a job begins, and not shown."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://alice:a-password@127.0.0.1:9")
    store = open_fsspec_store(S3FileSystem(key="testing", secret="testing", skip_instance_cache=True), "bucket/run")
    with pytest.raises(InvalidArgumentError, match="AWS_ENDPOINT_URL") as info:
        require_conditional_writes(store, Deadline(5), swaps=True)
    assert "a-password" not in "".join(traceback.format_exception(info.value))


def test_no_secret_of_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a proxy URL that no client can parse: the chain of errors does not show its password."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://alice:a-password@127.0.0.1:99999")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    filesystem = S3FileSystem(
        endpoint_url="http://store.example", key="testing", secret="testing", skip_instance_cache=True
    )
    with pytest.raises(StorageError) as info:
        open_fsspec_store(filesystem, "bucket/prefix").head("key")
    assert "a-password" not in "".join(traceback.format_exception(info.value))


@pytest.mark.parametrize("path", ["bucket/a/b", "s3://bucket/a/b", "s3a://bucket/a/b/", "/bucket/a/b"])
def test_paths_of_s3(path: str, s3_server: S3Server) -> None:
    """Open paths with and without protocol and slashes."""
    assert open_fsspec_store(file_system(s3_server), path).url == "s3://bucket/a/b"


def test_paths_below_a_folder(s3_server: S3Server, tmp_path: Path) -> None:
    """Open paths of a DirFileSystem, also of a nested one; no path leads out of it."""
    inner = DirFileSystem(path="bucket/a", fs=file_system(s3_server))
    assert open_fsspec_store(DirFileSystem(path="b", fs=inner), "c").url == "s3://bucket/a/b/c"
    assert open_fsspec_store(inner, "").url == "s3://bucket/a"
    folder = DirFileSystem(path=str(tmp_path), fs=LocalFileSystem())
    assert open_fsspec_store(folder, "run").url == LocalStore(tmp_path / "run").url
    for path in ("../b", "b/../../c", "/b"):
        with pytest.raises(InvalidArgumentError):
            open_fsspec_store(inner, path)
        with pytest.raises(InvalidArgumentError):
            open_fsspec_store(folder, path)


@pytest.mark.parametrize("path", ["", "bucket?versionId=1", "bucket/a//b", "bucket/../b", "user@bucket"])
def test_invalid_paths(path: str, s3_server: S3Server) -> None:
    with pytest.raises(InvalidArgumentError):
        open_fsspec_store(file_system(s3_server), path)


def test_local_file_systems_are_local_stores(tmp_path: Path) -> None:
    """Open a path, a URL and a Path on fsspec's LocalFileSystem, and put an object: a LocalStore."""
    for path in (str(tmp_path / "run"), f"file://{tmp_path}/run", tmp_path / "run"):
        store = open_fsspec_store(LocalFileSystem(auto_mkdir=True), path)
        assert isinstance(store, LocalStore)
        assert store.url == LocalStore(tmp_path / "run").url
    store.put("key", [b"x"], condition="absent")
    assert (tmp_path / "run" / "key").read_bytes() == b"x"
    with pytest.raises(ConditionFailedError):
        store.put("key", [b"y"], condition="absent")


def derived(base: Any, **attributes: object) -> Callable[[Path], AbstractFileSystem]:
    """Return a maker of a file system of a new class: of a library that is not installed, or a subclass."""
    return lambda _: type("Derived", (base,), attributes)()


def zip_file_system(folder: Path) -> ZipFileSystem:
    with ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("a", "b")
    return ZipFileSystem(str(folder / "archive.zip"))


def cached(kind: type[AbstractFileSystem]) -> Callable[[Path], AbstractFileSystem]:
    return lambda folder: kind(fs=LocalFileSystem(), cache_storage=str(folder / "cache"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(cached(SimpleCacheFileSystem), "from a cache", id="simplecache"),
        pytest.param(cached(WholeFileCacheFileSystem), "from a cache", id="filecache"),
        pytest.param(cached(CachingFileSystem), "from a cache", id="blockcache"),
        pytest.param(lambda _: HTTPFileSystem(asynchronous=True), "for coroutines", id="asynchronous"),
        pytest.param(lambda _: "s3://bucket", "no file system of fsspec", id="no file system"),
    ],
)
def test_refusals(make: Callable[[Path], AbstractFileSystem], reason: str, tmp_path: Path) -> None:
    """Pass each file system that is not accepted; the message says why, and what is accepted."""
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        open_fsspec_store(make(tmp_path), "bucket/prefix")
    assert "s3fs.S3FileSystem" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        pytest.param(derived(AbstractFileSystem, protocol=("gs", "gcs")), "fsspec's gs .* gs://bucket", id="gcsfs"),
        pytest.param(derived(AbstractFileSystem, protocol=("abfs", "az")), "az://container/prefix", id="adlfs"),
        pytest.param(derived(AbstractFileSystem, protocol="own"), "fsspec's own has no cond.* s3://", id="unheard-of"),
        pytest.param(derived(S3FileSystem), "s3fs's own S3FileSystem", id="derived from s3fs"),
        pytest.param(derived(LocalFileSystem), "fsspec's own LocalFileSystem", id="derived from local"),
        pytest.param(lambda _: MemoryFileSystem(), "memory://name/prefix", id="memory"),
        pytest.param(lambda _: DirFileSystem(path="a", fs=MemoryFileSystem()), "memory://name", id="dir of memory"),
        pytest.param(zip_file_system, "fsspec's zip has no conditional PUT", id="zip"),
    ],
)
def test_all_others_are_read_only(make: Callable[[Path], AbstractFileSystem], advice: str, tmp_path: Path) -> None:
    """Write to each file system without conditional PUTs: refused, and the message says where to write."""
    store = open_fsspec_store(make(tmp_path), "bucket/prefix")
    for condition in ("any", "absent", Version(etag='"old"')):
        with pytest.raises(InvalidArgumentError, match=f"read-only: .*{advice}"):
            store.put("key", [b"x"], condition=condition)
    with pytest.raises(InvalidArgumentError, match=f"read-only: .*{advice}"):
        store.delete(["key"])
    assert not store.capabilities.compare_and_swap
    assert store.capabilities.write_refusal == store.capabilities.swap_refusal


def test_pickles_carry_no_client(s3_server: S3Server) -> None:
    """Pickle a store before and after its first request, and use it in a spawned process."""
    s3_server.create_bucket("pickled-s3fs")
    store = open_fsspec_store(file_system(s3_server), "pickled-s3fs/p")
    before = pickle.dumps(store)
    store.put("key", [b"content"])
    assert pickle.dumps(store) == before
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).get('key', limit_bytes=9).data.decode())"
    done = subprocess.run([sys.executable, "-c", code], input=before, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "content"


def test_file_systems_of_other_event_loops(s3_server: S3Server) -> None:
    """Open an asynchronous file system, and one with a session, which cannot be pickled."""
    s3_server.create_bucket("other-loops")
    open_fsspec_store(file_system(s3_server, asynchronous=True), "other-loops").put("a", [b"x"], condition="absent")
    store = open_fsspec_store(file_system(s3_server, session=AioSession()), "other-loops")
    assert [info.key for info in store.list()] == ["a"]
    with pytest.raises(InvalidArgumentError, match="session"):
        pickle.dumps(store)


FORK = """
import os, sys, warnings
from s3fs import S3FileSystem
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage import open_fsspec_store
warnings.simplefilter("ignore")  # that a process with threads forks, which is the point
filesystem = S3FileSystem(key="testing", secret="testing", endpoint_url=sys.argv[1])
def in_child(store):
    pid = os.fork()
    if pid == 0:
        try:
            store.put("key", [b"x"])
            os._exit(1)
        except InvalidArgumentError as error:
            os._exit(2 if "spawn" in str(error) else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
store = open_fsspec_store(filesystem, "forked-s3fs")
print(in_child(store), end=" ")
store.put("key", [b"x"])
print(in_child(store), in_child(open_fsspec_store(filesystem, "forked-s3fs")))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forks_after_the_first_request_are_refused(s3_server: S3Server) -> None:
    """Fork before the first request (works), and after it: the old store is refused, a new one works."""
    s3_server.create_bucket("forked-s3fs")
    done = subprocess.run(
        [sys.executable, "-c", FORK, s3_server.endpoint_url], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["1", "2", "1"]


@contextmanager
def recording_proxy(server: S3Server) -> Iterator[ScriptedServer]:
    """Run a proxy of a server that records every request as the client sent it."""
    about_the_connection = {"connection", "expect", "transfer-encoding", "date", "server"}

    def forward(request: HttpRequest) -> HttpAnswer:
        headers = {name: value for name, value in request.headers.items() if name not in about_the_connection}
        connection = http.client.HTTPConnection(urlsplit(server.endpoint_url).netloc, timeout=30)
        try:
            connection.request(request.method, request.path, request.body, headers)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        kept = {name: value for name, value in response.headers.items() if name.lower() not in about_the_connection}
        return HttpAnswer(response.status, answer, kept)

    with scripted_server(forward) as proxy:
        yield proxy


def test_a_save_and_a_load(s3_server: S3Server) -> None:
    """Save through s3fs in three requests, and load through it and through an `s3://` URL.

    Every object is equal in both stores. The first save also sends the three requests of a probe.
    """
    s3_server.create_bucket("saved-by-s3fs")
    state = {"model": {"weight": torch.arange(50_000.0).reshape(250, 200), "bias": torch.ones(7)}}
    url = "s3://saved-by-s3fs/run/step-1"
    with recording_proxy(s3_server) as proxy:
        store = open_fsspec_store(file_system(proxy), "saved-by-s3fs/run/step-1")
        dcp.save(state, storage_writer=RemoteWriter(store.child("first")))
        assert [request.method for request in proxy.requests] == ["GET", "PUT", "PUT", "POST", "PUT", "PUT"]
        proxy.requests.clear()
        dcp.save(state, storage_writer=RemoteWriter(store))
        assert [request.method for request in proxy.requests] == ["GET", "PUT", "PUT"]
        assert [request.headers.get("if-none-match") for request in proxy.requests[1:]][-1] == "*"
        with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
            dcp.save(state, storage_writer=RemoteWriter(store))
        dcp.save(state, storage_writer=RemoteWriter(store, overwrite=True))
        own = open_store(url, s3_server.storage_options)
        for reader in (RemoteReader(store), RemoteReader(url, storage_options=s3_server.storage_options)):
            loaded = {"model": {"weight": torch.zeros(250, 200), "bias": torch.zeros(7)}}
            dcp.load(loaded, storage_reader=reader)
            assert all(torch.equal(state["model"][name], loaded["model"][name]) for name in state["model"])
        assert [info.key for info in store.list()] == [info.key for info in own.list()]
        for info in own.list():
            assert store.get(info.key, limit_bytes=info.size_bytes) == own.get(info.key, limit_bytes=info.size_bytes)


def test_a_body_reads_like_one_file() -> None:
    """Compare reads and seeks with those of a BytesIO of the same bytes; derandomized."""
    rng = random.Random(13)
    for _ in range(50):
        buffers = [rng.randbytes(rng.choice((0, 1, 2, 10, 300))) for _ in range(rng.randrange(8))]
        body, model = Body(buffers), io.BytesIO(b"".join(buffers))
        assert body.size_bytes == len(model.getvalue())
        for _ in range(20):
            if rng.random() < 0.5:
                size_bytes = rng.choice((0, 1, 5, 100, 2000, -1))
                assert body.read(size_bytes) == model.read(size_bytes)
            else:
                place = rng.randrange(body.size_bytes + 1)
                whence, offset = rng.choice(((0, place), (1, place - model.tell()), (2, place - body.size_bytes)))
                assert body.seek(offset, whence) == model.seek(offset, whence)
            assert body.tell() == model.tell()


def test_a_file_system_is_no_url(s3_server: S3Server) -> None:
    """Pass a file system as a URL: the error names `open_fsspec_store`."""
    for use in (RemoteWriter, RemoteReader, open_store):
        with pytest.raises(InvalidArgumentError, match="open_fsspec_store"):
            use(file_system(s3_server))


@pytest.mark.parametrize("url", ["simplecache::s3://bucket/run", "dir::file:///run", "zip://a::s3://user:pw@bucket/b"])
def test_chains_of_fsspec_are_no_paths(url: str) -> None:
    """Pass chained URLs of fsspec: refused, and no secret in them is shown."""
    with pytest.raises(InvalidArgumentError, match="open_fsspec_store") as caught:
        open_store(url)
    assert "pw" not in str(caught.value)
