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

Metrics: the table `METRICS`, which docs/monitoring.md, the dashboard and the alert rules in examples/monitoring follow.
Only the coordinator records a `SaveReport`, which covers all ranks, and what is observed; each rank records its own
`LoadReport`, and counts the failures that it sees.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache, cached_property, partial
from typing import Any, Literal, ParamSpec, TypeVar

from dcp_remote.errors import DcpRemoteError
from dcp_remote.manager.reports import LoadReport, SaveReport
from dcp_remote.run.background_deletions import BackgroundDeletions
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
# Attribute of every metric.
_URL = "dcp_remote.storage.url"


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of saves and loads; every one has the attribute `dcp_remote.storage.url`.

    Attributes:
        name: Name; a counter with the name of an attribute of spans adds up its values.
        kind: Kind of instrument; an observed one is read on the coordinator whenever the application exports.
        unit: Unit, as UCUM has it.
        text: Description.
        attributes: Further attributes.
    """

    name: str
    kind: Literal["counter", "histogram", "observed gauge", "observed counter"]
    unit: str
    text: str
    attributes: tuple[str, ...] = ()


_OPERATION = "dcp_remote.operation"  # save, load
METRICS = (
    Metric("dcp_remote.checkpoint.age", "observed gauge", "s", "Time since the newest checkpoint was committed"),
    Metric("dcp_remote.failures", "counter", "{failure}", "Saves and loads that failed", (_OPERATION, "error.type")),
    Metric("dcp_remote.saves.skipped", "observed counter", "{save}", "Saves left out because another was under way"),
    Metric("dcp_remote.duration", "histogram", "s", "Duration from the call until the end", (_OPERATION,)),
    Metric("dcp_remote.phase.duration", "histogram", "s", "Duration of a phase", (_OPERATION, "dcp_remote.phase")),
    Metric("dcp_remote.blocked.duration", "counter", "s", "Time for which saves blocked training"),
    Metric("dcp_remote.bytes.written", "counter", "By", "Bytes uploaded by saves"),
    Metric("dcp_remote.bytes.deduplicated", "counter", "By", "Bytes that an earlier checkpoint holds"),
    Metric("dcp_remote.bytes.read", "counter", "By", "Bytes read by loads"),
    Metric("dcp_remote.requests", "counter", "{request}", "Requests to the store, repetitions included", (_OPERATION,)),
    Metric("dcp_remote.retries", "counter", "{retry}", "Requests that were repetitions", (_OPERATION,)),
    Metric("dcp_remote.retention.failures", "observed counter", "{failure}", "Rounds in which retention failed"),
    Metric("dcp_remote.deletions.pending", "observed gauge", "{object}", "Objects to be deleted that still exist"),
    Metric("dcp_remote.orphans.left", "observed counter", "{object}", "Objects given up, left to `dcp-remote gc`"),
)
# OpenTelemetry's default boundaries are meant for milliseconds; these cover 10 ms to 50 minutes.
_BOUNDARIES_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


# Telemetry of open managers. OpenTelemetry keeps a callback for ever, and of equal names takes the first, so that one
# callback for each metric reads those of all managers.
_open: list[Telemetry] = []


class Telemetry:
    """Spans and metrics of one manager; a provider of None is the application's global one."""

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Keep the providers. `clock` returns seconds since the epoch."""
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._clock = clock
        self._has_failed = False
        # Time of the newest checkpoint, in seconds since the epoch; before that, of the first save or restore.
        self._newest_seconds: float | None = None
        self._observed: dict[str, Callable[[], float | None]] = {}
        self._url, self._pid = "", os.getpid()

    def observe(
        self, store: ObjectStore, deletions: BackgroundDeletions, skipped_saves: Callable[[], int] = lambda: 0
    ) -> None:
        """Let the application read the observed metrics until `close`; called on the coordinator."""
        self._url = store.url
        self._observed = {
            "dcp_remote.checkpoint.age": self._age_seconds,
            "dcp_remote.saves.skipped": skipped_saves,
            "dcp_remote.retention.failures": lambda: deletions.retention_failures,
            "dcp_remote.deletions.pending": lambda: deletions.pending,
            "dcp_remote.orphans.left": lambda: deletions.orphans_left,
        }
        _open.append(self)
        self._attempt(_register, self._meter_provider)

    def close(self) -> None:
        """End the observed metrics: the age of what a closed manager saved would grow for ever."""
        with suppress(ValueError):  # not on the coordinator
            _open.remove(self)

    def note_restored(self, created: str) -> None:
        """Note the time of the checkpoint from which the job goes on, as its entry in the catalog has it."""
        with suppress(ValueError, OverflowError):  # information only: the text may be anything
            self._newest_seconds = datetime.fromisoformat(created).timestamp()

    def _age_seconds(self) -> float | None:
        return None if self._newest_seconds is None else max(0.0, self._clock() - self._newest_seconds)

    def begin(
        self, name: Literal["save", "load"], store: ObjectStore, *, step: int | None = None, rank: int = 0
    ) -> Operation:
        """Begin the span of a save or load, below the caller's current span; any thread may end the operation.

        The report sets a step that is None.
        """
        known = {} if step is None else {"dcp_remote.step": step}
        return Operation(self, name, {_URL: store.url, **known}, rank)

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
    def _instruments(self) -> dict[str, Any]:
        meter = metrics.get_meter(_SCOPE, meter_provider=self._meter_provider)
        histogram = partial(meter.create_histogram, explicit_bucket_boundaries_advisory=_BOUNDARIES_SECONDS)
        create: dict[str, Callable[..., Any]] = {"counter": meter.create_counter, "histogram": histogram}
        return {
            metric.name: create[metric.kind](metric.name, metric.unit, metric.text)
            for metric in METRICS
            if metric.kind in create
        }

    def _record(
        self, operation: str, url: str, report: SaveReport | LoadReport | None, error: BaseException | None
    ) -> None:
        instruments, run = self._instruments, {_URL: url}
        labels = {**run, _OPERATION: operation}
        if error is not None:
            instruments["dcp_remote.failures"].add(1, labels | {"error.type": _type_name(error)})
        if report is not None:
            for name, value in _attributes(report).items():
                if name in instruments:
                    # Bytes need no operation, because their counters are of one each.
                    instruments[name].add(value, run if ".bytes." in name else labels)
            if isinstance(report, SaveReport):
                blocked_seconds = report.seconds.blocked if report.background else report.seconds.total
                instruments["dcp_remote.blocked.duration"].add(blocked_seconds, run)
            instruments["dcp_remote.duration"].record(report.seconds.total, labels)
            for phase, seconds in asdict(report.seconds).items():
                instruments["dcp_remote.phase.duration"].record(seconds, labels | {"dcp_remote.phase": phase})


@cache
def _register(provider: metrics.MeterProvider | None) -> None:
    """Create the observed metrics, once for each provider."""
    meter = metrics.get_meter(_SCOPE, meter_provider=provider)
    create = {"observed gauge": meter.create_observable_gauge, "observed counter": meter.create_observable_counter}
    for metric in METRICS:
        if metric.kind in create:
            create[metric.kind](metric.name, [partial(_observe, provider, metric.name)], metric.unit, metric.text)


def _observe(
    provider: metrics.MeterProvider | None, name: str, _options: metrics.CallbackOptions
) -> Iterator[metrics.Observation]:
    """Yield the values of open managers; none in a forked child, where the SDK asks too: its copies save nothing."""
    for telemetry in tuple(_open):
        if telemetry._meter_provider is provider and telemetry._pid == os.getpid():
            value = telemetry._observed[name]()
            if value is not None:
                yield metrics.Observation(value, {_URL: telemetry._url})


class Operation:
    """Save or load under way, made by `Telemetry`.

    The methods raise nothing, and do nothing without OpenTelemetry. The first call of `end` ends the operation; further
    calls do nothing.
    """

    def __init__(self, telemetry: Telemetry, name: str, attributes: dict[str, Any], rank: int) -> None:
        """Start the span below the caller's current one."""
        self._telemetry = telemetry
        self._attempt = telemetry._attempt
        self._name, self._url = name, attributes[_URL]
        if telemetry._newest_seconds is None:
            telemetry._newest_seconds = telemetry._clock()
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

    def end(self, report: SaveReport | LoadReport | None = None, *, error: BaseException | None = None) -> None:
        """End the operation; with an error, as a failure.

        `report` is None on ranks of a save that are not the coordinator.
        """
        if not self._is_ended:
            self._is_ended = True
            if self._started is not None:
                self._attempt(_end_span, self._started[0], report, error)
            if isinstance(report, SaveReport) and not report.is_repeated:
                self._telemetry._newest_seconds = self._telemetry._clock()
            self._attempt(self._telemetry._record, self._name, self._url, report, error)


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
