"""Streams of the bytes of a socket, plain or TLS, that `http.client` reads into the caller's memory.

Python's own TLS socket asks the kernel twice for each record of 16 KiB. Here one system call takes up to 256 KiB, and
OpenSSL decrypts the records from there, for one connection at a time: a load of 1.15 GiB over sixteen connections costs
0.85 CPU seconds per GiB, and 1.21 if all of them receive while one decrypts (two cores, AES-256-GCM, medians of five).

A thread that waits for bytes wakes up four times a second to check limits.
"""

from __future__ import annotations

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

# Interval in which a waiting thread calls `ByteStream.check`.
_TICK_SECONDS = 0.25

# Size of one read from the kernel. With 64 KiB the CPU cost is a tenth higher.
_RECORDS_BYTES = 256 * KiB

# OpenSSL decrypts a record in microseconds and releases the GIL for each: sixteen threads that contend for the GIL cost
# twice the CPU of one thread at a time. Reentrant, because a signal handler may read while its own thread decrypts.
_decrypting = threading.RLock()

# Buffers for one read, taken by the thread that decrypts. A signal handler finds the list empty and adds a buffer.
_records = [memoryview(bytearray(_RECORDS_BYTES))]

# Records after which a thread releases the lock and calls `check`: 16 MiB if the server fills them.
_TURN_RECORDS = 1024


# Time for an address that does not answer, before the next one is tried (RFC 8305, section 5, but one at a time); and
# the address family that answered last, by host.
_NEXT_ADDRESS_SECONDS = 0.25
_families: dict[str, int] = {}


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    """Connect to an address of a host that answers, in `seconds` for all addresses together.

    Each address is tried briefly, so that a dead one costs little; then each for an equal share of the time, for hosts
    that are far away, and for lost packets.
    """
    deadline = time.monotonic() + seconds
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found.sort(key=lambda info: info[0] != _families.get(host, info[0]))
    brief = [(info, _NEXT_ADDRESS_SECONDS) for info in found] if len(found) > 1 else []
    error: OSError = OSError("The host has no address.")
    for info, limit_seconds in [*brief, *((info, seconds / len(found)) for info in found)]:
        sock = socket.socket(*info[:3])
        sock.settimeout(min(max(0.001, deadline - time.monotonic()), limit_seconds))
        try:
            sock.connect(info[4])
        except OSError as failure:
            sock.close()
            error = failure
        else:
            _families[host] = info[0]
            return sock
    raise error


def do_nothing() -> None:
    """Check nothing."""


class ByteStream(io.RawIOBase):
    """Socket as `http.client` needs it, and the stream of the bytes that it receives. Ends with `disconnect`."""

    def __init__(self, sock: socket.socket) -> None:
        """Set the timeout of a connected socket's reads."""
        super().__init__()
        self._sock = sock
        # Called before each wait and every `_TICK_SECONDS` during it; an exception from it ends the read.
        self.check: Callable[[], None] = do_nothing
        self.received_seconds = 0.0  # time at which bytes last arrived, by the monotonic clock
        # The kernel's timeout: Python's own would make the socket non-blocking, and MSG_WAITALL without effect.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, round(_TICK_SECONDS * 1e6)))

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing: `http.client` calls this after each answer, and before the body of a connection's last one."""

    def disconnect(self) -> None:
        """Close the socket."""
        self._sock.close()

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return the file of one answer: bytes read ahead behind it are dropped with the file."""
        return io.BufferedReader(self)

    def sendall(self, data: bytes) -> None:
        """Send all of `data`."""
        self._sock.sendall(data)

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
        flags = socket.MSG_WAITALL if len(view) > io.DEFAULT_BUFFER_SIZE else 0
        while True:
            self.check()
            try:
                count = self._sock.recv_into(view, 0, flags)
            except (BlockingIOError, TimeoutError):
                continue
            self.received_seconds = time.monotonic()
            return count


class TlsStream(ByteStream):
    """Socket and stream through TLS."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str, *, seconds: float) -> None:
        """Perform the handshake, in `seconds` at most.

        Raises:
            OSError: The connection broke; as `ssl.SSLError` if there is no common version or cipher, or the certificate
                is not trusted or not that of `host`.
            TimeoutError: The handshake took too long.
        """
        super().__init__(sock)
        self._received = ssl.MemoryBIO()
        self._to_send = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0 or not self._poll.poll(left_seconds * 1000):
                    raise TimeoutError("The TLS handshake took longer than the limit to connect.") from None
                self._take_in(sock.recv(_RECORDS_BYTES))
        self._flush()

    def is_quiet(self) -> bool:
        """Implement `ByteStream.is_quiet`."""
        return not (self._tls.pending() or self._received.pending) and super().is_quiet()

    def sendall(self, data: bytes) -> None:
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
                self._poll.poll(_TICK_SECONDS * 1000)
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
        tls, length, done = self._tls, len(view), 0
        for _ in range(_TURN_RECORDS):
            if done == length:
                return done
            try:
                # The stubs know the signature of SSLSocket's method alone.
                count: int = tls.read(length - done, view[done:])  # type: ignore[assignment]  # with a buffer it returns a count
            except ssl.SSLWantReadError:
                records = _records.pop() if _records else memoryview(bytearray(_RECORDS_BYTES))
                try:
                    self._take_in(records[: self._sock.recv_into(records, 0, socket.MSG_DONTWAIT)])
                except BlockingIOError:
                    if done:
                        return done
                    raise
                finally:
                    _records.append(records)
                continue
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return done
            if not count:
                return done
            done += count
        return done or None

    def _take_in(self, data: bytes | memoryview) -> None:
        self.received_seconds = time.monotonic()
        if data:
            self._received.write(data)
        else:
            self._received.write_eof()

    def _flush(self) -> None:
        if self._to_send.pending:
            self._sock.sendall(self._to_send.read())


def open_stream(host: str, port: int, context: ssl.SSLContext | None, *, seconds: float) -> ByteStream:
    """Connect, and shake hands if there is a context, in `seconds` each."""
    sock = _connect(host, port, seconds)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ByteStream(sock) if context is None else TlsStream(sock, context, host, seconds=seconds)
    except BaseException:
        sock.close()
        raise
