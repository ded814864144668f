"""HTTP connections that read the bytes of a socket, plain or TLS, into the caller's memory.

Python's own TLS socket asks the kernel twice for each record of 16 KiB. Here one system call takes up to 256 KiB, and
OpenSSL decrypts the records from there, for one connection at a time: a load of 1.15 GiB over sixteen connections costs
0.85 CPU seconds per GiB, and 1.21 if all of them receive while one decrypts (two cores, AES-256-GCM, medians of five).

A thread that waits for bytes wakes up four times a second to check limits and a hedged request.
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

from dcp_remote.common.units import KiB
from dcp_remote.storage.cloud.connector import Connector
from dcp_remote.storage.request_context import writes_nothing

# Interval in which a waiting thread calls `ByteStream.check`.
TICK_SECONDS = 0.25

# Size of one read from the kernel. With 64 KiB the CPU cost is a tenth higher.
_RECORDS_BYTES = 256 * KiB

# OpenSSL decrypts a record in microseconds and releases the GIL for each: sixteen threads that contend for the GIL cost
# twice the CPU of one thread at a time. Reentrant, because a signal handler may read while its own thread decrypts.
_decrypting = threading.RLock()

# Buffers for one read, taken by the thread that decrypts. A signal handler finds the list empty and adds a buffer.
_records = [memoryview(bytearray(_RECORDS_BYTES))]

# Records after which a thread releases the lock and calls `check`: 16 MiB if the server fills them.
_TURN_RECORDS = 1024

# Size of one read during a handshake.
_HANDSHAKE_BYTES = 16 * KiB


def _do_nothing() -> None:
    pass


class ByteStream(io.RawIOBase):
    """Stream of the bytes that a socket receives.

    `close` leaves the socket open, because `http.client` closes the stream after each answer.

    Args:
        sock: Connected socket. Its reads wait for `TICK_SECONDS` at most from then on.

    Attributes:
        check: Function called before each wait and every `TICK_SECONDS` during the wait; an exception that it raises
            ends the read and the connection.
        received_seconds: Time at which bytes last arrived, by the monotonic clock, in seconds.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Set the socket's receive timeout."""
        super().__init__()
        self._sock = sock
        self.check: Callable[[], None] = _do_nothing
        self.received_seconds = 0.0
        # The kernel's timeout: Python's own would make the socket non-blocking, and MSG_WAITALL without effect.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, round(TICK_SECONDS * 1e6)))

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: `http.client` calls this after each answer, and the connection is kept."""

    def is_quiet(self) -> bool:
        """Return whether no unread bytes and no end of the stream have arrived."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def readinto(self, buffer: Any) -> int:
        """Implement `io.RawIOBase.readinto`; return 0 when the other side has closed."""
        view = memoryview(buffer)
        # A read longer than `BufferedReader` reads ahead lies within the body: one system call for all of it saves GIL
        # contention between many threads.
        return self._receive(view, socket.MSG_WAITALL if len(view) > io.DEFAULT_BUFFER_SIZE else 0)

    def _receive(self, buffer: memoryview, flags: int = 0) -> int:
        while True:
            self.check()
            try:
                count = self._sock.recv_into(buffer, 0, flags)
            except (BlockingIOError, TimeoutError):
                continue
            self.received_seconds = time.monotonic()
            return count


