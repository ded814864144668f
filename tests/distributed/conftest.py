"""Real ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_remote.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Four processes that live as long as the session; a test takes as many as it needs."""
    with RankPool(4) as pool:
        yield pool
