"""Uploads: budgets are counted, and gates control order and clean-up.

Threads are real. A gate holds a request until the test opens it, which fixes the order of events; waits have a limit
only so that a bug fails instead of hanging.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import numpy as np
import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.hedging import LATE_SECONDS_MIN, SAMPLES_MIN, LatencyTracker
from dcp_remote.errors import PermissionDeniedError, SaveFailedError, SaveTimeoutError, TransientStorageError
from dcp_remote.saving.uploads import UPLOADS_IN_FLIGHT, Prepared, Uploads
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.testing import Fault, FaultyStore
from tests.support.threads import PATIENCE_SECONDS, HookedStore, join, one_thread, opened, workers


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check after every test that its threads end."""
    yield
    join(workers("upload"))


def uploads_to(
    store: ObjectStore,
    *,
    budget_bytes: int = 1000,
    clock: Callable[[], float] = lambda: 0.0,
    seconds: float = 1800,
    latency_seconds: float = 0.0,
) -> Uploads[int]:
    return Uploads(
        store,
        rank=7,
        deadline=Deadline(seconds, clock),
        memory_budget_bytes=budget_bytes,
        latency_seconds=latency_seconds,
    )


def ready(buffers: list[Buffer], number: int) -> Prepared[int]:
    return Prepared(buffers, lambda _: number, lambda: None)


def sending(number: int) -> Callable[[], Prepared[int]]:
    return lambda: ready([b"x" * number, b"y"], number)


def upload(store: ObjectStore, *keys: str, latency_seconds: float = 0.0) -> list[int]:
    """Save once, and put these keys."""
    with uploads_to(store, latency_seconds=latency_seconds) as uploads:
        for number, key in enumerate(keys):
            uploads.submit(key, sending(number), claimed_bytes=0)
        return uploads.finish()


def test_reports_come_in_the_order_of_submission() -> None:
    """Hold the first put until the others are done."""
    memory = MemoryStore()
    last_is_done = threading.Event()

    def before(key: str) -> None:
        if key == "k0":
            opened(last_is_done)

    store = HookedStore(memory, before, lambda key: last_is_done.set() if key == "k29" else None)
    with uploads_to(store) as uploads:
        for number in range(30):
            uploads.submit(f"k{number}", sending(number), claimed_bytes=0)
        assert uploads.finish() == list(range(30))
    assert uploads.retries == 0
    assert {key: len(item.data) for key, item in memory.space.objects.items()} == {f"k{n}": n + 1 for n in range(30)}
    with uploads_to(store) as uploads:
        assert uploads.finish() == []


def test_claims_stay_within_the_budget() -> None:
    """Count claimed bytes that are not put yet after every claim; a claim above the budget goes alone."""
    memory = MemoryStore()
    rng = random.Random(3)
    sizes = [rng.choice([1, 30, 60, 100, 250]) for _ in range(300)]
    lock = threading.Lock()
    held: dict[str, int] = {}
    largest: list[list[int]] = []

    def after(key: str) -> None:
        with lock:
            del held[key]

    with uploads_to(HookedStore(memory, after=after), budget_bytes=100) as uploads:
        for number, size in enumerate(sizes):
            uploads.claim(size)
            with lock:
                held[f"k{number}"] = size
                largest.append(list(held.values()))
            uploads.submit(f"k{number}", sending(number), claimed_bytes=size)
        assert uploads.finish() == list(range(300))
    assert all(sum(values) <= 100 or len(values) == 1 for values in largest)
    assert max(map(len, largest)) > 1, "more than one went at a time"


def test_a_claim_waits_for_room() -> None:
    """Claim more than is free: the claim returns only after a put has freed the budget."""
    order: list[str] = []
    gate = threading.Event()

    def before(key: str) -> None:
        if key == "first":
            # Opened by the clock, which a claim reads when it begins, and again when it has to wait.
            opened(gate)
            order.append("put")

    def clock() -> float:
        if waiting.is_set():
            looks.append(1)
            if len(looks) > 1:
                gate.set()
        return 0.0

    waiting, looks = threading.Event(), list[int]()
    with uploads_to(HookedStore(MemoryStore(), before), budget_bytes=100, clock=clock) as uploads:
        uploads.claim(60)
        uploads.submit("first", sending(1), claimed_bytes=60)
        waiting.set()
        uploads.claim(50)
        order.append("claimed")
        assert order == ["put", "claimed"]
        uploads.submit("second", sending(2), claimed_bytes=50)
        uploads.finish()


