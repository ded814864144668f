"""Servers on this machine, for tests and demonstrations: clients in Rust cannot be patched inside the test's process.

`moto_server` is an S3 server, in a process of its own. It keeps everything in memory and verifies neither signatures
nor checksums: it shows what a client does, not what a store guarantees. `scripted_server` answers what a test tells it
to, errors and silence included, and remembers what it was asked.
"""

from __future__ import annotations

import http.client
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dcp_remote.errors import InvalidArgumentError, StorageError

# moto imports a good part of botocore before it listens: a second or two, on a busy machine many more.
START_SECONDS_MAX = 60.0

# Enough for the server to leave by itself; after that it is killed.
STOP_SECONDS_MAX = 5.0

# The child binds port 0 itself and says which one it got: a port that was probed could be taken before it is bound.
# It ends when its standard input does, which the kernel closes however this process dies.
# moto's state knows no threads: of two puts and a get of one key at a time, one is answered 500. So it works on one
# request at a time, whose body has arrived: a client that dies in the middle of it leaves nothing, as on a real store.
_CHILD = """
import io, os, sys, threading

def end_with_the_parent():
    sys.stdin.buffer.read()
    os._exit(0)

threading.Thread(target=end_with_the_parent, daemon=True).start()

import logging
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

class Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as by a real store

    def log_request(self, code="-", size="-"):
        pass

moto = DomainDispatcherApplication(create_backend_app)
working = threading.Lock()

def one_at_a_time(environ, start_response):
    size_bytes = int(environ.get("CONTENT_LENGTH") or 0)
    body = environ["wsgi.input"].read(size_bytes)
    if len(body) != size_bytes:
        raise ConnectionResetError("the client went away")
    environ["wsgi.input"] = io.BytesIO(body)
    with working:
        answer = moto(environ, start_response)
        try:
            return [b"".join(answer)]
        finally:
            if hasattr(answer, "close"):
                answer.close()

server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True, request_handler=Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class S3Server:
    """A server that runs.

    Attributes:
        endpoint_url: Where it listens, on the loopback interface only.
        pid: Its process.
    """

    endpoint_url: str
    pid: int

    @property
    def storage_options(self) -> dict[str, str]:
        """What to pass as `storage_options`; the server takes any credentials, and these are nobody's."""
        return {
            "endpoint_url": self.endpoint_url,
            "region_name": "us-east-1",
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
        }

    def create_bucket(self, name: str) -> None:
        """Create a bucket, in one request; one that exists already stays as it is.

        Raises:
            StorageError: The server refused.
        """
        # Plain HTTP: the server checks no signature, and this file needs no client library of any store.
        connection = http.client.HTTPConnection(urlsplit(self.endpoint_url).netloc, timeout=30)
        try:
            connection.request("PUT", f"/{name}")
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise StorageError(
                "The test server did not create the bucket.", bucket=name, status=response.status, answer=answer
            )


@contextmanager
def moto_server(*, log_path: Path | None = None) -> Iterator[S3Server]:
    """Run moto's S3 server while the block runs. What it stores is lost with it.

    It is stopped by its own handle, and ends by itself when this process dies in any way. Needs `moto[server,s3]`.

    Args:
        log_path: Where its errors go, appended; by default they are discarded.

    Raises:
        InvalidArgumentError: moto is not installed, or did not start; the message quotes what it said, if that was
            kept in `log_path`.
    """
    # Nothing of the user's AWS configuration concerns a server of our own.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    log = log_path.open("ab") if log_path is not None else None
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log if log is not None else subprocess.DEVNULL,
            env=environment,
        )
    finally:
        if log is not None:
            log.close()
    try:
        port = _read_port(process, log_path=log_path)
        yield S3Server(endpoint_url=f"http://127.0.0.1:{port}", pid=process.pid)
    finally:
        _stop(process)


def _read_port(process: subprocess.Popen[bytes], *, log_path: Path | None) -> int:
    """The one line that the child prints, once it listens: from then on connections wait until it answers."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS_MAX
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            ready = selector.select(timeout=max(0.0, deadline - time.monotonic()))
            # Unbuffered: the selector sees only what the kernel still holds.
            got = os.read(process.stdout.fileno(), 100) if ready else b""
            if not got:
                raise InvalidArgumentError(
                    "moto's server did not start: is `moto[server,s3]` installed?",
                    exit_status=process.poll(),
                    log=log_path.read_text(errors="replace")[-2000:] if log_path is not None else None,
                )
            line += got
    return int(line)


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What a client sent; names of headers in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What to answer.

    Attributes:
        status: 200, 404, ...
        body: What Content-Length is of, unless `headers` give one. Not sent to a HEAD.
        headers: Others.
        cut_bytes: Send this much of the body, and then close the connection.
        silent: Do not answer at all, while the server runs.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_bytes: int | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """A server that runs.

    Attributes:
        endpoint_url: Where it listens, on the loopback interface only.
        requests: What it was asked so far, in the order of arrival.
    """

    endpoint_url: str
    requests: list[HttpRequest]


class _Server(ThreadingHTTPServer):
    # Joined at the end, so that no thread outlives its test.
    daemon_threads = False

    def __init__(self, answer: Callable[[HttpRequest], HttpAnswer]) -> None:
        self.answer = answer
        self.requests: list[HttpRequest] = []
        self.ending = threading.Event()
        self._connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and remember it."""
        connection, address = super().get_request()
        self._connections.append(connection)
        return connection, address

    def server_close(self) -> None:
        """Close what clients keep open, and wait for the threads."""
        self.ending.set()
        for connection in self._connections:
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The headers and the body are two writes, and the second would wait for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: _Server

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
            self.server.ending.wait()
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

    # The names that the base class looks for.
    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Tests look into `requests`."""


@contextmanager
def scripted_server(answer: Callable[[HttpRequest], HttpAnswer]) -> Iterator[ScriptedServer]:
    """Run an HTTP server in a thread while the block runs; `answer` says what it answers. It remembers all requests."""
    server = _Server(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="scripted-server")
    thread.start()
    try:
        yield ScriptedServer(endpoint_url=f"http://127.0.0.1:{server.server_port}", requests=server.requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
