"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_remote.testing.servers import S3Server, moto_server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One S3 server for the whole session; tests take a bucket each."""
    with moto_server() as server:
        yield server