@pytest.mark.parametrize(("latency_seconds", "at_a_time"), [(0.0, 16), (0.04, 16), (0.05, 32), (2.0, 32)])
def test_uploads_in_flight(latency_seconds: float, at_a_time: int) -> None:
    """Let as many puts meet at a barrier as may be in flight; more of them where the store is far."""
    barrier = threading.Barrier(at_a_time)

    def before(key: str) -> None:
        barrier.wait(PATIENCE_SECONDS)

    keys = [f"k{n}" for n in range(2 * at_a_time)]
    store = HookedStore(MemoryStore(), before)
    assert upload(store, *keys, latency_seconds=latency_seconds) == list(range(len(keys)))


def test_a_failure_removes_everything() -> None:
    """Deny one put while one is done and one is held: the held one arrives after the error, and is removed."""
    memory = MemoryStore()
    is_done, is_held, gate = threading.Event(), threading.Event(), threading.Event()

    def before(key: str) -> None:
        if key == "held":
            is_held.set()
            opened(gate)
        if key == "denied":
            opened(is_done)
            opened(is_held)
            raise PermissionDeniedError("No grant.")

    store = HookedStore(memory, before, lambda key: is_done.set() if key == "done" else None)
    with pytest.raises(SaveFailedError) as caught:
        upload(store, "done", "held", "denied")
    assert memory.space.objects == {}
    assert caught.value.details == {
        "rank": 7,
        "url": memory.url,
        "shard": "denied",
        "attempts": 1,
        "cause": "PermissionDeniedError",
    }
    assert isinstance(caught.value.__cause__, PermissionDeniedError)
    assert "Rank 7" in str(caught.value)
    threads = workers("upload")
    assert threads
    gate.set()
    join(threads)
    assert memory.space.objects == {}


def test_after_a_failure_nothing_begins() -> None:
    """Deny one put while all workers are busy: of a hundred more, only its worker may begin one."""
    barrier = threading.Barrier(UPLOADS_IN_FLIGHT)
    gate = threading.Event()
    begun: list[str] = []

    def before(key: str) -> None:
        begun.append(key)
        if len(begun) <= UPLOADS_IN_FLIGHT:
            barrier.wait(PATIENCE_SECONDS)
        if key == "k0":
            raise PermissionDeniedError("No grant.")
        opened(gate)

    memory = MemoryStore()
    with pytest.raises(SaveFailedError):
        upload(HookedStore(memory, before), *(f"k{n}" for n in range(100)))
    threads = workers("upload")
    gate.set()
    join(threads)
    assert len(begun) <= UPLOADS_IN_FLIGHT + 1
    assert memory.space.objects == {}


def leave(store: ObjectStore, *, after_finish: bool, error: Exception | None) -> None:
    with uploads_to(store) as uploads:
        uploads.submit("a", sending(1), claimed_bytes=0)
        if after_finish:
            uploads.finish()
        if error:
            raise error


@pytest.mark.parametrize("error", [None, ZeroDivisionError()], ids=["quietly", "raising"])
def test_a_block_left_before_the_end_removes_everything(error: Exception | None) -> None:
    """Leave the block by an error, which is raised unchanged, or without one."""
    memory = MemoryStore()
    with pytest.raises(ZeroDivisionError) if error else nullcontext():
        leave(memory, after_finish=False, error=error)
    join(workers("upload"))
    assert memory.space.objects == {}


def test_after_finish_nothing_is_removed() -> None:
    """Raise after `finish`, when other ranks may know the keys."""
    memory = MemoryStore()
    with pytest.raises(ZeroDivisionError):
        leave(memory, after_finish=True, error=ZeroDivisionError())
    assert set(memory.space.objects) == {"a"}


