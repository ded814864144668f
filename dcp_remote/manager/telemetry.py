"""Spans and metrics of saves and loads, where OpenTelemetry's API is installed; otherwise nothing, at no cost.

Where they go, the application decides with OpenTelemetry's SDK; without one the API drops them. What fails here is told
in the log once, and fails no save.

Spans:

    dcp_remote.save             from the call until the end, in whatever thread, below the caller's current span
    dcp_remote.save.<phase>     below it: waiting, staging, planning, uploading, committing
    dcp_remote.load             as for a save
    dcp_remote.load.<phase>     planning, reading

Their attributes; those of the phases are on the span above them:

    dcp_remote.storage.url                 string   as the store prints it, which is without credentials
    dcp_remote.step                integer  of training
    dcp_remote.rank                integer

And when it has ended, where there is a report:

    dcp_remote.save_id             string
    dcp_remote.world_size          integer  how many ranks saved, or loaded
    dcp_remote.requests            integer  those that were repeated included
    dcp_remote.retries             integer  how many of them were repetitions
    dcp_remote.bytes.total         integer  of the checkpoint that was saved
    dcp_remote.bytes.written       integer
    dcp_remote.bytes.deduplicated  integer
    dcp_remote.attempts            integer  more than 1 if the save had to begin again
    dcp_remote.slowest.rank        integer
    dcp_remote.slowest.shard       string   its key, if one was put
    dcp_remote.saved_world_size    integer  how many ranks had saved what was loaded
    dcp_remote.bytes.read          integer
    dcp_remote.rereads             integer  requests that repeated a read whose bytes did not match their digest

A span that failed has the status ERROR, the attribute `error.type` (a class name) and an event `exception` with
`exception.type`, and `exception.message` for errors of ours alone: they carry no secrets, others may. No stack traces.

Counters, and two histograms, with their units and attributes:

    dcp_remote.bytes.written       By
    dcp_remote.bytes.deduplicated  By
    dcp_remote.bytes.read          By
    dcp_remote.requests            {request}  dcp_remote.operation (save, load)
    dcp_remote.retries             {retry}    dcp_remote.operation
    dcp_remote.failures            {failure}  dcp_remote.operation, error.type
    dcp_remote.duration            s          dcp_remote.operation
    dcp_remote.phase.duration      s          dcp_remote.operation, dcp_remote.phase

A `SaveReport` speaks for all ranks, and so the coordinator alone gives it; a `LoadReport` is of one rank, and a failure
is counted on each rank that sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from dcp_remote.errors import DcpRemoteError
from dcp_remote.manager.reports import LoadReport, SaveReport
from dcp_remote.storage.base import ObjectStore

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.metrics import Counter, Histogram, Meter, MeterProvider
    from opentelemetry.trace import Span, Tracer, TracerProvider

logger = logging.getLogger(__name__)

_SCOPE = "dcp_remote"

_COUNTERS = {
    "dcp_remote.bytes.written": ("By", "Put by saves"),
    "dcp_remote.bytes.deduplicated": ("By", "Not sent by saves, since an earlier checkpoint holds them"),
    "dcp_remote.bytes.read": ("By", "Read by loads"),
    "dcp_remote.requests": ("{request}", "Sent to the store, those that were repeated included"),
    "dcp_remote.retries": ("{retry}", "Requests that were repeated"),
    "dcp_remote.failures": ("{failure}", "Saves and loads that raised"),
}
_HISTOGRAMS = {
    "dcp_remote.duration": "Of saves and loads, from the call until the end",
    "dcp_remote.phase.duration": "Of their phases",
}
# From what nobody notices to what no save takes. OpenTelemetry's own boundaries are for milliseconds.
_BOUNDARIES_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


class Telemetry:
    """Makes the spans and counts.

    Args:
        tracer_provider: Instead of the application's global one.
        meter_provider: Likewise.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None
    ) -> None:
        """See the class."""
        self._tracer_provider = tracer_provider
        self._meters = _Meters(meter_provider)
        self._failed = False

    def save(self, store: ObjectStore, *, step: int, rank: int = 0) -> Operation:
        """Begin the span of a save, below the caller's. It lasts until the operation is ended, from any thread."""
        return self._begin("save", store, step=step, rank=rank)

    def load(self, store: ObjectStore, *, step: int | None = None, rank: int = 0) -> Operation:
        """Begin the span of a load, below the caller's; of the newest checkpoint, the report tells the step."""
        return self._begin("load", store, step=step, rank=rank)

    def _begin(self, name: str, store: ObjectStore, *, step: int | None, rank: int) -> Operation:
        operation = Operation(self, name)
        if is_installed():
            attributes: dict[str, str | int] = {"dcp_remote.storage.url": store.url, "dcp_remote.rank": rank}
            if step is not None:
                attributes["dcp_remote.step"] = step
            with self._harmless():
                operation._begin(_tracer(self._tracer_provider), attributes)
        return operation

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        # Exporters and processors of spans are anybody's code, some of which is called where a span ends.
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is, it is no reason to lose a checkpoint
            if not self._failed:
                self._failed = True
                logger.warning("OpenTelemetry failed, and spans and metrics may be missing. cause=%r", error)


