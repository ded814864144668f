"""An S3 server behind a relay that sees every request, and can cut, slow, delay or refuse it.

The fate of a request is decided at four moments of its way. So a process can be killed when half of its shard is sent,
or when the store has carried out a request whose answer was not sent yet.
"""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from dcp_remote.format import catalog_json
from dcp_remote.format.catalog import CATALOG_KEY, Catalog
from dcp_remote.testing.servers import S3Server
from tests.support.ports import reserved_port
from tests.support.scripted_server import HttpAnswer

# "half": half of the body has arrived; without a body, the same as "sent". "sent": all has arrived, and nothing was
# passed on. "answered": the server has carried it out, and the client has no answer.
Moment: TypeAlias = Literal["half", "sent", "answered"]

# Fate of a request: it goes on; its connection is cut; the relay answers with this status, unless only half has
# arrived; or one bit of the server's answer is flipped.
Fate: TypeAlias = Literal["goes on", "cut", "flipped"] | HttpAnswer

SLOW_DOWN = HttpAnswer(503, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>")
CONFLICT = HttpAnswer(
    409, b"<Error><Code>ConditionalRequestConflict</Code><Message>At the same time.</Message></Error>"
)
DENIED = HttpAnswer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")

_SHARD = re.compile(r"shards/.*-step-(\d+)-rank-(\d+)-")
_MANIFEST = re.compile(r"manifests/step-(\d+)-")

# Headers of one connection, or made anew for the other one.
_HOP_HEADERS = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}

_SLICE_BYTES = 16 * 1024

_UPSTREAM_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in progress."""

    method: str  # HTTP method; a delete of many objects is a POST
    key: str  # key relative to the run; empty for a request that names none in its path
    query: str  # text after the question mark
    size_bytes: int
    catalog: Catalog | None = None  # catalog that a swap puts, once its body has arrived

    @property
    def what(self) -> Literal["shard", "manifest", "swap", "delete", "read", "list", "other"]:
        """Return the request's kind in the run protocol."""
        if self.method == "PUT":
            kinds: dict[str, Literal["shard", "manifest", "swap"]] = {"shards": "shard", "manifests": "manifest"}
            return "swap" if self.key == CATALOG_KEY else kinds.get(self.key.partition("/")[0], "other")
        if self.method == "DELETE" or (self.method == "POST" and "delete" in self.query):
            return "delete"
        if self.method in ("GET", "HEAD"):
            return "list" if "list-type" in self.query else "read"
        return "other"

    @property
    def rank(self) -> int | None:
        """Return the rank that wrote the shard."""
        match = _SHARD.search(self.key)
        return int(match[2]) if match else None

    @property
    def step(self) -> int | None:
        """Return the step of the checkpoint; for a swap the newest step that its job has committed."""
        if self.catalog is not None:
            own = [entry.step for entry in self.catalog.entries if entry.token == self.catalog.token]
            return max(own, default=None)
        match = _SHARD.search(self.key) or _MANIFEST.search(self.key)
        return int(match[1]) if match else None


@dataclass(eq=False)
class Trap:
    """Fate of some requests."""

    moment: Moment  # moment at which `act` is called
    wanted: Callable[[Asked], bool]  # condition on requests
    # Returns the fate of the request; called in the thread that relays it, which may wait there.
    act: Callable[[Asked], Fate]
    times: int  # most calls of `act`
    hits: int = 0  # calls so far
    _hit: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Wait for the first hit; an assertion fails if there is none in time."""
        assert self._hit.wait(seconds), "no such request came by"

    def sprung(self) -> bool:
        return self._hit.is_set()


class Relay:
    """A relay to a server that runs; a context manager.

    Args:
        server: The server behind the relay.
        bucket: Bucket of the run.
        prefix: Prefix of the run in its bucket.
    """

    def __init__(self, server: S3Server, bucket: str, prefix: str) -> None:
        self.server = server  # the server; may be replaced by another one with the same objects
        self.latency_seconds = 0.0  # added latency of every request
        self.bytes_per_second: float | None = None  # rate of all bodies together, in both directions; None is unlimited
        self.catalogs: list[Catalog] = []  # every catalog that the server accepted, by revision
        self._path = f"/{bucket}/{prefix}/"
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._connections: set[socket.socket] = set()
        # Bound and not listening, it keeps the port while the relay is closed.
        self._reserved = reserved_port()
        self._port: int = self._reserved.getsockname()[1]
        self._http: _Server | None = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self.close()
        self._reserved.close()

    @property
    def endpoint_url(self) -> str:
        """Return the URL to use instead of the server's."""
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Accept connections."""
        self._http = _Server(self, self._port)
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="relay", daemon=True
        ).start()

    def close(self) -> None:
        """Cut all connections and refuse new ones, as if no server listened."""
        http_server, self._http = self._http, None
        if http_server is not None:
            http_server.shutdown()
            http_server.socket.close()
            with self._lock:
                open_ones = list(self._connections)
            for connection in open_ones:
                cut(connection)
            http_server.server_close()  # joins the threads

    def trap(
        self,
        moment: Moment,
        wanted: Callable[[Asked], bool],
        act: Callable[[Asked], Fate],
        *,
        times: int = 1,
    ) -> Trap:
        """Set the fate of such requests from now on."""
        trap = Trap(moment, wanted, act, times)
        with self._lock:
            self._traps.append(trap)
        return trap

    def clear(self) -> None:
        """Remove all traps and limits."""
        with self._lock:
            self._traps.clear()
        self.latency_seconds, self.bytes_per_second = 0.0, None

    @contextmanager
    def trapped(
        self, moment: Moment, wanted: Callable[[Asked], bool], act: Callable[[Asked], Fate], *, times: int = 1
    ) -> Iterator[Trap]:
        """Set a trap while the block runs."""
        trap = self.trap(moment, wanted, act, times=times)
        try:
            yield trap
        finally:
            with self._lock:
                if trap in self._traps:
                    self._traps.remove(trap)

    # ---- called by the threads that relay

    def asked(self, method: str, path: str, size_bytes: int) -> Asked:
        place, _, query = path.partition("?")
        return Asked(method, place.removeprefix(self._path) if place.startswith(self._path) else "", query, size_bytes)

    def meet(self, moment: Moment, asked: Asked) -> Fate:
        with self._lock:
            trap = next((one for one in self._traps if one.moment == moment and one.wanted(asked)), None)
            if trap is not None:
                trap.hits += 1
                if trap.hits >= trap.times:
                    self._traps.remove(trap)
        if trap is None:
            return "goes on"
        try:
            return trap.act(asked)
        finally:
            trap._hit.set()

    def pass_through(self, size_bytes: int) -> None:
        """Wait until so many bytes have passed at the relay's rate."""
        rate = self.bytes_per_second
        if rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / rate
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))

    def accepted(self, catalog: Catalog) -> None:
        """Record a catalog that the server accepted."""
        with self._lock:
            self.catalogs.append(catalog)
            self.catalogs.sort(key=lambda one: one.revision)

    def connected(self, connection: socket.socket, *, is_open: bool) -> None:
        """Record that a client connected or disconnected."""
        with self._lock:
            (self._connections.add if is_open else self._connections.discard)(connection)


