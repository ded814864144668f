"""Spans and metrics of saves and loads through OpenTelemetry's API; without the API, every call does nothing.

The application's OpenTelemetry SDK exports spans and metrics; without an SDK the API drops them. An error in
OpenTelemetry is logged once and fails no save. The SDK draws IDs of spans from Python's `random`: training that draws
from `random` too, and must be repeatable, needs a tracer provider with another `IdGenerator`.

Spans:

    dcp_remote.save             from the call until the end, in any thread, below the caller's current span
    dcp_remote.save.<phase>     below dcp_remote.save: waiting, staging, planning, uploading, committing
    dcp_remote.load             as for a save
    dcp_remote.load.<phase>     below dcp_remote.load: planning, reading

Attributes of dcp_remote.save and dcp_remote.load:

    dcp_remote.storage.url         string   as the store prints it, without credentials
    dcp_remote.step                integer  step of training
    dcp_remote.rank                integer  this rank

Attributes from the report, set at the end:

    dcp_remote.save_id             string
    dcp_remote.world_size          integer  number of ranks that saved, or loaded
    dcp_remote.requests            integer  requests, repetitions included
    dcp_remote.retries             integer  requests that were repetitions
    dcp_remote.bytes.total         integer  size of the saved checkpoint
    dcp_remote.bytes.written       integer
    dcp_remote.bytes.deduplicated  integer
    dcp_remote.attempts            integer  more than 1 if the save had to begin again
    dcp_remote.slowest.rank        integer
    dcp_remote.slowest.shard       string   key of the shard; absent if none was uploaded
    dcp_remote.saved_world_size    integer  number of ranks that had saved the loaded checkpoint
    dcp_remote.bytes.read          integer
    dcp_remote.rereads             integer  requests that repeated a read whose bytes did not match their digest

A failed span has the status ERROR, the attribute `error.type` (a class name) and an event `exception` with
`exception.type`, and `exception.message` only for errors of dcp_remote, because messages of others may hold secrets.
Stack traces are left out for the same reason.

Counters and two histograms, with units and attributes:

    dcp_remote.bytes.written       By
    dcp_remote.bytes.deduplicated  By
    dcp_remote.bytes.read          By
    dcp_remote.requests            {request}  dcp_remote.operation (save, load)
    dcp_remote.retries             {retry}    dcp_remote.operation
    dcp_remote.failures            {failure}  dcp_remote.operation, error.type
    dcp_remote.duration            s          dcp_remote.operation
    dcp_remote.phase.duration      s          dcp_remote.operation, dcp_remote.phase

Only the coordinator records a `SaveReport`, which covers all ranks; each rank records its own `LoadReport`, and counts
the failures that it sees.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

from dcp_remote.errors import DcpRemoteError
from dcp_remote.manager.reports import LoadReport, SaveReport
from dcp_remote.storage.base import ObjectStore

try:
    from opentelemetry import context, metrics, trace
except ImportError:  # the extra `otel` is not installed
    IS_INSTALLED = False
else:
    IS_INSTALLED = True

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_SCOPE = "dcp_remote"

# Attributes, and the fields of the two reports that they have.
_FIELDS = {
    "dcp_remote.step": "step",
    "dcp_remote.save_id": "save_id",
    "dcp_remote.world_size": "world_size",
    "dcp_remote.requests": "requests",
    "dcp_remote.retries": "retries",
    "dcp_remote.bytes.total": "total_bytes",
    "dcp_remote.bytes.written": "written_bytes",
    "dcp_remote.bytes.deduplicated": "deduplicated_bytes",
    "dcp_remote.attempts": "attempts",
    "dcp_remote.saved_world_size": "saved_world_size",
    "dcp_remote.bytes.read": "read_bytes",
    "dcp_remote.rereads": "rereads",
}
# Unit and description; each counter but the last one adds the attribute of its name.
_COUNTERS = {
    "dcp_remote.bytes.written": ("By", "Bytes uploaded by saves"),
    "dcp_remote.bytes.deduplicated": ("By", "Bytes that saves did not upload because an earlier checkpoint holds them"),
    "dcp_remote.bytes.read": ("By", "Bytes read by loads"),
    "dcp_remote.requests": ("{request}", "Requests to the store, repetitions included"),
    "dcp_remote.retries": ("{retry}", "Requests that were repetitions"),
    "dcp_remote.failures": ("{failure}", "Saves and loads that raised"),
}
_HISTOGRAMS = {
    "dcp_remote.duration": "Duration of saves and loads, from the call until the end",
    "dcp_remote.phase.duration": "Duration of the phases of saves and loads",
}
# OpenTelemetry's default boundaries are meant for milliseconds; these cover 10 ms to 50 minutes.
_BOUNDARIES_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Telemetry:
    """Spans and metrics of one manager; a provider of None is the application's global one."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None = None, meter_provider: metrics.MeterProvider | None = None
    ) -> None:
        """Keep the providers."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._has_failed = False

    def save(self, store: ObjectStore, *, step: int, rank: int = 0) -> Operation:
        """Begin the span of a save, below the caller's current span; any thread may end the operation."""
        return Operation(self, "save", {"dcp_remote.storage.url": store.url, "dcp_remote.step": step}, rank)

    def load(self, store: ObjectStore, *, step: int | None = None, rank: int = 0) -> Operation:
        """Begin the span of a load, below the caller's current span; the report sets a step that is None."""
        known = {} if step is None else {"dcp_remote.step": step}
        return Operation(self, "load", {"dcp_remote.storage.url": store.url, **known}, rank)

    def _attempt(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a function that uses OpenTelemetry; return None if the API is not installed or the function raises."""
        if not IS_INSTALLED:
            return None
        try:
            return act(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # processors and exporters of the application may raise anything
            if not self._has_failed:
                self._has_failed = True
                logger.warning("OpenTelemetry failed; spans and metrics may be missing. cause=%r", error)
            return None

    def _start(
        self, name: str, parent: context.Context | None, attributes: dict[str, Any] | None = None
    ) -> tuple[trace.Span, context.Context]:
        """Start a span below `parent`, or below the current span; return it and the context in which it is current."""
        tracer = trace.get_tracer(_SCOPE, tracer_provider=self._tracer_provider)
        span = tracer.start_span(name, parent, attributes=attributes)
        return span, trace.set_span_in_context(span, parent)

    # Created once, because the API without an SDK keeps every instrument for ever.
    @cached_property
    def _instruments(self) -> tuple[dict[str, metrics.Counter], dict[str, metrics.Histogram]]:
        meter = metrics.get_meter(_SCOPE, meter_provider=self._meter_provider)
        return {name: meter.create_counter(name, unit, text) for name, (unit, text) in _COUNTERS.items()}, {
            name: meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_BOUNDARIES_SECONDS)
            for name, text in _HISTOGRAMS.items()
        }

    def _record(self, operation: str, report: SaveReport | LoadReport | None, error: BaseException | None) -> None:
        counters, histograms = self._instruments
        labels = {"dcp_remote.operation": operation}
        if error is not None:
            counters["dcp_remote.failures"].add(1, labels | {"error.type": _type_name(error)})
        if report is not None:
            for name, value in _attributes(report).items():
                if name in counters:
                    # Bytes need no label, because their counters are of one operation each.
                    counters[name].add(value, {} if ".bytes." in name else labels)
            histograms["dcp_remote.duration"].record(report.seconds.total, labels)
            for phase, seconds in asdict(report.seconds).items():
                histograms["dcp_remote.phase.duration"].record(seconds, labels | {"dcp_remote.phase": phase})


class Operation:
    """Save or load under way, made by `Telemetry`.

    The methods raise nothing, and do nothing without OpenTelemetry. The first call of `end` or `fail` ends the
    operation; further calls do nothing.
    """

    def __init__(self, telemetry: Telemetry, name: str, attributes: dict[str, Any], rank: int) -> None:
        """Start the span below the caller's current one."""
        self._telemetry = telemetry
        self._attempt = telemetry._attempt
        self._name = name
        self._is_ended = False
        self._started = self._attempt(
            telemetry._start, f"dcp_remote.{name}", None, attributes | {"dcp_remote.rank": rank}
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Begin a span below the operation's, which is current in the calling thread until the block ends."""
        parent = None if self._started is None else self._started[1]
        started = self._attempt(self._telemetry._start, f"dcp_remote.{self._name}.{name}", parent)
        token = None if started is None else self._attempt(context.attach, started[1])
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            if token is not None:
                self._attempt(context.detach, token)
            if started is not None:
                self._attempt(_end_span, started[0], None, failure)

    def end(self, report: SaveReport | LoadReport | None = None) -> None:
        """End the operation as a success. `report` is None on ranks of a save that are not the coordinator."""
        self._finish(report, None)

    def fail(self, error: BaseException) -> None:
        """End the operation as a failure."""
        self._finish(None, error)

    def _finish(self, report: SaveReport | LoadReport | None, error: BaseException | None) -> None:
        if not self._is_ended:
            self._is_ended = True
            if self._started is not None:
                self._attempt(_end_span, self._started[0], report, error)
            self._attempt(self._telemetry._record, self._name, report, error)


def _attributes(report: SaveReport | LoadReport) -> dict[str, Any]:
    found = {name: getattr(report, field) for name, field in _FIELDS.items() if hasattr(report, field)}
    if isinstance(report, SaveReport):
        found["dcp_remote.slowest.rank"] = report.slowest_rank.rank
        if report.slowest_shard is not None:
            found["dcp_remote.slowest.shard"] = report.slowest_shard.key
    return found


def _end_span(span: trace.Span, report: SaveReport | LoadReport | None, error: BaseException | None) -> None:
    if report is not None:
        span.set_attributes(_attributes(report))
    if error is not None:
        kind = _type_name(error)
        # Only messages of dcp_remote, because a client's error and stack may hold a signed URL.
        message = {"exception.message": str(error)} if isinstance(error, DcpRemoteError) else {}
        span.set_attribute("error.type", kind)
        span.add_event("exception", {"exception.type": kind, **message})
        span.set_status(trace.StatusCode.ERROR, message.get("exception.message", kind))
    span.end()


def _type_name(error: BaseException) -> str:
    kind = type(error)
    is_known = isinstance(error, DcpRemoteError) or kind.__module__ == "builtins"
    return kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