class Operation:
    """A save or a load under way, made by `Telemetry`. Its methods raise nothing, and do nothing without OpenTelemetry.

    It ends once: after `end` or `fail`, both do nothing.
    """

    def __init__(self, telemetry: Telemetry, name: str) -> None:
        """See the class."""
        self._telemetry = telemetry
        self._name = name
        self._tracer: Tracer | None = None
        self._span: Span | None = None
        self._context: Context | None = None
        self._ended = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A span below the operation's, which is current in this thread until the block is left; for any thread."""
        entered: tuple[Span, Token[Context]] | None = None
        with self._telemetry._harmless():
            entered = self._enter(name)
        try:
            yield
        except BaseException as error:
            with self._telemetry._harmless():
                self._leave(entered, error)
            raise
        with self._telemetry._harmless():
            self._leave(entered, None)

    def end(self, report: SaveReport | LoadReport | None = None) -> None:
        """It succeeded.

        Args:
            report: Of it, which is counted; None on the ranks of a save that have none.
        """
        if self._ended or not is_installed():
            return
        self._ended = True
        with self._telemetry._harmless():
            if self._span is not None:
                if report is not None:
                    self._span.set_attributes(_attributes(report))
                self._span.end()
        with self._telemetry._harmless():
            if report is not None:
                self._telemetry._meters.add_report(self._name, report)

    def fail(self, error: BaseException) -> None:
        """It raised."""
        if self._ended or not is_installed():
            return
        self._ended = True
        with self._telemetry._harmless():
            if self._span is not None:
                _set_failed(self._span, error)
                self._span.end()
        with self._telemetry._harmless():
            self._telemetry._meters.add_failure(self._name, error)

    def _begin(self, tracer: Tracer, attributes: dict[str, str | int]) -> None:
        from opentelemetry import context, trace

        caller = context.get_current()
        self._tracer = tracer
        self._span = tracer.start_span(f"dcp_remote.{self._name}", context=caller, attributes=attributes)
        self._context = trace.set_span_in_context(self._span, caller)

    def _enter(self, phase: str) -> tuple[Span, Token[Context]] | None:
        if self._tracer is None:
            return None
        from opentelemetry import context, trace

        span = self._tracer.start_span(f"dcp_remote.{self._name}.{phase}", context=self._context)
        return span, context.attach(trace.set_span_in_context(span, self._context))

    def _leave(self, entered: tuple[Span, Token[Context]] | None, error: BaseException | None) -> None:
        if entered is None:
            return
        from opentelemetry import context

        span, token = entered
        context.detach(token)
        if error is not None:
            _set_failed(span, error)
        span.end()


