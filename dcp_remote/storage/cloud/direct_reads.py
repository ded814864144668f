"""Direct range reads: GETs of signed URLs over connections of this module, straight into the caller's memory.

obstore returns memory of its own, which has to be copied; fresh memory and copies cost as much as the network does.
Here `http.client` reads into the destination. Everything unusual is left to obstore, which repeats the request: a
proxy, an answer other than the requested bytes, a broken connection, an untrusted certificate. So no rule of HTTP or of
a cloud is implemented twice, and no range depends on direct reads.

A store may refuse signed URLs, or a middlebox may cut every connection that carries one. Once obstore has read what
direct reads could not, three times in a row, it reads all ranges but one a minute. Reads that were under way together
fail together, as when a load balancer restarts; they count as one.

One GET per range; if the answer is late (`common.hedging`), it is given up, and obstore sends another one.
"""

from __future__ import annotations

import http.client
import logging
import math
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from dcp_remote.common.hedging import LatencyTracker
from dcp_remote.common.units import KiB
from dcp_remote.storage.cloud.errors import is_slow_down
from dcp_remote.storage.cloud.tls_stream import ByteStream, do_nothing, open_stream
from dcp_remote.storage.request_context import remaining_seconds, require_may_write, writes_nothing

logger = logging.getLogger(__name__)

# Outcome of a direct read; unless "direct", obstore has to read the range. "failed": this read failed, or the last two
# met a busy store. "skipped": direct reads are paused, or are not possible, or this one was late.
Outcome: TypeAlias = Literal["direct", "failed", "skipped"]

# Ranges in a row that only obstore could read before direct reads are paused, and the length of the pause.
_FAILED_MAX = 3
_PAUSE_SECONDS = 60.0

# Busy answers in a row, but for the store's own "SlowDown", after which obstore reads one range.
_BUSY_MAX = 2

# Servers close idle connections; one that was idle for longer than this is probably closed.
_IDLE_SECONDS = 4.0

# Statuses of a server that is overloaded or failing. Any other unexpected status may be due to the signed URL.
_BUSY = frozenset({408, 429, 500, 502, 503, 504})

# Bytes to read of an error's body; with the store's error code it has a few hundred.
_ERROR_BODY_BYTES_MAX = 4 * KiB


class BusyError(ConnectionError):
    """The store is too busy for this request, by whatever way."""


class _LateError(Exception):
    """The answer is later than almost all others: another request is probably faster."""


class DirectReads:
    """Direct reads of one bucket over connections that are kept. Safe to use from many threads."""

    def __init__(self, bucket: str, *, connect_seconds: float, silence_seconds: float) -> None:
        """Open no connection. The limits are for opening one, and for the time between two arrivals of bytes."""
        self._bucket = bucket
        self._connect_seconds = connect_seconds
        self.silence_seconds = silence_seconds
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        self._failed_seconds = -math.inf
        self._busy_in_a_row = 0
        self.latencies = LatencyTracker()
        self._context: ssl.SSLContext | None = None
        self._idle: list[tuple[float, str, ByteStream]] = []
        # A store has no `close`: close connections when this object is garbage-collected.
        weakref.finalize(self, _close_all, self._idle)

    def note_failed(self, began_seconds: float) -> None:
        """Note that obstore has read a range after a failed direct read; pause direct reads after three in a row.

        `began_seconds` is the time by `time.monotonic` at which the first request was sent.
        """
        with self._lock:
            if began_seconds < self._failed_seconds:
                return
            self._failed_seconds = time.monotonic()
            self._failed_in_a_row += 1
            is_last = self._failed_in_a_row == _FAILED_MAX
        if is_last:
            logger.warning(
                "Direct reads of this store fail; obstore reads the ranges, at more CPU. Look for a proxy or firewall "
                "that cuts or refuses signed URLs. bucket=%s next_try_seconds=%d",
                self._bucket,
                _PAUSE_SECONDS,
            )

    def read(
        self,
        sign: Callable[[], str | None],
        start: int,
        buffer: memoryview,
        *,
        verify: bool | str | None,
        seconds: float,
        may_repeat: bool,
    ) -> Outcome:
        """Read a range into `buffer`; unless the result is "direct", obstore has to read the range.

        `sign` returns the signed URL; None skips this read. After two busy answers in a row obstore finds out whether
        the store is busy or refuses signed URLs.

        A read that is late is given up if `may_repeat`; `seconds` limits the whole read.

        Raises:
            BusyError: The store is too busy.
            TimeoutError: The store was silent, or slow, until the deadline of the caller.
            StorageError: The caller has reclaimed `buffer` (`request_context`).
        """
        with self._lock:
            if self._busy_in_a_row >= _BUSY_MAX:
                self._busy_in_a_row = 0
                return "failed"
            if self._failed_in_a_row >= _FAILED_MAX:
                if time.monotonic() < self._failed_seconds + _PAUSE_SECONDS:
                    return "skipped"
                self._failed_seconds = time.monotonic()
        url = sign()
        if url is None:
            return "skipped"
        request = _RangeRequest(self, url, start, buffer, seconds=seconds, may_repeat=may_repeat)
        try:
            kept = self._take_idle(request.server)
            if kept is not None:
                # A connection that was closed while idle, or just now: in that case a new one fails as well.
                with suppress(ConnectionResetError, BrokenPipeError):
                    return self._read(kept, request)
            return self._read(self._open(request, verify=verify), request)
        except BusyError as error:
            with self._lock:
                self._busy_in_a_row += not is_slow_down(error)
            raise
        except TimeoutError:
            if not remaining_seconds():
                raise
            return "failed"
        except _LateError:
            return "skipped"
        except (OSError, http.client.HTTPException):
            return "failed"  # obstore resolves names, verifies certificates and parses answers by itself

    def _read(self, stream: ByteStream, request: _RangeRequest) -> Outcome:
        buffer, is_reusable = request.buffer, False
        connection = http.client.HTTPConnection(request.host, request.port)
        connection.sock = stream
        stream.check = partial(request.check, stream)
        try:
            connection.request("GET", request.target, headers=request.headers)
            with connection.getresponse() as answer:
                if answer.status in _BUSY:
                    raise BusyError(_describe_busy(answer))
                if not request.is_answer(answer):
                    return "failed"
                if answer.readinto(buffer) < len(buffer):
                    raise ConnectionError("The answer ended before all bytes had arrived.")
                is_reusable = not answer.will_close
        finally:
            stream.check = do_nothing  # breaks a cycle that keeps the caller's memory alive
            if is_reusable:
                with self._lock:
                    self._idle.append((time.monotonic(), request.server, stream))
            else:
                stream.disconnect()
        self.latencies.record(len(buffer), time.monotonic() - request.began_seconds)
        with self._lock:
            self._failed_in_a_row = self._busy_in_a_row = 0
        return "direct"

    def _open(self, request: _RangeRequest, *, verify: bool | str | None) -> ByteStream:
        context = self._get_context(verify=verify) if request.is_tls else None
        with writes_nothing():
            return open_stream(request.host, request.port, context, seconds=min(self._connect_seconds, request.seconds))

    def _get_context(self, *, verify: bool | str | None) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
                if verify is False:
                    self._context.check_hostname = False
                    self._context.verify_mode = ssl.CERT_NONE
            return self._context

    def _take_idle(self, server: str) -> ByteStream | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                since_seconds, connected_to, stream = self._idle.pop()
            if time.monotonic() - since_seconds < _IDLE_SECONDS and connected_to == server and stream.is_quiet():
                return stream
            stream.disconnect()


