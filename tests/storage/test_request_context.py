"""Time limits of requests: they end with the deadline of the store that repeats them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from s3fs import S3FileSystem

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import TransientStorageError
from dcp_remote.storage import open_fsspec_store
from dcp_remote.storage.base import Version
from dcp_remote.storage.cloud.store import open_cloud_store
from dcp_remote.storage.cloud.timeouts import Timeouts
from dcp_remote.storage.request_context import limit_requests, remaining_seconds, rounded_up
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import parse_url
from dcp_remote.testing.servers import HttpAnswer, HttpRequest, scripted_server

# So long that a test which waits for the end of a request does not end.
FOREVER = Timeouts(floor_seconds=1e5, silence_seconds=1e5)

KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}

VERBS: dict[str, Callable[[RetryingStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=10),
    "get_into": lambda store: store.get_into("key", 0, memoryview(bytearray(10))),
    "put": lambda store: store.put("key", [b"x"]),
    "create": lambda store: store.put("key", [b"x"], condition="absent"),
    "swap": lambda store: store.put("key", [b"x"], condition=Version('"abc"')),
    "list": lambda store: list(store.list()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_ends_at_the_deadline(verb: str) -> None:
    """Send each verb to a silent store with a deadline of half a second: one request, and no diagnosis after it."""
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        options = {"endpoint_url": server.endpoint_url, **KEYS}
        store = open_cloud_store(parse_url("s3://bucket/run"), options, timeouts=FOREVER)
        with pytest.raises(TransientStorageError):
            VERBS[verb](RetryingStore(store, Deadline(0.5)))
        (request,) = server.requests
        path, _, query = request.path.partition("?")
        assert path == "/bucket/run/key" or "list-type" in query


def test_each_page_of_a_listing_ends_at_the_deadline() -> None:
    """List a page, then let the store be silent while little time is left, long after the listing began.

    The listing goes on after the last key, with a client of a lower limit.
    """
    keys = [f"{number:03}" for number in range(1000)]
    entry = "<LastModified>2024-01-01T00:00:00Z</LastModified><ETag>e</ETag><Size>1</Size>"
    page = "".join(f"<Contents><Key>run/{key}</Key>{entry}</Contents>" for key in keys)
    page = f"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>{page}"

    def answer(request: HttpRequest) -> HttpAnswer:
        if "X-Amz-Signature" in request.path:  # a diagnosis
            return HttpAnswer(404)
        later = "start-after" in request.path or "continuation-token" in request.path
        return HttpAnswer(200, f"<ListBucketResult>{page}</ListBucketResult>".encode(), silent=later)

    left = [60.0]
    with scripted_server(answer) as server, limit_requests(lambda: left[0]):
        options = {"endpoint_url": server.endpoint_url, **KEYS}
        infos = open_cloud_store(parse_url("s3://bucket/run"), options, timeouts=FOREVER).list()
        assert [next(infos).key for _ in keys] == keys
        left[0] = 0.5
        with pytest.raises(TransientStorageError):
            next(infos)
    assert "start-after=run%2F999" in server.requests[1].path


@pytest.mark.parametrize("verb", ["get", "put", "list"])
def test_a_request_of_s3fs_ends_at_the_deadline(verb: str) -> None:
    """Do the same through s3fs's client, with a long limit of its own."""
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        filesystem = S3FileSystem(
            key="testing",
            secret="testing",
            endpoint_url=server.endpoint_url,
            config_kwargs={"read_timeout": 1e5},
            skip_instance_cache=True,
        )
        store = open_fsspec_store(filesystem, "bucket/run")
        with pytest.raises(TransientStorageError):
            VERBS[verb](RetryingStore(store, Deadline(0.5)))


def test_rounded_limits() -> None:
    """Check that limits are at least what is left, at most a quarter more, at least 1 s, and four per octave."""
    lefts = [number / 100 for number in range(100_000)]
    for left in lefts:
        assert max(1.0, left) <= rounded_up(left) <= max(1.0, 1.25 * left)
    assert len({rounded_up(left) for left in lefts if left <= 64}) == 1 + 4 * 6
    assert rounded_up(math.inf) == math.inf


def test_the_inner_limit_counts() -> None:
    """Nest two limits; none is left afterwards."""
    with limit_requests(lambda: 5.0):
        with limit_requests(lambda: 7.0):
            assert remaining_seconds() == 7.0
        assert remaining_seconds() == 5.0
    assert remaining_seconds() == math.inf
