"""Ceph's gateway in the place of the benchmark's own server: a store that people run, though it counts nothing.

It knows none of S3's newer checksums; no client sends it one, nor signs the body. Its processes share the machine's
cores with the clients, and cost more than these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.benchmark.server.counts import Counts
from tests.support.ceph import CephGateway, ceph_gateway


@dataclass(frozen=True, slots=True)
class CephServer:
    """As `BenchServer`, as far as measurements ask for it."""

    gateway: CephGateway

    @property
    def storage_options(self) -> dict[str, Any]:
        given = self.gateway.storage_options
        return {
            "endpoint_url": given["endpoint_url"],
            "region_name": given["region_name"],
            "key": given["aws_access_key_id"],
            "secret": given["aws_secret_access_key"],
            "etag_quotes": given["etag_quotes"],
            "checksum_algorithm": given["checksum_algorithm"],
        }

    def counts(self) -> Counts:
        """Nothing: it does not tell."""
        return Counts()

    def reset(self) -> None:
        """Nothing."""


@contextmanager
def ceph_server() -> Iterator[CephServer]:
    """An empty one, with the benchmark's bucket, while the block runs. Starts in a second or two."""
    with ceph_gateway() as gateway:
        gateway.create_bucket("bench")
        yield CephServer(gateway)
