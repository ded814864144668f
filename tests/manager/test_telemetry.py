"""Spans and metrics, collected in memory by OpenTelemetry's SDK; and no effect without OpenTelemetry."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader, NumberDataPoint
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from dcp_remote import CheckpointManager
from dcp_remote.errors import SaveFailedError, StorageError
from dcp_remote.manager import telemetry as telemetry_module
from dcp_remote.manager.reports import LoadReport, LoadSeconds, SaveReport, Seconds, SlowRank, SlowShard
from dcp_remote.manager.telemetry import METRICS, Telemetry
from dcp_remote.run.background_deletions import BackgroundDeletions
from dcp_remote.storage import MemoryStore, open_store

REPOSITORY = Path(__file__).parent.parent.parent
SAVE_ID = "0123456789abcdef0123456789abcdef"
URL = "dcp_remote.storage.url"

SAVED = SaveReport(
    step=7,
    save_id=SAVE_ID,
    world_size=8,
    total_bytes=1000,
    written_bytes=300,
    deduplicated_bytes=700,
    seconds=Seconds(0.25, 0.5, 0.125, 4.0, 0.0625),
    requests=20,
    retries=3,
    slowest_rank=SlowRank(5, 4.5),
    slowest_shard=SlowShard("shards/ab/x.safetensors", 2.0, 5),
    attempts=2,
)
LOADED = LoadReport(7, SAVE_ID, 8, 3, 400, LoadSeconds(0.5, 2.0), 10, 1)


class Collected:
    """Telemetry with the spans and metrics that it has recorded."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.meter_provider = MeterProvider([self._reader])
        self.now = 1_767_323_045.0  # 2026-01-02T03:04:05 UTC
        self.telemetry = self.another()

    def another(self) -> Telemetry:
        """Return the telemetry of another manager, with the same providers and clock."""
        return Telemetry(self.tracer_provider, self.meter_provider, lambda: self.now)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """Return ended spans by name."""
        found = self._exporter.get_finished_spans()
        assert len({span.name for span in found}) == len(found)
        return {span.name: span for span in found}

    def points(self) -> dict[str, dict[tuple[Any, ...], NumberDataPoint | HistogramDataPoint]]:
        """Return data points by metric name and by attribute values but the URL, sorted by attribute name."""
        data = self._reader.get_metrics_data()
        metrics = [
            metric
            for resource in (data.resource_metrics if data is not None else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]
        assert len({metric.name for metric in metrics}) == len(metrics)
        return {
            metric.name: {
                tuple(value for name, value in sorted((point.attributes or {}).items()) if name != URL): point
                for point in metric.data.data_points
                if isinstance(point, (NumberDataPoint, HistogramDataPoint))
            }
            for metric in metrics
        }

    def numbers(self) -> dict[str, dict[tuple[Any, ...], float]]:
        """Return the values of counters and the sums of histograms."""
        return {
            name: {
                key: point.sum if isinstance(point, HistogramDataPoint) else point.value
                for key, point in points.items()
            }
            for name, points in self.points().items()
        }


@pytest.fixture
def collected() -> Collected:
    return Collected()


def in_thread(act: Callable[[], object]) -> None:
    """Call a function in another thread, where no span is current."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            assert trace.get_current_span() is trace.INVALID_SPAN
            act()
            assert trace.get_current_span() is trace.INVALID_SPAN
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def parent_of(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent is not None else None


def id_of(span: ReadableSpan) -> int:
    own: trace.SpanContext | None = span.get_span_context()
    assert own is not None
    return own.span_id


def test_a_save_in_the_background(collected: Collected) -> None:
    """Put the spans below the caller's, which ends before the save does in another thread."""
    tracer = collected.tracer_provider.get_tracer("training")
    with tracer.start_as_current_span("train") as train:
        saving = collected.telemetry.begin("save", MemoryStore("run"), step=7, rank=3)
        assert trace.get_current_span() is train
        with saving.phase("staging"):
            tracer.start_span("copy").end()
        assert trace.get_current_span() is train

    def upload() -> None:
        with saving.phase("uploading"):
            tracer.start_span("request").end()
        saving.end(SAVED)

    in_thread(upload)
    spans = collected.spans
    top = spans["dcp_remote.save"]
    assert parent_of(top) == id_of(spans["train"])
    assert parent_of(spans["dcp_remote.save.staging"]) == parent_of(spans["dcp_remote.save.uploading"]) == id_of(top)
    assert parent_of(spans["copy"]) == id_of(spans["dcp_remote.save.staging"])
    assert parent_of(spans["request"]) == id_of(spans["dcp_remote.save.uploading"])
    assert all(span.status.status_code is StatusCode.UNSET for span in spans.values())
    assert (top.end_time or 0) >= (spans["dcp_remote.save.uploading"].end_time or 0) > (spans["train"].end_time or 0)
    assert dict(top.attributes or {}) == {
        "dcp_remote.storage.url": "memory://run",
        "dcp_remote.step": 7,
        "dcp_remote.rank": 3,
        "dcp_remote.save_id": SAVE_ID,
        "dcp_remote.world_size": 8,
        "dcp_remote.requests": 20,
        "dcp_remote.retries": 3,
        "dcp_remote.bytes.total": 1000,
        "dcp_remote.bytes.written": 300,
        "dcp_remote.bytes.deduplicated": 700,
        "dcp_remote.attempts": 2,
        "dcp_remote.slowest.rank": 5,
        "dcp_remote.slowest.shard": "shards/ab/x.safetensors",
    }


def test_background_has_the_context_of_the_caller(collected: Collected) -> None:
    """Carry baggage, which other instrumentation reads, into the phases of another thread."""
    token = context.attach(baggage.set_baggage("job", "a"))
    saving = collected.telemetry.begin("save", MemoryStore("run"), step=7)
    context.detach(token)
    seen = []

    def upload() -> None:
        with saving.phase("uploading"):
            seen.append(baggage.get_baggage("job"))

    in_thread(upload)
    assert seen == ["a"]


def test_a_load(collected: Collected) -> None:
    """Record a load of the newest checkpoint, whose step only the report tells, without a caller's span."""
    loading = collected.telemetry.begin("load", MemoryStore("run"))
    for phase in ("planning", "reading"):
        with loading.phase(phase):
            pass
    loading.end(LOADED)
    spans = collected.spans
    top = spans["dcp_remote.load"]
    assert parent_of(top) is None
    assert parent_of(spans["dcp_remote.load.planning"]) == parent_of(spans["dcp_remote.load.reading"]) == id_of(top)
    assert dict(top.attributes or {}) == {
        "dcp_remote.storage.url": "memory://run",
        "dcp_remote.step": 7,
        "dcp_remote.rank": 0,
        "dcp_remote.save_id": SAVE_ID,
        "dcp_remote.world_size": 3,
        "dcp_remote.requests": 10,
        "dcp_remote.retries": 1,
        "dcp_remote.saved_world_size": 8,
        "dcp_remote.bytes.read": 400,
        "dcp_remote.rereads": 0,
    }


def test_metrics(collected: Collected) -> None:
    """Count two saves, one of them without a shard, a load, two failures, and a save without a report."""
    store = MemoryStore("run")
    collected.telemetry.begin("save", store, step=7).end(SAVED)
    waited_for = replace(SAVED, slowest_shard=None, written_bytes=1, retries=0, background=False)
    collected.telemetry.begin("save", store, step=7).end(waited_for)
    collected.telemetry.begin("save", store, step=7, rank=1).end()
    collected.telemetry.begin("load", store, step=7).end(LOADED)
    collected.telemetry.begin("save", store, step=8).end(error=SaveFailedError("No."))
    collected.telemetry.begin("load", store, step=8).end(error=KeyboardInterrupt())
    assert collected.numbers() == {
        "dcp_remote.bytes.written": {(): 301},
        "dcp_remote.bytes.deduplicated": {(): 1400},
        "dcp_remote.bytes.read": {(): 400},
        "dcp_remote.requests": {("save",): 40, ("load",): 10},
        "dcp_remote.retries": {("save",): 3, ("load",): 1},
        "dcp_remote.failures": {("save", "SaveFailedError"): 1, ("load", "KeyboardInterrupt"): 1},
        "dcp_remote.blocked.duration": {(): 0.75 + 4.9375},
        "dcp_remote.duration": {("save",): 2 * 4.9375, ("load",): 2.5},
        "dcp_remote.phase.duration": {
            ("save", "waiting"): 0.5,
            ("save", "staging"): 1.0,
            ("save", "planning"): 0.25,
            ("save", "uploading"): 8.0,
            ("save", "committing"): 0.125,
            ("save", "copying"): 0.0,
            ("load", "planning"): 0.5,
            ("load", "reading"): 2.0,
        },
    }
    staging = collected.points()["dcp_remote.phase.duration"]["save", "staging"]
    assert isinstance(staging, HistogramDataPoint)
    assert staging.count == 2
    # With OpenTelemetry's default boundaries, half a second would lie in the first bucket.
    assert staging.bucket_counts[0] == 0
    assert 0.3 in staging.explicit_bounds


# ---- what is observed


def observe(telemetry: Telemetry, url: str = "run") -> BackgroundDeletions:
    """Observe a telemetry as the coordinator's manager does; return its deletions."""
    store = MemoryStore(url)
    deletions = BackgroundDeletions(store)
    telemetry.observe(store, deletions)
    return deletions


def test_age_of_the_newest_checkpoint(collected: Collected) -> None:
    """Restore a checkpoint that is an hour old, fail to save, keep a checkpoint, save: only the save makes it young."""
    telemetry, store = collected.telemetry, MemoryStore("run")
    observe(telemetry)

    def age() -> float | None:
        return collected.numbers().get("dcp_remote.checkpoint.age", {}).get(())

    assert age() is None  # nothing is known yet
    telemetry.begin("load", store).end(LOADED)
    telemetry.note_restored("2026-01-02T02:04:05+00:00")
    assert age() == 3600.0
    collected.now += 60
    telemetry.begin("save", store, step=8).end(error=SaveFailedError("No."))
    telemetry.begin("save", store, step=7).end(replace(SAVED, is_repeated=True))
    telemetry.begin("save", store, step=9)  # under way
    assert age() == 3660.0
    telemetry.begin("save", store, step=9).end(SAVED)
    collected.now += 5
    assert age() == 5.0
    collected.now -= 60  # the clock was set back
    assert age() == 0.0
    telemetry.close()
    assert age() is None


@pytest.mark.parametrize("created", ["", "yesterday", "0001-01-01T00:00:00"])
def test_age_without_a_checkpoint(collected: Collected, created: str) -> None:
    """Count from the first call if no save succeeds, and from the restore if its checkpoint has no readable time."""
    observe(collected.telemetry)
    collected.telemetry.begin("load", MemoryStore("run")).end()
    collected.now += 600
    collected.telemetry.begin("load", MemoryStore("run")).end()
    collected.telemetry.note_restored(created)
    assert collected.numbers()["dcp_remote.checkpoint.age"] == {(): 600.0}


def test_managers_of_one_process(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe two managers with one provider, each by its URL, and neither in a forked child."""
    other = collected.another()
    observe(collected.telemetry, "one").orphans_left = 3
    observe(other, "two").retention_failures = 2

    def urls() -> dict[str, float]:
        metrics: Any = collected._reader.get_metrics_data()
        found = metrics.resource_metrics[0].scope_metrics[0].metrics if metrics is not None else []
        orphans = [metric.data.data_points for metric in found if metric.name == "dcp_remote.orphans.left"]
        return {point.attributes[URL]: point.value for points in orphans for point in points}

    assert urls() == {"memory://one": 3, "memory://two": 0}
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        assert urls() == {}
    collected.telemetry.close()
    assert urls() == {"memory://two": 0}
    other.close()


def test_a_manager_is_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save, and restore in another manager: its age is that of the checkpoint; `go_on=False` leaves it alone."""
    collected, state = Collected(), {"x": torch.zeros(2)}
    monkeypatch.setattr("dcp_remote.manager.manager.Telemetry", collected.another)
    collected.now = time.time()
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        checkpoints.save(1, state, wait=True)
        checkpoints.save(2, state, wait=True)
    numbers = collected.numbers()
    assert numbers["dcp_remote.blocked.duration"][()] == numbers["dcp_remote.duration"]["save",]
    assert "dcp_remote.checkpoint.age" not in numbers
    collected.now += 900
    with CheckpointManager(tmp_path, progress=False) as checkpoints:
        assert checkpoints.restore(state, go_on=False) == 2
        assert collected.numbers()["dcp_remote.checkpoint.age"] == {(): 0.0}
        assert checkpoints.restore(state) == 2
        assert 899 <= collected.numbers()["dcp_remote.checkpoint.age"][()] < 920
        assert checkpoints.last_load is not None
        assert checkpoints.last_load.created == checkpoints.run.checkpoints()[1].created


# ---- failures


def failed_with(collected: Collected, error: BaseException) -> list[ReadableSpan]:
    """Return the spans of a save that raises in a phase."""
    saving = collected.telemetry.begin("save", MemoryStore("run"), step=7)

    def save() -> None:
        with saving.phase("uploading"):
            raise error

    with pytest.raises(type(error)) as caught:
        save()
    saving.end(error=caught.value)
    return list(collected.spans.values())


def test_a_save_that_fails(collected: Collected) -> None:
    """Mark the phase and the save as failed, with the message of an error of dcp_remote."""
    error = SaveFailedError("It failed.", rank=3, shard="shards/x")
    for span in failed_with(collected, error):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == str(error)
        assert (span.attributes or {})["error.type"] == "SaveFailedError"
        [event] = span.events
        assert event.name == "exception"
        assert dict(event.attributes or {}) == {"exception.type": "SaveFailedError", "exception.message": str(error)}
    assert len(collected.spans) == 2


def test_only_the_type_of_foreign_errors_is_recorded(collected: Collected) -> None:
    """Keep a client's message and the cause of an own error out of spans, because they may hold a signed URL."""

    class ClientError(Exception):
        pass

    secret = "X-Amz-Signature=5ecre7"
    for span in failed_with(collected, ClientError(secret)):
        assert secret not in span.to_json()
        assert (span.attributes or {})["error.type"] == f"{__name__}.{ClientError.__qualname__}"
    assert list(collected.numbers()["dcp_remote.failures"]) == [("save", f"{__name__}.{ClientError.__qualname__}")]

    again = Collected()
    error = StorageError("It failed.")
    error.__cause__ = ClientError(secret)
    assert not any(secret in span.to_json() for span in failed_with(again, error))


def test_urls_without_credentials(collected: Collected) -> None:
    """Record the URL without the credentials that the store was opened with."""
    options = {"key": "AKIAIOSFODNN7EXAMPLE", "secret": "5ecre7", "region_name": "us-east-1"}
    collected.telemetry.begin("save", open_store("s3://bucket/run", options), step=7).end(SAVED)
    [span] = collected.spans.values()
    assert (span.attributes or {})["dcp_remote.storage.url"] == "s3://bucket/run"
    assert "5ecre7" not in span.to_json()
    assert "AKIA" not in span.to_json()


def test_an_operation_ends_once(collected: Collected, caplog: pytest.LogCaptureFixture) -> None:
    """Ignore `end` and `fail` after the first `end`."""
    saving = collected.telemetry.begin("save", MemoryStore("run"), step=7)
    saving.end(SAVED)
    saving.end(SAVED)
    saving.end(error=KeyError())
    numbers = collected.numbers()
    assert numbers["dcp_remote.bytes.written"] == {(): 300}
    assert "dcp_remote.failures" not in numbers
    assert collected.spans["dcp_remote.save"].status.status_code is StatusCode.UNSET
    assert caplog.messages == []


class Failing(SpanProcessor):
    """Span processor of an application that raises."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError("on_start")

    def on_end(self, span: Any) -> None:
        raise RuntimeError("on_end")


def test_errors_of_opentelemetry_fail_no_save(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log one warning for a processor and a meter that raise; run the blocks, and pass on their own errors."""
    provider = TracerProvider()
    provider.add_span_processor(Failing())
    telemetry = Telemetry(provider, MeterProvider())
    monkeypatch.setattr(MeterProvider, "get_meter", lambda *_: 1 / 0)
    saving = telemetry.begin("save", MemoryStore("run"), step=7)
    done = []
    with saving.phase("staging"):
        done.append("staging")
    with pytest.raises(KeyError), saving.phase("uploading"):
        raise KeyError
    saving.end(SAVED)
    telemetry.begin("load", MemoryStore("run")).end(error=ValueError())
    assert done == ["staging"]
    [warning] = [record for record in caplog.records if record.name == telemetry_module.__name__]
    assert warning.levelno == logging.WARNING
    assert "on_start" in warning.getMessage()


# ---- without OpenTelemetry


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
import dcp_remote.manager.telemetry as telemetry
from dcp_remote.storage import MemoryStore
saving = telemetry.Telemetry().begin("save", MemoryStore("run"), step=7, rank=3)
with saving.phase("staging"):
    pass
try:
    with saving.phase("uploading"):
        raise KeyError("raised in the block")
except KeyError as error:
    saving.end(error=error)
loads = telemetry.Telemetry()
loads.observe(MemoryStore("run"), None)
loads.begin("load", MemoryStore("run")).end()
loads.close()
print(telemetry.IS_INSTALLED, [name for name in sys.modules if name.startswith("opentelemetry.")])
"""


def test_without_the_api() -> None:
    """Do nothing in a process that cannot import OpenTelemetry, except to pass on the errors of blocks."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, check=False, text=True, cwd=REPOSITORY
    )
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "False []", "")


