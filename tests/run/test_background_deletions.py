"""Background deletion: without a killed process, the bucket ends with just the objects that live checkpoints name."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import pytest
import torch

from dcp_remote import CheckpointManager, Retention, load
from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import (
    CheckpointExistsError,
    ConditionFailedError,
    DcpRemoteError,
)
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, Entry, add_entry, raise_floor
from dcp_remote.format.catalog_json import encode
from dcp_remote.manager import background_save, coordinator
from dcp_remote.run import background_deletions
from dcp_remote.run.background_deletions import BackgroundDeletions
from dcp_remote.run.catalog_store import see_catalog, swap
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.live_shards import LiveShards
from dcp_remote.run.retention import ChooseToDelete
from dcp_remote.storage import MemoryStore, ObjectStore, retrying
from dcp_remote.storage.deletion_queue import DeletionQueue
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore, nth
from tests.support.catalogs import stored
from tests.support.faults import denied
from tests.support.manifests import decode
from tests.support.runs import (
    FROZEN,
    TRAINED,
    MeanwhileStore,
    a_run,
    assert_sound,
    assert_tidy,
    begin,
    copied,
    fence,
    keys,
    live,
    manifest_at,
    named,
    save,
    shard_at,
    thin,
)
from tests.support.threads import join, workers

_Answer = TypeVar("_Answer")

pytestmark = pytest.mark.usefixtures("short_pauses")

PATIENCE_SECONDS = 30.0


def state_of(value: float) -> dict[str, Any]:
    """Return a state of one part that never changes, and parts that do."""
    return {
        "model": {"frozen": torch.arange(300.0), "w": torch.full((6, 3), value)},
        "optim": {"m": torch.full((6,), value)},
        "n": float(value),
    }


def deadline() -> Deadline:
    return Deadline(PATIENCE_SECONDS)


def assert_nothing_is_left(store: MemoryStore) -> None:
    """Assert that the bucket holds what the catalog names, and that every live checkpoint loads."""
    assert keys(store) == named(store)
    for entry in live(store):
        assert load(store, step=entry.step)["n"] >= 0


# ---- back to back


class Fullest(WrappedStore):
    """Store that takes two milliseconds for each request, and notes the most objects that it ever held."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.most = 0

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        time.sleep(0.002)
        answer = send()
        assert isinstance(self._store, MemoryStore)
        self.most = max(self.most, len(self._store.space.objects))
        return answer


def test_back_to_back_saves_keep_what_is_kept() -> None:
    """Save twenty times and keep one: never more than three checkpoints' objects lie there while the job runs."""
    store = MemoryStore()
    fullest = Fullest(store)
    checkpoints = CheckpointManager(fullest, retention=Retention(keep_last=1), dedup=False)
    checkpoints.save(0, state_of(0), wait=True)
    each = len(store.space.objects) - 1
    for step in range(1, 20):
        checkpoints.save(step, state_of(step))
    checkpoints.wait()
    assert fullest.most <= 3 * each + 1
    checkpoints.close()
    assert len(store.space.objects) == each + 1
    assert_nothing_is_left(store)


