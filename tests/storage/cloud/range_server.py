"""An S3 server of one object that closes or cuts connections, and counts the bytes of it that it sends."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

from tests.support.clouds import is_direct

__all__ = ["RangeServer", "is_direct", "range_server"]

_HEADERS = 'Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nETag: "abc"\r\n'


class RangeServer:
    """A running server.

    Args:
        data: Content of the object.
        context: TLS settings for https; None for http.
        closes: Whether to announce `Connection: close` and close each connection after its answer.
        answers_max: Number of answers after which a connection is closed without notice.
        cut: Function of a request's target that returns how many bytes of the body to send before the connection is
            reset; None for all of them, -1 for a reset without an answer.

    Attributes:
        targets: Targets of the requests for ranges, in order of arrival.
        connections: Number of accepted connections.
        sent_bytes: Sum of the bytes sent of all bodies.
    """

    def __init__(
        self,
        data: bytes,
        context: ssl.SSLContext | None,
        *,
        closes: bool,
        answers_max: int,
        cut: Callable[[str], int | None],
    ) -> None:
        self._data = data
        self._context = context
        self._closes, self._answers_max = closes, answers_max
        self._cut = cut
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.targets: list[str] = []
        self.connections = 0
        self.sent_bytes = 0

    @property
    def endpoint_url(self) -> str:
        """URL of the server."""
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"

    def start(self) -> None:
        """Listen in a thread."""
        self._threads[0].start()

    def stop(self) -> None:
        """Close all connections and wait for the threads."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as file:
                for _ in range(self._answers_max):
                    if not self._answer(connection, file) or self._closes:
                        break

    def _answer(self, connection: socket.socket, file: BinaryIO) -> bool:
        lines: list[str] = []
        while (line := file.readline()).strip():
            lines.append(line.decode().strip())
        asked = next((line for line in lines if line.lower().startswith("range:")), None)
        if asked is None:  # the end of the connection, or a diagnosis
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return bool(lines)
        target = lines[0].split()[1]
        first, last = map(int, asked.partition("=")[2].split("-"))
        body = self._data[first : last + 1]
        cut_bytes = self._cut(target)
        closing = "Connection: close\r\n" * self._closes
        head = (
            f"HTTP/1.1 206 Partial Content\r\n{closing}{_HEADERS}"
            f"Content-Length: {len(body)}\r\nContent-Range: bytes {first}-{last}/{len(self._data)}\r\n\r\n"
        ).encode()
        with self._lock:
            self.targets.append(target)
        if cut_bytes is None or cut_bytes >= 0:
            sent = body[:cut_bytes]
            with self._lock:  # before sending: the test may read the count as soon as the last byte arrives
                self.sent_bytes += len(sent)
            connection.sendall(head + sent)
        if cut_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return cut_bytes is None


@contextmanager
def range_server(
    data: bytes,
    *,
    context: ssl.SSLContext | None = None,
    closes: bool = False,
    answers_max: int = 1_000_000,
    cut: Callable[[str], int | None] = lambda _: None,
) -> Iterator[RangeServer]:
    """Run a server while the block runs."""
    server = RangeServer(data, context, closes=closes, answers_max=answers_max, cut=cut)
    server.start()
    try:
        yield server
    finally:
        server.stop()
