"""A store that redirects to another host: what that host is told, and whether what it answers is believed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast
from urllib.parse import urlsplit

import pytest
from s3fs import S3FileSystem

from dcp_remote.errors import StorageError, TransientStorageError
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.cloud.store import CloudStore, open_cloud_store
from dcp_remote.storage.fsspec import open_fsspec_store
from dcp_remote.storage.url import parse_url
from tests.support.clouds import OBJECT_HEADERS, VERBS, listing
from tests.support.scripted_server import HttpAnswer, HttpRequest, ScriptedServer, scripted_server

STATUSES = [301, 302, 303, 307, 308]


def _explain(store: ObjectStore) -> None:
    error = cast("CloudStore", store).explain_missing()
    assert error is not None
    raise error


ALL_VERBS: dict[str, Callable[[ObjectStore], object]] = {**VERBS, "explain": _explain}


def answer_plausibly(request: HttpRequest) -> HttpAnswer:
    """Answer a request like a store that has every object."""
    if "range" in request.headers:
        return HttpAnswer(206, b"evil", {**OBJECT_HEADERS, "Content-Range": "bytes 0-3/4"})
    if "list-type" in request.path:
        return HttpAnswer(200, listing(), OBJECT_HEADERS)
    if "delete" in request.path:
        return HttpAnswer(200, b"<DeleteResult></DeleteResult>")
    return HttpAnswer(200, json.dumps({}).encode(), OBJECT_HEADERS)


@contextmanager
def redirect(status: int, **headers: str) -> Iterator[tuple[dict[str, object], ScriptedServer]]:
    """Run a store that redirects everything to another host; yield its options, and the other host."""
    with scripted_server(answer_plausibly) as other:
        location = f"http://localhost:{urlsplit(other.endpoint_url).port}/elsewhere"

        def answer(request: HttpRequest) -> HttpAnswer:
            target = location + ("?list-type=2" if "list-type" in request.path else "")
            return HttpAnswer(status, b"", {"Location": target, **headers})

        with scripted_server(answer) as server:
            keys = {"key": "testing", "secret": "a-secret-key", "token": "a-session-token", "region": "us-east-1"}
            yield {"endpoint_url": server.endpoint_url, **keys}, other


@pytest.mark.parametrize(("status", "anon"), [*((status, False) for status in STATUSES), (307, True)])
@pytest.mark.parametrize("verb", ALL_VERBS)
def test_no_request_goes_to_another_host(verb: str, status: int, *, anon: bool) -> None:
    """Redirect every verb in every way, also without credentials: it fails, and the other host receives no request."""
    with redirect(status) as (options, other):
        given = {"endpoint_url": options["endpoint_url"], "anon": True} if anon else options
        store = open_cloud_store(parse_url("s3://bucket/run"), given)
        with pytest.raises(StorageError, match="redirects requests"):
            ALL_VERBS[verb](store)
        assert other.requests == []


@pytest.mark.torture(smoke=False)
def test_no_request_goes_to_another_host_through_s3fs() -> None:
    """Redirect every verb in every way: the call fails with advice, and the other host receives no request."""
    for status in STATUSES:
        with redirect(status) as (options, other):
            given = {option: value for option, value in options.items() if option != "region"}
            filesystem = S3FileSystem(**given, client_kwargs={"region_name": "r"}, skip_instance_cache=True)
            store = open_fsspec_store(filesystem, "bucket/run")
            for ask in VERBS.values():
                with pytest.raises(StorageError, match="redirects requests") as refused:
                    ask(store)
                assert not isinstance(refused.value, TransientStorageError)
            assert other.requests == []


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-bucket-region": "eu-central-1"},
        {"Location": "https://bucket.s3.eu-central-1.amazonaws.com/run/key"},
        {"Location": "https://s3.dualstack.eu-central-1.amazonaws.com/bucket/run/key"},
    ],
    ids=["named", "in the host", "in the dual host"],
)
@pytest.mark.parametrize("verb", ALL_VERBS)
def test_a_redirect_to_another_region_names_it(verb: str, headers: dict[str, str]) -> None:
    """Name the region in a header or in the location: the error names it, and no redirect is followed."""
    with redirect(307, **headers) as (options, other):
        store = open_cloud_store(parse_url("s3://bucket/run"), options)
        with pytest.raises(StorageError, match="to 'eu-central-1'"):
            ALL_VERBS[verb](store)
        assert other.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "127.1"])
def test_the_host_itself_is_reached(host: str) -> None:
    """Spell the host in every usual way."""
    with scripted_server(answer_plausibly) as server:
        endpoint_url = f"http://{host}:{urlsplit(server.endpoint_url).port}"
        store = open_cloud_store(
            parse_url("s3://bucket/run"), {"endpoint_url": endpoint_url, "key": "k", "secret": "s", "region": "r"}
        )
        assert store.get("key", limit_bytes=10).data == b"{}"
        assert len(server.requests) == 1
