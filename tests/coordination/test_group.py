"""Collective operations one after another: the keys left in the store, and how ranks close. Ranks are threads."""

from __future__ import annotations

import itertools
import pickle
import random
import re
import threading
import time

import pytest
import torch.distributed as dist

from dcp_remote.common.deadline import Deadline
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.heartbeat import RankStatus
from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.messages import CollectiveKeys
from dcp_remote.coordination.outcome import Cancelled
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from tests.support.rank_threads import (
    WHAT,
    Clock,
    Ended,
    RankThreads,
    expected,
    join,
    rank_threads,
    together,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("no_heartbeat_is_left")


# ---- one after the other


def test_one_thing_at_a_time() -> None:
    """A second operation is refused while the first is under way, not once it is cancelled; a closed group has none."""
    ranks = RankGroup(0, 1, None)
    first = join(ranks)
    with pytest.raises(InvalidArgumentError, match="under way"):
        join(ranks, "another")
    first.cancel(Cancelled(SaveFailedError("No.")))
    with join(ranks, "another"):
        assert Ended(lambda: first.gather(1, len)).error is first.cancelled
    ranks.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        join(ranks)


def test_closing_ends_what_is_under_way() -> None:
    """Close a group while an operation waits in another thread."""
    with rank_threads(2) as them:
        collective = join(them.ranks[0])
        ended: list[Ended[int]] = []

        def wait() -> None:
            with collective:
                collective.gather(1, len)

        thread = threading.Thread(target=lambda: ended.append(Ended(wait)))  # type: ignore[arg-type]
        thread.start()
        them.ranks[0].close()
        thread.join(30)
        assert "The rank group was closed during" in str(ended[0].error)


# ---- alone


def test_a_rank_alone() -> None:
    """A single rank needs no store and no thread: check answers, unchanged errors, and the deadline."""
    before = threading.active_count()
    ranks = RankGroup.from_process_group(None, "checkpoints")
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator, ranks.heartbeat) == (0, 1, True, None)
    assert together(ranks) == (0, 1)
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="boo"), join(ranks):
        raise ValueError("boo")
    with join(ranks) as collective:
        collective.set_activity("committing")
        collective.begin_commit()
        collective.check_time_and_store()
        assert isinstance(collective.deadline, Deadline)
    ranks.close()


def test_a_group_without_torch_distributed() -> None:
    """A process group is given, but torch.distributed is not initialized."""
    with pytest.raises(InvalidArgumentError, match="not initialized"):
        RankGroup.from_process_group(object(), "checkpoints")  # type: ignore[arg-type]


# ---- keys left in the store


@pytest.mark.parametrize("seed", [1, 2])
def test_no_key_is_left_of_old_operations(seed: int) -> None:
    """Operations fail at random places, one after another: before, between and after the rounds, or in a decision."""
    rng = random.Random(seed)
    with rank_threads(3) as them:
        for number in range(1, 16):
            endings = {rng.randrange(3): rng.randrange(5) for _ in range(rng.randrange(3))}

            def part(ranks: RankGroup, endings: dict[int, int] = endings, number: int = number) -> None:
                where = endings.get(ranks.rank)
                places = itertools.count()

                def maybe() -> None:
                    if next(places) == where:
                        raise ValueError("boo")

                with join(ranks, f"the save of step {number}", seconds=5.0) as collective:
                    maybe()
                    collective.gather(ranks.rank, len)
                    maybe()
                    collective.scatter(ranks.rank, lambda values: values)
                    collective.scatter(ranks.rank, lambda values: ["one" for _ in values])
                    maybe()
                    collective.gather(ranks.rank, lambda values: maybe())
                    maybe()

            for result in them.run(part):
                assert result.error is None or isinstance(result.error, ValueError | SaveFailedError), result.error
            wait_until(lambda number=number: numbers_left(them) <= {number - 1, number})  # type: ignore[misc]
        assert [result.value for result in them.run(together)] == expected(3)
        # All ranks have met, and nobody knows that they have read the last answers.
        assert them.left() == [CollectiveKeys(16, WHAT).answer(2)]


def test_no_key_is_left_of_operations_that_fail_at_once() -> None:
    """The coordinator hears of each failure before its first round, and deletes old keys a heartbeat later."""

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            if ranks.rank == 1:
                raise ValueError("boo")
            wait_until(lambda: collective.cancelled)
            collective.gather(ranks.rank, len)

    with rank_threads(3) as them:
        for number in range(1, 5):
            them.run(part)
            wait_until(lambda number=number: numbers_left(them) <= {number - 1, number})  # type: ignore[misc]


def numbers_left(them: RankThreads) -> set[int]:
    """Numbers of the operations of which keys lie in the store; without what other ranks may still have to read."""
    return {int(re.split("[-/]", key)[0]) for key in them.left() if not re.search("/verdict$|/out", key)}