class _Meters:
    """The metrics; made when they are needed first, and once: an API without an SDK keeps each that was ever made."""

    def __init__(self, provider: MeterProvider | None) -> None:
        self._provider = provider

    def add_report(self, operation: str, report: SaveReport | LoadReport) -> None:
        of = {"dcp_remote.operation": operation}
        if isinstance(report, SaveReport):
            self._counters["dcp_remote.bytes.written"].add(report.written_bytes)
            self._counters["dcp_remote.bytes.deduplicated"].add(report.deduplicated_bytes)
        else:
            self._counters["dcp_remote.bytes.read"].add(report.read_bytes)
        self._counters["dcp_remote.requests"].add(report.requests, of)
        self._counters["dcp_remote.retries"].add(report.retries, of)
        self._histograms["dcp_remote.duration"].record(report.seconds.total, of)
        for phase, seconds in asdict(report.seconds).items():
            self._histograms["dcp_remote.phase.duration"].record(seconds, of | {"dcp_remote.phase": phase})

    def add_failure(self, operation: str, error: BaseException) -> None:
        of = {"dcp_remote.operation": operation, "error.type": _type_name(error)}
        self._counters["dcp_remote.failures"].add(1, of)

    @cached_property
    def _counters(self) -> dict[str, Counter]:
        meter = self._meter()
        return {name: meter.create_counter(name, unit, what) for name, (unit, what) in _COUNTERS.items()}

    @cached_property
    def _histograms(self) -> dict[str, Histogram]:
        meter = self._meter()
        return {
            name: meter.create_histogram(name, "s", what, explicit_bucket_boundaries_advisory=_BOUNDARIES_SECONDS)
            for name, what in _HISTOGRAMS.items()
        }

    def _meter(self) -> Meter:
        from opentelemetry import metrics

        return metrics.get_meter(_SCOPE, _version(), self._provider)


@cache
def is_installed() -> bool:
    """Whether OpenTelemetry's API can be imported; it is, by the first call."""
    try:
        from opentelemetry import context, metrics, trace  # noqa: F401
    except ImportError:
        return False
    return True


@cache
def _version() -> str:
    try:
        return version("dcp-remote")
    except PackageNotFoundError:  # copied into somebody's tree
        return "unknown"


def _tracer(provider: TracerProvider | None) -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer(_SCOPE, _version(), provider)


def _attributes(report: SaveReport | LoadReport) -> dict[str, str | int]:
    common: dict[str, str | int] = {
        "dcp_remote.step": report.step,
        "dcp_remote.save_id": report.save_id,
        "dcp_remote.world_size": report.world_size,
        "dcp_remote.requests": report.requests,
        "dcp_remote.retries": report.retries,
    }
    if isinstance(report, LoadReport):
        return common | {
            "dcp_remote.saved_world_size": report.saved_world_size,
            "dcp_remote.bytes.read": report.read_bytes,
            "dcp_remote.rereads": report.rereads,
        }
    shard = report.slowest_shard
    return common | {
        "dcp_remote.bytes.total": report.total_bytes,
        "dcp_remote.bytes.written": report.written_bytes,
        "dcp_remote.bytes.deduplicated": report.deduplicated_bytes,
        "dcp_remote.attempts": report.attempts,
        "dcp_remote.slowest.rank": report.slowest_rank.rank,
        **({"dcp_remote.slowest.shard": shard.key} if shard is not None else {}),
    }


def _set_failed(span: Span, error: BaseException) -> None:
    from opentelemetry.trace import Status, StatusCode

    kind = _type_name(error)
    # A client's error may tell of a signed URL, and so may the stack that leads to it.
    message = {"exception.message": str(error)} if isinstance(error, DcpRemoteError) else {}
    span.set_attribute("error.type", kind)
    span.add_event("exception", {"exception.type": kind, **message})
    span.set_status(Status(StatusCode.ERROR, message.get("exception.message", kind)))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    is_known = isinstance(error, DcpRemoteError) or kind.__module__ == "builtins"
    return kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
