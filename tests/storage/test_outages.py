"""Lines of the log about an outage: how many, when, of which process, and what they say. The clock is fake."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcp_remote.common.deadline import Clock, Deadline, RetryPolicy
from dcp_remote.errors import ObjectNotFoundError, TransientStorageError
from dcp_remote.storage import MemoryStore, ObjectInfo, ObjectStore
from dcp_remote.storage.outages import Outage, name_speaker, outage_of
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore
from tests.support.clocks import SleepClock

URL = "memory://outage"


def _retrying(store: ObjectStore, clock: SleepClock, outage: Outage, *, seconds: float = 1800.0) -> RetryingStore:
    return RetryingStore(
        store,
        Deadline(seconds, Clock(clock, clock.sleep, lambda low, high: 0.5)),
        RetryPolicy(first_delay_seconds=1.0, delay_seconds_max=16.0),
        outage=outage,
    )


def _outage(clock: SleepClock, *, is_speaker: bool = True) -> Outage:
    name_speaker(URL, is_speaker=is_speaker)
    return Outage(URL, clock=clock)


def _failing_until(clock: SleepClock, seconds: float) -> ObjectStore:
    memory = MemoryStore()
    memory.put("key", [b"data"])
    began_seconds = clock.now
    fault = Fault(lambda verb, key, number: clock.now - began_seconds < seconds, "request", persistent=True)
    return FaultyStore(memory, [fault])


class _SlowStore(WrappedStore):
    """Store whose first request fails after some seconds."""

    def __init__(self, clock: SleepClock, seconds: float) -> None:
        super().__init__(_failing_until(clock, seconds))
        self._clock, self._left_seconds = clock, seconds

    def head(self, key: str) -> ObjectInfo:
        try:
            return super().head(key)
        finally:
            self._clock.now, self._left_seconds = self._clock.now + self._left_seconds, 0.0


@pytest.fixture(autouse=True)
def _debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dcp_remote.storage.outages")


def _lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [record for record in caplog.records if record.name == "dcp_remote.storage.outages"]
    return [(record.levelname, record.getMessage()) for record in records]


def test_an_outage_of_two_minutes(caplog: pytest.LogCaptureFixture) -> None:
    """Fail every request for two minutes: a line soon, one about every half minute, and one at the end."""
    clock = SleepClock()
    store = _retrying(_failing_until(clock, 120), clock, _outage(clock))
    assert store.get("key", limit_bytes=4).data == b"data"
    # Pauses: 0.5, 1, 2, 4, and 8 s from then on; a line is written when an attempt fails.
    end = "at most. Last: get of key: An injected fault: the request was lost."
    assert _lines(caplog) == [
        (
            "WARNING",
            f"{URL}: 1 request to the store has failed for {failed}, and will be repeated for another {left} {end}",
        )
        for failed, left in (("8 s", "30 min"), ("40 s", "29 min"), ("1 min", "29 min"), ("2 min", "28 min"))
    ] + [("WARNING", f"{URL}: the store answers again, after 2 min.")]


def test_a_short_failure_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Fail for three seconds, twice: no line, whatever the time between."""
    clock = SleepClock()
    outage = _outage(clock)
    for _ in range(2):
        _retrying(_failing_until(clock, 3), clock, outage).head("key")
        clock.now += 60
    assert _lines(caplog) == []


def test_a_silent_store(caplog: pytest.LogCaptureFixture) -> None:
    """Fail a request after 40 s, as a store that does not answer: a line at once. After 20 s: none."""
    clock = SleepClock()
    for seconds in (20, 40):
        store = _retrying(_SlowStore(clock, seconds), clock, _outage(clock))
        assert store.head("key").size_bytes == 4
    assert [text.partition(", and")[0] for _, text in _lines(caplog)] == [
        f"{URL}: 1 request to the store has failed for 40 s",
        f"{URL}: the store answers again, after 40 s.",
    ]


def test_an_outage_that_outlasts_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    """Fail until the deadline: the error says how it ended, and no line says that the store answers."""
    clock = SleepClock()
    outage = _outage(clock)
    with pytest.raises(TransientStorageError, match="attempts="):
        _retrying(_failing_until(clock, 1e9), clock, outage, seconds=20).head("key")
    assert [text.partition(" at most")[0] for _, text in _lines(caplog)] == [
        f"{URL}: 1 request to the store has failed for 8 s, and will be repeated for another 12 s"
    ]
    caplog.clear()
    _retrying(_failing_until(clock, 3), clock, outage).head("key")  # a new failure is no part of the old outage
    assert _lines(caplog) == []


def test_an_answer_that_is_an_error_ends_the_outage(caplog: pytest.LogCaptureFixture) -> None:
    """Look for an object that does not exist, during an outage."""
    clock = SleepClock()
    with pytest.raises(ObjectNotFoundError):
        _retrying(_failing_until(clock, 10), clock, _outage(clock)).head("other")
    assert _lines(caplog)[-1][1] == f"{URL}: the store answers again, after 16 s."


def test_many_requests_make_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Fail sixteen requests in as many threads: one line counts them; the last that is answered ends the outage."""
    clock = SleepClock()
    outage = _outage(clock)
    error = TransientStorageError("The store is down.", verb="put", url="memory://outage/key", cause="refused")

    def fail(number: int) -> None:
        outage.note_failure(
            number, Request("put", (f"key-{number}",)), error, sent_seconds=100.0, left_seconds=lambda: 600.0
        )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(fail, range(16)))
        clock.now += 6
        fail(3)
        list(pool.map(fail, range(16)))
        [(level, text)] = _lines(caplog)
        assert level == "WARNING"
        assert text.startswith(f"{URL}: 16 requests to the store have failed for 6 s")
        assert text.endswith("Last: put of key-3: The store is down. cause='refused'")
        caplog.clear()
        list(pool.map(lambda number: outage.note_end(number, is_answered=True), range(16)))
    assert [text for _, text in _lines(caplog)] == [f"{URL}: the store answers again, after 6 s."]


@pytest.mark.parametrize(("rank", "level"), [(None, "WARNING"), ("", "WARNING"), ("0", "WARNING"), ("3", "DEBUG")])
def test_a_process_alone_speaks(
    rank: str | None, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fail in a process that nobody told whether it speaks: its environment decides."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    clock = SleepClock()
    _retrying(_failing_until(clock, 10), clock, Outage(f"{URL}/{rank}", clock=clock)).head("key")
    assert {found for found, _ in _lines(caplog)} == {level}


def test_who_speaks_is_told_by_url(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name this process the speaker for one store, and another process for another store."""
    monkeypatch.setenv("RANK", "5")
    clock = SleepClock()
    for url, is_speaker in ((f"{URL}/a", True), (f"{URL}/b", False)):
        name_speaker(url, is_speaker=is_speaker)
        caplog.clear()
        _retrying(_failing_until(clock, 10), clock, Outage(url, clock=clock)).head("key")
        assert {level for level, _ in _lines(caplog)} == {"WARNING" if is_speaker else "DEBUG"}


def test_stores_of_a_url_share_their_outage() -> None:
    """Ask for the outage of one URL twice, as two ranges of a load do, and of another."""
    assert outage_of(URL) is outage_of(URL) is not outage_of("memory://another-outage")
