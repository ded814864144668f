"""Ranges read straight into the caller's memory: GETs of signed URLs over connections of our own.

obstore gives what it read in memory of its own, from where it has to be copied; fresh memory and copies cost as much as
the network does. Here `http.client` reads into the destination. All that is unusual is left to obstore, which is asked
again: a proxy, an answer other than the bytes that were asked for, a certificate that is not trusted here. So no rule
of HTTP or of a cloud is implemented twice.

One GET per range; a second one, by the other way, where the first is late (`pace.py`).
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dcp_remote.ranges import KiB
from dcp_remote.storage.connecting import Connector
from dcp_remote.storage.landing import require_wanted
from dcp_remote.storage.pace import Pace
from dcp_remote.storage.streams import StreamConnection

# Servers close what is idle; one that was kept longer than this is more likely dead than not.
_IDLE_SECONDS = 4.0
_IDLE_MAX = 64

# Late requests that are asked for again at the same time.
_SECOND_READS_IN_FLIGHT = 2

# Answers that say: not now. All others may be to the way in which it was asked.
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

# Of an answer that says so, with the error code of the store in it: a few hundred bytes.
_REASON_BYTES_MAX = 4 * KiB

# What a connection that was kept raises when the server closed it meanwhile.
_CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)


class _OvertakenError(Exception):
    """The second request was faster."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self.data = data


@dataclass(frozen=True, slots=True)
class _Asked:
    place: tuple[str, str]  # scheme, and host with port
    target: str
    start: int
    buffer: memoryview
    seconds: float
    other_way: Callable[[], memoryview] | None


class DirectReads:
    """The connections to one store in this process. Safe to use from many threads.

    Args:
        verify: Of certificates: False accepts any, a path names a file of those to trust.
        connect_seconds: How long a connection may take to open.
        silence_seconds: How long an answer may pause.
        connector: Opens the connections; None for one of its own.
    """

    def __init__(
        self,
        *,
        verify: bool | str | None,
        connect_seconds: float,
        silence_seconds: float,
        connector: Connector | None = None,
    ) -> None:
        """Opens nothing."""
        self._verify = verify
        self._connect_seconds = connect_seconds
        self._silence_seconds = silence_seconds
        self._connector = connector or Connector()
        self._pace = Pace()
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._idle: list[tuple[float, tuple[str, str], StreamConnection]] = []
        self._others = ThreadPoolExecutor(_SECOND_READS_IN_FLIGHT, thread_name_prefix="dcp_remote-second-read")
        # Whoever forgets the store leaves no open connection behind.
        weakref.finalize(self, _close, self._idle)

    def read(
        self, url: str, start: int, buffer: memoryview, *, seconds: float, other_way: Callable[[], memoryview] | None
    ) -> bool:
        """Read a range into `buffer`; on any other outcome than True its content is undefined.

        Args:
            url: Signed.
            start: First byte.
            buffer: As long as the range.
            seconds: What it may take in all.
            other_way: Reads the same range; called in another thread when this one is late; None to wait for it.

        Returns:
            Whether it was read. If not, the store answered something that has to be asked for by the other way.

        Raises:
            ConnectionError: The connection broke, or the store is too busy.
            TimeoutError: The store was silent, or slow.
            OSError: There is no such host, or no trust in it.
            StorageError: `buffer` is wanted back (`landing.py`).
        """
        parts = urlsplit(url)
        asked = _Asked(
            place=(parts.scheme, parts.netloc),
            target=f"{parts.path}?{parts.query}" if parts.query else parts.path,
            start=start,
            buffer=buffer,
            seconds=seconds,
            other_way=other_way,
        )
        kept = self._kept(asked.place)
        if kept is not None:
            try:
                return self._read(kept, asked)
            except _CLOSED:
                pass  # while it was idle; or just now, and a new one will show it
        context = self._tls() if parts.scheme == "https" else None
        return self._read(
            StreamConnection(
                parts.hostname or "",
                parts.port,
                context=context,
                connect_seconds=self._connect_seconds,
                connector=self._connector,
            ),
            asked,
        )

    def _read(self, connection: StreamConnection, asked: _Asked) -> bool:
        start, buffer = asked.start, asked.buffer
        usable = False
        watch = _Watch(
            self._pace, connection, len(buffer), seconds=asked.seconds, silence_seconds=self._silence_seconds
        )
        try:
            watch.begin(partial(self._others.submit, asked.other_way) if asked.other_way is not None else None)
            connection.request("GET", asked.target, headers={"Range": f"bytes={start}-{start + len(buffer) - 1}"})
            with connection.getresponse() as answer:
                if answer.status in _BUSY:
                    raise ConnectionError(_busy(answer))
                if not _is_range(answer, start, len(buffer)):
                    return False
                if answer.readinto(buffer) < len(buffer):
                    raise ConnectionError("The answer ends too early.")
                usable = not answer.will_close
        except http.client.HTTPException as error:
            if isinstance(error, ConnectionError):
                raise
            if isinstance(error, http.client.IncompleteRead):
                raise ConnectionError("The answer ends too early.") from error
            return False  # obstore may understand it
        except _OvertakenError as overtaken:
            buffer[:] = overtaken.data
        finally:
            watch.end()
            if usable:
                self._keep(asked.place, connection)
            else:
                connection.close()
        self._pace.note(len(buffer), watch.elapsed_seconds())
        return True

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                context = ssl.create_default_context(cafile=self._verify if isinstance(self._verify, str) else None)
                if self._verify is False:
                    context.check_hostname = False
                    context.verify_mode = ssl.CERT_NONE
                self._context = context
            return self._context

    def _kept(self, place: tuple[str, str]) -> StreamConnection | None:
        old: list[StreamConnection] = []
        found: StreamConnection | None = None
        with self._lock:
            while self._idle and found is None:
                since, where, connection = self._idle.pop()
                if time.monotonic() - since < _IDLE_SECONDS and where == place and connection.is_quiet():
                    found = connection
                else:
                    old.append(connection)
        for connection in old:
            connection.close()
        return found

    def _keep(self, place: tuple[str, str], connection: StreamConnection) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), place, connection))
            too_many = self._idle.pop(0)[2] if len(self._idle) > _IDLE_MAX else None
        if too_many is not None:
            too_many.close()