def cut(connection: socket.socket) -> None:
    """End a connection in both directions, in the middle of its message."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined, so that no thread outlives its test

    def __init__(self, relay: Relay, port: int) -> None:
        self.relay = relay
        super().__init__(("127.0.0.1", port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and record it."""
        connection, address = super().get_request()
        self.relay.connected(connection, is_open=True)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and drop its record."""
        self.relay.connected(request, is_open=False)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that vanish: the tests kill them."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server
    connection: socket.socket
    _upstream: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        """Relay all requests of a connection."""
        try:
            with suppress(OSError, http.client.HTTPException):
                super().handle()
        finally:
            if self._upstream is not None:
                self._upstream.close()

    def _relay(self) -> None:
        relay = self.server.relay
        size_bytes = int(self.headers.get("Content-Length", "0"))
        asked = relay.asked(self.command, self.path, size_bytes)
        time.sleep(relay.latency_seconds)
        first = self._read(size_bytes // 2)
        fate = relay.meet("half", asked)
        assert not isinstance(fate, HttpAnswer), "answered before it was asked"
        if self._stops(fate):
            return
        body = first + self._read(size_bytes - len(first))
        if asked.what == "swap":
            asked = replace(asked, catalog=catalog_json.decode(body))
        if self._stops(relay.meet("sent", asked)):
            return
        status, headers, answer = self._ask(body)
        if asked.catalog is not None and status == http.HTTPStatus.OK:
            relay.accepted(asked.catalog)
        fate = relay.meet("answered", asked)
        if self._stops(fate):
            return
        if fate == "flipped":
            middle = len(answer) // 2
            answer = answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :]
        self._send(status, headers, answer)

    def _read(self, size_bytes: int) -> bytes:
        parts, missing = [], size_bytes
        while missing:
            part = self.rfile.read(min(missing, _SLICE_BYTES))
            if not part:
                raise ConnectionResetError("the client went away")
            self.server.relay.pass_through(len(part))
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def _stops(self, fate: Fate) -> bool:
        if fate in ("goes on", "flipped"):
            return False
        self.close_connection = True
        if fate == "cut":
            cut(self.connection)
        else:
            assert isinstance(fate, HttpAnswer)
            self._send(fate.status, {"Content-Length": str(len(fate.body)), "Connection": "close"}, fate.body)
        return True

    def _ask(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        target = urlsplit(self.server.relay.server.endpoint_url).netloc
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
        if self._upstream is None or f"{self._upstream.host}:{self._upstream.port}" != target:
            self._upstream = http.client.HTTPConnection(target, timeout=_UPSTREAM_SECONDS)
        self._upstream.request(self.command, self.path, body=body, headers=headers)
        response = self._upstream.getresponse()
        answer = response.read()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_HEADERS}
        # A HEAD has the length of what a GET would return.
        length = response.getheader("Content-Length") if self.command == "HEAD" else None
        return response.status, kept | {"Content-Length": length or str(len(answer))}, answer

    def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for first in range(0, len(body), _SLICE_BYTES):
            part = body[first : first + _SLICE_BYTES]
            self.server.relay.pass_through(len(part))
            self.wfile.write(part)

    # The names that the base class looks for.
    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _relay

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Log nothing: traps see the requests."""