# ---- the table and the docstring


def test_the_table_and_the_docstring_name_everything(collected: Collected) -> None:
    """Name every metric in `METRICS`, every attribute and phase of spans in the module's docstring, and no others."""
    observe(collected.telemetry)
    reports: dict[Literal["save", "load"], SaveReport | LoadReport] = {"save": SAVED, "load": LOADED}
    for operation, report in reports.items():
        running = collected.telemetry.begin(operation, MemoryStore("run"), step=7)
        for phase in fields(report.seconds)[:5]:  # `copying` goes on beside the others, and is no span
            with running.phase(phase.name):
                pass
        running.end(report)
    failing = Collected()
    failing.telemetry.begin("save", MemoryStore("run"), step=7).end(error=StorageError("No."))
    recorded = {
        name: {attribute for point in points.values() for attribute in point.attributes or {}}
        for collection in (collected, failing)
        for name, points in collection.points().items()
    }
    collected.telemetry.close()
    assert recorded == {metric.name: {URL, *metric.attributes} for metric in METRICS}
    spans = [*collected.spans.values(), *failing.spans.values()]
    attributes = {attribute for span in spans for attribute in span.attributes or {}}
    attributes |= {attribute for span in spans for event in span.events for attribute in event.attributes or {}}
    text = telemetry_module.__doc__ or ""
    named = set(re.findall(r"\b(?:dcp_remote|error|exception)\.[a-z_.]+[a-z]\b", text))
    assert named == attributes | {"dcp_remote.save", "dcp_remote.load"}
    phases = {span.name.rpartition(".")[2] for span in spans if span.name.count(".") == 2}
    assert phases <= set(re.findall(r"[a-z]+", text))
