"""Fixtures of the tests of cloud stores."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def own_request_limits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Share no limit of requests with earlier tests, whose servers refused requests and may have had the same port.

    Processes of this host share these limits by files in the temporary folder. Under a reduced limit no late read is
    sent twice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("request-limits")))
        yield
