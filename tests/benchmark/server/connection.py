"""One connection, in one thread: requests in, answers out; counted, delayed, and failed where the shape says so.

It counts before it answers, so whoever has an answer finds it counted. What is asked below `/-/` is neither counted nor
shaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http import HTTPStatus

from dcp_remote.errors import InvalidArgumentError
from tests.benchmark.server.body import Body
from tests.benchmark.server.objects import Object
from tests.benchmark.server.reply import Reply, error_reply
from tests.benchmark.server.request import Request, S3Error, operation_of, parse_head
from tests.benchmark.server.service import Service
from tests.benchmark.server.shape import Fault, Shape
from tests.benchmark.server.wire import GoneError, Wire


class Connection:
    """What one client asks, one request after another."""

    def __init__(self, service: Service, wire: Wire) -> None:
        self._service = service
        self._wire = wire
        self._counted = False
        self._fault: Fault | None = None

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
        if not self._counted:
            self._counted = True
            self._service.counter.connection()
        shape, fates = self._service.shape
        self._wire.pace(shape.bandwidth_bytes_per_second)
        self._fault = fates.draw(f"{request.bucket}/{request.key}")
        operation = operation_of(request)
        try:
            body = Body(self._wire, request, lambda: self._halfway(shape))
            reply = self._reply(operation, request, body)
        except OSError:
            self._service.counter.request(request.method, operation, "cut", bytes_in=self._wire.bytes_in, bytes_out=0)
            raise
        close = body.unwanted or not request.keep_alive
        try:
            if shape.latency_ms:
                time.sleep(shape.latency_ms / 1000)
            size_bytes = reply.body_bytes(request.method)
            self._service.counter.request(
                request.method, operation, str(int(reply.status)), bytes_in=self._wire.bytes_in, bytes_out=size_bytes
            )
            try:
                self._send_reply(request.method, reply, close=close, halfway=lambda: self._halfway(shape))
            finally:
                if self._wire.bytes_out < size_bytes:
                    self._service.counter.unsent(request.method, size_bytes - self._wire.bytes_out)
        finally:
            if reply.content is not None:
                self._service.objects.release(reply.content.pieces)
        return not close

    def _reply(self, operation: str, request: Request, body: Body) -> Reply:
        """The answer, once all of the body has come that will."""
        try:
            if self._fault is Fault.SLOW_DOWN:
                self._service.counter.fault(Fault.SLOW_DOWN)
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

    def _halfway(self, shape: Shape) -> None:
        """In the middle of a body: what was to become of this request becomes of it now."""
        fault, self._fault = self._fault, None
        if fault is Fault.RESET:
            self._service.counter.fault(fault)
            self._wire.reset()
            raise GoneError("A fault.")
        if fault is Fault.STALL:
            self._service.counter.fault(fault)
            time.sleep(shape.stall_seconds)

    def _send_reply(
        self, method: str, reply: Reply, *, close: bool, halfway: Callable[[], None] = lambda: None
    ) -> None:
        head = reply.head(method, now_seconds=self._service.objects.now_seconds(), close=close)
        size_bytes = reply.body_bytes(method)
        half = size_bytes // 2 if self._fault is not None and size_bytes > 1 else 0
        if not size_bytes:
            self._wire.send(head)
        elif reply.content is not None:
            self._wire.send(head, more=True)
            if half:
                self._send_content(reply.content, reply.start, half)
                halfway()
            self._send_content(reply.content, reply.start + half, size_bytes - half)
        elif half:
            self._wire.send(head + reply.body[:half], body_bytes=half)
            halfway()
            self._wire.send(reply.body[half:], body_bytes=size_bytes - half)
        else:
            self._wire.send(head + reply.body, body_bytes=size_bytes)

    def _send_content(self, content: Object, start: int, size_bytes: int) -> None:
        for span in content.spans(start, size_bytes):
            self._wire.send_span(span)

    def _answer_admin(self, request: Request) -> bool:
        self._wire.pace(None)
        self._fault = None
        body = Body(self._wire, request, lambda: None)
        document = body.read_document()
        try:
            answer = self._service.administer(f"{request.method} {request.path}", document)
        except InvalidArgumentError as error:
            reply = Reply(HTTPStatus.BAD_REQUEST, body=json.dumps({"error": str(error)}).encode())
        else:
            reply = Reply(HTTPStatus.OK, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        self._send_reply(request.method, reply, close=not request.keep_alive)
        return request.keep_alive