class _Watch:
    """Looks after one request while its thread waits for bytes."""

    def __init__(
        self, pace: Pace, connection: StreamConnection, size_bytes: int, *, seconds: float, silence_seconds: float
    ) -> None:
        self._pace = pace
        self._connection = connection
        self._size_bytes = size_bytes
        self._began_seconds = time.monotonic()
        self._seconds = seconds
        self._silence_seconds = silence_seconds
        self._late_seconds = pace.late_seconds(size_bytes)
        self._ask_other: Callable[[], Future[memoryview]] | None = None
        self._other: Future[memoryview] | None = None

    def begin(self, ask_other: Callable[[], Future[memoryview]] | None) -> None:
        """Connect, if need be, and look from now on; `ask_other` sends a second request."""
        self._ask_other = ask_other
        self._connection.watched_by(self._look)

    def end(self) -> None:
        """Let go of everything: connection and watch know each other, and what they hold is the caller's memory."""
        self._connection.unwatched()
        self._ask_other = self._other = None

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began_seconds

    def _look(self) -> None:
        require_wanted()
        now_seconds = time.monotonic()
        if self._other is not None and self._other.done() and self._other.exception() is None:
            data = self._other.result()
            if len(data) == self._size_bytes:  # or the object is shorter, as this way will find, too
                raise _OvertakenError(data)
        elapsed_seconds = now_seconds - self._began_seconds
        if elapsed_seconds > self._seconds:
            raise TimeoutError("The store took too long to answer.")
        if now_seconds - max(self._began_seconds, self._connection.heard_seconds) > self._silence_seconds:
            raise TimeoutError("The store fell silent in the middle of an answer.")
        if self._ask_other is not None and elapsed_seconds > self._late_seconds and self._pace.may_repeat():
            with suppress(RuntimeError):  # the interpreter is about to exit
                self._other = self._ask_other()
            self._ask_other = None


def _close(idle: list[tuple[float, tuple[str, str], StreamConnection]]) -> None:
    for _, _, connection in idle:
        connection.close()
    idle.clear()


def _busy(answer: http.client.HTTPResponse) -> str:
    """A text with status and error code, and nothing else of the answer: it may quote the request, a secret."""
    status = HTTPStatus(answer.status)
    code = re.search(r"<Code>\w{1,64}</Code>", answer.read(_REASON_BYTES_MAX).decode(errors="replace"))
    return f"The store answered {status} {status.phrase}. {code[0] if code else ''}"


def _is_range(answer: http.client.HTTPResponse, start: int, length: int) -> bool:
    given = (answer.getheader("Content-Range") or "").partition("/")[0]
    return (
        answer.status == HTTPStatus.PARTIAL_CONTENT
        and answer.length == length
        and given == f"bytes {start}-{start + length - 1}"
        and (answer.getheader("Content-Encoding") or "identity") == "identity"
    )


def goes_through_a_proxy(url: str) -> bool:
    """Whether the environment (or the system) names a proxy for it."""
    parts = urlsplit(url)
    proxies = getproxies()
    named = bool(proxies.get(parts.scheme) or proxies.get("all"))
    return named and not proxy_bypass(parts.netloc)