def test_a_failed_cleanup_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Deny the clean-up: the caller gets the error of the save."""
    memory = MemoryStore()
    denied = Fault(
        lambda verb, key, _: verb == "delete" or key == "b",
        "request",
        persistent=True,
        error=lambda: PermissionDeniedError("No grant."),
    )
    with caplog.at_level(logging.WARNING), pytest.raises(SaveFailedError):
        upload(FaultyStore(memory, [denied]), "a", "b")
    assert "stay as orphans" in caplog.text


def test_attempts_are_counted() -> None:
    """Lose two answers and deny the third attempt; a retry of another key does not count."""
    lost = [Fault(lambda verb, key, _: (verb, key) == ("put", "bad"), "response")] * 2
    other = Fault(lambda verb, key, _: (verb, key) == ("put", "good"), "request")
    denied = Fault(lambda _, key, __: key == "bad", "request", error=lambda: PermissionDeniedError("No grant."))
    with pytest.raises(SaveFailedError) as caught:
        upload(FaultyStore(MemoryStore(), [*lost, other, denied]), "good", "bad")
    assert (caught.value.details["shard"], caught.value.details["attempts"]) == ("bad", 3)
    uploads = uploads_to(FaultyStore(MemoryStore(), [other, *lost]))
    with uploads:
        uploads.submit("good", sending(1), claimed_bytes=0)
        uploads.submit("bad", sending(1), claimed_bytes=0)
        uploads.finish()
    assert uploads.retries == 3


def test_the_bytes_of_a_repeated_put_are_freed() -> None:
    """The first attempt of each put fails: the memory of a shard is freed when its put ends, not with the save."""
    failed: set[str] = set()
    memories: list[weakref.ref[object]] = []

    def before(key: str) -> None:
        if key not in failed:
            failed.add(key)
            raise TransientStorageError("503 Slow Down.")

    def prepare() -> Prepared[int]:
        memory = np.zeros(1000, dtype=np.uint8)
        memories.append(weakref.ref(memory))
        return ready([memoryview(memory)], 1)  # type: ignore[arg-type]  # an array is a buffer

    with uploads_to(HookedStore(MemoryStore(), before)) as uploads:
        for number in range(3):
            uploads.submit(f"k{number}", prepare, claimed_bytes=0)
        uploads.finish()
        assert uploads.retries == 3
        assert [memory() for memory in memories] == [None] * 3


def test_preparing_may_fail() -> None:
    """Fail to prepare: the error names the cause, and the claim is freed, so that a waiting thread sees the error."""

    def prepare() -> Prepared[int]:
        raise MemoryError("no room")

    def save() -> None:
        with uploads_to(MemoryStore(), budget_bytes=1000) as uploads:
            uploads.claim(1000)
            uploads.submit("a", prepare, claimed_bytes=1000)
            uploads.claim(1000)

    with pytest.raises(SaveFailedError) as caught:
        save()
    assert caught.value.details["cause"] == "MemoryError: no room"


@pytest.mark.parametrize("waits_in", ["finish", "claim"])
def test_the_deadline(waits_in: str) -> None:
    """Let the deadline pass while a put is held: the error counts the open shards, and the put is removed later."""
    memory = MemoryStore()
    gate = threading.Event()
    now_seconds = [0.0]

    def save() -> None:
        store = HookedStore(memory, lambda key: opened(gate))
        with uploads_to(store, clock=lambda: now_seconds[0], seconds=10) as uploads:
            for number in range(3):
                uploads.claim(300)
                uploads.submit(f"k{number}", sending(number), claimed_bytes=300)
            now_seconds[0] = 11.0
            if waits_in == "claim":
                uploads.claim(300)
            uploads.finish()

    with pytest.raises(SaveTimeoutError) as caught:
        save()
    assert (caught.value.details["unfinished"], caught.value.details["shard"]) == (3, "k0")
    assert caught.value.details["rank"] == 7
    threads = workers("upload")
    gate.set()
    join(threads)
    assert memory.space.objects == {}


def test_the_deadline_names_the_last_error_of_a_shard() -> None:
    """One put is held, another fails again and again until the deadline: the error names that one, and why."""
    gate, tried = threading.Event(), threading.Event()
    now_seconds = [0.0]

    def before(key: str) -> None:
        if key == "failing":
            tried.set()
            raise TransientStorageError("503 Slow Down.")
        opened(gate)

    def save() -> None:
        store = HookedStore(MemoryStore(), before)
        with uploads_to(store, clock=lambda: now_seconds[0], seconds=10) as uploads:
            for key in ("held", "failing"):
                uploads.submit(key, sending(1), claimed_bytes=0)
            opened(tried)
            while not uploads.retries:
                time.sleep(0.001)
            now_seconds[0] = 11.0
            uploads.finish()

    with pytest.raises(SaveTimeoutError) as caught:
        save()
    gate.set()
    join(workers("upload"))
    assert caught.value.details["shard"] == "failing"
    assert caught.value.details["cause"] == "TransientStorageError: 503 Slow Down."


def test_puts_are_reported_and_timed() -> None:
    """Record `on_put`: key and bytes, from the worker thread; seconds and retries include what was sent again."""
    now_seconds = itertools.count()
    told: list[tuple[str, int, str]] = []
    faults = [Fault(lambda verb, key, _: (verb, key) == ("put", "k1"), "response")]

    def on_put(key: str, size_bytes: int) -> None:
        told.append((key, size_bytes, threading.current_thread().name))

    uploads: Uploads[int] = Uploads(
        FaultyStore(MemoryStore(), faults),
        rank=0,
        deadline=Deadline(600),
        memory_budget_bytes=1000,
        on_put=on_put,
        clock=lambda: float(next(now_seconds)),
    )
    with uploads:
        assert not uploads.seconds
        for number in range(3):
            uploads.submit(f"k{number}", sending(number), claimed_bytes=0)
        uploads.finish()
    assert sorted((key, size) for key, size, _ in told) == [("k0", 1), ("k1", 2), ("k2", 3)]
    assert all(name.startswith("dcp_remote-upload") for _, _, name in told)
    assert uploads.retries == 1
    assert set(uploads.seconds) == {"k0", "k1", "k2"}
    assert all(seconds >= 1 for seconds in uploads.seconds.values())


def test_retries_end_with_the_save() -> None:
    """Fail one key for ever and deny another, half an hour before the deadline: all workers end."""
    tried = threading.Event()

    def before(key: str) -> None:
        if key == "stuck":
            tried.set()
            raise TransientStorageError("503.")
        opened(tried)
        raise PermissionDeniedError("No grant.")

    with pytest.raises(SaveFailedError) as caught:
        upload(HookedStore(MemoryStore(), before), "stuck", "denied")
    assert caught.value.details["shard"] == "denied"
    join(workers("upload"))


def test_uploads_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put each object once, by the worker or by the caller."""
    one_thread(monkeypatch)
    memory = MemoryStore()
    puts: list[str] = []

    def before(key: str) -> None:
        puts.append(key)
        time.sleep(0.02 if threading.current_thread() is threading.main_thread() else 0.005)

    with uploads_to(HookedStore(memory, before)) as uploads:
        for number in range(8):
            uploads.submit(f"k{number}", sending(number), claimed_bytes=0)
        assert uploads.finish() == list(range(8))
    join(workers("upload"))
    assert sorted(puts) == [f"k{number}" for number in range(8)] == [info.key for info in memory.list()]


