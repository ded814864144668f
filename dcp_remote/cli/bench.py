"""`dcp-remote bench`: requests as a save and a load send them, at a rising number of parallel ones.

Not `save` and `load` themselves: a save divides a state into shards of 64 MiB, so that 16 of them in parallel would
move gigabytes, and torch would have to be imported.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, parse_bytes
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.provenance import software_versions
from dcp_remote.common.units import GiB, KiB, MiB
from dcp_remote.errors import InvalidArgumentError, ObjectNotFoundError, StorageError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import parse_url

logger = logging.getLogger(__name__)

# Parallel requests, ascending: a save uses eight per rank, and often eight ranks share a host. Each moves two objects.
_PARALLEL = (1, 2, 4, 8, 16)
_OBJECTS_EACH = 2

# Size of an object: at most that of a shard, and large enough that its transfer is not mostly latency.
_OBJECT_BYTES_MAX = 64 * MiB
_OBJECT_BYTES_MIN = 64 * KiB

_LATENCY_REQUESTS = 10

# Time for which one request is repeated: short for those without a body, so that an outage is reported within seconds.
_SMALL_SECONDS = 10.0
_BODY_SECONDS = 60.0
_DELETE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput of a number of parallel requests; `cpu_seconds` are those of this process meanwhile."""

    parallel: int
    size_bytes: int
    seconds: float
    cpu_seconds: float

    def format_columns(self) -> str:
        """Return MiB per second and CPU seconds per GiB, as in the table."""
        return f"{self.size_bytes / self.seconds / MiB:>10.1f}  {self.cpu_seconds / (self.size_bytes / GiB):>9.2f}"


def bench(
    out: Output,
    url: Url,
    *,
    size_bytes: Annotated[
        int,
        argument(
            "--bytes",
            type=parse_bytes,
            metavar="SIZE",
            help="most bytes to upload, and to download, such as 64MiB (default: 256MiB)",
        ),
    ] = 256 * MiB,
    seconds: Annotated[
        float, argument(type=float, metavar="N", help="start no new measurement after this time (default: %(default)g)")
    ] = 60.0,
    storage_options: StorageOptions = None,
) -> None:
    """Measure a bucket from this machine.

    Measures latency, and bandwidth by the number of parallel requests. Writes objects below a fresh
    prefix and deletes them at the end, also after Ctrl-C. With --json prints a report that can be published: it
    contains neither credentials nor the name of the bucket.
    """
    objects = 1 + sum(_PARALLEL) * _OBJECTS_EACH
    if size_bytes < objects * _OBJECT_BYTES_MIN:
        raise InvalidArgumentError("--bytes must be at least 4MiB, to measure a bandwidth.", bytes=size_bytes)
    if not 0 < seconds < math.inf:
        raise InvalidArgumentError("--seconds must be a positive number.", seconds=seconds)
    store = open_store(url, storage_options).child(f"bench-{secrets.token_hex(8)}")
    object_bytes = min(_OBJECT_BYTES_MAX, size_bytes // objects)
    # Printed before anything is put, so that a user who kills this process knows what to delete.
    out.say(f"{store.url}: objects below this URL are written, read and deleted")
    bucket = _Bucket(store)
    try:
        first, later = _measure_latency(bucket)
        out.say(f"latency {1000 * later:.1f} ms; first request {1000 * first:.1f} ms, with credentials and connection")
        rates = list(_measure_rates(out, bucket, object_bytes, Deadline(seconds)))
    finally:
        left = bucket.delete_objects()
    requests, failures = bucket.store.counts.requests, bucket.failures
    cause = f"; the last because: {failures[-1]}" if failures else ""
    out.say(f"requests sent again {len(failures)} of {requests}{cause}")
    out.give(
        {  # identifies neither bucket nor user
            "dcp_remote": software_versions()["dcp_remote"],
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "scheme": parse_url(url).scheme,
            "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "measured": {
                "first_request_seconds": first,
                "latency_seconds": later,
                "object_bytes": object_bytes,
                "up": [asdict(up) for up, _ in rates],
                "down": [asdict(down) for _, down in rates],
                "requests": requests,
                "requests_again": len(failures),
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            },
        }
    )
    if left:
        raise StorageError("Some objects could not be deleted; the warning names the URL to clean up.", objects=left)


class _Bucket:
    """Store at the fresh prefix, which counts requests and knows which objects to delete."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = CountingStore(store)
        self.failures: list[StorageError] = []
        self._keys: list[str] = []

    def retry(self, seconds: float) -> ObjectStore:
        """Return a store that repeats failed requests for some seconds."""
        return RetryingStore(
            self.store, Deadline(seconds), on_retry=lambda _verb, _key, error: self.failures.append(error)
        )

    def put(self, key: str, data: bytes) -> None:
        """Put an object."""
        self._keys.append(key)  # before the request, which may be carried out although it fails
        self.retry(_BODY_SECONDS).put(key, [data])

    def delete_objects(self) -> int:
        """Delete all objects; return how many could not be deleted, of which a warning tells."""
        failed = self.retry(_DELETE_SECONDS).delete(self._keys) if self._keys else {}
        if failed:
            logger.warning(
                "Objects of the benchmark may be left. Delete everything below this URL. url=%s objects=%d cause=%s",
                self.store.url,
                len(failed),
                next(iter(failed.values())),
            )
        return len(failed)


def _measure_latency(bucket: _Bucket) -> tuple[float, float]:
    """Return the seconds of the first request, and the median of later ones: HEAD of an absent object has no body."""
    seconds = []
    for _ in range(1 + _LATENCY_REQUESTS):
        began = time.monotonic()
        with suppress(ObjectNotFoundError):
            bucket.retry(_SMALL_SECONDS).head("absent")
        seconds.append(time.monotonic() - began)
    return seconds[0], statistics.median(seconds[1:])


def _measure_rates(out: Output, bucket: _Bucket, object_bytes: int, deadline: Deadline) -> Iterator[tuple[Rate, Rate]]:
    """Yield the rates of uploads and downloads at each number of parallel requests, as long as there is time."""
    body = os.urandom(object_bytes)  # random, so that it cannot be compressed on its way
    local = threading.local()

    def put(key: str) -> None:
        bucket.put(key, body)

    def get(key: str) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(len(body)))  # reused, because new memory costs page faults
        bucket.retry(_BODY_SECONDS).get_into(key, 0, local.buffer)

    put("warm")  # not measured: opens connections
    get("warm")
    out.say(f"{'parallel':<11}    up MiB/s  CPU s/GiB  down MiB/s  CPU s/GiB")
    for parallel in _PARALLEL:
        if deadline.expired():
            out.say("time ran out before all measurements: give more --seconds")
            return
        keys = [f"{parallel}-{number}" for number in range(_OBJECTS_EACH * parallel)]
        up, down = (_measure(parallel, transfer, keys, len(body)) for transfer in (put, get))
        yield up, down
        out.say(f"{parallel:>11}  {up.format_columns()}  {down.format_columns()}")


def _measure(parallel: int, transfer: Callable[[str], None], keys: Sequence[str], object_bytes: int) -> Rate:
    pool = ThreadPoolExecutor(parallel)
    try:
        cpu, began = time.process_time(), time.monotonic()
        for future in as_completed([pool.submit(transfer, key) for key in keys]):
            future.result()
        return Rate(parallel, len(keys) * object_bytes, time.monotonic() - began, time.process_time() - cpu)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure or Ctrl-C, only requests under way are waited for
