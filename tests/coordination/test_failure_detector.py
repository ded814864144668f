"""Errors that name the ranks which are late or silent. Ranks are threads of this process."""

from __future__ import annotations

import re
import threading

import pytest
import torch.distributed as dist

from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from tests.support.rank_threads import (
    WHAT,
    CountingStore,
    Ended,
    expected,
    held,
    join,
    plain,
    rank_threads,
    together,
    upload,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("no_heartbeat_is_left")


def test_a_rank_that_waits_looks_for_a_verdict_only_if_one_is_announced() -> None:
    """Count operations of ten heartbeats: none but those of the heartbeat itself; then the coordinator fails."""
    store = CountingStore(dist.HashStore())
    coordinator = RankGroup(0, 2, store.store, beat_seconds=0.03)
    one = RankGroup(1, 2, store, beat_seconds=0.03)  # type: ignore[arg-type]
    counts: list[int] = []
    try:
        failing = join(coordinator)
        waiting = join(one)
        one.hooks.append(lambda _client: counts.append(store.operations))
        wait_until(lambda: len(counts) > 14)
        assert counts[13] - counts[3] == 20
        with pytest.raises(ValueError, match="boo"), failing:
            raise ValueError("boo")
        wait_until(lambda: waiting.cancelled)
        assert "cause='ValueError: boo'" in plain(waiting.cancelled)
        one.abandon(waiting, ValueError())
    finally:
        one.close()
        coordinator.close()


# ---- the deadline


def test_absent_ranks_are_named_at_the_deadline() -> None:
    """Rank 1 has a heartbeat and begins nothing, rank 2 has none; the others raise the same error."""

    def part(ranks: RankGroup) -> None:
        with join(ranks, seconds=2.0) as collective:
            collective.set_activity(f"asking, as number {ranks.rank}")
            collective.gather(None, len)

    store = dist.HashStore()
    groups = [RankGroup(rank, 4, dist.PrefixStore("group", store), beat_seconds=0.03) for rank in (0, 1, 3)]
    groups[1].heartbeat.set_activity("training")  # type: ignore[union-attr]
    try:
        ended: dict[int, Ended[None]] = {}
        threads = [
            threading.Thread(target=lambda group=group: ended.update({group.rank: Ended(lambda: part(group))}))
            for group in (groups[0], groups[2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        for group in groups:
            group.close()
    for rank in (0, 3):
        error = ended[rank].error
        assert type(error) is SaveTimeoutError
        assert plain(error) == (
            f"Ranks 1, 2 did not report by the deadline; {WHAT} was given up. "
            "ranks='1, 2' last='1: has not joined, training; 2: no heartbeat yet'"
        )


def test_the_notes_of_late_ranks_are_told() -> None:
    """A rank and the coordinator upload beyond the deadline: both are named, with their notes."""

    def part(ranks: RankGroup) -> None:
        with join(ranks, seconds=2.0) as collective:
            collective.set_activity(f"uploading, {ranks.rank} of 40 shards")
            if ranks.rank != 1:
                wait_until(lambda: collective.cancelled)  # ignores the deadline
            collective.gather(None, len)

    with rank_threads(3) as them:
        for result in them.run(part):
            assert type(result.error) is SaveTimeoutError
            assert "Ranks 0, 2 did not report by the deadline" in plain(result.error)
            assert "0: uploading, 0 of 40 shards; 2: uploading, 2 of 40 shards" in plain(result.error)


def test_many_late_ranks_are_counted() -> None:
    """Ninety-nine ranks are late: sixteen are named, the others counted."""
    store = dist.HashStore()
    ranks = RankGroup(0, 100, store, beat_seconds=0.03)
    try:
        ended = Ended(lambda: together(ranks, seconds=0.3))
    finally:
        ranks.close()
    assert plain(ended.error).startswith("Ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 83 more did")
    assert isinstance(ended.error, SaveTimeoutError)
    assert str(ended.error.details["ranks"]).endswith("15, 16 and 83 more")
    assert str(ended.error.details["last"]).count("no heartbeat yet") == 16


def test_an_absent_coordinator() -> None:
    """The other ranks wait for the grace and raise by themselves; they know that the coordinator has done nothing."""
    collectives: list[Collective] = []

    def part(ranks: RankGroup) -> int:
        with join(ranks, seconds=0.3) as collective:
            collectives.append(collective)
            return collective.gather(ranks.rank, sum)

    with rank_threads(3) as them:
        them.ranks[0].heartbeat.set_activity("training")  # type: ignore[union-attr]
        ended = them.run(part, ranks=(1, 2))
        for result in ended:
            assert type(result.error) is SaveTimeoutError
            assert "ranks='0' last='0: has not joined, training'" in plain(result.error)
        assert [collective.is_commit_unknown for collective in collectives] == [False, False]
        # The verdicts are posted by the heartbeats' threads, in order, soon after the ranks have raised.
        told = threading.Semaphore(0)
        for rank in (1, 2):
            heartbeat = them.ranks[rank].heartbeat
            assert heartbeat is not None, "each of three ranks has one"
            heartbeat.enqueue(lambda _: told.release())
        assert all(told.acquire(timeout=60) for _ in range(2))
        # The coordinator begins when all is over, is told at once, and the next operation works.
        late = them.run(part, ranks=[0])[0]
        assert type(late.error) is SaveTimeoutError
        assert "rank=" in plain(late.error)
        assert [result.value for result in them.run(together)] == expected(3)


def test_a_decision_that_takes_too_long() -> None:
    """The coordinator itself is late, and named."""

    def decide(values: list[None]) -> None:
        wait_until(lambda: collectives[0].cancelled)

    collectives: list[Collective] = []

    def part(ranks: RankGroup) -> None:
        with join(ranks, seconds=2.0) as collective:
            if ranks.is_coordinator:
                collectives.append(collective)
                collective.set_activity("deciding")
            collective.gather(None, decide)

    with rank_threads(2) as them:
        for result in them.run(part):
            assert type(result.error) is SaveTimeoutError
            assert "Rank 0 did not report by the deadline" in plain(result.error)
            assert "last='0: deciding'" in plain(result.error)


# ---- silence


def test_a_silent_rank_ends_it_by_name() -> None:
    """Stop the heartbeat of a rank: the others raise after `silence_seconds`, and not at the deadline."""

    def part(ranks: RankGroup) -> None:
        with join(ranks, silence_seconds=2.0) as collective:
            collective.gather(None, len)
            collective.set_activity(f"uploading, {ranks.rank} of 40 shards")
            if ranks.is_coordinator:
                wait_until(lambda: "uploading" in note_of(ranks, 2))
            met.wait(30)
            if ranks.rank == 2:
                with held(ranks):
                    wait_until(over.is_set)
            else:
                upload(collective)

    def note_of(ranks: RankGroup, rank: int) -> str:
        assert ranks.heartbeat is not None, "each of three ranks has one"
        status = ranks.heartbeat.last(rank)
        return "" if status is None else status.note

    met, over = threading.Barrier(3), threading.Event()

    def watched(ranks: RankGroup) -> None:
        try:
            part(ranks)
        finally:
            if ranks.rank != 2:
                over.set()

    with rank_threads(3) as them:
        ended = them.run(watched)
    for result in ended[:2]:
        assert type(result.error) is SaveFailedError
        assert re.search(r"Rank 2 has been silent for \d+ s;", plain(result.error))
        assert f"{WHAT} was given up" in plain(result.error)
        assert "ranks='2' last='2: uploading, 2 of 40 shards'" in plain(result.error)


def test_a_silent_coordinator_is_lost() -> None:
    """Each other rank finds out by itself; when the coordinator goes on, it is told, and commits nothing."""
    collectives: list[Collective] = []
    met, over = threading.Barrier(3), threading.Barrier(3)

    def part(ranks: RankGroup) -> None:
        with join(ranks, silence_seconds=20.0 if ranks.is_coordinator else 2.0) as collective:
            collectives.append(collective)
            collective.gather(None, len)
            met.wait(30)
            if ranks.is_coordinator:
                with held(ranks):
                    over.wait(30)
                    collective.begin_commit()
            else:
                try:
                    upload(collective)
                finally:
                    wait_until(lambda: them.store.check(["group/1/failed"]))
                    over.wait(30)

    with rank_threads(3) as them:
        ended = them.run(part)
    for result in ended:
        assert type(result.error) is SaveFailedError
        assert "Rank 0 has been silent" in plain(result.error)
    assert plain(ended[0].error).split(" rank=")[1] in "12"
    assert sorted(collective.is_commit_unknown for collective in collectives) == [False, True, True]
