"""Direct range reads: GETs of signed URLs over connections of this module, straight into the caller's memory.

obstore returns memory of its own, which has to be copied; fresh memory and copies cost as much as the network does.
Here `http.client` reads into the destination. Everything unusual is left to obstore, which repeats the request: a
proxy, an answer other than the requested bytes, an untrusted certificate. So no rule of HTTP or of a cloud is
implemented twice.

One GET per range; a second one, by obstore, if the first is late (`common.hedging`).
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dcp_remote.common.hedging import LatencyTracker
from dcp_remote.common.threads import CallOnce, Workers
from dcp_remote.common.units import KiB
from dcp_remote.storage.cloud.connector import Connector
from dcp_remote.storage.cloud.tls_stream import StreamConnection
from dcp_remote.storage.request_context import require_may_write

# Servers close idle connections; one that was idle for longer than this is probably closed.
_IDLE_SECONDS = 4.0
_IDLE_MAX = 64

# Hedged requests in flight at the same time.
_HEDGES_MAX = 2

# Statuses of a server that is overloaded or failing. Any other unexpected status may be due to the signed URL.
_BUSY = frozenset(
    {
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.INTERNAL_SERVER_ERROR,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)

# Bytes to read of an error's body; with the store's error code it has a few hundred.
_ERROR_BODY_BYTES_MAX = 4 * KiB

# Exceptions of a kept connection that the server closed meanwhile.
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class _OvertakenError(Exception):
    """The hedged request was faster."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self.data = data


@dataclass(frozen=True, slots=True)
class _RangeRequest:
    """One read of a range.

    Attributes:
        server: Scheme, and host with port.
        target: Path and query of the signed URL.
        start: First byte.
        buffer: Destination, as long as the range.
        seconds: Time limit of the whole read.
        hedge: Function that reads the same range by obstore; None to send no second request.
    """

    server: tuple[str, str]
    target: str
    start: int
    buffer: memoryview
    seconds: float
    hedge: Callable[[], memoryview] | None


class DirectRangeReader:
    """Reads ranges of one store over connections that it keeps. Safe to use from many threads.

    Args:
        verify: False accepts any certificate; a path names a file of certificates to trust.
        connect_seconds: Time limit to open a connection; that of the read counts if it is shorter.
        silence_seconds: Time limit between two arrivals of bytes.
        connector: Opens the connections; None for a new one.
    """

    def __init__(
        self,
        *,
        verify: bool | str | None,
        connect_seconds: float,
        silence_seconds: float,
        connector: Connector | None = None,
    ) -> None:
        """Store the arguments; no connection is opened."""
        self._verify = verify
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._connector = connector or Connector()
        self._latencies = LatencyTracker()
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._idle: list[tuple[float, tuple[str, str], StreamConnection]] = []
        self._hedges = Workers(_HEDGES_MAX, "dcp_remote-second-read")
        # A store has no `close`: close connections and threads when the reader is garbage-collected.
        weakref.finalize(self, _close_all, self._idle)
        weakref.finalize(self, self._hedges.shutdown, wait=False)

    def read(
        self, url: str, start: int, buffer: memoryview, *, seconds: float, hedge: Callable[[], memoryview] | None
    ) -> bool:
        """Read a range into `buffer`; unless the result is True, the content of `buffer` is undefined.

        Args:
            url: Signed URL.
            start: First byte.
            buffer: Destination, as long as the range.
            seconds: Time limit of the whole read.
            hedge: Function that reads the same range by obstore, called in another thread, with a copy of this context,
                if this read is late; None to send no second request.

        Returns:
            Whether the range was read. If not, the store gave another answer, and obstore has to repeat the request.

        Raises:
            ConnectionError: The connection broke, or the store is too busy.
            TimeoutError: The store was silent, or slow.
            OSError: The host does not exist, or its certificate is not trusted.
            StorageError: The caller has reclaimed `buffer` (`request_context`).
        """
        parts = urlsplit(url)
        request = _RangeRequest(
            server=(parts.scheme, parts.netloc),
            target=f"{parts.path}?{parts.query}" if parts.query else parts.path,
            start=start,
            buffer=buffer,
            seconds=seconds,
            hedge=hedge,
        )
        kept = self._take_idle(request.server)
        if kept is not None:
            try:
                return self._read(kept, request)
            except _CLOSED:
                pass  # closed while idle, or just now: in that case a new connection fails as well
        context = self._get_context() if parts.scheme == "https" else None
        return self._read(
            StreamConnection(
                parts.hostname or "",
                parts.port,
                context=context,
                connect_seconds=min(self._connect_seconds, seconds),
                connector=self._connector,
            ),
            request,
        )

    def _read(self, connection: StreamConnection, request: _RangeRequest) -> bool:
        start, buffer = request.start, request.buffer
        is_reusable = False
        watch = _Watch(
            self._latencies, connection, len(buffer), seconds=request.seconds, silence_seconds=self._silence_seconds
        )
        try:
            watch.begin(partial(self._send_hedge, request.hedge) if request.hedge is not None else None)
            connection.request("GET", request.target, headers={"Range": f"bytes={start}-{start + len(buffer) - 1}"})
            with connection.getresponse() as answer:
                if answer.status in _BUSY:
                    raise ConnectionError(_describe_busy(answer))
                if not _is_range(answer, start, len(buffer)):
                    return False
                if answer.readinto(buffer) < len(buffer):
                    raise ConnectionError("The answer ended before all bytes had arrived.")
                is_reusable = not answer.will_close
        except http.client.HTTPException as error:
            if isinstance(error, ConnectionError):
                raise
            if isinstance(error, http.client.IncompleteRead):
                raise ConnectionError("The answer ended before all bytes had arrived.") from error
            return False  # obstore may understand the answer
        except _OvertakenError as overtaken:
            buffer[:] = overtaken.data
        finally:
            watch.end()
            if is_reusable:
                self._keep(request.server, connection)
            else:
                connection.close()
        self._latencies.record(len(buffer), watch.elapsed_seconds())
        return True

    def _send_hedge(self, hedge: Callable[[], memoryview]) -> Future[memoryview]:
        call = CallOnce(partial(copy_context().run, hedge))
        self._hedges.submit(call)
        return call.future

    def _get_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context(cafile=self._verify if isinstance(self._verify, str) else None)
                if self._verify is False:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                self._context = context
            return self._context

    def _take_idle(self, server: tuple[str, str]) -> StreamConnection | None:
        stale: list[StreamConnection] = []
        found: StreamConnection | None = None
        with self._lock:
            while self._idle and found is None:
                since_seconds, connected_to, connection = self._idle.pop()
                is_fresh = time.monotonic() - since_seconds < _IDLE_SECONDS
                if is_fresh and connected_to == server and connection.is_quiet():
                    found = connection
                else:
                    stale.append(connection)
        for connection in stale:
            connection.close()
        return found

    def _keep(self, server: tuple[str, str], connection: StreamConnection) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), server, connection))
            oldest = self._idle.pop(0)[2] if len(self._idle) > _IDLE_MAX else None
        if oldest is not None:
            oldest.close()


