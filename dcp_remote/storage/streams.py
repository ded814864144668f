"""Bytes of a socket, into the caller's memory: what `http.client` reads its answers from.

Python's own TLS socket asks the kernel twice for each record of 16 KiB. Here the kernel is asked for a quarter of a
megabyte at a time, and OpenSSL takes its records from there, for one connection after another: a load of 1.15 GiB over
sixteen of them costs 0.85 CPU seconds per GiB, and 1.21 if all of them receive while one decrypts (two cores,
AES-256-GCM, medians of five). And whoever waits looks up four times a second: at the clock, or for an answer that came
another way.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from dcp_remote.ranges import KiB
from dcp_remote.storage.connecting import Connector
from dcp_remote.storage.landing import nothing_lands

# How often a wait is interrupted to look around.
TICK_SECONDS = 0.25

# What the kernel is asked for at a time. At 64 KiB the same costs a tenth more.
_RECORDS_BYTES = 256 * KiB

# OpenSSL decrypts a record in microseconds, and Python's lock is given up for each: sixteen threads that take it from
# each other cost twice the CPU of one that does the records of all. Who has this one has those bytes, too; a signal
# handler that reads in the middle of its own thread's turn has it already, finds no bytes, and brings some.
_decrypting = threading.RLock()
_records = [memoryview(bytearray(_RECORDS_BYTES))]

# Whoever decrypts lets others do that, and looks up, after so many records: 16 MiB of a server that fills them.
_TURN_RECORDS = 1024

# Of a handshake.
_GREETING_BYTES = 16 * KiB


def _nothing() -> None:
    pass


class ByteStream(io.RawIOBase):
    """What a socket receives. Its `close` leaves the socket open: the reader of an answer closes it with itself.

    Attributes:
        look: Called before each wait, and every `TICK_SECONDS` of it; what it raises ends the read, and the connection.
        heard_seconds: When bytes last arrived, by the monotonic clock.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Of a connected socket, whose reads now wait for `TICK_SECONDS` at most."""
        super().__init__()
        self._sock = sock
        self.look: Callable[[], None] = _nothing
        self.heard_seconds = 0.0
        # By the kernel's clock and not Python's, which would take the socket out of blocking mode.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, round(TICK_SECONDS * 1e6)))

    def readable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """Nothing: `http.client` closes what it read an answer from."""

    def is_quiet(self) -> bool:
        """Whether nothing has arrived that nobody has read: neither bytes nor an end."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`. 0 when the other side has closed."""
        view = memoryview(buffer)
        # What is longer than what `BufferedReader` reads ahead is all of it the body's: one call of the kernel for it,
        # and so no fight of many threads for Python's lock.
        return self._receive(view, socket.MSG_WAITALL if len(view) > io.DEFAULT_BUFFER_SIZE else 0)

    def _receive(self, buffer: memoryview, flags: int = 0) -> int:
        while True:
            self.look()
            try:
                count = self._sock.recv_into(buffer, 0, flags)
            except (BlockingIOError, TimeoutError):
                continue
            self.heard_seconds = time.monotonic()
            return count


