"""Ranks that do not come to an operation, or come late. Ranks are threads of this process."""

from __future__ import annotations

import pickle
import re
import sys
import threading
import time
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from dcp_remote.common.threads import HelperThread
from dcp_remote.coordination.call_position import position_of
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.messages import CollectiveKeys
from dcp_remote.errors import SaveTimeoutError
from tests.support.rank_threads import (
    WHAT,
    Ended,
    RankThreads,
    errors,
    expected,
    held,
    join,
    plain,
    rank_threads,
    together,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("no_heartbeat_is_left")

ARRIVAL_SECONDS = 0.6


def come(ranks: RankGroup, what: str = WHAT) -> tuple[int, int]:
    """Take part in an operation, for whose ranks this one does not wait long."""
    return together(ranks, what, arrival_seconds=ARRIVAL_SECONDS)


@pytest.mark.parametrize("absent", [[2], [0], [1, 2], [0, 2]])
def test_ranks_that_do_not_come_are_named(absent: list[int]) -> None:
    """Long before the deadline, on all that came; a rank that comes later hears the same, and the next one works."""
    present = [rank for rank in range(3) if rank not in absent]
    with rank_threads(3) as them:
        for rank in absent:
            them.ranks[rank].heartbeat.set_activity("training")  # type: ignore[union-attr]
        ended = them.run(come, ranks=present)
        for result in ended:
            assert type(result.error) is SaveTimeoutError
            assert f"not called {WHAT} within" in plain(result.error)
            named = [0] if 0 in absent else absent  # the others watch the coordinator alone
            assert result.error.details["ranks"] == ", ".join(map(str, named))
            assert f"{named[0]}: has not joined, training" in str(result.error.details["last"])
            assert "rank_threads.py" in str(result.error.details["now"])  # whose thread made the group
        began = time.monotonic()
        for result in them.run(come, ranks=absent):
            assert type(result.error) is SaveTimeoutError
            assert f"not called {WHAT} within" in plain(result.error)
        assert time.monotonic() - began < 10  # not at the deadline
        assert [result.value for result in them.run(together)] == expected(3)


@pytest.mark.parametrize("absent", [0, 1])
def test_a_long_wait_is_logged_once(
    absent: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a first restore, which waits for five minutes: a rank comes some heartbeats after the warning."""
    monkeypatch.setattr("dcp_remote.coordination.failure_detector._ASK_SECONDS", 0.1)
    monkeypatch.setattr("dcp_remote.coordination.failure_detector._WARN_SECONDS", 2.0)  # the answer has come by then

    def warnings() -> list[str]:
        return [text for record in caplog.records if "goes on waiting" in (text := record.getMessage())]

    def part(ranks: RankGroup) -> tuple[int, int]:
        if ranks.rank == absent:
            wait_until(warnings)
            time.sleep(0.3)
        return together(ranks, arrival_seconds=20.0)

    with rank_threads(2) as them:
        assert [result.value for result in them.run(part)] == expected(2)
    (text,) = warnings()
    begin = rf"Rank {absent} has not called {WHAT} within \d+ s of rank {1 - absent}, which goes on waiting"
    assert re.match(begin, plain(text)), text
    assert "rank_threads.py" in text


def test_a_rank_that_comes_after_the_coordinator_has_closed_hears_the_same() -> None:
    with rank_threads(2) as them:
        (first,) = them.run(come, ranks=[0])
        assert them.ranks[0].heartbeat is not None, "each of two ranks has one"
        them.ranks[0].heartbeat.close()
        (late,) = them.run(come, ranks=[1])
        assert type(late.error) is type(first.error) is SaveTimeoutError
        assert "Rank 1 has not called" in plain(late.error)


def test_a_rank_that_was_stopped_hears_the_same_from_a_closed_coordinator() -> None:
    """The coordinator fails and closes meanwhile; for a rank that is silent it waits a second."""
    begun, closed = threading.Event(), threading.Event()
    with rank_threads(2) as them:
        heartbeat = them.ranks[0].heartbeat
        assert heartbeat is not None, "each of two ranks has one"

        def is_heard_inside() -> bool:
            status = heartbeat.last(1)
            return status is not None and status.is_inside

        def take_part(ranks: RankGroup) -> None:
            with join(ranks) as collective:
                if ranks.rank == 0:
                    begun.wait(30)
                    raise ValueError("boo")
                wait_until(is_heard_inside)
                with held(ranks):
                    begun.set()
                    closed.wait(30)
                collective.gather(1, sum)

        def close_after(ranks: RankGroup) -> None:
            try:
                take_part(ranks)
            finally:
                if ranks.rank == 0:
                    heartbeat.close()
                    closed.set()

        first, second = them.run(close_after)
        assert type(first.error) is ValueError
        assert "boo" in plain(second.error)


def guard(them: RankThreads, ranks: Sequence[int], *, times: int) -> None:
    """Let these ranks alone begin operations, as under `if rank == 0`."""
    for step in range(times):
        ended = them.run(
            lambda ranks, step=step: together(ranks, f"the save of step {step}", arrival_seconds=0.05),  # type: ignore[misc]
            ranks=ranks,
        )
        assert all("not called" in error for error in errors(ended))


@pytest.mark.parametrize(
    ("guarded", "last", "kept"),
    [
        ([0], 0, 64),
        ([0], 1, 64),
        ([0], 0, 2),
        ([0], 2, 2),
        ([1], 0, 64),
        ([1], 2, 2),
        ([0, 2], 0, 64),
        ([0, 2], 1, 2),
        ([1, 2], 0, 64),
        ([1, 2], 1, 2),
    ],
)
def test_after_guarded_operations_all_ranks_meet(
    guarded: list[int], last: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some ranks missed five operations: the next is the same for all, in whatever order the ranks come to it."""
    for module in ("member", "outcome"):
        monkeypatch.setattr(f"dcp_remote.coordination.{module}.OPERATIONS_KEPT", kept)
    with rank_threads(3) as them:
        guard(them, guarded, times=5)

        def part(ranks: RankGroup) -> tuple[int, int]:
            if ranks.rank == last:
                time.sleep(0.1)
            return together(ranks, "the restore", arrival_seconds=5.0)

        for _ in range(2):
            assert [repr(result) for result in them.run(part)] == [repr(value) for value in expected(3)]
        assert not [key for key in them.left() if key.endswith("/verdict")]


def test_a_rank_in_its_last_operation_is_waited_for() -> None:
    """A rank is slow to leave an operation: the others wait in the next one for longer than for an absent rank."""

    def part(ranks: RankGroup) -> tuple[int, int]:
        with join(ranks, "the save of step 1") as collective:
            collective.gather(None, len)
            if ranks.rank == slow:
                time.sleep(2 * ARRIVAL_SECONDS)
        return come(ranks)

    with rank_threads(3) as them:
        for slow in (2, 0):  # noqa: B007  # read by the ranks
            assert [result.value for result in them.run(part)] == expected(3)


def test_a_rank_that_works_in_an_operation_is_waited_for() -> None:
    """A rank copies its state before it contributes."""

    def part(ranks: RankGroup) -> int:
        with join(ranks, arrival_seconds=ARRIVAL_SECONDS) as collective:
            if ranks.rank == slow:
                time.sleep(2 * ARRIVAL_SECONDS)
            return collective.gather(ranks.rank, sum)

    with rank_threads(3) as them:
        for slow in (2, 0):  # noqa: B007  # read by the ranks
            assert [result.value for result in them.run(part)] == [3, 3, 3]


def test_a_rank_in_another_call_is_waited_for() -> None:
    """The thread of a rank is in this package, as while a manager deletes old checkpoints."""

    def part(ranks: RankGroup) -> tuple[int, int]:
        if ranks.rank == slow:
            helper = HelperThread("busy")
            helper.run(lambda: time.sleep(2 * ARRIVAL_SECONDS), lambda: None)
            helper.close()
        return come(ranks)

    def begin(ranks: RankGroup) -> int:
        together(ranks)  # the thread that began the last operation is the one that is looked at
        met.wait(30)
        return part(ranks)[0]

    met = threading.Barrier(3)
    with rank_threads(3) as them:
        for slow in (2, 0):  # noqa: B007  # read by the ranks
            assert [result.value for result in them.run(begin)] == [3, 3, 3]


def test_a_contribution_shows_that_a_rank_has_come() -> None:
    """In a large group the heartbeats of all ranks are not known at once: a contribution is enough."""
    store = dist.HashStore()
    ranks = RankGroup(0, 3, store, beat_seconds=0.03)
    try:
        ended: list[Ended[int]] = []

        def part() -> int:
            with join(ranks, arrival_seconds=ARRIVAL_SECONDS) as collective:
                assert ranks.heartbeat is not None
                part = pickle.dumps({2: b""})
                ranks.heartbeat.enqueue(
                    lambda client: client.append(CollectiveKeys(collective.keys.number, WHAT).parts(1), part)
                )
                return collective.gather(None, len)

        thread = threading.Thread(target=lambda: ended.append(Ended(part)))
        thread.start()
        thread.join(30)
    finally:
        ranks.close()
    assert type(ended[0].error) is SaveTimeoutError
    assert ended[0].error.details["ranks"] == "1"
    assert ended[0].error.details["last"] == "1: no heartbeat yet"


def test_nobody_looks_where_training_is_unless_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between operations, and in one to which all come at once; after one that asked, nobody looks any more."""
    looked: list[str] = []

    def look(thread: threading.Thread) -> tuple[str, bool]:
        looked.append(thread.name)
        return "evaluate (train.py:1)", False

    def beat_on() -> None:
        beating = [ranks.heartbeat for ranks in them.ranks if ranks.heartbeat is not None]
        assert len(beating) == 2
        for heartbeat in beating:
            count = heartbeat._count
            wait_until(lambda heartbeat=heartbeat, count=count: heartbeat._count > count + 3)  # type: ignore[misc]

    monkeypatch.setattr("dcp_remote.coordination.heartbeat.position_of", look)
    with rank_threads(2) as them:
        assert [result.value for result in them.run(together)] == expected(2)
        beat_on()
        assert not looked
        (ended,) = them.run(lambda ranks: together(ranks, arrival_seconds=1.0), ranks=[0])
        assert isinstance(ended.error, SaveTimeoutError)
        assert ended.error.details["now"] == "1: evaluate (train.py:1)"
        beat_on()
        looked.clear()
        beat_on()
        assert not looked


def test_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The innermost line of a user's code, and whether the thread is in a call of this package.

    Without frame objects: to walk those of a running thread crashed Python 3.11 in `f_back`.
    """
    monkeypatch.setattr(sys, "_current_frames", lambda: pytest.fail("frames of running threads"))
    arrived, go_on = threading.Event(), threading.Event()

    def evaluate(*, by_helper: bool) -> None:
        def wait() -> None:
            arrived.set()
            go_on.wait(30)

        if by_helper:
            helper = HelperThread("busy")
            helper.run(wait, lambda: None)
            helper.close()
        else:
            wait()

    for by_helper in (False, True):
        arrived.clear()
        go_on.clear()
        thread = threading.Thread(target=evaluate, kwargs={"by_helper": by_helper})
        thread.start()
        assert arrived.wait(30)
        where, is_calling = position_of(thread)
        assert where.startswith("evaluate (test_arrival.py:" if by_helper else "wait (test_arrival.py:")
        assert is_calling == by_helper
        go_on.set()
        thread.join(30)
        assert position_of(thread) == ("", False)
