"""The benchmark's S3 server: a process whose own CPU does not hide the client's.

    with bench_server(size_bytes=4 * GiB) as server:
        store = open_store("s3://bench", storage_options=server.storage_options)
        server.shape(Shape(latency_ms=100, slow_down_share=0.05))
        server.reset()
        ...
        print(server.counts().requests)

Bodies lie in one file in shared memory (`space.py`), which the kernel fills and empties (`wire.py`).

What it is not: it checks no signature and knows no versions, grants or regions. Any credentials will do, it listens
on the loopback interface unless told otherwise, and what it does not know it answers with 501. All that it holds is
lost with the process.

By hand: `python -m tests.benchmark.server.server` prints one line of JSON, and ends when its standard input does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import selectors
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from dcp_remote.common.units import GiB
from dcp_remote.errors import InvalidArgumentError, StorageError
from tests.benchmark.server.certificates import make_certificates
from tests.benchmark.server.connection import Connection
from tests.benchmark.server.counts import Counts, parse_counts
from tests.benchmark.server.service import Service
from tests.benchmark.server.shape import Shape
from tests.benchmark.server.wire import Wire

# A shape is what a server is started with.
__all__ = ["BenchServer", "bench_server", "main"]

# Preallocating zeroes every page and maps it: about a second a GiB, on a busy machine several.
START_SECONDS_MAX = 120.0

# It leaves at the first word; after that it is killed.
STOP_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class BenchServer:
    """A server that runs."""

    endpoint_url: str  # URL on the loopback interface
    pid: int
    ca_file: Path | None  # certificate of the authority; None over http

    @property
    def storage_options(self) -> dict[str, str]:
        """Options to pass as `storage_options`; the server takes any credentials, and these are nobody's."""
        options = {
            "endpoint_url": self.endpoint_url,
            "key": "benchmark",
            "secret": "benchmark",
            "region_name": "us-east-1",
        }
        return options if self.ca_file is None else {**options, "verify": str(self.ca_file)}

    def counts(self) -> Counts:
        """Return its counts since it was started, or reset."""
        return parse_counts(self._ask("GET", "/-/counts"))

    def reset(self) -> None:
        """Count from zero."""
        self._ask("POST", "/-/reset")

    def clear(self) -> None:
        """Forget all objects and uploads; buckets and counts stay."""
        self._ask("POST", "/-/clear")

    def shape(self, shape: Shape) -> None:
        """Behave so from the next request on, its faults drawn anew."""
        self._ask("POST", "/-/shape", json.dumps(asdict(shape)).encode())

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection to it, which its first request opens."""
        parts = urlsplit(self.endpoint_url)
        assert parts.hostname is not None
        if self.ca_file is None:
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        context = ssl.create_default_context(cafile=self.ca_file)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=60, context=context)

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = self.connection()
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
        if response.status != HTTPStatus.OK:
            raise StorageError(
                "The benchmark's server refused.", asked=f"{method} {path}", status=response.status, answer=answer
            )
        return answer


@contextmanager
def bench_server(
    *,
    size_bytes: int = GiB,  # room for bodies, taken at once: about a second a GiB
    folder: Path | None = None,  # where they lie; by default shared memory
    tls: bool = False,  # https, with certificates made for this server; needs the `openssl` command
    verify: bool = False,  # refuse bodies whose checksum is wrong; needs awscrt
    buckets: Sequence[str] = ("bench",),  # made at the start
    shape: Shape | None = None,  # how it behaves; by default as fast as it can, without faults
) -> Iterator[BenchServer]:
    """Run the server in a process of its own while the block runs. What it stores is lost with it.

    It is stopped by its own handle, and ends by itself when this process dies in any way.
    """
    command = [sys.executable, "-m", "tests.benchmark.server.server", "--bytes", str(size_bytes)]
    command += ["--folder", str(folder)] if folder is not None else []
    command += [flag for flag, wanted in (("--tls", tls), ("--verify", verify)) if wanted]
    command += [argument for bucket in buckets for argument in ("--bucket", bucket)]
    command += ["--shape", json.dumps(asdict(shape))] if shape is not None else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # our own words
    ca_file = None
    try:
        told = _read_line(process)
        ca_file = Path(told["ca_file"]) if told["ca_file"] is not None else None
        scheme = "http" if ca_file is None else "https"
        server = BenchServer(f"{scheme}://127.0.0.1:{told['port']}", process.pid, ca_file)
        server.reset()  # and so it has answered
        yield server
    finally:
        _stop(process)
        if ca_file is not None:  # it did so itself, unless it had to be killed
            shutil.rmtree(ca_file.parent, ignore_errors=True)


def _read_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The one line that the server prints, once it listens: from then on connections wait until it answers."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS_MAX
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            ready = selector.select(timeout=max(0.0, deadline - time.monotonic()))
            # Unbuffered: the selector sees only what the kernel still holds.
            got = os.read(process.stdout.fileno(), 4096) if ready else b""
            if not got:
                raise InvalidArgumentError("The benchmark's server did not start.", exit_status=process.poll())
            line += got
    told: dict[str, Any] = json.loads(line)
    if "error" in told:
        raise InvalidArgumentError(f"The benchmark's server did not start: {told['error']}")
    return told


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdin.close()
    process.stdout.close()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the server until standard input ends, or a signal comes. Prints one line of JSON.

    That has `port`, `pid` and `ca_file` (null over http) once it listens; or `error`, where it cannot, and ends.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmark.server.server", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--bytes", type=int, default=GiB, help="room for bodies; taken at once")
    parser.add_argument("--folder", type=Path, default=_default_folder(), help="where the file lies; shared memory")
    parser.add_argument("--tls", action="store_true", help="https, with certificates that are made at the start")
    parser.add_argument("--verify", action="store_true", help="refuse bodies whose checksum is wrong; needs awscrt")
    parser.add_argument("--bucket", action="append", default=[], help="made at the start; may be repeated")
    parser.add_argument("--address", default="127.0.0.1", help="where it listens; by default on the loopback interface")
    parser.add_argument("--port", type=int, default=0, help="at which it listens; by default any free one")
    parser.add_argument("--shape", default="{}", help='like {"latency_ms": 100}; names as in the class Shape')
    options = parser.parse_args(arguments)
    secrets = Path(tempfile.mkdtemp(prefix="dcp-remote-bench-")) if options.tls else None

    def leave(status: int) -> NoReturn:
        if secrets is not None:
            shutil.rmtree(secrets, ignore_errors=True)
        # At once: threads are in the middle of transfers, and what they transfer lies in a mapping.
        os._exit(status)

    def watch_the_parent() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        leave(0)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: leave(0))
    threading.Thread(target=watch_the_parent, name="parent", daemon=True).start()
    try:
        ca_file, tls = None, None
        if secrets is not None:
            ca_file, chain = make_certificates(secrets)
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(chain)
        listening = socket.create_server((options.address, options.port), backlog=1024)
        service = Service(
            folder=options.folder,
            size_bytes=options.bytes,
            verify=options.verify,
            buckets=options.bucket,
            shape=Shape(**json.loads(options.shape)),
        )
    except (InvalidArgumentError, OSError) as error:
        _tell(error=str(error))
        leave(2)
    _tell(port=listening.getsockname()[1], pid=os.getpid(), ca_file=str(ca_file) if ca_file is not None else None)
    while True:
        connected, _ = listening.accept()
        connection = Connection(service, Wire(service.space, connected, tls))
        threading.Thread(target=connection.serve, name="connection", daemon=True).start()


def _tell(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _default_folder() -> Path:
    shared_memory = Path("/dev/shm")  # the file has no name there
    return shared_memory if shared_memory.is_dir() else Path(tempfile.gettempdir())


if __name__ == "__main__":
    main()
