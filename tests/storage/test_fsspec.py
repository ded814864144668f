"""Stores on s3fs: the shipped suite, servers that record their requests, and file systems that are refused."""

from __future__ import annotations

import io
import pickle
import random
import traceback
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from aiobotocore.session import AioSession
from fsspec import AbstractFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem

from dcp_remote import RemoteReader, RemoteWriter
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConditionFailedError,
    InvalidArgumentError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import LocalStore, open_fsspec_store, open_store
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.fsspec import _Body
from dcp_remote.testing.servers import S3Server
from dcp_remote.testing.wrappers import RecordingStore
from tests.support.clouds import OBJECT_HEADERS, VERBS, S3Suite, error_body, listing, open_s3fs
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


def file_system(server: S3Server | ScriptedServer, **options: object) -> S3FileSystem:
    """Make a file system as a user does, not reused from an earlier test."""
    given = {"key": "testing", "secret": SECRET, "endpoint_url": server.endpoint_url, **options}
    return S3FileSystem(**given, skip_instance_cache=True)


def open_on(server: ScriptedServer, **options: object) -> ObjectStore:
    return open_s3fs(server.endpoint_url, "bucket/prefix", **{"secret": SECRET, **options})


@pytest.fixture(scope="module")
def bucket(s3_server: S3Server) -> ObjectStore:
    """Make one client for the whole suite, since botocore needs a fifth of a second for one."""
    s3_server.create_bucket("suite-s3fs")
    return open_fsspec_store(file_system(s3_server), "suite-s3fs")


class TestS3fsOnMoto(S3Suite):
    """The contract, below a new prefix for each test, with boto3 to read and write past the store."""

    @pytest.fixture
    def store(self, bucket: ObjectStore) -> ObjectStore:
        return bucket.child(uuid.uuid4().hex)


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


def test_answers_that_are_not_s3() -> None:
    """Answer with a proxy's page instead of XML, without the headers that S3 always sends, and without a range."""
    page = HttpAnswer(200, b"<html><p>busy", OBJECT_HEADERS)
    with scripted_server(lambda _: page) as server, pytest.raises(TransientStorageError):
        next(open_on(server).list())
    with scripted_server(lambda _: HttpAnswer(200, b"0123")) as server, pytest.raises(StorageError):
        open_on(server).head("key")
    undated = HttpAnswer(200, listing("prefix/a").replace(b"LastModified>", b"Elsewhere>"))
    with scripted_server(lambda _: undated) as server, pytest.raises(StorageError):
        next(open_on(server).list())
    with scripted_server(lambda _: HttpAnswer(200, b"0123", OBJECT_HEADERS)) as server, pytest.raises(StorageError):
        VERBS["get_into"](open_on(server))


def test_settings_of_the_file_system_are_kept() -> None:
    """Set arguments of every request: sent with each, except for a condition of its own."""
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        store = open_on(server, s3_additional_kwargs={"ServerSideEncryption": "AES256", "IfMatch": '"theirs"'})
        for verb in ("put", "create", "swap"):
            VERBS[verb](store)
    assert [request.headers["x-amz-server-side-encryption"] for request in server.requests] == ["AES256"] * 3
    assert [request.headers.get("if-match") for request in server.requests] == [None, None, '"abc"']


def test_listing_by_pages() -> None:
    """List two pages, the second with the marker of a folder, which is left out.

    The first request has the key to begin after, the second the token.
    """

    def answer(request: HttpRequest) -> HttpAnswer:
        if "continuation-token=next" in request.path:
            return HttpAnswer(200, listing("prefix/d/", "prefix/e"))
        return HttpAnswer(200, listing("prefix/b", "prefix/c", IsTruncated="true", NextContinuationToken="next"))

    with scripted_server(answer) as server:
        store = open_on(server)
        assert [info.key for info in store.list(after="a")] == ["b", "c", "e"]
        first, second = server.requests
    assert "start-after=prefix%2Fa" in first.path
    assert "start-after" not in second.path