class TlsStream(ByteStream):
    """The same through TLS.

    Args:
        sock: Connected.
        context: Says what is trusted.
        host: Whose certificate is expected.
        seconds: What the handshake may take.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, *, seconds: float) -> None:
        """Shakes hands.

        Raises:
            ssl.SSLError: They do not understand or trust each other.
            OSError: The connection broke.
            TimeoutError: It took too long.
        """
        super().__init__(sock)
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        deadline = time.monotonic() + seconds

        def look() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError("The handshake of TLS took too long.")

        self.look = look
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._greet()
        self._flush()
        self.look = _nothing

    def is_quiet(self) -> bool:
        """See `ByteStream.is_quiet`."""
        return not (self._tls.pending() or self._received.pending) and super().is_quiet()

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self._tls.write(data)
        self._flush()

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`. As much as has arrived, at least one byte; 0 when the other side has closed."""
        view = memoryview(buffer)
        while True:
            self.look()
            try:
                with _decrypting:
                    count = self._decrypt(view)
            except BlockingIOError:
                self._flush()
                self._poll.poll(TICK_SECONDS * 1000)
                continue
            self._flush()
            if count is not None:
                return count

    def _decrypt(self, view: memoryview) -> int | None:
        """All that has arrived and fits, as far as one turn goes; None if that is nothing yet.

        With the lock held: it never waits.

        Raises:
            BlockingIOError: Nothing has arrived.
        """
        records = _records.pop() if _records else memoryview(bytearray(_RECORDS_BYTES))
        try:
            return self._decrypt_through(records, view)
        finally:
            _records.append(records)

    def _decrypt_through(self, records: memoryview, view: memoryview) -> int | None:
        tls, length, done = self._tls, len(view), 0
        for _ in range(_TURN_RECORDS):
            if done == length:
                return done
            try:
                # The stubs know the signature of SSLSocket's method alone.
                count: int = tls.read(length - done, view[done:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                try:
                    self._heard(records[: self._sock.recv_into(records, 0, socket.MSG_DONTWAIT)])
                except BlockingIOError:
                    if done:
                        return done
                    raise
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return done
            if not count:
                return done
            done += count
        return done or None

    def _greet(self) -> None:
        """Send what a handshake has to say, and wait for what it wants to hear."""
        self._flush()
        greeting = memoryview(bytearray(_GREETING_BYTES))
        self._heard(greeting[: self._receive(greeting)])

    def _heard(self, data: memoryview) -> None:
        self.heard_seconds = time.monotonic()
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()

    def _flush(self) -> None:
        if self._to_send.pending:
            self._sock.sendall(self._to_send.read())


class _Answer(io.BufferedReader):
    """What `http.client` reads one answer from."""

    def __init__(self, stream: ByteStream, closed: Callable[[], None]) -> None:
        super().__init__(stream)
        self._say_closed = closed

    def close(self) -> None:
        super().close()
        # Once: Python closes again what it deletes, as the stream below never says that it is closed.
        say_closed, self._say_closed = self._say_closed, _nothing
        say_closed()


class _Sock:
    """What `http.client` calls the socket of a connection: open until that and all answers are closed.

    Of a server that closes after its answer, `http.client` closes the connection before it reads the body.
    """

    def __init__(self, sock: socket.socket, stream: ByteStream) -> None:
        self._sock = sock
        self._stream = stream
        self._users = 1

    def sendall(self, data: Any) -> None:
        if isinstance(self._stream, TlsStream):
            self._stream.send(bytes(data))
        else:
            self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        # One for each answer, as `http.client` expects: what came behind an answer is no part of the next.
        self._users += 1
        return _Answer(self._stream, self.close)

    def close(self) -> None:
        self._users -= 1
        if not self._users:
            self._sock.close()


class StreamConnection(http.client.HTTPConnection):
    """An HTTP connection over such a stream.

    Args:
        host: Where to.
        port: None for the scheme's own.
        context: For https; None for http.
        connect_seconds: What connecting, and then shaking hands, may take.
        connector: Finds the host's addresses.
    """

    def __init__(
        self,
        host: str,
        port: int | None,
        *,
        context: ssl.SSLContext | None,
        connect_seconds: float,
        connector: Connector,
    ) -> None:
        """Opens nothing yet."""
        self.default_port = http.client.HTTP_PORT if context is None else http.client.HTTPS_PORT
        # With a port: it would look for one in an address of IPv6.
        super().__init__(host, self.default_port if port is None else port, timeout=connect_seconds)
        self._context = context
        self._connect_seconds = connect_seconds
        self._connector = connector
        self._stream: ByteStream | None = None

    def connect(self) -> None:
        """See `http.client.HTTPConnection`."""
        sock = self._connector.connect(self.host, self.port, seconds=self._connect_seconds)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                self._stream = ByteStream(sock)
            else:
                self._stream = TlsStream(sock, self._context, self.host, seconds=self._connect_seconds)
        except BaseException:
            sock.close()
            raise
        self.sock = _Sock(sock, self._stream)

    @property
    def heard_seconds(self) -> float:
        """When bytes last arrived, by the monotonic clock; 0 before the first."""
        return self._stream.heard_seconds if self._stream is not None else 0.0

    def is_quiet(self) -> bool:
        """Whether it can be used again: what has come unasked would be taken for the next answer."""
        return self._stream is not None and self._stream.is_quiet()

    def watched_by(self, look: Callable[[], None]) -> None:
        """Connect, if that is not done, and look around while waiting from now on; see `ByteStream.look`."""
        if self._stream is None:
            with nothing_lands():
                self.connect()
        assert self._stream is not None
        self._stream.look = look

    def unwatched(self) -> None:
        """Look no more."""
        if self._stream is not None:
            self._stream.look = _nothing
