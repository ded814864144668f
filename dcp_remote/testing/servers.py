"""An S3 server on the loopback interface, for tests and demonstrations: moto's, in its own process.

The server keeps all objects in memory and verifies neither signatures nor checksums, so it tests what a client does,
not what a store guarantees.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dcp_remote.errors import InvalidArgumentError, StorageError

# Before it listens, moto imports much of botocore, which takes a second or two, and many more on a busy machine.
START_SECONDS_MAX = 60.0

# Time for the server to exit by itself, after which it is killed.
STOP_SECONDS_MAX = 5.0

# The child binds port 0 and prints the port that it got: a port probed here could be taken before the child binds it.
# The child exits when its standard input closes, which happens however this process dies.
# moto is not thread-safe: of two puts and a get of one key at a time, one is answered 500. So requests are handled one
# at a time, and only once the body is complete: a client that dies while sending leaves nothing, as on a real store.
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
    """Running S3 server.

    Attributes:
        endpoint_url: URL at which the server listens, on the loopback interface only.
        pid: Process id of the server.
    """

    endpoint_url: str
    pid: int

    @property
    def storage_options(self) -> dict[str, str]:
        """Value for `storage_options`. The credentials are fake; the server accepts any."""
        return {
            "endpoint_url": self.endpoint_url,
            "region_name": "us-east-1",
            "aws_access_key_id": "testing",
            "aws_secret_access_key": "testing",
        }

    def create_bucket(self, name: str) -> None:
        """Create a bucket, in one request; an existing bucket stays as it is.

        Raises:
            StorageError: The server refused.
        """
        # Plain HTTP, so that no client library of a store is needed; the server checks no signature.
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
    """Run moto's S3 server during the block; its objects are lost at the end. Needs `moto[server,s3]`.

    The server also exits when this process dies in any way.

    Args:
        log_path: File to which the server's errors are appended; None discards them.

    Raises:
        InvalidArgumentError: moto is not installed, or did not start; the message quotes the end of `log_path`.
    """
    # The user's AWS configuration must not affect this server.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    log = log_path.open("ab") if log_path is not None else None
    with log or nullcontext():
        process = subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log or subprocess.DEVNULL,
            env=environment,
        )
    try:
        port = _read_port(process, log_path=log_path)
        yield S3Server(endpoint_url=f"http://127.0.0.1:{port}", pid=process.pid)
    finally:
        _stop(process)


def _read_port(process: subprocess.Popen[bytes], *, log_path: Path | None) -> int:
    """Read the port, which the child prints once it listens; connections are accepted from then on."""
    assert process.stdout is not None
    give_up = threading.Timer(START_SECONDS_MAX, process.kill)
    give_up.start()
    try:
        line = process.stdout.readline()
    finally:
        give_up.cancel()
    if not line.endswith(b"\n"):
        raise InvalidArgumentError(
            "moto's server did not start. Install `moto[server,s3]`, or see the log.",
            exit_status=process.poll(),
            log=log_path.read_text(errors="replace")[-2000:] if log_path is not None else None,
        )
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