class _RangeRequest:
    """One read of a range; checks limits and the buffer while its thread waits for bytes."""

    def __init__(
        self,
        reads: DirectReads,
        url: str,
        start: int,
        buffer: memoryview,
        *,
        seconds: float,
        may_repeat: bool,
    ) -> None:
        self._reads = reads
        parts = urlsplit(url)
        self.is_tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (http.client.HTTPS_PORT if self.is_tls else http.client.HTTP_PORT)
        self.server = f"{parts.scheme}://{parts.netloc}"
        self.target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._range = f"{start}-{start + len(buffer) - 1}"
        # The host as it was signed.
        self.headers = {"Host": parts.netloc, "Range": f"bytes={self._range}"}
        self.buffer = buffer
        self.seconds = seconds
        self.began_seconds = time.monotonic()
        self._late_seconds = reads.latencies.late_seconds(len(buffer)) if may_repeat else math.inf

    def is_answer(self, answer: http.client.HTTPResponse) -> bool:
        """Return whether an answer has exactly the bytes of this range."""
        return (
            answer.status == HTTPStatus.PARTIAL_CONTENT
            and answer.length == len(self.buffer)
            and (answer.getheader("Content-Range") or "").partition("/")[0] == f"bytes {self._range}"
            and (answer.getheader("Content-Encoding") or "identity") == "identity"
        )

    def check(self, stream: ByteStream) -> None:
        """Check this request; called before each wait for bytes, and during the wait."""
        require_may_write()
        now_seconds = time.monotonic()
        elapsed_seconds = now_seconds - self.began_seconds
        if elapsed_seconds > self.seconds:
            raise TimeoutError("The store did not answer within the time limit.")
        if now_seconds - max(self.began_seconds, stream.received_seconds) > self._reads.silence_seconds:
            raise TimeoutError("The store fell silent in the middle of an answer.")
        has_time = remaining_seconds() > 2 * self._late_seconds
        if elapsed_seconds > self._late_seconds and has_time and self._reads.latencies.may_repeat():
            raise _LateError


def _close_all(idle: list[tuple[float, str, ByteStream]]) -> None:
    for _, _, stream in idle:
        stream.disconnect()
    idle.clear()


def _describe_busy(answer: http.client.HTTPResponse) -> str:
    """Return a text with status and error code only: the rest of the answer may quote the request, a secret."""
    status = HTTPStatus(answer.status)
    code = re.search(r"<Code>\w{1,64}</Code>", answer.read(_ERROR_BODY_BYTES_MAX).decode(errors="replace"))
    return f"The store answered {status} {status.phrase}. {code[0] if code else ''}"