# ---- puts that are late


class LateStore(HookedStore):
    """Store that holds the put of "first" until its gate opens; then the put may fail, before or after it is done."""

    def __init__(self, *, fails: str = "") -> None:
        self.memory = MemoryStore()
        self.gate = threading.Event()
        self.arrived = threading.Event()
        self._fails = fails
        super().__init__(self.memory, self._held, self._lost)

    def _held(self, key: str) -> None:
        if key == "first":
            self.arrived.set()
            opened(self.gate)
            if self._fails == "before":
                raise PermissionDeniedError("refused")

    def _lost(self, key: str) -> None:
        if key == "first" and self._fails == "after":
            raise PermissionDeniedError("refused, and yet carried out")

    def keys(self) -> list[str]:
        return [info.key for info in self.memory.list()]


class LateClock:
    """Clock that stands still until the held put has begun, and is late from then on."""

    def __init__(self, store: LateStore) -> None:
        self._store = store

    def __call__(self) -> float:
        return 10 * LATE_SECONDS_MIN if self._store.arrived.is_set() else 0.0


def known_pace() -> LatencyTracker:
    pace = LatencyTracker()
    for _ in range(2 * SAMPLES_MIN):
        pace.record(2, 0.01)
    return pace


def late_upload(
    store: LateStore,
    *,
    pace: LatencyTracker,
    on_put: Callable[[str, int], None] | None = None,
    around: ObjectStore | None = None,
) -> Uploads[str]:
    uploads: Uploads[str] = Uploads(
        around or store,
        rank=7,
        deadline=Deadline(60),
        memory_budget_bytes=1000,
        clock=LateClock(store),
        pace=pace,
        on_put=on_put,
    )
    return uploads


def named(key: str) -> str:
    return key


