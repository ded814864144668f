"""An S3 server of one object, also over TLS, that closes or cuts connections, and counts them."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.support.clouds import answer_range
from tests.support.scripted_server import HttpAnswer, HttpRequest, Server


@dataclass
class RangeServer:
    """A running server: its URL, the targets of its requests for ranges in their order, and its connections."""

    endpoint_url: str = ""
    targets: list[str] = field(default_factory=list)
    connections: list[object] = field(default_factory=list)


@contextmanager
def range_server(
    data: bytes,
    *,
    context: ssl.SSLContext | None = None,
    headers: dict[str, str] | None = None,
    cut: Callable[[str], int | None] = lambda _: None,
) -> Iterator[RangeServer]:
    """Run a server while the block runs.

    `cut` returns for a target after how many bytes of the body the connection is closed without notice; None for never,
    -1 for no answer at all. `headers` are added to each answer.
    """
    found = RangeServer()

    def answer(request: HttpRequest) -> HttpAnswer:
        if "range" not in request.headers:  # a diagnosis
            return HttpAnswer(404)
        found.targets.append(request.path)
        cut_bytes, whole = cut(request.path), answer_range(request, data)
        if cut_bytes == -1:
            raise ConnectionAbortedError
        return HttpAnswer(whole.status, whole.body, {**whole.headers, **(headers or {})}, cut_bytes=cut_bytes)

    server = Server(answer)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    found.connections = server._connections  # type: ignore[assignment]  # of sockets
    found.endpoint_url = f"http{'s' if context is not None else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
