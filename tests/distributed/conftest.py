"""Real ranks for the tests of this folder, and an end of those that are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dcp_remote.testing.rank_pool import RankPool
from tests.distributed.parties import wait_until


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four processes that live as long as the session; a test takes as many as it needs."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def no_pulse_is_left() -> Iterator[None]:
    """Those that a test has left behind end by themselves."""
    yield
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "dcp_remote pulse"])
