"""Tests of the measurement behind `dcp-remote bench`: correct, bounded in bytes, and without objects left."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dcp_remote.cli.findings import Probe, Rate, find_limit
from dcp_remote.cli.probe import CONNECTIONS, fresh_name, object_bytes, probe
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError, PermissionDeniedError, StorageError, TransientStorageError
from dcp_remote.storage import Buffer, MemoryStore, ObjectStore, Version
from dcp_remote.storage.base import Condition
from dcp_remote.storage.counting import CountingStore
from dcp_remote.storage.wrapper import WrappedStore

BYTES = 8 * MiB


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(f"probe-{os.urandom(4).hex()}")


def ask(store: ObjectStore, seconds: float = 30.0) -> Probe:
    return probe(store, name=fresh_name(), bytes_max=BYTES, seconds_max=seconds, tell=lambda line: None)


class Refusing(WrappedStore):
    """Store that raises an error from every put, after a number of puts that succeed."""

    def __init__(self, store: ObjectStore, error: BaseException, after: int) -> None:
        super().__init__(store)
        self.error, self.left = error, [after]

    def child(self, prefix: str) -> Refusing:
        child = Refusing(self._store.child(prefix), self.error, 0)
        child.left = self.left
        return child

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if not self.left[0]:
            raise self.error
        self.left[0] -= 1
        return self._store.put(key, buffers, condition=condition)


class Lenient(WrappedStore):
    """Store that ignores conditions, as some servers do."""

    def child(self, prefix: str) -> Lenient:
        return Lenient(self._store.child(prefix))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        return self._store.put(key, buffers)


def test_measures_within_its_bytes(store: MemoryStore) -> None:
    """Count the requests: no more bytes than allowed in either direction, and no object is left."""
    counting = CountingStore(store)
    found = ask(counting)
    assert (found.creates_if_absent, found.compares_and_swaps) == (True, True)
    assert [rate.connections for rate in found.up] == [rate.connections for rate in found.down] == list(CONNECTIONS)
    assert found.requests_again == 0
    assert not found.stopped_early
    assert counting.counts.put_bytes <= BYTES + 8192
    assert counting.counts.got_bytes <= BYTES + 80 * 4096
    assert list(store.list()) == []


def test_store_that_ignores_conditions(store: MemoryStore) -> None:
    """Ignore conditions: the result says that neither conditional write works."""
    found = ask(Lenient(store))
    assert found.creates_if_absent is False
    assert not found.compares_and_swaps


@pytest.mark.parametrize(
    "error",
    [PermissionDeniedError("No."), StorageError("Broken."), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_failures_leave_no_objects(store: MemoryStore, error: BaseException, after: int) -> None:
    """Deny, fail or interrupt a put in each part: no object is left."""
    with pytest.raises(type(error)):
        ask(Refusing(store, error, after))
    assert list(store.list()) == []


class Keeping(WrappedStore):
    """Store that denies all deletions."""

    def child(self, prefix: str) -> Keeping:
        return Keeping(self._store.child(prefix))

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        return dict.fromkeys(keys, PermissionDeniedError("No."))


def test_objects_that_cannot_be_deleted(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """Deny deletions: the results are complete, and a warning names the URL."""
    found = ask(Keeping(store))
    assert found.objects_left == len(list(store.list())) > 0
    assert len(found.up) == len(CONNECTIONS)
    (warning,) = caplog.messages
    assert f"{store.url}/bench-" in warning


def test_nothing_is_begun_after_its_time(store: MemoryStore) -> None:
    found = ask(store, seconds=1e-9)
    assert found.stopped_early
    assert found.up == ()
    assert "--seconds" in find_limit(found)
    assert list(store.list()) == []


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="Too few bytes"):
        object_bytes(1000)
    assert object_bytes(10**12) == 64 * MiB


def rates(*bytes_per_second: float, cpu_share: float = 0.1) -> tuple[Rate, ...]:
    return tuple(
        Rate(connections, MiB * speed, 1.0, cpu_share, int(MiB * speed))
        for connections, speed in zip(CONNECTIONS, bytes_per_second, strict=True)
    )


FOUND = Probe(
    first_answer_seconds=0.1,
    answer_seconds=0.01,
    slow_answer_seconds=0.02,
    creates_if_absent=True,
    compares_and_swaps=True,
    small_reads_per_second=100.0,
    object_bytes=8 * MiB,
    up=rates(50, 100, 200, 400, 800),
    down=rates(50, 100, 200, 400, 800),
    requests_again=0,
    slow_downs=0,
    requests=200,
    cores=2,
    stopped_early=False,
    objects_left=0,
)


def test_limit_of_one_connection() -> None:
    assert find_limit(FOUND).startswith("Upload: one connection gives 50 MiB/s, 16 give 16.0 times that")


def test_limit_of_latency() -> None:
    """Let a request of 8 MiB take 160 ms, of which the answer takes 100: latency is named as the limit."""
    assert find_limit(replace(FOUND, answer_seconds=0.1)).startswith("Upload: latency")


def test_limit_of_the_network() -> None:
    told = find_limit(replace(FOUND, up=rates(50, 100, 110, 111, 112)))
    assert told.startswith("Upload: the network or the store limits; 110 MiB/s with 4 connections")


def test_limit_of_the_processor() -> None:
    assert "CPU" in find_limit(replace(FOUND, up=rates(50, 100, 110, 111, 112, cpu_share=1.9)))


def test_limit_of_the_rate() -> None:
    """Report refusals for the request rate as throttling, and other failures as failures."""
    assert find_limit(replace(FOUND, requests_again=20, slow_downs=15)).startswith("Throttling: 15 of 200 requests")
    failing = find_limit(replace(FOUND, requests_again=20, slow_downs=1))
    assert failing == "The store or the network fails: 20 of 200 requests had to be sent again."


def test_limit_that_is_near() -> None:
    """Let the last doubling add a fifth, although all connections give many times what one gives: near the limit."""
    told = find_limit(replace(FOUND, up=rates(4, 8, 15, 29, 35)))
    assert told.startswith(
        "Upload: 35 MiB/s with 16 connections, 1.2 times the rate of 8: near the limit of the network"
    )
    assert "still growing at 16" in told.partition("Download")[0]
    assert "the connection limits" not in told.partition("Download")[0]


def test_limit_that_is_not_near() -> None:
    told = find_limit(replace(FOUND, up=rates(50, 40, 40, 100, 200), down=()))
    assert told == "Upload: 200 MiB/s with 16 connections, 2.0 times the rate of 8: still growing at 16."


def test_nothing_is_concluded_from_what_is_unsteady() -> None:
    told = find_limit(replace(FOUND, up=rates(50, 100, 40, 80, 160), down=()))
    assert told == (
        "Upload: the network or the store is unsteady, 100 MiB/s with 2 connections and only 40 MiB/s with 4: nothing "
        "can be concluded."
    )


def test_words_for_one_and_for_what_has_no_connections() -> None:
    alone = find_limit(replace(FOUND, up=rates(100, 101, 102, 101, 100), down=()))
    assert alone == "Upload: the network or the store limits; 100 MiB/s with 1 connection, and hardly more with others."
    assert "connection" not in find_limit(FOUND, unit="thread")


def test_closed_output_leaves_no_objects(store: MemoryStore) -> None:
    """Raise BrokenPipeError from each line after the eighth, that of the deletion included: no object is left."""
    heard: list[str] = []

    def tell(line: str) -> None:
        if len(heard) > 8:
            raise BrokenPipeError
        heard.append(line)

    with pytest.raises(BrokenPipeError):
        probe(store, name=fresh_name(), bytes_max=BYTES, seconds_max=30, tell=tell)
    assert list(store.list()) == []


def test_results_are_reported_before_a_failure(store: MemoryStore) -> None:
    """Fail the ninth put: the results until then were reported."""
    told: list[str] = []
    with pytest.raises(StorageError, match="Broken"):
        probe(
            Refusing(store, StorageError("Broken."), 8),
            name=fresh_name(),
            bytes_max=BYTES,
            seconds_max=30,
            tell=told.append,
        )
    assert "create-if-absent works; compare-and-swap works" in told
    assert any(line.startswith("1 connection: up ") for line in told)
    assert told[-1] == "deleting the objects"


class Stumbling(WrappedStore):
    """Store that raises a transient error from the first conditional create, without carrying it out."""

    def __init__(self, store: ObjectStore, seen: list[str]) -> None:
        super().__init__(store)
        self.seen = seen

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if condition == "absent" and not self.seen:
            self.seen.append(key)
            raise TransientStorageError("Slow down.", code="SlowDown")
        return self._store.put(key, buffers, condition=condition)


def test_unclear_conditional_write_is_tried_on_a_fresh_key(store: MemoryStore) -> None:
    """Fail the first create: its retry gives no clear answer, a fresh key does."""
    found = ask(Stumbling(store, []))
    assert (found.creates_if_absent, found.compares_and_swaps) == (True, True)
    assert (found.requests_again, found.slow_downs) == (1, 1)
    assert list(store.list()) == []


def test_store_without_conditional_writes_is_not_a_transient_failure(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answer 501 to every conditional write: unknown, and not counted as retried."""

    class Plain(WrappedStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            if condition != "any":
                raise TransientStorageError("Not implemented.", code="NotImplemented")
            return self._store.put(key, buffers, condition=condition)

    monkeypatch.setattr("dcp_remote.cli.probe._CONDITIONAL_PAUSE_SECONDS", 0.0)
    found = ask(Plain(store))
    assert (found.creates_if_absent, found.compares_and_swaps) == (None, None)
    assert found.requests_again == 0


def test_no_request_starts_after_a_failure(store: MemoryStore) -> None:
    """Fail the first key of a thread: the thread does not go on with the second, which might take a minute to fail."""
    seen: list[str] = []

    class Broken(WrappedStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            if key.startswith("1-"):
                seen.append(key)
                raise StorageError("Broken.")
            return self._store.put(key, buffers, condition=condition)

    with pytest.raises(StorageError, match="Broken"):
        ask(Broken(store))
    assert seen == ["1-0"]


def test_every_request_is_counted(store: MemoryStore) -> None:
    """Count by a store outside: the same number, with conditional writes and deletions."""
    counting = CountingStore(store)
    assert ask(counting).requests == counting.counts.requests


def test_object_of_a_lost_answer_is_deleted(store: MemoryStore) -> None:
    """Carry out the first attempt, lose its answer and deny the retry: no object is left."""

    class Expiring(WrappedStore):
        seen: list[str] = []  # noqa: RUF012  # shared by the store and its children

        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            if key != "1-0":
                return self._store.put(key, buffers, condition=condition)
            if self.seen:
                raise PermissionDeniedError("Expired.")
            self.seen.append(key)
            self._store.put(key, buffers, condition=condition)
            raise TransientStorageError("Lost.")

    with pytest.raises(PermissionDeniedError):
        ask(Expiring(store))
    assert list(store.list()) == []


def test_nothing_interrupts_the_deletion(store: MemoryStore) -> None:
    """Check that `hold` is called once, while the objects still exist."""
    lying: list[int] = []
    probe(
        store,
        name=fresh_name(),
        bytes_max=BYTES,
        seconds_max=30,
        tell=lambda line: None,
        hold=lambda: lying.append(len(list(store.list()))),
    )
    assert len(lying) == 1
    assert lying[0] > 0


def test_transient_failures_are_counted(store: MemoryStore) -> None:
    """Refuse the first attempt of each read for its rate: counted as sent again, and as refused."""

    class Busy(WrappedStore):
        seen: set[str] = set()  # noqa: RUF012  # shared by the store and its children

        def child(self, prefix: str) -> Busy:
            return Busy(self._store.child(prefix))

        def get_into(self, key: str, start: int, buffer: memoryview) -> None:
            if key.startswith("1-") and key not in self.seen:
                self.seen.add(key)
                raise TransientStorageError("Slow down.", code="SlowDown")
            self._store.get_into(key, start, buffer)

    found = ask(Busy(store))
    assert (found.requests_again, found.slow_downs) == (2, 2)


@pytest.mark.parametrize("cause", ["The store answered 503 Service Unavailable.", "429 Too Many Requests: wait"])
def test_refused_reads_are_recognized_by_text(store: MemoryStore, cause: str) -> None:
    """Fail reads without a code: the client's text tells a refusal from a broken connection."""

    class Busy(WrappedStore):
        causes: list[str] = []  # noqa: RUF012  # shared by the store and its children

        def get_into(self, key: str, start: int, buffer: memoryview) -> None:
            if key == "1-0" and self.causes:
                raise TransientStorageError("For now.", cause=self.causes.pop())
            self._store.get_into(key, start, buffer)

    Busy.causes = ["connection reset", cause]
    found = ask(Busy(store))
    assert (found.requests_again, found.slow_downs) == (2, 1)