def submit(uploads: Uploads[str], *, second_key: str = "second") -> None:
    data = bytearray(b"12")
    uploads.submit("first", lambda: Prepared([data], named, lambda: None), claimed_bytes=0, second_key=second_key)


@pytest.mark.parametrize("fails", ["", "before", "after"])
def test_a_late_put_is_sent_under_another_name(fails: str) -> None:
    """Hold the first put: the second is the shard and is reported once, and the first is deleted when it arrives."""
    store = LateStore(fails=fails)
    told: list[str] = []
    with late_upload(store, pace=known_pace(), on_put=lambda key, _: told.append(key)) as uploads:
        submit(uploads)
        assert uploads.finish() == ["second"]
        assert (len(uploads.seconds), uploads.retries) == (1, 1)
    assert store.keys() == ["second"]
    store.gate.set()
    join(workers("upload"))
    assert store.keys() == ["second"]
    assert told == ["second"]


@pytest.mark.parametrize("is_denied", [False, True])
def test_of_two_puts_the_one_that_arrives_counts(*, is_denied: bool) -> None:
    """Let the first put arrive while the second is in progress, which is then deleted; or deny the second."""
    store = LateStore()

    def before(key: str) -> None:
        if key == "second":
            store.gate.set()
            while not is_denied and uploads._jobs[0].over is False:
                time.sleep(0.001)
            if is_denied:
                raise PermissionDeniedError("refused")

    uploads = late_upload(store, pace=known_pace(), around=HookedStore(store, before))
    with uploads:
        submit(uploads)
        assert uploads.finish() == ["first"]
    join(workers("upload"))
    assert store.keys() == ["first"]


def test_a_failed_save_deletes_both_names() -> None:
    """Hold the first put, finish the second, and fail: nothing stays."""
    store = LateStore()

    def save() -> None:
        with late_upload(store, pace=known_pace()) as uploads:
            submit(uploads)
            while not uploads._jobs[0].over:
                uploads.claim(0)
                with uploads._changed:
                    uploads._wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save()
    store.gate.set()
    join(workers("upload"))
    assert store.keys() == []


@pytest.mark.parametrize("why", ["nothing is known", "one name", "enough were sent twice"])
def test_puts_that_are_not_sent_twice(why: str) -> None:
    """Hold a put while the waiting thread checks several times."""
    store = LateStore()
    pace = LatencyTracker() if why == "nothing is known" else known_pace()
    while why == "enough were sent twice" and pace.may_repeat():
        pass
    with late_upload(store, pace=pace) as uploads:
        submit(uploads, second_key="" if why == "one name" else "second")
        opened(store.arrived)
        for _ in range(3):
            with uploads._changed:
                uploads._repeat_late_puts()
        store.gate.set()
        assert uploads.finish() == ["first"]
        assert (len(uploads.seconds), uploads.retries) == (1, 0)


@pytest.mark.parametrize("waits_in", ["finish", "claim"])
def test_a_deadline_that_another_thread_lets_expire(waits_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the deadline expire while no put ends: the waiting thread checks it by itself."""
    monkeypatch.setattr("dcp_remote.saving.uploads.WAKE_SECONDS", 0.01)
    gate = threading.Event()
    now_seconds = [0.0]

    def before(key: str) -> None:
        now_seconds[0] = 1801.0
        opened(gate)

    def save() -> None:
        with uploads_to(HookedStore(MemoryStore(), before), clock=lambda: now_seconds[0]) as uploads:
            uploads.claim(1000)
            uploads.submit("k", sending(1), claimed_bytes=1000)
            if waits_in == "claim":
                uploads.claim(1)
            uploads.finish()

    with pytest.raises(SaveTimeoutError):
        save()
    gate.set()
    join(workers("upload"))


def test_failed_puts_are_not_reported() -> None:
    told: list[str] = []
    denied = Fault(lambda _, key, __: key == "bad", "request", error=lambda: PermissionDeniedError("No grant."))
    store = FaultyStore(MemoryStore(), [denied])

    def save() -> None:
        with Uploads[int](
            store, rank=0, deadline=Deadline(600), memory_budget_bytes=9, on_put=lambda key, _: told.append(key)
        ) as uploads:
            uploads.submit("bad", sending(1), claimed_bytes=0)
            uploads.finish()

    with pytest.raises(SaveFailedError):
        save()
    assert told == []
