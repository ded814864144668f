"""An S3 server behind a link that is watched request by request, and can be cut, slowed, held up, refused.

What happens to a request is decided at four moments of its way. So a process can be killed while half of its shard is
sent, or when the store has carried out what nobody has heard of yet.
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
from dcp_remote.testing.servers import HttpAnswer, S3Server

# "half": half of the body has arrived; of what has none, as "sent". "sent": all of it, and the server knows nothing.
# "answered": the server has carried it out, and the client knows nothing.
Moment: TypeAlias = Literal["half", "sent", "answered"]

# What becomes of a request: it goes on; its connection is cut; it is answered so, unless it is only half there; or one
# bit of the server's answer is another.
Fate: TypeAlias = Literal["goes on", "cut", "flipped"] | HttpAnswer

SLOW_DOWN = HttpAnswer(503, b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>")
CONFLICT = HttpAnswer(
    409, b"<Error><Code>ConditionalRequestConflict</Code><Message>At the same time.</Message></Error>"
)
DENIED = HttpAnswer(403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>")

_SHARD = re.compile(r"shards/.*-step-(\d+)-rank-(\d+)-")
_MANIFEST = re.compile(r"manifests/step-(\d+)-")

# These belong to one connection, or are made anew for the other one.
_HOP_HEADERS = {"connection", "content-length", "date", "host", "server", "transfer-encoding"}

_SLICE_BYTES = 16 * 1024

_UPSTREAM_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request on its way.

    Attributes:
        method: Of HTTP; a delete of many objects is a POST.
        key: Relative to the run; of a request that names none in its path, empty.
        query: What follows the question mark.
        size_bytes: Of its body.
        catalog: That a swap puts, once it has arrived.
    """

    method: str
    key: str
    query: str
    size_bytes: int
    catalog: Catalog | None = None

    @property
    def what(self) -> Literal["shard", "manifest", "swap", "delete", "read", "list", "other"]:
        """What it is to the run protocol."""
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
        """Whose shard it is."""
        match = _SHARD.search(self.key)
        return int(match[2]) if match else None

    @property
    def step(self) -> int | None:
        """Of which checkpoint; of a swap the newest of those that its job has committed."""
        if self.catalog is not None:
            own = [entry.step for entry in self.catalog.entries if entry.token == self.catalog.token]
            return max(own, default=None)
        match = _SHARD.search(self.key) or _MANIFEST.search(self.key)
        return int(match[1]) if match else None


@dataclass(eq=False)
class Trap:
    """What is done to some requests.

    Attributes:
        moment: At which it is done.
        wanted: To which requests.
        act: Says what becomes of the request; called in the thread that relays it, which may wait there.
        times: How often at most.
        hits: How often so far.
    """

    moment: Moment
    wanted: Callable[[Asked], bool]
    act: Callable[[Asked], Fate]
    times: int
    hits: int = 0
    _hit: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Until it is sprung; an assertion fails if it is not."""
        assert self._hit.wait(seconds), "no such request came by"

    def sprung(self) -> bool:
        """Whether it was, at least once."""
        return self._hit.is_set()


class Relay:
    """A link to a server that runs; use as a context manager.

    Args:
        server: What is behind it.
        bucket: Of the run.
        prefix: Of the run, in its bucket.

    Attributes:
        server: May be replaced by another that holds the same.
        latency_seconds: Of every request.
        bytes_per_second: Of all bodies together, in both directions; None is as fast as it goes.
        catalogs: Every catalog that the server accepted, by revision.
    """

    def __init__(self, server: S3Server, bucket: str, prefix: str) -> None:
        self.server = server
        self.latency_seconds = 0.0
        self.bytes_per_second: float | None = None
        self.catalogs: list[Catalog] = []
        self._path = f"/{bucket}/{prefix}/"
        self._traps: list[Trap] = []
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._connections: set[socket.socket] = set()
        # Bound and not listened at, it keeps the port while the link is down.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
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
        """Where to connect instead of to the server."""
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Take connections."""
        self._http = _Server(self, self._port)
        threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, name="relay", daemon=True
        ).start()

    def close(self) -> None:
        """Cut all connections and refuse new ones, as where no server listens."""
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
        """Do this to such requests from now on."""
        trap = Trap(moment, wanted, act, times)
        with self._lock:
            self._traps.append(trap)
        return trap

    def clear(self) -> None:
        """No traps, and a fast link."""
        with self._lock:
            self._traps.clear()
        self.latency_seconds, self.bytes_per_second = 0.0, None

    @contextmanager
    def trapped(
        self, moment: Moment, wanted: Callable[[Asked], bool], act: Callable[[Asked], Fate], *, times: int = 1
    ) -> Iterator[Trap]:
        """As `trap`, while the block runs."""
        trap = self.trap(moment, wanted, act, times=times)
        try:
            yield trap
        finally:
            with self._lock:
                if trap in self._traps:
                    self._traps.remove(trap)

    # ---- in the threads that relay

    def asked(self, method: str, path: str, size_bytes: int) -> Asked:
        place, _, query = path.partition("?")
        return Asked(method, place.removeprefix(self._path) if place.startswith(self._path) else "", query, size_bytes)

    def meet(self, moment: Moment, asked: Asked) -> Fate:
        """What becomes of a request now."""
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
        """Wait until so many bytes have gone over the link."""
        rate = self.bytes_per_second
        if rate is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size_bytes / rate
            wait_seconds = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait_seconds))

    def accepted(self, catalog: Catalog) -> None:
        """The server has taken it."""
        with self._lock:
            self.catalogs.append(catalog)
            self.catalogs.sort(key=lambda one: one.revision)

    def connected(self, connection: socket.socket, *, is_open: bool) -> None:
        """A client has come, or gone."""
        with self._lock:
            (self._connections.add if is_open else self._connections.discard)(connection)


def cut(connection: socket.socket) -> None:
    """End it in both directions, in the middle of whatever it carries."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined, so that none outlives its test

    def __init__(self, relay: Relay, port: int) -> None:
        self.relay = relay
        super().__init__(("127.0.0.1", port), _Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and remember it."""
        connection, address = super().get_request()
        self.relay.connected(connection, is_open=True)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, and forget it."""
        self.relay.connected(request, is_open=False)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Peers that vanish are what this is about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server
    connection: socket.socket
    _upstream: http.client.HTTPConnection | None = None

    def handle(self) -> None:
        """All requests of a connection."""
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
        # Of a HEAD it is that of what a GET would give.
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
        """Traps see what comes by."""
