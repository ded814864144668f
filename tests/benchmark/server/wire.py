"""One connection's bytes: heads and lines through a small buffer, bodies straight between the socket and the file.

The interpreter sees a few dozen lines a request, so a thread per connection is enough, and processes would have nothing
to win. Over TLS the library reads and writes records of 16 KiB, which costs several times as much, with one connection
as with four. (Large blocks through `ssl.MemoryBIO` were tried: what they save in calls they lose in copies.)
"""

from __future__ import annotations

import os
import socket
import ssl

from dcp_remote.common.units import GiB, MiB
from tests.benchmark.server.shape import Pacer
from tests.benchmark.server.space import Extent, Space, Span

# Of a head, and of what arrives behind it in one piece. A larger one would copy more of a body, a smaller one makes
# more calls where a client sends chunks of a few kilobytes.
_BUFFER_BYTES = 64 * 1024

# From here on a body is received where it belongs; what is smaller comes through the buffer, with what follows it.
_DIRECT_BYTES = 16 * 1024

# A line of a chunk or a trailer.
LINE_BYTES_MAX = 8 * 1024

# One call: sendfile takes up to 2 GiB, and over TLS the library works on as much as it is given.
_SEND_BYTES = GiB
_TLS_SEND_BYTES = 16 * MiB


class GoneError(ConnectionError):
    """The client went away, or is sent away: its connection ends without another word."""


class Wire:
    """A connected socket, in one thread."""

    def __init__(self, space: Space, connected: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.bytes_in = 0  # bytes of the body of the last request, as on the wire
        self.bytes_out = 0  # bytes of the body of its answer
        self._space = space
        self._socket = connected
        self._tls = tls
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0
        self._on_the_way: list[Extent] = []
        self._bandwidth: float | None = None
        self._pacer_in: Pacer | None = None
        self._pacer_out: Pacer | None = None

    def open(self) -> None:
        """Shake hands, over TLS: in the connection's own thread."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            self._socket = self._tls.wrap_socket(self._socket, server_side=True)

    def close(self) -> None:
        """End the connection."""
        self._arrived()
        self._socket.close()

    def pace(self, bytes_per_second: float | None) -> None:
        """Keep to a bandwidth in each direction from now on; None for all there is."""
        if bytes_per_second != self._bandwidth:
            self._bandwidth = bytes_per_second
            self._pacer_in = Pacer(bytes_per_second) if bytes_per_second is not None else None
            self._pacer_out = Pacer(bytes_per_second) if bytes_per_second is not None else None

    def _arrived(self) -> None:
        """Note the end of an answer: a client that asks again has read it, and one that is gone needs none."""
        for extent in self._on_the_way:
            self._space.arrived(extent)
        self._on_the_way.clear()

    # Bytes in.

    def _receive(self, view: memoryview, *, all_of_it: bool) -> int:
        """One call; with `all_of_it` the kernel comes back when the view is full, which is what the GIL wants."""
        if self._pacer_in is not None:
            view = view[: self._pacer_in.slice_bytes]
        flags = socket.MSG_WAITALL if all_of_it and self._tls is None else 0
        size_bytes = self._socket.recv_into(view, len(view), flags)
        if not size_bytes:
            raise GoneError("The client closed the connection.")
        if self._pacer_in is not None:
            self._pacer_in.pay(size_bytes)
        return size_bytes

    def _fill(self) -> None:
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._stop == _BUFFER_BYTES:
            left = self._stop - self._start
            self._buffer[:left] = self._buffer[self._start : self._stop]
            self._start, self._stop = 0, left
        self._stop += self._receive(self._view[self._stop :], all_of_it=False)

    def read_head(self) -> bytes:
        """The next request's head, without the empty line at its end; its bytes are counted from zero."""
        head = self._until(b"\r\n\r\n", _BUFFER_BYTES)[:-4]
        self._arrived()
        self.bytes_in = self.bytes_out = 0
        return head

    def read_into(self, view: memoryview) -> None:
        """Fill the view: what came behind the head is copied, the rest goes where it belongs."""
        self.bytes_in += len(view)
        while view:
            buffered = min(len(view), self._stop - self._start)
            if buffered:
                view[:buffered] = self._view[self._start : self._start + buffered]
                self._start += buffered
                view = view[buffered:]
            elif len(view) >= _DIRECT_BYTES:
                view = view[self._receive(view, all_of_it=True) :]
            else:
                self._fill()

    def skip(self, size_bytes: int) -> None:
        """Read so many bytes for nothing."""
        scratch = memoryview(bytearray(min(size_bytes, MiB)))
        while size_bytes:
            count = min(size_bytes, len(scratch))
            self.read_into(scratch[:count])
            size_bytes -= count

    def _until(self, end: bytes, limit_bytes: int) -> bytes:
        looked = self._start
        while (at := self._buffer.find(end, looked, self._stop)) < 0:
            if self._stop - self._start >= limit_bytes:
                raise GoneError("A head or a line is too long.")
            passed = max(0, self._stop - self._start - len(end) + 1)
            self._fill()
            looked = self._start + passed
        found = bytes(self._view[self._start : at + len(end)])
        self._start = at + len(end)
        return found

    def read_line(self) -> bytes:
        """A line of a chunk, with its end."""
        line = self._until(b"\r\n", LINE_BYTES_MAX)
        self.bytes_in += len(line)
        return line

    # Bytes out.

    def send(self, data: bytes, *, body_bytes: int = 0, more: bool = False) -> None:
        """All of it. `body_bytes` of it are an answer's body; with `more` the kernel waits for what follows."""
        flags = socket.MSG_MORE if more and self._tls is None else 0
        if self._pacer_out is None:
            self._socket.sendall(data, flags)
        else:
            for start in range(0, len(data), self._pacer_out.slice_bytes):
                part = data[start : start + self._pacer_out.slice_bytes]
                self._pacer_out.pay(len(part))
                self._socket.sendall(part, flags)
        self.bytes_out += body_bytes

    def send_span(self, span: Span) -> None:
        """An answer's body, or some of it, from the file."""
        if self._tls is None:
            self._space.sending(span.extent)
            self._on_the_way.append(span.extent)
        at, end = span.start, span.start + span.size_bytes
        while at < end:
            sent = self._send_some(at, end - at)
            self.bytes_out += sent
            at += sent

    def _send_some(self, offset: int, count: int) -> int:
        if self._pacer_out is not None:
            count = min(count, self._pacer_out.slice_bytes)
            self._pacer_out.pay(count)
        if self._tls is not None:
            count = min(count, _TLS_SEND_BYTES)
            self._socket.sendall(self._space.view[offset : offset + count])
            return count
        sent = os.sendfile(self._socket.fileno(), self._space.file.fileno(), offset, min(count, _SEND_BYTES))
        if not sent:
            raise GoneError("The client closed the connection.")
        return sent
