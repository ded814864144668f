"""One connection, in one thread: requests in, answers out; counted, delayed, and failed where the shape says so.

It counts before it answers, so whoever has an answer finds it counted. What is asked below `/-/` is neither counted nor
shaped.
"""

from __future__ import annotations

import json
import time
from http import HTTPStatus

from tests.benchmark.server.body import Body
from tests.benchmark.server.reply import Reply, error_reply
from tests.benchmark.server.request import Request, S3Error, operation_of, parse_head
from tests.benchmark.server.service import Service
from tests.benchmark.server.wire import GoneError, Wire


class Connection:
    """Requests of one client, one after another."""

    def __init__(self, service: Service, wire: Wire) -> None:
        self._service = service
        self._wire = wire

    def serve(self) -> None:
        """Answer until the client has no more to ask."""
        try:
            self._wire.open()
            while self._answer_one():
                pass
        except OSError:
            pass  # it went, or was sent away
        finally:
            self._wire.close()

    def _answer_one(self) -> bool:
        """One request; whether there may be another."""
        head = self._wire.read_head()
        try:
            request = parse_head(head)
        except S3Error as error:
            self._send_reply("GET", error_reply(error, None), close=True)
            return False
        if request.path.startswith("/-/"):
            return self._answer_admin(request)
        shape, slow_downs = self._service.shape
        self._wire.pace(shape.bandwidth_bytes_per_second)
        is_slowed = slow_downs.draw(f"{request.bucket}/{request.key}")
        operation = operation_of(request)
        try:
            body = Body(self._wire, request)
            reply = self._reply(operation, request, body, is_slowed=is_slowed)
        except OSError:
            self._service.counter.request(operation, bytes_in=self._wire.bytes_in, bytes_out=0)
            raise
        close = body.unwanted or not request.keep_alive
        try:
            if shape.latency_ms:
                time.sleep(shape.latency_ms / 1000)
            size_bytes = reply.body_bytes(request.method)
            self._service.counter.request(operation, bytes_in=self._wire.bytes_in, bytes_out=size_bytes)
            try:
                self._send_reply(request.method, reply, close=close)
            finally:
                if self._wire.bytes_out < size_bytes:
                    self._service.counter.unsent(size_bytes - self._wire.bytes_out)
        finally:
            if reply.content is not None:
                self._service.objects.release(reply.content.pieces)
        return not close

    def _reply(self, operation: str, request: Request, body: Body, *, is_slowed: bool) -> Reply:
        """The answer, once all of the body has come that will."""
        try:
            if is_slowed:
                raise S3Error(HTTPStatus.SERVICE_UNAVAILABLE, "SlowDown", "Please reduce your request rate.")
            reply = self._service.operations.carry_out(operation, request, body)
        except S3Error as error:
            reply = error_reply(error, request)
        try:
            if not body.unwanted:
                body.finish()
        except S3Error as error:
            raise GoneError("The body does not end where it says.") from error
        return reply

    def _send_reply(self, method: str, reply: Reply, *, close: bool) -> None:
        head = reply.head(method, now_seconds=self._service.objects.now_seconds(), close=close)
        size_bytes = reply.body_bytes(method)
        if not size_bytes:
            self._wire.send(head)
        elif reply.content is not None:
            self._wire.send(head, more=True)
            for span in reply.content.spans(reply.start, size_bytes):
                self._wire.send_span(span)
        else:
            self._wire.send(head + reply.body, body_bytes=size_bytes)

    def _answer_admin(self, request: Request) -> bool:
        self._wire.pace(None)
        body = Body(self._wire, request)
        document = body.read_document()
        answer = self._service.administer(f"{request.method} {request.path}", document)
        reply = Reply(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        self._send_reply(request.method, reply, close=not request.keep_alive)
        return request.keep_alive