def test_a_discarded_shard_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete a shard after an attempt could not be settled: the floor, which a save may rest on, is left alone."""
    monkeypatch.setattr(retrying, "RetryPolicy", partial(RetryPolicy, first_delay_seconds=1e6, delay_seconds_max=1e6))
    store = a_run(1, 2)
    catalog = stored(store)
    assert catalog is not None
    recording = RecordingStore(FaultyStore(store, [nth(1, "request")]))
    deletions = BackgroundDeletions(recording)
    last = catalog.entries[-1]
    deletions.failed(Attempt(last, catalog.run_id), ["shards/00/none.safetensors"])
    assert deletions.wait(PATIENCE_SECONDS)
    before = recording.count()
    deletions.delete(["shards/00/other.safetensors"])
    assert deletions.wait(PATIENCE_SECONDS)
    assert [verb for verb, _ in recording.calls[before:]] == ["delete"]


@pytest.mark.parametrize("retention", [Retention(keep_last=1), lambda live: [info.step for info in live]])
def test_retention_of_a_fenced_job(retention: Retention | ChooseToDelete) -> None:
    """Hold up the thread of a commit until a newer job has the fence: the retention of the first deletes nothing."""
    store = a_run(1, 2, 3)
    before = stored(store)
    assert before is not None
    maintenance = BackgroundDeletions(store, retention)
    fence(store)
    save(store, 4, base=3)
    shards = manifest_at(store, 3).shards.keys
    maintenance.committed(before, before.entries[-1], shards, replaced=[], unnamed=[])
    maintenance.finish(PATIENCE_SECONDS)
    assert [entry.step for entry in live(store)] == [1, 2, 3, 4]
    assert maintenance.retention_failures == 0
    after = stored(store)
    assert after is not None
    maintenance.committed(after, after.entries[-1], manifest_at(store, 4).shards.keys, replaced=[], unnamed=[])
    maintenance.finish(PATIENCE_SECONDS)
    assert [entry.step for entry in live(store)] == [4]
    assert_sound(store)


# ---- one thread at a time


class StuckStore(WrappedStore):
    """Store whose first request of a verb hangs until it is released."""

    def __init__(self, store: ObjectStore, verb: str) -> None:
        super().__init__(store)
        self._verb = verb
        self.reached, self.released = threading.Event(), threading.Event()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.verb == self._verb and not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(PATIENCE_SECONDS)
        return send()


def test_a_thread_that_was_left_behind_deletes_no_more() -> None:
    """Hang a deletion until its thread is given up: another thread goes on, and what the first had queued stays."""
    store = MemoryStore()
    for key in ("a", "b", "c"):
        store.put(key, [b""])
    stuck = StuckStore(store, "delete")
    tidying = BackgroundDeletions(stuck)
    tidying.delete(["a"])
    assert stuck.reached.wait(PATIENCE_SECONDS)
    tidying.delete(["b"])
    first = workers("deletions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_deletions, "_ROUND_SECONDS", 0.0)
        patch.setattr(background_deletions, "_STUCK_SECONDS", 0.0)
        tidying.delete(["c"])
    assert tidying.wait(PATIENCE_SECONDS)
    stuck.released.set()
    join(first)
    assert keys(store) == {"b"}  # left to gc


# ---- leftovers


@cache
def two_steps() -> MemoryStore:
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step))
    return store


def next_saves(faulty: ObjectStore, act: str) -> None:
    """Save as a job that goes on from step 2: a new step, an overwrite, or step 2 again after going back to step 1."""
    checkpoints = CheckpointManager(faulty, retention=Retention(keep_last=2), timeout_seconds=PATIENCE_SECONDS)
    assert checkpoints.restore(state_of(0), 1 if act == "go back" else None)
    for step in (3, 4) if act == "save" else (2, 3):
        with suppress(DcpRemoteError):
            checkpoints.save(step, state_of(step), wait=True, overwrite=act == "overwrite" and step == 2)
    checkpoints.close()


FAULTS: dict[str, Callable[[int], Fault]] = {
    "request lost": lambda number: nth(number, "request"),
    "response lost": lambda number: nth(number, "response"),
    # A job that may not delete leaves its objects to gc.
    "403": lambda number: Fault(lambda verb, _key, now: now >= number and verb != "delete", "request", error=denied),
}


@pytest.mark.torture
@pytest.mark.parametrize("way", FAULTS)
@pytest.mark.parametrize("act", ["save", "overwrite", "go back"])
def test_a_job_without_kills_leaves_nothing(act: str, way: str) -> None:
    """Fail each request once: when the job has closed, the bucket holds what the catalog names, without gc."""
    for number in itertools.count(1):
        store = copied(two_steps())
        faulty = FaultyStore(store, [FAULTS[way](number)])
        with suppress(DcpRemoteError):  # the restore may fail
            next_saves(faulty, act)
        assert_nothing_is_left(store)
        if not faulty.hits:
            break
    assert number > 8


def take_over(store: MemoryStore) -> None:
    """Let another job go on with the run, from the newest checkpoint."""
    with CheckpointManager(store) as other:
        other.restore(state_of(0))
        other.save(5, state_of(7))


def by_hand(store: MemoryStore, act: Callable[[Deletions], object]) -> None:
    maintenance = Deletions(store)
    act(maintenance)
    maintenance.queue.delete(deadline=deadline())


MEANWHILE: dict[str, Callable[[MemoryStore], object]] = {
    "retire the newest": partial(by_hand, act=lambda it: it.retire([2], deadline=deadline(), force=True)),
    "thin the oldest": partial(by_hand, act=lambda it: thin(it, [1], deadline=deadline())),
    "raise the floor": lambda store: swap(store, lambda now: raise_floor(now, now.revision + 1), deadline=deadline()),
    "take over": take_over,
}


@pytest.mark.parametrize("act", MEANWHILE)
def test_a_save_beside_others_leaves_nothing(act: str) -> None:
    """Act on the run before each request of a save: committed, refused or fenced, it leaves no object behind."""
    for number in itertools.count(1):
        store = copied(two_steps())
        busy = MeanwhileStore(store, number, partial(MEANWHILE[act], store))
        with suppress(DcpRemoteError), CheckpointManager(busy) as checkpoints:
            checkpoints.restore(state_of(0))
            checkpoints.save(3, state_of(3))
        assert_nothing_is_left(store)
        if not busy.acted:
            break
    assert number > 5


# ---- attempts that may still be committed


class Unheard(NamedTuple):
    """Save whose swap is under way, and whose outcome its job does not know."""

    arrive: Callable[[], object]
    entry: Entry
    shards: tuple[str, ...]
    run_id: str


def unheard(store: MemoryStore, step: int) -> Unheard:
    attempt = begin(store, step)
    seen = see_catalog(store)
    assert seen.content is not None
    after = add_entry(seen.content, attempt)
    assert after is not None
    body = encode(after, "f" * 32)

    def arrive() -> None:
        with suppress(ConditionFailedError):
            store.put(CATALOG_KEY, [body], condition=seen.version or "absent")

    shards = decode(store.space.objects[attempt.entry.manifest].data).shards.keys
    return Unheard(arrive, attempt.entry, shards, attempt.run_id)


def settle(store: ObjectStore, told: Unheard) -> Deletions:
    maintenance = Deletions(store)
    maintenance.note(told.run_id, told.entry, told.shards)
    maintenance.settle(deadline=deadline())
    maintenance.queue.delete(deadline=deadline())
    return maintenance


@pytest.mark.parametrize("after", [False, True])
def test_a_swap_that_is_late(*, after: bool) -> None:
    """Let the swap arrive at each request that settles the save, or last: the save is live and whole, or all gone."""
    outcomes: set[tuple[int, ...]] = set()
    for number in itertools.count(1):
        store = a_run(1)
        told = unheard(store, 2)
        busy = MeanwhileStore(store, number, told.arrive, after=after)
        maintenance = settle(busy, told)
        told.arrive()
        assert_tidy(store)
        assert maintenance.is_done
        outcomes.add(tuple(entry.step for entry in live(store)))
        if not busy.acted:
            break
    assert outcomes == {(1,), (1, 2)}


def test_what_was_reused_meanwhile_stays() -> None:
    """Commit an unheard save, reuse its shards, and retire it before its job looks: the reused shards stay."""
    store = a_run(1, borrow=False)
    told = unheard(store, 2)
    told.arrive()
    save(store, 3, base=2, borrows=(FROZEN, TRAINED))
    Deletions(store).retire([2], deadline=deadline())
    lent = shard_at(store, 3, TRAINED)
    assert lent in told.shards
    settle(store, told)
    assert lent in keys(store)
    assert_tidy(store)


def test_what_is_of_another_run_is_left_alone() -> None:
    """Note an attempt of another run: the revisions of this run say nothing of it, so its objects stay."""
    store = a_run(1)
    told = unheard(store, 2)._replace(run_id="0" * 32)
    before = keys(store)
    assert settle(store, told).is_done
    assert keys(store) == before


def test_a_thread_that_cannot_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Refuse to start a thread: no save fails, and the next thread deletes for both."""
    store = MemoryStore()
    for key in ("a", "b"):
        store.put(key, [b""])
    tidying = BackgroundDeletions(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        tidying.delete(["a"])
    assert "deleted later" in caplog.text
    tidying.delete(["b"])
    assert tidying.wait(PATIENCE_SECONDS)
    assert keys(store) == set()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_failed_is_tried_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the deletion of a round: the object stays queued, and closing deletes it."""
    store = MemoryStore()
    store.put("a", [b""])
    tidying = BackgroundDeletions(FaultyStore(store, [nth(1, "request")]))
    # The first delay is longer than any deadline here, so nothing is retried.
    monkeypatch.setattr(retrying, "RetryPolicy", partial(RetryPolicy, first_delay_seconds=1e6, delay_seconds_max=1e6))
    tidying.delete(["a"])
    assert tidying.wait(PATIENCE_SECONDS)
    assert keys(store) == {"a"}
    tidying.finish(PATIENCE_SECONDS)
    assert keys(store) == set()


def test_closing_waits_less_for_deletions_after_a_save_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close after a failed save, when the store may be dead: the wait is shorter than a minute."""
    waits: list[float] = []
    finish = BackgroundDeletions.finish

    def noted(tidying: BackgroundDeletions, seconds: float) -> None:
        waits.append(seconds)
        finish(tidying, seconds)

    monkeypatch.setattr(BackgroundDeletions, "finish", noted)
    with CheckpointManager(MemoryStore()) as checkpoints:
        checkpoints.save(1, {"n": 1}, wait=True)
    with CheckpointManager(MemoryStore()) as checkpoints:
        checkpoints.save(1, {"n": 1}, wait=True)
        with pytest.raises(CheckpointExistsError):
            checkpoints.save(1, {"n": 2}, exist_ok=False, wait=True)
    committed_seconds, failed_seconds = waits
    assert committed_seconds > 30
    assert failed_seconds <= 5


def test_deletions_are_no_requests_of_a_save() -> None:
    """Save beside a deletion: the report counts as many requests as without one."""
    requests: list[int] = []
    for retention in (None, Retention(keep_last=1)):
        with CheckpointManager(MemoryStore(), retention=retention, dedup=False) as checkpoints:
            for step in range(6):
                checkpoints.save(step, state_of(step))
            report = checkpoints.wait()
            assert report is not None
            requests.append(report.requests)
    assert requests[0] == requests[1]


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of a `Deletions` by one thread while another is in it."""
    inside: dict[int, tuple[threading.Thread, int]] = {}
    lock = threading.Lock()
    found: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Deletions, *arguments: Any, **others: Any) -> Any:
            thread = threading.current_thread()
            with lock:
                owner, depth = inside.get(id(self), (thread, 0))
                if depth and owner is not thread:
                    found.append(f"{name} in {thread.name}, beside {owner.name}")
                    return method(self, *arguments, **others)
                inside[id(self)] = thread, depth + 1
            try:
                return method(self, *arguments, **others)
            finally:
                with lock:
                    inside[id(self)] = thread, depth

        return call

    for name in ("apply", "note", "settle"):
        monkeypatch.setattr(Deletions, name, watched(name, getattr(Deletions, name)))
    for owner, name in ((LiveShards, "remember"), (DeletionQueue, "add"), (DeletionQueue, "delete")):
        monkeypatch.setattr(owner, name, watched(name, getattr(owner, name)))
    return found


def test_a_thread_that_is_stuck_shares_nothing(strangers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hang a deletion: later saves commit, and use nothing that its thread holds. Released, the thread goes on."""
    for where, name in ((background_save, "_STOP_SECONDS"), (coordinator, "_WAIT_SECONDS")):
        monkeypatch.setattr(where, name, 0.02)
    store = MemoryStore()
    stuck = StuckStore(store, "delete")
    checkpoints = CheckpointManager(stuck, retention=Retention(keep_last=1))
    for step in range(4):
        checkpoints.save(step, state_of(step), wait=True)
    assert stuck.reached.is_set()
    assert [entry.step for entry in live(store)][-1] == 3
    assert strangers == []
    stuck.released.set()
    checkpoints.close()
    assert strangers == []
    assert_nothing_is_left(store)


def test_requests_of_an_overwrite() -> None:
    """Overwrite a step: a swap, and a read of the replaced manifest, but of none of older checkpoints."""
    store = a_run(1, 2, 3, 4, borrow=False)
    recording = RecordingStore(store)
    old = live(store)[-1]
    run = stored(store)
    assert run is not None
    new = save(store, 4, letter="b", overwrite=True)
    maintenance = Deletions(recording)
    maintenance.named.remember(new.manifest, decode(store.space.objects[new.manifest].data).shards.keys)
    maintenance.note(run.run_id, old)
    maintenance.settle(deadline=deadline(), catalog=stored(store))
    maintenance.queue.delete(deadline=deadline())
    assert recording.calls == [
        ("get", CATALOG_KEY),
        ("put", CATALOG_KEY),
        ("get", old.manifest),
        ("delete", recording.calls[-1][1]),
    ]
    assert keys(store) == named(store)


def test_what_is_given_up_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete while the store fails for now, then while it denies: what is to be tried again is pending, not left."""
    monkeypatch.setattr(retrying, "RetryPolicy", partial(RetryPolicy, first_delay_seconds=1e6, delay_seconds_max=1e6))
    failing = BackgroundDeletions(FaultyStore(MemoryStore(), [nth(1, "request")]))
    failing.delete(["a", "b"])
    assert failing.wait(PATIENCE_SECONDS)
    assert (failing.pending, failing.orphans_left) == (2, 0)
    deny = Fault(lambda verb, _key, _now: verb == "delete", "request", error=denied, persistent=True)
    denied_here = BackgroundDeletions(FaultyStore(MemoryStore(), [deny]))
    for keys_of_a_save in (["a", "b"], ["c"]):
        denied_here.delete(keys_of_a_save)
        assert denied_here.wait(PATIENCE_SECONDS)
    assert (denied_here.pending, denied_here.orphans_left) == (0, 3)
