"""What `dcp-remote bench` asks of a bucket: that it is right, bounded, and gone at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dcp_remote.bench.findings import Probe, Rate, limit
from dcp_remote.bench.probe import CONNECTIONS, fresh_name, object_bytes, probe
from dcp_remote.bench.space import MiB
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
    """Denies every put; or every put of a key of rates once this many were put."""

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
    """Ignores conditions, as some servers do."""

    def child(self, prefix: str) -> Lenient:
        return Lenient(self._store.child(prefix))

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        return self._store.put(key, buffers)


def test_finds_what_a_store_does_within_its_bytes(store: MemoryStore) -> None:
    """Counted by a store around it: no more bytes than were allowed, either way; and nothing is left."""
    counting = CountingStore(store)
    found = ask(counting)
    assert (found.creates_if_absent, found.compares_and_swaps) == (True, True)
    assert [rate.connections for rate in found.up] == [rate.connections for rate in found.down] == list(CONNECTIONS)
    assert found.requests_again == 0
    assert not found.stopped_early
    assert counting.counts.put_bytes <= BYTES + 8192
    assert counting.counts.got_bytes <= BYTES + 80 * 4096
    assert list(store.list()) == []


def test_store_that_ignores_conditions_is_told(store: MemoryStore) -> None:
    """It would hold checkpoints that are replaced by others."""
    found = ask(Lenient(store))
    assert found.creates_if_absent is False
    assert not found.compares_and_swaps


@pytest.mark.parametrize(
    "error",
    [PermissionDeniedError("No."), StorageError("Broken."), KeyboardInterrupt()],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("after", [0, 1, 3, 9])
def test_whatever_ends_it_nothing_is_left(store: MemoryStore, error: BaseException, after: int) -> None:
    """A put that is denied, that fails, or Ctrl-C: in each part."""
    with pytest.raises(type(error)):
        ask(Refusing(store, error, after))
    assert list(store.list()) == []


class Keeping(WrappedStore):
    """Has no grant to delete."""

    def child(self, prefix: str) -> Keeping:
        return Keeping(self._store.child(prefix))

    def delete(self, keys: Sequence[str]) -> Mapping[str, StorageError]:
        return dict.fromkeys(keys, PermissionDeniedError("No."))


def test_what_cannot_be_deleted_is_told(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """The figures are there all the same; the warning says where it lies."""
    found = ask(Keeping(store))
    assert found.objects_left == len(list(store.list())) > 0
    assert len(found.up) == len(CONNECTIONS)
    (warning,) = caplog.messages
    assert f"{store.url}/bench-" in warning


def test_nothing_is_begun_after_its_time(store: MemoryStore) -> None:
    found = ask(store, seconds=1e-9)
    assert found.stopped_early
    assert found.up == ()
    assert "--seconds" in limit(found)
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
    assert limit(FOUND).startswith("Upload: one connection gives 50 MiB/s, 16 give 16.0 times that")


def test_limit_of_latency() -> None:
    """A request of 8 MiB takes 160 ms at this rate, of which an answer takes 100."""
    assert limit(replace(FOUND, answer_seconds=0.1)).startswith("Upload: latency")


def test_limit_of_the_network() -> None:
    told = limit(replace(FOUND, up=rates(50, 100, 110, 111, 112)))
    assert told.startswith("Upload: the network or the store; 110 MiB/s by 4 connections")


def test_limit_of_the_processor() -> None:
    assert "CPU" in limit(replace(FOUND, up=rates(50, 100, 110, 111, 112, cpu_share=1.9)))


def test_limit_of_the_rate() -> None:
    """Only what the store refused is for its rate; what else was sent again is a failure."""
    assert limit(replace(FOUND, requests_again=20, slow_downs=15)).startswith("Throttling: 15 of 200 requests")
    failing = limit(replace(FOUND, requests_again=20, slow_downs=1))
    assert failing == "The store or the network fails: 20 of 200 requests had to be sent again."


def test_limit_that_is_near_is_told_apart_from_one_connection() -> None:
    """The last step is compared with the one before it: 4 times as much in all, and the last doubling gives a fifth."""
    told = limit(replace(FOUND, up=rates(4, 8, 15, 29, 35)))
    assert told.startswith("Upload: 35 MiB/s by 16 connections, 1.2 times what 8 give: near the limit of the network")
    assert "still growing at 16" in told.partition("Download")[0]
    assert "the connection is what limits" not in told.partition("Download")[0]


def test_limit_that_is_not_near() -> None:
    told = limit(replace(FOUND, up=rates(50, 40, 40, 100, 200), down=()))
    assert told == "Upload: 200 MiB/s by 16 connections, 2.0 times what 8 give: still growing at 16."


def test_nothing_is_concluded_from_what_is_unsteady() -> None:
    told = limit(replace(FOUND, up=rates(50, 100, 40, 80, 160), down=()))
    assert told == (
        "Upload: the network or the store is unsteady, 100 MiB/s by 2 connections and only 40 MiB/s by 4: nothing can "
        "be concluded."
    )


def test_words_for_one_and_for_what_has_no_connections() -> None:
    alone = limit(replace(FOUND, up=rates(100, 101, 102, 101, 100), down=()))
    assert alone == "Upload: the network or the store; 100 MiB/s by 1 connection, and hardly more by others."
    assert "connection" not in limit(FOUND, unit="thread")


def test_whoever_does_not_listen_leaves_nothing(store: MemoryStore) -> None:
    """A closed pipe: each word is an error from some part on, that of the deletion, too."""
    heard: list[str] = []

    def tell(line: str) -> None:
        if len(heard) > 8:
            raise BrokenPipeError
        heard.append(line)

    with pytest.raises(BrokenPipeError):
        probe(store, name=fresh_name(), bytes_max=BYTES, seconds_max=30, tell=tell)
    assert list(store.list()) == []


def test_what_was_found_is_told_before_it_fails(store: MemoryStore) -> None:
    """The ninth put fails for good: the figures of what came before are there."""
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
    assert told[-1] == "deleting what was put"


class Stumbling(WrappedStore):
    """Carries the first conditional create out (or not) and says that it is too busy."""

    def __init__(self, store: ObjectStore, seen: list[str]) -> None:
        super().__init__(store)
        self.seen = seen

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if condition == "absent" and not self.seen:
            self.seen.append(key)
            raise TransientStorageError("Slow down.", code="SlowDown")
        return self._store.put(key, buffers, condition=condition)


def test_refusal_before_a_conditional_write_is_no_answer(store: MemoryStore) -> None:
    """Whose doing the refusal of the second try is nobody knows: a fresh key tells."""
    found = ask(Stumbling(store, []))
    assert (found.creates_if_absent, found.compares_and_swaps) == (True, True)
    assert (found.requests_again, found.slow_downs) == (1, 1)
    assert list(store.list()) == []


def test_store_without_such_writes_does_not_fail_for_now(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers each of them with 501: not known, and nothing of it is a failing network."""

    class Plain(WrappedStore):
        def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
            if condition != "any":
                raise TransientStorageError("Not implemented.", code="NotImplemented")
            return self._store.put(key, buffers, condition=condition)

    monkeypatch.setattr("dcp_remote.bench.probe._CONDITIONAL_PAUSE_SECONDS", 0.0)
    found = ask(Plain(store))
    assert (found.creates_if_absent, found.compares_and_swaps) == (None, None)
    assert found.requests_again == 0


