"""An S3 server on the loopback interface that takes so many requests a second and prefix, and answers 503 to others.

    with rated_server(Rates(puts=3500, gets=5500)) as server:
        store = open_store("s3://storm/run", storage_options=server.storage_options)
        ...
        print(server.count("PUT", is_refused=True), max(server.seconds("PUT")))

It knows PUT and ranged GET of an object, in one thread of asyncio, and has a token bucket for each method and prefix,
the first folder of a key. Everything else is answered with 404 and counted as "other". It ends with the block.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

from tests.support.storm import Prefixes

_BUCKET = "storm"

# Requests beyond these wait for the kernel: all ranks connect in the same second.
_BACKLOG = 4096

_STATUS = {200: "OK", 206: "Partial Content", 404: "Not Found", 503: "Slow Down"}
_ERROR = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>Of the test.</Message></Error>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Requests a second of each prefix, and how long one takes that is accepted. Those of S3, unless scaled."""

    puts: float = 3500.0
    gets: float = 5500.0
    put_seconds: float = 0.3
    get_seconds: float = 0.13

    def scaled(self, factor: float) -> Rates:
        """Return the rates of a store that is so many times as large."""
        return Rates(
            puts=self.puts * factor,
            gets=self.gets * factor,
            put_seconds=self.put_seconds,
            get_seconds=self.get_seconds,
        )


class RatedServer:
    """Server that runs in a thread; see `rated_server`.

    Attributes:
        objects: Accepted objects, by key.
        answered: Accepted requests: method, key and range.
        is_limited: False to take all requests at once.
        connections: Connections that were made.
    """

    def __init__(self, rates: Rates) -> None:
        """Listen nowhere yet."""
        self.rates = rates
        self.objects: dict[str, bytes] = {}
        self.port = 0
        self.is_limited = True
        self.loop = asyncio.new_event_loop()
        self._of_prefix: dict[tuple[str, str], Prefixes] = {}
        self.reset()

    def reset(self) -> None:
        """Count from zero; objects stay."""
        self.answered: Counter[tuple[str, str, str]] = Counter()
        self.connections = 0
        self._began: float | None = None
        self._offered: Counter[tuple[str, bool, int]] = Counter()  # by method, refusal and second
        self.ended_seconds = 0.0  # from the first request to the last answer

    @property
    def storage_options(self) -> dict[str, str]:
        """Options of a store on this server."""
        options = {"endpoint_url": f"http://127.0.0.1:{self.port}", "region_name": "us-east-1"}
        return options | {"key": "storm", "secret": "storm"}

    def count(self, method: str, *, is_refused: bool) -> int:
        """Return the requests of a method that were refused, or accepted."""
        return sum(count for (of, refused, _), count in self._offered.items() if (of, refused) == (method, is_refused))

    def seconds(self, method: str, *, is_refused: bool | None = None) -> list[int]:
        """Return the requests in each second, from the first request on; all, or those refused or accepted."""
        found: Counter[int] = Counter()
        for (of, refused, second), count in self._offered.items():
            if of == method and is_refused in (None, refused):
                found[second] += count
        return [found[second] for second in range(max(found, default=-1) + 1)]

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[float, bytes]:
        """Return the answer to a request, and the seconds after which it is sent."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        key = unquote(path.partition("?")[0]).removeprefix(f"/{_BUCKET}/")
        asked = headers.get("range", "")
        is_known = method == "PUT" or (method == "GET" and bool(asked))
        if not is_known:
            self._offered["other", False, int(now - self._began)] += 1
            return 0.0, _answer(404, _ERROR.format("NoSuchKey").encode())
        is_taken = not self.is_limited or self._takes(method, key.partition("/")[0], now)
        self._offered[method, not is_taken, int(now - self._began)] += 1
        if not is_taken:
            return 0.0, _answer(503, _ERROR.format("SlowDown").encode())
        self.answered[method, key, asked] += 1
        seconds = self.rates.put_seconds if method == "PUT" else self.rates.get_seconds
        self.ended_seconds = now + seconds - self._began
        if method == "PUT":
            self.objects[key] = body
            return seconds, _answer(200, b"", etag='"0"')
        start, stop = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        whole = self.objects[key]
        told = {"content-range": f"bytes {start}-{stop}/{len(whole)}", "etag": '"0"'}
        told |= {"last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        return seconds, _answer(206, whole[start : stop + 1], **told)

    def _takes(self, method: str, prefix: str, now: float) -> bool:
        rate = self.rates.puts if method == "PUT" else self.rates.gets
        one = self._of_prefix.setdefault((method, prefix), Prefixes(1, rate))
        return one.takes(0, now)


class _Connection(asyncio.Protocol):
    """One connection, whose requests come one after another."""

    def __init__(self, server: RatedServer) -> None:
        self._server = server
        self._inbox = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections += 1

    def data_received(self, data: bytes) -> None:
        self._inbox += data
        end = self._inbox.find(b"\r\n\r\n")
        if end < 0:
            return
        first, *lines = self._inbox[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body_end = end + 4 + int(headers.get("content-length", "0"))
        if len(self._inbox) < body_end:
            return
        body = bytes(self._inbox[end + 4 : body_end])
        del self._inbox[:body_end]
        method, path, _ = first.split(" ")
        seconds, answer = self._server.answer(method, path, headers, body)
        if seconds:
            self._server.loop.call_later(seconds, partial(self._send, answer))
        else:
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _answer(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} {_STATUS[status]}", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def rated_server(rates: Rates) -> Iterator[RatedServer]:
    """Run a server while the block runs."""
    server = RatedServer(rates)
    loop = server.loop

    async def listen() -> asyncio.Server:
        return await loop.create_server(partial(_Connection, server), "127.0.0.1", 0, backlog=_BACKLOG)

    thread = threading.Thread(target=loop.run_forever, name="rated server")
    thread.start()
    try:
        listening = asyncio.run_coroutine_threadsafe(listen(), loop).result()
        server.port = listening.sockets[0].getsockname()[1]
        yield server
        loop.call_soon_threadsafe(listening.close)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
