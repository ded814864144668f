"""Time limits of requests: they end with the deadline of the store that repeats them."""

from __future__ import annotations

import math

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import TransientStorageError
from dcp_remote.storage.request_context import limit_requests, remaining_seconds, rounded_up
from dcp_remote.storage.retrying import RetryingStore
from tests.support.clouds import FOREVER, VERBS, is_direct, listing, open_s3, open_s3fs
from tests.support.scripted_server import HttpAnswer, HttpRequest, scripted_server


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"delete"}))
def test_a_request_ends_at_the_deadline(verb: str) -> None:
    """Send each verb to a silent store with a deadline of half a second: one request, and no diagnosis after it."""
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        with pytest.raises(TransientStorageError):
            VERBS[verb](RetryingStore(open_s3(server.endpoint_url, timeouts=FOREVER), Deadline(0.5)))
        (request,) = server.requests
        path, _, query = request.path.partition("?")
        assert path == "/bucket/run/key" or "list-type" in query


def test_each_page_of_a_listing_ends_at_the_deadline() -> None:
    """List a page, then let the store be silent while little time is left, long after the listing began.

    The listing goes on after the last key, with a client of a lower limit.
    """
    keys = [f"{number:03}" for number in range(1000)]
    page = listing(*(f"run/{key}" for key in keys), IsTruncated="true", NextContinuationToken="t")

    def answer(request: HttpRequest) -> HttpAnswer:
        if is_direct(request.path):  # a diagnosis
            return HttpAnswer(404)
        later = "start-after" in request.path or "continuation-token" in request.path
        return HttpAnswer(200, page, silent=later)

    left = [60.0]
    with scripted_server(answer) as server, limit_requests(lambda: left[0]):
        infos = open_s3(server.endpoint_url, timeouts=FOREVER).list()
        assert [next(infos).key for _ in keys] == keys
        left[0] = 0.5
        with pytest.raises(TransientStorageError):
            next(infos)
    assert "start-after=run%2F999" in server.requests[1].path


def test_a_request_of_s3fs_ends_at_the_deadline() -> None:
    """Do the same through s3fs's client, with a long limit of its own."""
    with scripted_server(lambda _: HttpAnswer(silent=True)) as server:
        store = open_s3fs(server.endpoint_url, config_kwargs={"read_timeout": 1e5})
        with pytest.raises(TransientStorageError):
            VERBS["put"](RetryingStore(store, Deadline(0.5)))


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