def test_after_a_failure_nothing_is_begun(store: MemoryStore) -> None:
    """A thread alone would go on with the second of its keys, of which each may take a minute to fail."""
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
    """Those without a body, conditional ones and the deletion as well, by a store around it."""
    counting = CountingStore(store)
    assert ask(counting).requests == counting.counts.requests


def test_denied_after_a_lost_answer_is_deleted(store: MemoryStore) -> None:
    """The first attempt was carried out, and its answer lost; then the credentials expire."""

    class Expiring(WrappedStore):
        seen: list[str] = []  # noqa: RUF012  # of the one store, and of its children

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
    """It is said before that nothing may from there on, while all still lies there."""
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


def test_failures_for_now_are_counted(store: MemoryStore) -> None:
    """The first attempt of each read is refused for its rate."""

    class Busy(WrappedStore):
        seen: set[str] = set()  # noqa: RUF012  # of the one store, and of its children

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
def test_refused_reads_have_no_code(store: MemoryStore, cause: str) -> None:
    """What a client says of the answer tells it; a broken connection is none of these."""

    class Busy(WrappedStore):
        causes: list[str] = []  # noqa: RUF012  # of the one store, and of its children

        def get_into(self, key: str, start: int, buffer: memoryview) -> None:
            if key == "1-0" and self.causes:
                raise TransientStorageError("For now.", cause=self.causes.pop())
            self._store.get_into(key, start, buffer)

    Busy.causes = ["connection reset", cause]
    found = ask(Busy(store))
    assert (found.requests_again, found.slow_downs) == (2, 1)