def test_no_contribution_to_a_cancelled_operation() -> None:
    """A rank that ends its upload after the operation was cancelled contributes nothing."""

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            if ranks.rank == 1:
                raise ValueError("boo")
            wait_until(lambda: collective.cancelled)
            collective.gather("late", len)

    with rank_threads(3) as them:
        ended = them.run(part)
        assert [type(result.error) for result in ended] == [SaveFailedError, ValueError, SaveFailedError]
        assert them.left() == ["1/failed", "1/verdict"]


# ---- closing


def test_questions_to_the_coordinator() -> None:
    """All get its answer; keys go with a later operation; without an answer, or a store, it is no."""
    answers = iter([True, False, True])
    with rank_threads(3) as groups, rank_threads(1) as alone:

        def ask(group: RankGroup, question: str = "q", **times: float) -> bool:
            seconds, left = times.get("seconds", 20.0), times.get("left", 20.0)
            return group.ask_coordinator(question, lambda: next(answers), seconds=seconds, left_seconds=lambda: left)

        def meet(group: RankGroup, number: int) -> int:
            with join(group, f"operation {number}") as collective:
                total: int = collective.gather(1, sum)
                return total

        assert [one.value for one in groups.run(ask)] == [False] * 3  # before the first operation
        assert [one.value for one in groups.run(lambda group: meet(group, 1))] == [3] * 3
        assert [[one.value for one in groups.run(ask)] for _ in range(2)] == [[True] * 3, [False] * 3]
        assert [key for key in groups.left() if "asked" in key] == ["asked/q/1", "asked/q/2"]
        for number in (2, 3):
            groups.run(lambda group, number=number: meet(group, number))  # type: ignore[misc]  # mypy infers no default
        assert [key for key in groups.left() if "asked" in key] == []
        # One rank gives up, for all: the answer of the coordinator comes too late.
        assert groups.run(lambda group: ask(group, "late", left=0.0), ranks=[2])[0].value is False
        assert [one.value for one in groups.run(lambda group: ask(group, "late"), ranks=[0, 1])] == [False] * 2
        assert alone.run(ask)[0].value is False


def test_the_host_stays_until_its_last_answer_is_read() -> None:
    """The coordinator closes at once, and waits for a rank that is slow to read the last answer."""
    closed: list[float] = []
    read: list[float] = []

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(None, len)
            if ranks.rank == 1:
                time.sleep(0.3)
                read.append(time.monotonic())
        ranks.close()
        if ranks.rank == 0:
            closed.append(time.monotonic())

    with rank_threads(2) as them:
        them.run(part)
    assert closed[0] > read[0]


def test_a_rank_whose_heartbeat_is_late_has_its_answer() -> None:
    """The contribution of a rank overtakes its heartbeat; the coordinator closes once the rank has left."""
    client, keys = Client(store := dist.HashStore()), CollectiveKeys(1, WHAT)
    client.append(keys.parts(1), pickle.dumps({1: pickle.dumps(5)}))
    ranks = RankGroup(0, 2, store, beat_seconds=0.03)
    with join(ranks) as collective:
        assert collective.gather(4, sum) == 9
    assert not ranks._may_stop(client)
    assert client.has([keys.answer(1)])
    client.put("beat/1", RankStatus(1, 1, WHAT).encode())
    ranks.close()
    assert not client.has([keys.answer(1)])


def test_a_coordinator_that_was_suspended_waits_for_the_last_answer_to_be_read() -> None:
    """All processes of a host may be suspended at once: that time is no silence of another rank."""
    clock, client, keys = Clock(), Client(store := dist.HashStore()), CollectiveKeys(1, WHAT)
    client.append(keys.parts(1), pickle.dumps({1: pickle.dumps(5)}))
    client.put("beat/1", RankStatus(1, 1, WHAT, is_inside=True).encode())
    ranks = RankGroup(0, 2, store, beat_seconds=0.03, clock=clock)
    with join(ranks) as collective:
        assert collective.gather(4, sum) == 9
    assert not ranks._may_stop(client)
    clock.now += 3600
    assert not ranks._may_stop(client)
    assert client.has([keys.answer(1)])
    client.put("beat/1", RankStatus(2, 1, WHAT).encode())
    ranks.close()


def test_the_dead_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was killed in the last operation never leaves it; the coordinator closes without waiting for it."""
    monkeypatch.setattr("dcp_remote.coordination.heartbeat._CLOSE_SECONDS", 4.0)
    store = dist.HashStore()
    client = Client(store)
    client.put("beat/1", RankStatus(3, 1, WHAT, is_inside=True, note="uploading").encode())
    ranks = RankGroup(0, 2, store, beat_seconds=0.03)
    with pytest.raises(ValueError, match="boo"), join(ranks):
        raise ValueError("boo")
    wait_until(lambda: client.has(["1/verdict"]))
    kept: list[bool] = []
    monkeypatch.setattr(
        ranks._member, "delete_left_keys", lambda _client, _before, *, have_all_come: kept.append(not have_all_come)
    )
    ranks.close()
    assert kept == [True]  # once, after the wait: `close` has not run into its time limit
    assert client.has(["1/verdict"])  # for a rank that was stopped, and goes on
