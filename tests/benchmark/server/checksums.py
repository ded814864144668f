"""The checksums that come with bodies: which there are, and whether they are right, where the server verifies."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from http import HTTPStatus
from importlib import import_module
from typing import Any, TypeAlias

from dcp_remote.errors import InvalidArgumentError
from tests.benchmark.server.request import S3Error

NAMES = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")

Digest: TypeAlias = Callable[[memoryview], bytes]


def load_digests() -> dict[str, Digest]:
    """Checksums with which the bytes of a body are compared, by name."""
    try:
        checksums = import_module("awscrt.checksums")
    except ImportError as error:
        raise InvalidArgumentError(
            "verify=True needs awscrt, which computes CRC64NVME: pip install awscrt, or leave bodies unverified."
        ) from error

    def crc(function: Callable[[Any], int], size_bytes: int) -> Digest:
        return lambda body: function(body).to_bytes(size_bytes, "big")

    return {
        "crc32": crc(zlib.crc32, 4),
        "crc32c": crc(checksums.crc32c, 4),
        "crc64nvme": crc(checksums.crc64nvme, 8),
        "sha1": lambda body: hashlib.sha1(body, usedforsecurity=False).digest(),
        "sha256": lambda body: hashlib.sha256(body).digest(),
    }


def told_checksums(headers: Mapping[str, str]) -> dict[str, str]:
    """Those that came with a body, by name and in base64; `headers` hold its trailers, too."""
    return {name: headers[header] for name in NAMES if (header := f"x-amz-checksum-{name}") in headers}


def require_checksums(headers: Mapping[str, str], body: memoryview, digests: Mapping[str, Digest]) -> None:
    """Compare a body with what its headers and trailers tell of it."""
    expected = [(name, value, digests[name]) for name, value in told_checksums(headers).items()]
    for name, value, digest in expected:
        if base64.b64encode(digest(body)).decode() != value:
            message = f"The {name} that you specified did not match the body."
            raise S3Error(HTTPStatus.BAD_REQUEST, "BadDigest", message)