class _Watch:
    """Checks one request while its thread waits for bytes: limits, a reclaimed buffer, and the hedged request.

    Args:
        latencies: Latencies of earlier reads, which say when this one is late.
        connection: Connection of the request.
        size_bytes: Length of the range.
        seconds: Time limit of the whole read.
        silence_seconds: Time limit between two arrivals of bytes.
    """

    def __init__(
        self,
        latencies: LatencyTracker,
        connection: StreamConnection,
        size_bytes: int,
        *,
        seconds: float,
        silence_seconds: float,
    ) -> None:
        """Start the clock."""
        self._latencies = latencies
        self._connection = connection
        self._size_bytes = size_bytes
        self._began_seconds = time.monotonic()
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._late_seconds = latencies.late_seconds(size_bytes)
        self._send_hedge: Callable[[], Future[memoryview]] | None = None
        self._hedge: Future[memoryview] | None = None

    def begin(self, send_hedge: Callable[[], Future[memoryview]] | None) -> None:
        """Connect if necessary and check from now on; `send_hedge` sends a second request."""
        self._send_hedge = send_hedge
        self._connection.watch(self._check)

    def end(self) -> None:
        """Break the reference cycle of connection and watch, which keeps the caller's memory alive."""
        self._connection.unwatch()
        self._send_hedge = self._hedge = None

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began_seconds

    def _check(self) -> None:
        require_may_write()
        now_seconds = time.monotonic()
        if self._hedge is not None and self._hedge.done() and self._hedge.exception() is None:
            data = self._hedge.result()
            if len(data) == self._size_bytes:  # else the object is shorter, which this read will find as well
                raise _OvertakenError(data)
        elapsed_seconds = now_seconds - self._began_seconds
        if elapsed_seconds > self._seconds:
            raise TimeoutError("The store did not answer within the time limit.")
        if now_seconds - max(self._began_seconds, self._connection.received_seconds) > self._silence_seconds:
            raise TimeoutError("The store fell silent in the middle of an answer.")
        if self._send_hedge is not None and elapsed_seconds > self._late_seconds and self._latencies.may_repeat():
            with suppress(RuntimeError):  # no thread can be started
                self._hedge = self._send_hedge()
            self._send_hedge = None


def _close_all(idle: list[tuple[float, tuple[str, str], StreamConnection]]) -> None:
    for _, _, connection in idle:
        connection.close()
    idle.clear()


def _describe_busy(answer: http.client.HTTPResponse) -> str:
    """Return a text with status and error code only: the rest of the answer may quote the request, a secret."""
    status = HTTPStatus(answer.status)
    code = re.search(r"<Code>\w{1,64}</Code>", answer.read(_ERROR_BODY_BYTES_MAX).decode(errors="replace"))
    return f"The store answered {status} {status.phrase}. {code[0] if code else ''}"


def _is_range(answer: http.client.HTTPResponse, start: int, length: int) -> bool:
    content_range = (answer.getheader("Content-Range") or "").partition("/")[0]
    return (
        answer.status == HTTPStatus.PARTIAL_CONTENT
        and answer.length == length
        and content_range == f"bytes {start}-{start + length - 1}"
        and (answer.getheader("Content-Encoding") or "identity") == "identity"
    )


def uses_proxy(url: str) -> bool:
    """Return whether the environment (or the system) names a proxy for a URL."""
    parts = urlsplit(url)
    proxies = getproxies()
    has_proxy = bool(proxies.get(parts.scheme) or proxies.get("all"))
    return has_proxy and not proxy_bypass(parts.netloc)
