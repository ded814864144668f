"""An HTTP server on the loopback interface that gives the answers that a test defines, and records the requests.

Clients in Rust cannot be patched in-process. The answers include errors and silence.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Request of a client; names of headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Answer to a request.

    Attributes:
        status: HTTP status, such as 200 or 404.
        body: Body of the answer; not sent to a HEAD request.
        headers: Further headers. Content-Length is that of `body` unless given here.
        cut_bytes: Number of bytes of the body after which the connection is closed; None sends all.
        silent: True to send no answer while the server runs.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """Running scripted server.

    Attributes:
        endpoint_url: URL at which the server listens, on the loopback interface only.
        requests: Requests so far, in the order of arrival.
    """

    endpoint_url: str
    requests: list[HttpRequest]


class Server(ThreadingHTTPServer):
    # Not daemons, so that `server_close` joins them and no thread outlives its test.
    daemon_threads = False

    def __init__(self, answer: Callable[[HttpRequest], HttpAnswer]) -> None:
        self.answer = answer
        self.requests: list[HttpRequest] = []
        self.closing = threading.Event()
        self._connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection and record it for `server_close`."""
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def server_close(self) -> None:
        """Close all connections, and wait for the threads."""
        self.closing.set()
        for connection in self._connections:
            with suppress(OSError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: many tests let a client disconnect on purpose."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and body are two writes: with Nagle's algorithm, the second would wait for the client's delayed ACK.
    disable_nagle_algorithm = True
    server: Server

    def _answer(self) -> None:
        request = HttpRequest(
            method=self.command,
            path=self.path,
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length", "0"))),
        )
        self.server.requests.append(request)
        answer = self.server.answer(request)
        if answer.silent:
            self.server.closing.wait()
            self.close_connection = True
            return
        self.send_response(answer.status)
        headers = {"Content-Length": str(len(answer.body)), **answer.headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: answer.cut_bytes])
        if answer.cut_bytes is not None:
            self.close_connection = True

    # The base class looks up these names.
    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # names that http.server calls

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Print nothing: tests read `requests`."""


@contextmanager
def scripted_server(answer: Callable[[HttpRequest], HttpAnswer]) -> Iterator[ScriptedServer]:
    """Run an HTTP server in a thread during the block; `answer` returns the answer to each request."""
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="scripted-server")
    thread.start()
    try:
        yield ScriptedServer(endpoint_url=f"http://127.0.0.1:{server.server_port}", requests=server.requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
