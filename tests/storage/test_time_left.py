"""Requests of the cloud end with the deadline of who tries them again, whatever the store does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.base import Version
from dcp_remote.storage.cloud import open_cloud_store
from dcp_remote.storage.retrying import Deadline, RetryingStore
from dcp_remote.storage.time_left import of_use_for, rounded_up, seconds_left
from dcp_remote.storage.timeouts import Timeouts
from dcp_remote.testing.servers import HttpAnswer, scripted_server
from dcp_remote.url import parse_url

# So long that a test which waits for the end of a request does not end.
FOREVER = Timeouts(floor_seconds=1e5, silence_seconds=1e5)

VERBS: dict[str, Callable[[RetryingStore], object]] = {
    "head": lambda store: store.head("key"),
    "get": lambda store: store.get("key", limit_bytes=10),
    "put": lambda store: store.put("key", [b"x"]),
    "create": lambda store: store.put("key", [b"x"], condition="absent"),
    "swap": lambda store: store.put("key", [b"x"], condition=Version('"abc"')),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_silent_store_is_left_at_the_deadline(verb: str) -> None:
    """No limit but that of half a second: the request ends, and nobody asks why it failed."""
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        options = {"endpoint_url": server.endpoint_url, **keys}
        store = open_cloud_store(parse_url("s3://bucket/run"), options, timeouts=FOREVER)
        with pytest.raises(TransientStorageError):
            VERBS[verb](RetryingStore(store, Deadline(0.5)))
        assert [request.path for request in server.requests] == ["/bucket/run/key"]


def test_few_limits_serve_all() -> None:
    """Never less than what is left, at most a quarter more, and at least a second; four values in each octave."""
    lefts = [number / 100 for number in range(100_000)]
    for left in lefts:
        assert max(1.0, left) <= rounded_up(left) <= max(1.0, 1.25 * left)
    assert len({rounded_up(left) for left in lefts if left <= 64}) == 1 + 4 * 6
    assert rounded_up(math.inf) == math.inf


def test_the_inner_one_counts() -> None:
    """Of requests within requests, and nothing is left of either afterwards."""
    with of_use_for(lambda: 5.0):
        with of_use_for(lambda: 7.0):
            assert seconds_left() == 7.0
        assert seconds_left() == 5.0
    assert seconds_left() == math.inf
