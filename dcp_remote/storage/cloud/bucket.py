"""State that the stores of one bucket share: its clients, throttle and connections.

Clients are created on first use, and again when their credentials have changed.
"""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError

from dcp_remote.common.descriptors import find_shortage
from dcp_remote.errors import InvalidArgumentError, TransientStorageError
from dcp_remote.storage.cloud.direct_reads import DirectReads
from dcp_remote.storage.cloud.errors import get_safe_cause, translate
from dcp_remote.storage.cloud.provider import Client, Provider
from dcp_remote.storage.cloud.throttle import Throttle
from dcp_remote.storage.request_context import remaining_seconds, rounded_up

if TYPE_CHECKING:
    from obstore.store import ClientConfig

# obstore's threads do not survive a fork; a child process that uses them hangs.
_requesting_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits after which a request counts as stalled; they grow with its size."""

    floor_seconds: float = 30.0  # of a request without a body
    slowest_bytes_per_second: int = 500_000  # half of 1 MB/s, which is slow
    # Longest pause of a download. Uploads have none: the client cannot tell a server that does not read from one that
    # does not answer yet.
    silence_seconds: float = 30.0

    def request_seconds(self, size_bytes: int) -> float:
        """Return the limit for a request: `floor_seconds` times a power of two, as obstore needs a client per limit."""
        needed = 1 + size_bytes / self.slowest_bytes_per_second / self.floor_seconds
        return float(self.floor_seconds * 2 ** math.ceil(math.log2(needed)))


class Bucket:
    """State of one opened store and its children. Safe to use from many threads."""

    def __init__(self, provider: Provider, timeouts: Timeouts) -> None:
        """Create and send nothing."""
        self.provider = provider
        self.timeouts = timeouts
        self.throttle = Throttle()
        self.latency_seconds = 0.0  # least of a GET's; 0 before the first
        self.direct = DirectReads(
            provider.bucket,
            connect_seconds=provider.options.connect_timeout_seconds,
            silence_seconds=timeouts.silence_seconds,
        )
        self._lock = threading.Lock()
        # By (download, delete_singly, request_seconds): obstore fixes these per client, and clients are cheap.
        self._clients: dict[tuple[bool, bool, float], Client] = {}
        self._credentials_number = 0

    def note_latency(self, seconds: float) -> None:
        """Note the time of a GET's answer; the longer ones had a connection to make, or a busy store."""
        self.latency_seconds = min(self.latency_seconds or seconds, seconds)

    @staticmethod
    def refuse_fork() -> None:
        """Refuse a process that was forked from one that has sent a request."""
        global _requesting_pid  # noqa: PLW0603  # one runtime per process, whatever the number of stores
        _requesting_pid = refuse_after_fork(_requesting_pid)

    def get_client(self, *, download: bool, size_bytes: int = 0, delete_singly: bool = False) -> Client:
        """Return the client for requests of a size, creating it if necessary.

        With `download`, the answer is the larger part, and not the request; `size_bytes` is the size of that part. With
        `delete_singly`, it sends a request per key, since the answer to a batch does not show each error.

        Raises:
            InvalidArgumentError: This process was forked after the first request; or the configuration is invalid.
            PermissionDeniedError: There are no credentials.
            TransientStorageError: This process can open too few files.
            botocore.exceptions.BotoCoreError: Profile, region or credentials cannot be read.
        """
        self.refuse_fork()
        seconds = self.request_seconds(size_bytes)
        settings = (download, delete_singly, seconds)
        with self._lock:
            number = self.provider.credentials.changes
            if number != self._credentials_number:
                self._clients.clear()
                self._credentials_number = number
            if settings not in self._clients:
                if (shortage := find_shortage()) is not None:
                    raise TransientStorageError(shortage)
                self._clients[settings] = self._open(
                    download=download, delete_singly=delete_singly, request_seconds=seconds
                )
            return self._clients[settings]

    def request_seconds(self, size_bytes: int = 0) -> float:
        """Return the time limit of a request of a size that begins now, which ends with the caller's deadline."""
        return min(self.timeouts.request_seconds(size_bytes), rounded_up(remaining_seconds()))

    def _open(self, *, download: bool, delete_singly: bool, request_seconds: float) -> Client:
        provider = self.provider
        http: ClientConfig = {
            "allow_http": (provider.endpoint_url() or "").lower().startswith("http:"),
            "connect_timeout": timedelta(seconds=provider.options.connect_timeout_seconds),
            "timeout": timedelta(seconds=request_seconds),
        }
        if download:
            # Not for uploads: the client counts the whole time of sending a body as silence.
            http["read_timeout"] = timedelta(seconds=self.timeouts.silence_seconds)
        verify = provider.verify()
        if verify is False:
            http["allow_invalid_certificates"] = True
        elif isinstance(verify, str):
            http["root_certificate"] = _read_certificates(verify)
        try:
            return provider.open_client(http, delete_singly=delete_singly)
        except BaseError as error:
            secrets = provider.secrets()
            reason = translate(error, verb="open", url=provider.bucket, secrets=secrets)
            raise InvalidArgumentError(
                "The store's client cannot be configured from storage_options and environment.",
                bucket=provider.bucket,
                cause=reason.details.get("cause"),
            ) from get_safe_cause(error, secrets)


def _read_certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(
            "The file of certificates (storage_options['verify'], AWS_CA_BUNDLE or ca_bundle) cannot be read.",
            path=path,
        ) from error


def refuse_after_fork(requesting_pid: int | None) -> int:
    """Return the number of this process; refuse one that was forked from that which sent the first request."""
    if requesting_pid not in (None, os.getpid()):
        raise InvalidArgumentError(
            "This process was forked after its parent had used a cloud store, whose client does not survive a fork. "
            "Start processes with `spawn` or `forkserver`.",
            pid=os.getpid(),
            forked_from=requesting_pid,
        )
    return os.getpid()
