"""Waiting for a newer checkpoint: what counts as newer, what a wait costs, outages, and the end of the wait."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    BucketNotFoundError,
    CorruptCheckpointError,
    InvalidArgumentError,
    PermissionDeniedError,
)
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.info import CheckpointInfo
from dcp_remote.run.waiting import wait_for_newer, watch_run
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.clocks import SleepClock
from tests.support.faults import denied, verb_is
from tests.support.runs import a_run, fence, save


class Clock(SleepClock):
    """Clock that advances by each sleep, and calls functions when their time comes."""

    def __init__(self, events: dict[float, Callable[[], object]] | None = None) -> None:
        super().__init__()
        self.events = events or {}

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        for due in [due for due in self.events if due <= self.now]:
            self.events.pop(due)()


def wait(
    store: ObjectStore, step: int | None, clock: Clock, *, timeout_seconds: float = 3600.0, poll_seconds: float = 30.0
) -> CheckpointInfo | None:
    return wait_for_newer(
        store, step, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds, clock=clock.deadline(0).clock
    )


def test_what_is_there_is_returned_at_once() -> None:
    """Wait for a step above one that is behind: one GET and no pause; None waits for any."""
    store, clock = RecordingStore(a_run(1, 2)), Clock()
    for step in (None, 0, 1):
        info = wait(store, step, clock)
        assert info is not None
        assert info.step == 2
    assert store.calls == [("get", CATALOG_KEY)] * 3
    assert clock.sleeps == []


def test_a_checkpoint_that_comes() -> None:
    """Commit a checkpoint after a while: returned at the next look; each look is one GET."""
    inner = a_run(1, 2)
    store, clock = RecordingStore(inner), Clock({95.0: lambda: save(inner, 3)})
    info = wait(store, 2, clock)
    assert info is not None
    assert info.step == 3
    assert clock.now == 120.0
    assert store.calls == [("get", CATALOG_KEY)] * 5


def test_none_in_time() -> None:
    """Wait in vain: None at the timeout, after a last look, at which a checkpoint still counts."""
    store, clock = RecordingStore(a_run(1)), Clock()
    assert wait(store, 1, clock, timeout_seconds=70.0) is None
    assert clock.sleeps == [30.0, 30.0, 10.0]
    assert store.count() == 4
    inner = a_run(1)
    clock = Clock({70.0: lambda: save(inner, 2)})
    assert wait(inner, 1, clock, timeout_seconds=70.0) is not None


def test_a_run_that_begins_later(caplog: pytest.LogCaptureFixture) -> None:
    """Wait for a run that has not begun: said once, with what else lies there, and its first checkpoint returned."""
    inner = MemoryStore()
    inner.put("model.safetensors", [b"x"])
    store = RecordingStore(inner)
    clock = Clock({40.0: lambda: fence(inner), 70.0: lambda: save(inner, 5)})
    info = wait(store, None, clock)
    assert info is not None
    assert info.step == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no run here yet" in line
    assert "Hugging Face" in line
    looks = [("head", "manifest.json"), ("list", "manifests/"), ("list", "")]
    assert store.calls == [("get", CATALOG_KEY), *looks, *[("get", CATALOG_KEY)] * 3]


def test_urls_at_which_no_run_will_begin() -> None:
    """Wait at a checkpoint by itself, and at a run that has lost its catalog: an error at once."""
    store = MemoryStore()
    store.put("manifest.json", [b"x"])
    with pytest.raises(InvalidArgumentError, match="checkpoint by itself"):
        wait(store, None, Clock())
    lost = a_run(1)
    lost.delete([CATALOG_KEY])
    with pytest.raises(CorruptCheckpointError, match="recover"):
        wait(lost, None, Clock())


def test_abandoned_checkpoints_are_not_newer() -> None:
    """Go back to step 1 and save step 2: of a waiter at step 1 that is newer, the abandoned step 3 is not."""
    store = a_run(1, 3)
    fence(store)
    save(store, 2, abandons=1)
    info = wait(store, 1, Clock())
    assert info is not None
    assert info.step == 2
    assert wait(store, 2, Clock(), timeout_seconds=60.0) is None


def test_an_outage_is_waited_out(caplog: pytest.LogCaptureFixture) -> None:
    """Fail every request for ten minutes: one request a poll, a line when that begins, and one when it ends."""
    inner, clock = a_run(1, 2), Clock()
    down = Fault(lambda verb, key, number: 30.0 <= clock.now < 630.0, "request", persistent=True)
    faulty = FaultyStore(inner, [down])
    store = RecordingStore(faulty)
    clock.events[300.0] = lambda: save(inner, 3)
    with caplog.at_level(logging.WARNING):
        info = wait(store, 2, clock, poll_seconds=10.0)
    assert info is not None
    assert info.step == 3
    assert clock.now == 630.0
    assert store.count() == 64
    began, ended = caplog.messages
    assert "the store does not answer; still waiting for a newer checkpoint: " in began
    assert ended.endswith("the store answers again")
    # It ends by the timeout if the store does not come back.
    clock = Clock()
    down = Fault(lambda verb, key, number: True, "request", persistent=True)
    assert wait(FaultyStore(a_run(1), [down]), None, clock, timeout_seconds=100.0) is None
    assert clock.now == 100.0


def test_a_refusal_is_raised() -> None:
    """Deny the catalog: an error at once, which no wait mends."""
    with pytest.raises(PermissionDeniedError):
        wait(FaultyStore(a_run(1), [Fault(verb_is("get"), "request", error=denied)]), None, Clock())


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"step": 1.5}, {"step": "best"}, {"timeout_seconds": 0}, {"poll_seconds": 0}, {"poll_seconds": "1"}],
)
def test_wrong_arguments(wrong: dict[str, object]) -> None:
    """Pass a wrong step, timeout or pause: refused before a request is sent."""
    store = RecordingStore(a_run(1))
    arguments: dict[str, object] = {"step": 1, "timeout_seconds": 1.0, **wrong}
    with pytest.raises(InvalidArgumentError):
        wait_for_newer(store, arguments.pop("step"), **arguments)  # type: ignore[arg-type]  # the mistakes that are tested
    assert store.calls == []


def test_a_bucket_that_does_not_exist() -> None:
    """Wait in a bucket that does not exist: an error at once, since no run will begin there."""

    class NoBucket(MemoryStore):
        def explain_missing(self) -> BucketNotFoundError:
            return BucketNotFoundError("There is no such bucket.")

    with pytest.raises(BucketNotFoundError, match="no such bucket"):
        wait(NoBucket(), None, Clock())


# ---- each new checkpoint


def watched(
    store: ObjectStore, clock: Clock, *, after: int | None = None, timeout_seconds: float = 100.0
) -> list[tuple[float, int]]:
    """Return the checkpoints that a watch yields, with the times at which it does."""
    watch = watch_run(store, after=after, timeout_seconds=timeout_seconds, clock=clock.deadline(0).clock)
    return [(clock.now, entry.step) for entry in watch]


def test_a_watch_yields_what_is_new() -> None:
    """Commit one, then two between two looks: each once, and the wait begins again after each; none of what was there.

    A look is one GET, and another one follows what was yielded.
    """
    inner = a_run(1, 2)
    events = {65.0: lambda: save(inner, 3), 95.0: lambda: (save(inner, 4), save(inner, 5))}
    store, clock = RecordingStore(inner), Clock(dict(events))
    assert watched(store, clock) == [(90.0, 3), (120.0, 4), (120.0, 5)]
    assert clock.now == 220.0
    assert store.calls == [("get", CATALOG_KEY)] * (4 + 3 + 5)
    assert watched(inner, Clock(), after=3) == [(0.0, 4), (0.0, 5)]


def test_a_watch_leaves_out_what_is_deleted_meanwhile() -> None:
    """Delete step 2 while the first checkpoint of a look is taken: the third follows at once."""
    store, clock = a_run(1, 2, 3), Clock()
    watch = watch_run(store, after=0, timeout_seconds=100.0, clock=clock.deadline(0).clock)
    assert next(watch).step == 1
    Deletions(store).retire([2], deadline=Deadline(30))
    assert [(clock.now, entry.step) for entry in watch] == [(0.0, 3)]


def test_a_watch_of_a_run_that_begins_later() -> None:
    """Watch where there is no run: its first checkpoint is new."""
    store = MemoryStore()
    clock = Clock({40.0: lambda: fence(store), 70.0: lambda: save(store, 5)})
    assert watched(store, clock) == [(90.0, 5)]


def test_a_watch_over_a_rollback_and_an_overwrite() -> None:
    """Go back to step 1 and save steps 2 and 3 again: both are new, and what was abandoned before is not."""
    store = a_run(1, 3)

    def go_back() -> None:
        fence(store)
        save(store, 2, abandons=1)

    assert watched(store, Clock({10.0: go_back})) == [(30.0, 2)]
    assert watched(store, Clock(), after=0) == [(0.0, 1), (0.0, 2)]
    assert watched(store, Clock({40.0: lambda: save(store, 3, letter="b")})) == [(60.0, 3)]


def test_a_watch_over_an_outage_and_a_lost_catalog(caplog: pytest.LogCaptureFixture) -> None:
    """Fail for ten minutes, in a wait without an end; then delete the run, and put it back: nothing is new."""
    inner, clock = a_run(1, 2), Clock()
    down = Fault(lambda verb, key, number: 30.0 <= clock.now < 630.0, "request", persistent=True)
    clock.events[300.0] = lambda: save(inner, 3)
    watch = watch_run(FaultyStore(inner, [down]), clock=clock.deadline(0).clock)
    assert next(watch).step == 3
    began, ended = caplog.messages
    assert "the store does not answer; still waiting for a newer checkpoint: " in began
    assert ended.endswith("the store answers again")
    objects = dict(inner.space.objects)
    clock.events[640.0] = lambda: inner.delete(list(objects))
    clock.events[700.0] = lambda: inner.space.objects.update(objects)
    clock.events[800.0] = lambda: save(inner, 4)
    assert next(watch).step == 4
