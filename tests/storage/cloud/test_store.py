"""S3 on moto by the shipped suite; requests, timeouts and processes against servers that say what they were sent."""

from __future__ import annotations

import html
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dcp_remote.errors import (
    BucketNotFoundError,
    ConditionFailedError,
    CorruptCheckpointError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.cloud.bucket import Timeouts
from dcp_remote.storage.cloud.endpoint import S3Options, resolve_s3
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.options import parse_options
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import S3Server
from tests.support.clouds import OBJECT_HEADERS, VERBS, S3Suite, always, is_direct, listing, open_s3
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server


def open_on(server: ScriptedServer, url: str = "s3://bucket/prefix", **options: Any) -> CloudStore:
    return open_s3(server.endpoint_url, url, **options)


class TestS3OnMoto(S3Suite):
    """Run the store suite, and check by boto3."""

    @pytest.fixture
    def store(self, s3_server: S3Server) -> Iterator[ObjectStore]:
        bucket = f"suite-{uuid.uuid4().hex}"
        s3_server.create_bucket(bucket)
        store = open_cloud_store(parse_url(f"s3://{bucket}"), s3_server.storage_options)
        yield store
        assert store._bucket.direct._failed_seconds == float("-inf")  # no range was left to obstore


def test_objects_beside_a_prefix(s3_server: S3Server) -> None:
    """Put objects whose keys begin like the store's prefix but lie beside it: they are not listed, read or deleted."""
    s3_server.create_bucket("beside-a-prefix")
    bucket = open_cloud_store(parse_url("s3://beside-a-prefix"), s3_server.storage_options)
    others = ["a/prefi", "a/prefix-of", "a/prefix.x/y", "a/prefix0", "b"]
    for key in [*others, "a/prefix/k0", "a/prefix/k1"]:
        bucket.put(key, [key.encode()])
    store = open_cloud_store(parse_url("s3://beside-a-prefix/a/prefix"), s3_server.storage_options)
    assert [info.key for info in store.list()] == ["k0", "k1"]
    assert [info.key for info in store.list("k", after="k0")] == ["k1"]
    assert store.get("k0", limit_bytes=20).data == b"a/prefix/k0"
    assert store.delete(["k0", "k1", "-of", "b"]) == {}
    assert [info.key for info in bucket.list()] == others


@pytest.mark.torture(smoke=False)
def test_many_objects_on_moto(s3_server: S3Server) -> None:
    """List and delete 1,100 objects, more than a page and a batch: whole, from the middle, and by part of a name."""
    s3_server.create_bucket("many-objects")
    store = open_cloud_store(parse_url("s3://many-objects/p"), s3_server.storage_options)
    keys = [f"shards/{number:04}" for number in range(1100)]
    for key in keys:
        store.put(key, [b"x"])
    assert [info.key for info in store.list()] == keys
    assert [info.key for info in store.list("shards/", after="shards/1090")] == keys[1091:]
    assert [info.key for info in store.list("shards/01")] == keys[100:200]
    assert store.delete(keys) == {}
    assert list(store.list()) == []


def test_settings_of_the_payload() -> None:
    """Set the options for other servers: the headers of one PUT each follow them."""
    with scripted_server(lambda _: HttpAnswer(headers=OBJECT_HEADERS)) as server:
        open_on(server, sign_payload=True, checksum_algorithm="none").put("key", [b""])
        open_on(server, checksum_algorithm="SHA256").put("key", [b""])
        open_on(server, etag_quotes=False).put("key", [b""], condition=Version(etag='"abc"'))
        open_cloud_store(parse_url("s3://bucket"), {"endpoint_url": server.endpoint_url, "anon": True}).put(
            "key", [b""]
        )
    signed, sha, unquoted, anonymous = (request.headers for request in server.requests)
    assert signed["x-amz-content-sha256"] == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert not any("checksum" in name for name in signed)
    assert "x-amz-checksum-sha256" in sha
    assert unquoted["if-match"] == "abc"
    assert "authorization" not in anonymous


@pytest.mark.parametrize("status", [416, 200], ids=["no code", "whole empty object"])
def test_a_short_object_without_codes_of_s3(status: int) -> None:
    """Answer a range as a server does that has no error codes: a HEAD tells the size."""

    def answer(request: HttpRequest) -> HttpAnswer:
        if request.method == "HEAD":
            return HttpAnswer(200, b"", {**OBJECT_HEADERS, "Content-Length": "2" if status == 416 else "0"})
        return HttpAnswer(status, b"", OBJECT_HEADERS)

    with scripted_server(answer) as server, pytest.raises(CorruptCheckpointError, match="ends before the range"):
        open_on(server).get_into("key", 2, memoryview(bytearray(4)))


def test_the_latency_is_known_after_a_get_of_nothing() -> None:
    """Look for an object that is not there, as each first save does."""
    with scripted_server(always(404, "NoSuchKey")) as server:
        store = open_s3(server.endpoint_url)
        assert store.latency_seconds == 0
        with pytest.raises(ObjectNotFoundError):
            store.child("one").get("manifest.json", limit_bytes=100)
        assert store.latency_seconds > 0


def test_an_address_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve a host to a dead address first: the next one is tried, and the answering family is remembered."""
    tried: list[object] = []

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        tried.append(host)
        dead = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("100::1", port, 0, 0))  # discarded by every router
        return [dead, (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    answer = HttpAnswer(206, b"01", {**OBJECT_HEADERS, "Content-Range": "bytes 0-1/2"})
    with scripted_server(lambda _: answer) as server:
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        store = open_on(server)
        store.get_into("key", 0, memoryview(bytearray(2)))
        assert [is_direct(request.path) for request in server.requests] == [True]
    assert tried


def test_nested_options_of_s3fs() -> None:
    """Give `client_kwargs`: what is None there leaves the outer option alone, and no setting is given twice."""
    with scripted_server(lambda _: HttpAnswer(200, b"", OBJECT_HEADERS)) as server:
        open_on(server, client_kwargs={"endpoint_url": None}).put("key", [b""])
        assert len(server.requests) == 1
        for twice in ({"region": "eu-west-2"}, {"client_kwargs": {"region_name": "eu-west-2"}}):
            with pytest.raises(InvalidArgumentError, match="one setting twice"):
                open_on(server, region_name="eu-west-1", **twice)


@pytest.mark.parametrize("verb", ["get", "get_into", "head", "put", "list"])
def test_a_stalled_request_ends(verb: str) -> None:
    """Never answer, with limits of a tenth of a second: every verb returns with a timeout."""

    def answer(request: HttpRequest) -> HttpAnswer:
        # Answer the diagnosis, whose own limits are seconds.
        return HttpAnswer(404, silent="X-Amz-Signature" not in request.path)

    with scripted_server(answer) as server:
        timeouts = Timeouts(floor_seconds=0.1, silence_seconds=0.1, slowest_bytes_per_second=10_000_000)
        with pytest.raises(TransientStorageError, match="Timeout"):
            VERBS[verb](open_s3(server.endpoint_url, timeouts=timeouts))


@pytest.mark.parametrize("silent", [False, True], ids=["headers", "nothing"])
def test_a_silent_download_ends_before_its_time_limit(silent: bool) -> None:
    """Send only headers or nothing, with an hour for the request and a tenth of a second for silence: the read ends."""
    headers = {**OBJECT_HEADERS, "Content-Length": "10"}

    def answer(request: HttpRequest) -> HttpAnswer:
        is_diagnosis = "X-Amz-Signature" in request.path
        return HttpAnswer(404) if is_diagnosis else HttpAnswer(200, b"", headers, silent=silent)

    with scripted_server(answer) as server:
        store = open_s3(server.endpoint_url, timeouts=Timeouts(floor_seconds=3600, silence_seconds=0.1))
        with pytest.raises(TransientStorageError):
            store.get("key", limit_bytes=10)


def test_documents_come_over_one_connection() -> None:
    """Read objects of different limits, as of catalog and manifest: the server has one connection, and one thread."""
    serving: set[threading.Thread] = set()

    def answer(_request: HttpRequest) -> HttpAnswer:
        serving.add(threading.current_thread())
        return HttpAnswer(200, b"data", OBJECT_HEADERS)

    with scripted_server(answer) as server:
        store = open_s3(server.endpoint_url)
        for limit_bytes in (1000, 64 * 2**20, 256 * 2**20):
            store.get("key", limit_bytes=limit_bytes)
        assert len(serving) == 1


def test_timeouts_grow_with_the_size() -> None:
    """Compute limits: a shard of 64 MiB at 1 MB/s (67 s) is within them, and there are few different ones."""
    timeouts = Timeouts()
    assert timeouts.request_seconds(0) == 30
    assert timeouts.request_seconds(10 * 2**20) == 60
    assert timeouts.request_seconds(64 * 2**20) == 240
    for size_bytes in range(0, 2**30, 2**24):
        assert timeouts.request_seconds(size_bytes) >= 30 + size_bytes / 500_000
    assert len({timeouts.request_seconds(size_bytes) for size_bytes in range(0, 2**30, 2**20)}) < 10


def test_threads_share_one_store(s3_server: S3Server) -> None:
    """Start sixteen threads on a store without clients: every object arrives."""
    s3_server.create_bucket("threads")
    store = open_cloud_store(parse_url("s3://threads"), s3_server.storage_options)
    barrier = threading.Barrier(16)

    def put(number: int) -> None:
        barrier.wait()
        store.child(f"c{number % 2}").put(f"k{number:02}", [f"{number}".encode()])

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [info.key for info in store.list()] == sorted(f"c{number % 2}/k{number:02}" for number in range(16))


def test_listing_with_markers_and_foreign_keys(s3_server: S3Server, raw_s3: Any) -> None:
    """List a console's `folder/` object, which is skipped, and an invalid key, which the error names as the reason."""
    s3_server.create_bucket("foreign-keys")
    store = open_cloud_store(parse_url("s3://foreign-keys/run"), s3_server.storage_options)
    store.put("a", [b"x"])
    store.put("a-b", [b"x"])
    raw_s3.put_object(Bucket="foreign-keys", Key="run/a/", Body=b"")
    assert [info.key for info in store.list()] == ["a", "a-b"]
    raw_s3.put_object(Bucket="foreign-keys", Key="run/b/./c", Body=b"")
    with pytest.raises(StorageError, match="a key that no checkpoint has"):
        list(store.list())


@pytest.mark.parametrize("etag", ["abc", "&quot;abc&quot;"])
def test_one_form_of_a_version(etag: str) -> None:
    """Use a versioned bucket, whose listing has no version ID and maybe no quotes: all verbs return equal versions."""
    headers = {**OBJECT_HEADERS, "ETag": html.unescape(etag), "x-amz-version-id": "an-id"}

    def answer(request: HttpRequest) -> HttpAnswer:
        return HttpAnswer(200, listing("prefix/key", etag=etag) if "list-type" in request.path else b"", headers)

    with scripted_server(answer) as server:
        store = open_on(server)
        found = [store.put("key", [b""]), store.head("key").version, store.get("key", limit_bytes=1).version]
        assert {*found, next(store.list()).version} == {Version(etag='"abc"')}


def test_keys_that_are_ordered_by_utf_16() -> None:
    """List foreign keys in UTF-16 order, as Azure does; keys that are in no order are refused."""
    keys = ["run/b", "run/\U0001f600", "run/\uffee"]
    with scripted_server(lambda _: HttpAnswer(200, listing(*keys, etag="abc"))) as server:
        assert [info.key for info in open_on(server, "s3://bucket/run").list()] == ["b", "\U0001f600", "\uffee"]
        keys.append("run/a")
        with pytest.raises(StorageError, match="does not list its keys in order"):
            list(open_on(server, "s3://bucket/run").list())


@pytest.mark.usefixtures("empty_environment")
@pytest.mark.parametrize(
    ("bucket", "options", "endpoint_url", "virtual_hosted"),
    [
        ("bucket", {"region": "eu-west-1"}, "https://bucket.s3.amazonaws.com", True),
        ("with.dots", {"region": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com", False),
        ("bucket", {"endpoint_url": "http://host:9000/base/"}, "http://host:9000/base", False),
        ("bucket", {"endpoint_url": "https://host", "addressing_style": "virtual"}, "https://bucket.host", True),
        ("bucket", {"region": "eu-west-1", "addressing_style": "path"}, "https://s3.eu-west-1.amazonaws.com", False),
    ],
)
def test_addresses(bucket: str, options: dict[str, object], endpoint_url: str, virtual_hosted: bool) -> None:
    """Resolve endpoints by botocore; nothing is sent."""
    place = resolve_s3(bucket, parse_options(S3Options, options))
    assert (place.endpoint_url, place.virtual_hosted) == (endpoint_url, virtual_hosted)


class TestGoogle:
    """Google Cloud through its XML API, on a scripted server, since no other server for it is available."""

    headers: ClassVar = {**OBJECT_HEADERS, "x-goog-generation": "77"}

    def test_requests(self) -> None:
        """Put with all conditions and read: the requests, and what is returned for the answers."""

        def answer(request: HttpRequest) -> HttpAnswer:
            if "range" in request.headers:
                return HttpAnswer(206, b"12", {**self.headers, "Content-Range": "bytes 1-2/5"})
            return HttpAnswer(200, b"" if request.method == "PUT" else b"01234", self.headers)

        with scripted_server(answer) as server:
            store = open_on(server, "gs://bucket/a b", bearer_token="a-google-token")
            version = store.put("any", [b"1", b"2"])
            assert version == Version(etag='"abc"', generation="77")
            store.put("absent", [b"1"], condition="absent")
            store.put("swap", [b"1"], condition=version)
            assert store.get("any", limit_bytes=5).version == version
            buffer = bytearray(2)
            store.get_into("any", 1, memoryview(buffer))
            assert buffer == b"12"
            with pytest.raises(ConditionFailedError):
                store.put("swap", [b"1"], condition=Version(etag='"abc"'))
        any_, absent, swap, *_ = server.requests
        assert (any_.method, any_.path, any_.body) == ("PUT", "/bucket/a%20b%2Fany", b"12")
        assert any_.headers["authorization"] == "Bearer a-google-token"
        assert absent.headers["x-goog-if-generation-match"] == "0"
        assert swap.headers["x-goog-if-generation-match"] == "77"
        assert len(server.requests) == 5

    @pytest.mark.parametrize("options", [{"anon": True}, {"token": "anon"}])
    def test_anonymous(self, options: dict[str, object]) -> None:
        """Send every verb without credentials: the store is reached, and no other server is asked for credentials."""
        with scripted_server(lambda _: HttpAnswer(200, b"", self.headers)) as server:
            store = open_on(server, "gs://bucket", **options)
            store.put("key", [b"1"])
            assert store.delete(["key"]) == {}
            store.head("key")
            store.get("key", limit_bytes=5)
        assert [request.method for request in server.requests] == ["PUT", "DELETE", "HEAD", "GET"]
        assert {
            request.headers.get("authorization", "").removeprefix("Bearer").strip() for request in server.requests
        } == {""}

    @pytest.mark.parametrize("option", ["token", "service_account", "application_credentials"])
    def test_missing_credentials_files(self, option: str, tmp_path: Path) -> None:
        """Name a file that does not exist by each option."""
        store = open_cloud_store(parse_url("gs://bucket"), {option: str(tmp_path / "none.json")})
        with pytest.raises(InvalidArgumentError):
            store.head("key")

    def test_a_missing_bucket(self) -> None:
        """Answer 404 to a put, a list and a get: the first two name the bucket, the last the object."""
        body = b"<Error><Code>NoSuchBucket</Code></Error>"
        with scripted_server(lambda request: HttpAnswer(404, body if "list" in request.path else b"")) as server:
            store = open_on(server, "gs://bucket", bearer_token="a-google-token")
            for call in (lambda: store.put("key", [b"x"]), lambda: next(store.list())):
                with pytest.raises(BucketNotFoundError, match="The bucket does not exist"):
                    call()
            with pytest.raises(ObjectNotFoundError, match="no such object"):
                store.get("key", limit_bytes=1)
            assert store.explain_missing() is None
            assert len(server.requests) == 3


class TestAzure:
    """Azure on a scripted server."""

    key = "a2V5a2V5a2V5a2V5"

    def test_requests(self) -> None:
        """Put with all conditions and read: the requests, and what is returned for the answers."""

        def answer(request: HttpRequest) -> HttpAnswer:
            return (
                HttpAnswer(201, b"", OBJECT_HEADERS)
                if request.method == "PUT"
                else HttpAnswer(200, b"01", OBJECT_HEADERS)
            )

        with scripted_server(answer) as server:
            store = open_on(server, "az://container/p", account_name="account", account_key=self.key)
            version = store.put("any", [b"1", b"2"])
            store.put("absent", [b"1"], condition="absent")
            store.put("swap", [b"1"], condition=version)
            assert store.get("any", limit_bytes=5).data == b"01"
        any_, absent, swap, read = server.requests
        assert (any_.method, any_.path, any_.body) == ("PUT", "/container/p/any", b"12")
        assert any_.headers["x-ms-blob-type"] == "BlockBlob"
        assert any_.headers["authorization"].startswith("SharedKey account:")
        assert absent.headers["if-none-match"] == "*"
        assert swap.headers["if-match"] == '"abc"'
        assert read.method == "GET"

    def test_sas_and_connection_strings(self) -> None:
        """Send the same request with a SAS and with the portal's connection string."""
        with scripted_server(lambda _: HttpAnswer(201, b"", OBJECT_HEADERS)) as server:
            open_on(server, "az://container", account_name="account", sas_token="?sv=1&sig=abc").put("key", [b""])
            text = f"AccountName=account;AccountKey={self.key};BlobEndpoint={server.endpoint_url}/"
            open_cloud_store(parse_url("az://container"), {"connection_string": text}).put("key", [b""])
        sas, shared_key = server.requests
        assert sas.path == "/container/key?sv=1&sig=abc"
        assert shared_key.headers["authorization"].startswith("SharedKey account:")

    def test_no_account(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Name the account neither by option nor by environment."""
        for name in [name for name in os.environ if name.startswith("AZURE_")]:
            monkeypatch.delenv(name)
        with pytest.raises(InvalidArgumentError, match="Account must be specified"):
            open_cloud_store(parse_url("az://container"), {}).head("key")