class TlsStream(ByteStream):
    """Stream of the bytes that a socket receives through TLS.

    Args:
        sock: Connected socket.
        context: TLS settings and trusted certificates.
        host: Host name that the certificate must have.
        seconds: Time limit of the handshake.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, *, seconds: float) -> None:
        """Perform the handshake.

        Raises:
            ssl.SSLError: No common version or cipher, or the certificate is not trusted.
            OSError: The connection broke.
            TimeoutError: The handshake took longer than `seconds`.
        """
        super().__init__(sock)
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        deadline = time.monotonic() + seconds

        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError("The TLS handshake took longer than the limit to connect.")

        self.check = check
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._continue_handshake()
        self._flush()
        self.check = _do_nothing

    def is_quiet(self) -> bool:
        """Implement `ByteStream.is_quiet`."""
        return not (self._tls.pending() or self._received.pending) and super().is_quiet()

    def send(self, data: bytes) -> None:
        """Encrypt and send all of `data`."""
        self._tls.write(data)
        self._flush()

    def readinto(self, buffer: Any) -> int:
        """Implement `io.RawIOBase.readinto`: read what has arrived, at least one byte; 0 at the end."""
        view = memoryview(buffer)
        while True:
            self.check()
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
        """Decrypt what has arrived into `view`, at most `_TURN_RECORDS` records; None if they hold no byte.

        Called with the lock held; never waits.

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
                count: int = tls.read(length - done, view[done:])  # type: ignore[assignment]  # with a buffer it returns a count
            except ssl.SSLWantReadError:
                try:
                    self._take_in(records[: self._sock.recv_into(records, 0, socket.MSG_DONTWAIT)])
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

    def _continue_handshake(self) -> None:
        """Send the pending bytes of the handshake and wait for the answer."""
        self._flush()
        answer = memoryview(bytearray(_HANDSHAKE_BYTES))
        self._take_in(answer[: self._receive(answer)])

    def _take_in(self, data: memoryview) -> None:
        self.received_seconds = time.monotonic()
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()

    def _flush(self) -> None:
        if self._to_send.pending:
            self._sock.sendall(self._to_send.read())


class _Answer(io.BufferedReader):
    """File from which `http.client` reads one answer."""

    def __init__(self, stream: ByteStream, on_close: Callable[[], None]) -> None:
        super().__init__(stream)
        self._on_close = on_close

    def close(self) -> None:
        super().close()
        # Python closes the reader again when it is deleted, since the raw stream is never closed: call back only once.
        on_close, self._on_close = self._on_close, _do_nothing
        on_close()


class _Sock:
    """Socket of an `http.client` connection, which stays open until the connection and all answers are closed.

    If a server closes after its answer, `http.client` closes the connection before it reads the body.
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
        # One file per answer, as `http.client` expects: bytes read ahead behind an answer are dropped with its file.
        self._users += 1
        return _Answer(self._stream, self.close)

    def close(self) -> None:
        self._users -= 1
        if not self._users:
            self._sock.close()


class StreamConnection(http.client.HTTPConnection):
    """HTTP connection that reads from a `ByteStream` or `TlsStream`.

    Args:
        host: Host name or address.
        port: Port; None for the scheme's default.
        context: TLS settings for https; None for http.
        connect_seconds: Time limit to connect, and again for the handshake.
        connector: Opens the TCP connection.
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
        """Store the arguments; no connection is opened."""
        self.default_port = http.client.HTTP_PORT if context is None else http.client.HTTPS_PORT
        # Always with a port: without one, http.client takes the end of an IPv6 address for a port.
        super().__init__(host, self.default_port if port is None else port, timeout=connect_seconds)
        self._context = context
        self._connect_seconds = connect_seconds
        self._connector = connector
        self._stream: ByteStream | None = None

    def connect(self) -> None:
        """Implement `http.client.HTTPConnection.connect`."""
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
    def received_seconds(self) -> float:
        """Time at which bytes last arrived, by the monotonic clock, in seconds; 0 before the first."""
        return self._stream.received_seconds if self._stream is not None else 0.0

    def is_quiet(self) -> bool:
        """Return whether the connection is reusable; unread bytes would be taken for the next answer."""
        return self._stream is not None and self._stream.is_quiet()

    def watch(self, check: Callable[[], None]) -> None:
        """Connect if necessary, and call `check` while waiting for bytes from now on; see `ByteStream.check`."""
        if self._stream is None:
            with writes_nothing():
                self.connect()
        assert self._stream is not None
        self._stream.check = check

    def unwatch(self) -> None:
        """Stop calling the function given to `watch`."""
        if self._stream is not None:
            self._stream.check = _do_nothing