def test_wrong_listings_are_refused() -> None:
    """Refuse each wrong listing, since objects missing in it could be deleted by mistake, or kept for ever."""
    pages = [
        (listing("prefix/b", "prefix/a"), "in order"),
        (listing("prefix/a", "prefix/a"), "in order"),
        (listing("elsewhere/a"), "in order"),
        (listing("prefix/a/../b"), "no checkpoint has"),
        (listing("prefix/a", IsTruncated="true"), "NextContinuationToken"),
        (listing(IsTruncated="true", NextContinuationToken="same"), "does not go on"),
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
        return (
            HttpAnswer(200, b"<DeleteResult/>") if b"1000" in request.body else HttpAnswer(503, error_body("SlowDown"))
        )

    with scripted_server(answer) as server:
        failed = open_on(server).delete(keys)
        assert len(server.requests) == 2
    assert list(failed) == keys[:1000]
    assert {type(error) for error in failed.values()} == {TransientStorageError}


def test_a_botocore_without_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the parameters of conditions, as in an older botocore: s3fs would drop them; here nothing is sent."""
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        store: Any = open_on(server)
        model = store._connection.filesystem().connect().meta.service_model.operation_model("PutObject")
        for name in ("IfMatch", "IfNoneMatch"):
            monkeypatch.delitem(model.input_shape.members, name)
        for condition in ("absent", Version(etag='"old"')):
            with pytest.raises(InvalidArgumentError, match="Unknown parameter"):
                store.put("key", [b"x"], condition=condition)
        assert server.requests == []
        store.put("key", [b"x"])
        assert len(server.requests) == 1


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


@pytest.mark.usefixtures("empty_environment")
def test_missing_credentials() -> None:
    """Clear the environment: refused before a request is sent; `anon` needs no credentials."""
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
        store: Any = open_on(server, key=None, secret=None)
        with pytest.raises(PermissionDeniedError) as caught:
            store.put("key", [b"x"])
        assert server.requests[0].headers["x-amz-security-token"] == "a-session-token"
    shown = str(caught.value) + repr(store) + repr(store._connection)
    assert SECRET not in shown
    assert "a-session-token" not in shown


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


def test_paths(s3_server: S3Server) -> None:
    """Open paths with and without protocol and slashes; invalid paths are refused."""
    filesystem = file_system(s3_server)
    for path in ("bucket/a/b", "s3://bucket/a/b", "s3a://bucket/a/b/", "/bucket/a/b"):
        assert open_fsspec_store(filesystem, path).url == "s3://bucket/a/b"
    for path in ("", "bucket?versionId=1", "bucket/a//b", "bucket/../b", "user@bucket"):
        with pytest.raises(InvalidArgumentError):
            open_fsspec_store(filesystem, path)


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


def derived(base: Any, **attributes: object) -> AbstractFileSystem:
    """Return a file system of a new class: of a library that is not installed, or a subclass."""
    return type("Derived", (base,), attributes)()


@pytest.mark.parametrize(
    "filesystem",
    [
        pytest.param(derived(AbstractFileSystem, protocol=("gs", "gcs")), id="gcsfs"),
        pytest.param(derived(S3FileSystem), id="derived from s3fs"),
        pytest.param(derived(LocalFileSystem), id="derived from local"),
        pytest.param(DirFileSystem(path="bucket", fs=S3FileSystem()), id="folder of s3fs"),
        pytest.param(MemoryFileSystem(), id="memory"),
        pytest.param("s3://bucket", id="no file system"),
    ],
)
def test_all_others_are_refused(filesystem: AbstractFileSystem) -> None:
    """Open file systems without conditional PUTs: refused, and the message says what to pass."""
    with pytest.raises(InvalidArgumentError, match=r"no conditional PUT.*gs://.*S3FileSystem"):
        open_fsspec_store(filesystem, "bucket/prefix")


def test_file_systems_of_other_event_loops(s3_server: S3Server) -> None:
    """Open an asynchronous file system, and one with a session, which cannot be pickled."""
    s3_server.create_bucket("other-loops")
    open_fsspec_store(file_system(s3_server, asynchronous=True), "other-loops").put("a", [b"x"], condition="absent")
    store = open_fsspec_store(file_system(s3_server, session=AioSession()), "other-loops")
    assert [info.key for info in store.list()] == ["a"]
    with pytest.raises(InvalidArgumentError, match="session"):
        pickle.dumps(store)


def test_a_save_and_a_load(s3_server: S3Server) -> None:
    """Save through s3fs in three requests, and load through it and through an `s3://` URL.

    Every object is equal in both stores.
    """
    s3_server.create_bucket("saved-by-s3fs")
    state = {"model": {"weight": torch.arange(50_000.0).reshape(250, 200), "bias": torch.ones(7)}}
    url = "s3://saved-by-s3fs/run/step-1"
    store = open_fsspec_store(file_system(s3_server), "saved-by-s3fs/run/step-1")
    dcp.save(state, storage_writer=RemoteWriter(store.child("first")))  # probes the server
    recording = RecordingStore(store)
    dcp.save(state, storage_writer=RemoteWriter(recording))
    assert [verb for verb, _ in recording.calls] == ["get", "put", "put"]
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
        raw, model = _Body(buffers), io.BytesIO(b"".join(buffers))
        body = io.BufferedReader(raw, rng.choice((1, 7, 8192)))
        assert raw.size_bytes == len(model.getvalue())
        for _ in range(20):
            if rng.random() < 0.5:
                size_bytes = rng.choice((0, 1, 5, 100, 2000, -1))
                assert body.read(size_bytes) == model.read(size_bytes)
            else:
                place = rng.randrange(raw.size_bytes + 1)
                whence, offset = rng.choice(((0, place), (1, place - model.tell()), (2, place - raw.size_bytes)))
                assert body.seek(offset, whence) == model.seek(offset, whence)
            assert body.tell() == model.tell()
