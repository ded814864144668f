"""Ends of a collective operation: in the commit phase, under other numbers, and of one rank. Ranks are threads."""

from __future__ import annotations

import pickle
import random
import re
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist

from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.heartbeat import RankStatus
from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.messages import Commit, Verdict
from dcp_remote.coordination.outcome import GRACE_SECONDS, Cancelled, Outcome, Phase
from dcp_remote.errors import CommitUnknownError, FencedError, SaveFailedError, SaveTimeoutError
from tests.support.rank_threads import (
    Clock,
    Ended,
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


# ---- the commit phase


def test_a_coordinator_that_is_refused_the_commit_phase_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator in the commit phase cares for the shards of a commit that fails; no other rank does."""
    clock, enter_commit = Clock(), Outcome.enter_commit

    def delayed(outcome: Outcome) -> None:
        enter_commit(outcome)
        clock.now += 10.0 + GRACE_SECONDS

    monkeypatch.setattr(Outcome, "enter_commit", delayed)
    with join(RankGroup(0, 1, None, clock=clock), seconds=10.0) as collective:
        collective.begin_commit()
        assert collective.is_committing
        assert collective.deadline.expired()

    def too_late(outcome: Outcome) -> None:
        outcome.cancel(Cancelled(SaveFailedError("Interrupted.")))
        enter_commit(outcome)

    monkeypatch.setattr(Outcome, "enter_commit", too_late)
    with pytest.raises(SaveFailedError, match="Interrupted"), join(RankGroup(0, 1, None)) as collective:
        collective.begin_commit()
    assert collective.ended_before_commit


def test_no_rank_is_needed_in_the_commit_phase() -> None:
    """A rank fails, another falls silent; the coordinator commits, and the rank that still waits is told."""
    met = threading.Barrier(4)
    over = threading.Event()

    def part(ranks: RankGroup) -> str:
        with join(ranks, silence_seconds=2.0) as collective:

            def commit(values: list[None]) -> str:
                collective.begin_commit()
                met.wait(30)
                wait_until(lambda: them.store.check(["group/1/failed"]))
                wait_until(lambda: ranks.heartbeat.silent_ranks(2.0))  # type: ignore[union-attr]
                time.sleep(0.2)
                assert collective.cancelled is None
                return "committed"

            if ranks.rank in (1, 2):
                threading.Thread(target=lambda: Ended(lambda: collective.gather(None, len)), daemon=True).start()
                met.wait(30)
                if ranks.rank == 1:
                    raise ValueError("boo")
                with held(ranks):
                    assert over.wait(30)
                return "silent"
            if ranks.rank == 3:
                threading.Thread(target=met.wait, args=(30,), daemon=True).start()
            try:
                return collective.gather(None, commit)
            finally:
                if ranks.rank == 3:
                    over.set()

    with rank_threads(4) as them:
        ended = them.run(part)
    assert ended[0].value == "committed"
    assert ended[3].value == "committed"


def test_a_failure_before_the_commit_phase_counts() -> None:
    """The heartbeat's thread has not looked yet: `begin_commit` does."""
    failed = threading.Event()

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(None, len)
            if ranks.rank == 1:
                failed.set()
                raise FencedError("Stop.")
            with held(ranks):
                assert failed.wait(30)
                wait_until(lambda: them.store.check(["group/1/failed"]))
                assert collective.cancelled is None
                collective.begin_commit()

    with rank_threads(2) as them:
        ended = them.run(part)
        assert [type(result.error) for result in ended] == 2 * [FencedError]


def test_no_commit_phase_after_the_deadline() -> None:
    """`begin_commit` raises even if nothing has cancelled the operation yet."""
    clock = Clock()

    def part() -> None:
        with join(RankGroup(0, 1, None, clock=clock), seconds=10.0) as collective:
            clock.now += 10.5
            assert collective.cancelled is None
            collective.begin_commit()

    assert type(Ended(part).error) is SaveTimeoutError


def test_the_deadline_counts_in_the_commit_phase() -> None:
    """A commit takes longer than the deadline: other ranks do not know its outcome; the coordinator raises its own."""
    collectives: list[Collective] = []

    def part(ranks: RankGroup) -> None:
        with join(ranks, seconds=2.0) as collective:
            collectives.append(collective)

            def commit(values: list[None]) -> None:
                collective.begin_commit()
                wait_until(collective.deadline.expired)
                wait_until(ended_others.is_set)
                raise CommitUnknownError("The store never said.")

            try:
                collective.gather(None, commit)
            finally:
                if ranks.rank == 1:
                    ended_others.set()

    ended_others = threading.Event()
    with rank_threads(2) as them:
        ended = them.run(part)
    assert [type(result.error) for result in ended] == [CommitUnknownError, SaveTimeoutError]
    assert {collective._member.rank: collective.is_commit_unknown for collective in collectives} == {0: False, 1: True}


def test_a_commit_within_the_grace_is_told() -> None:
    """A commit ends after the deadline, but within the grace: nothing was cancelled, and all ranks get the answer."""

    def part(ranks: RankGroup) -> str:
        with join(ranks, seconds=2.0) as collective:

            def commit(values: list[None]) -> str:
                collective.begin_commit()
                wait_until(collective.deadline.expired)
                time.sleep(0.2)
                return "committed"

            return collective.gather(None, commit)

    with rank_threads(2) as them:
        assert [result.value for result in them.run(part)] == ["committed", "committed"]


def test_another_round_needs_all_ranks_again() -> None:
    """The commit is to be repeated in another round; a rank that fails before it ends the operation."""

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:

            def again(values: list[None]) -> str:
                collective.begin_commit()
                return "again"

            assert collective.gather(None, again) == "again"
            if ranks.rank == 1:
                raise ValueError("boo")
            collective.gather(None, len)

    with rank_threads(3) as them:
        ended = them.run(part)
        assert [type(result.error) for result in ended] == [SaveFailedError, ValueError, SaveFailedError]


def test_commit_phase_and_cancellation_exclude_each_other() -> None:
    """Both at once, a hundred times: the coordinator goes on and is not cancelled, or is, and raises."""
    for _ in range(100):
        ranks = RankGroup(0, 1, None)
        collective = join(ranks)
        start = threading.Barrier(2)

        def cancel(collective: Collective = collective, start: threading.Barrier = start) -> None:
            start.wait(30)
            collective.cancel(Cancelled(SaveFailedError("No.")))

        thread = threading.Thread(target=cancel)
        thread.start()
        start.wait(30)
        ended = Ended(collective.begin_commit)
        thread.join(30)
        assert (ended.error is None) == (collective.cancelled is None)


# ---- numbers


def test_a_rank_that_missed_a_failed_operation_takes_part_in_the_next() -> None:
    """A rank raised before it began an operation, which failed without it: the next one works with all ranks."""
    with rank_threads(3) as them:
        for missing in (2, 0):
            ended = them.run(
                lambda ranks: together(ranks, "the save of step 1", seconds=0.3),
                ranks=[rank for rank in range(3) if rank != missing],
            )
            assert [type(result.error) for result in ended] == 2 * [SaveTimeoutError]
            assert [
                result.value for result in them.run(lambda ranks: together(ranks, "the save of step 2"))
            ] == expected(3)
        assert [result.value for result in them.run(lambda ranks: together(ranks, "the save of step 2"))] == expected(3)
        assert not [key for key in them.left() if int(re.split("[-/]", key)[0]) < them.ranks[0]._number]


@pytest.mark.parametrize("failing", range(3))
def test_an_operation_repeated_at_once(failing: int) -> None:
    """An operation fails and is repeated by its name before other ranks have seen that: they end the first one."""

    def part(number: int, ranks: RankGroup) -> tuple[int, int]:
        if ranks.rank == failing:
            with pytest.raises(ValueError, match="boo"), join(ranks):
                raise ValueError("boo")
        else:
            first = Ended(lambda: late(number, ranks))
            assert type(first.error) is SaveFailedError
            assert f"rank={failing} cause='ValueError: boo'" in plain(first.error)
        return together(ranks)

    with rank_threads(3) as them:

        def late(number: int, ranks: RankGroup) -> None:
            """Contribute when the coordinator is in the next operation, or this one was cancelled."""
            client = Client(dist.PrefixStore("group", them.store))
            with join(ranks) as collective:
                if ranks.rank != 0:
                    wait_until(
                        lambda: (
                            ((beat := client.get("beat/0")) and RankStatus.decode(beat).operation > number)
                            or collective.cancelled is not None
                        )
                    )
                collective.gather(None, len)

        for number in range(1, 40, 2):
            assert [result.value for result in them.run(partial(part, number))] == expected(3)


def test_a_rank_that_missed_several() -> None:
    """Nothing is left of the operations it missed: it takes part once the others are in the same operation."""
    with rank_threads(2) as them:
        for step in range(4):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.1), ranks=[0])  # type: ignore[misc]
        arrived = threading.Event()

        def part(ranks: RankGroup) -> tuple[int, int]:
            if ranks.rank == 1:
                wait_until(lambda: them.ranks[0]._collective is not None)
                wait_until(lambda: b"of step 9" in Client(dist.PrefixStore("group", them.store)).get("beat/0"))
            arrived.set()
            return together(ranks, "the save of step 9")

        assert [result.value for result in them.run(part)] == expected(2)
        assert [result.value for result in them.run(together)] == expected(2)


def test_a_rank_that_is_two_operations_behind() -> None:
    """Let the rank begin the operations that failed without it: each raises at once; then it takes part in the next."""
    with rank_threads(2) as them:
        for step in (1, 2):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.2), ranks=[0])  # type: ignore[misc]
        for step in (1, 2):
            (late,) = them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}"), ranks=[1])  # type: ignore[misc]
            assert type(late.error) is SaveTimeoutError
            assert f"the save of step {step}" in plain(late.error)
        assert [result.value for result in them.run(lambda ranks: together(ranks, "the save of step 3"))] == expected(2)


def test_a_number_that_is_found_while_the_rank_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat's thread goes on to the next number after the waiting thread has read the coordinator's status."""
    found = []

    def fail(ranks: RankGroup) -> None:
        with join(ranks, "the save of step 0"):
            is_inside.set()
            assert is_waiting.wait(30)
            raise ValueError("boo")

    def part(ranks: RankGroup) -> tuple[int, int]:
        if ranks.rank == 0:
            with pytest.raises(ValueError, match="boo"):
                fail(ranks)
        assert is_inside.wait(30)
        return together(ranks, "the restore")

    with rank_threads(2) as them:
        client = Client(dist.PrefixStore("group", them.store))
        is_inside, is_waiting = threading.Event(), threading.Event()
        coordinator_status, has_rank_left = Outcome.coordinator_status, Outcome.has_rank_left

        def status_when_waiting(outcome: Outcome) -> RankStatus | None:
            status = coordinator_status(outcome)
            if status is not None:
                is_waiting.set()
            return status

        def renumbered(outcome: Outcome, status: RankStatus) -> bool:
            has_left = has_rank_left(outcome, status)
            if has_left and status.is_inside:
                number = outcome.keys.number
                while outcome.read_verdict(client):
                    pass
                found.append(outcome.keys.number - number)
            return has_left

        monkeypatch.setattr(Outcome, "coordinator_status", status_when_waiting)
        monkeypatch.setattr(Outcome, "has_rank_left", renumbered)
        # The heartbeats of this rank look at nothing, so that the number is found above alone.
        monkeypatch.setattr("dcp_remote.coordination.failure_detector.FailureDetector.check", lambda *_: None)
        assert [repr(result) for result in them.run(part)] == [repr(value) for value in expected(2)]
    assert 1 in found


def test_a_verdict_that_is_read_while_another_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict on another operation ends nothing, also if all ranks have met under the next number meanwhile."""
    # The first heartbeat, at once, looks at nothing, so that the verdict is read below alone.
    monkeypatch.setattr("dcp_remote.coordination.failure_detector.FailureDetector.check", lambda *_: None)
    store = dist.HashStore()
    ranks = RankGroup(0, 2, store, beat_seconds=60.0)
    try:
        with join(ranks) as outcome:
            verdict = Verdict(frozenset({"the save of step 0"}), "Over.", b"", Commit.NEVER, is_unattended=False)
            Client(store).put("1/failed", pickle.dumps(verdict))

            class SlowClient(Client):
                def get(self, key: str) -> bytes:
                    data = super().get(key)
                    assert outcome.read_verdict(Client(store))
                    outcome.phase = Phase.MET
                    return data

            assert outcome.read_verdict(SlowClient(store))
            assert (outcome.cancelled, outcome.keys.number) == (None, 2)
    finally:
        ranks.close()


def test_the_next_operation_has_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is slow to look for its answer, while the coordinator has left, and waits in the same operation again."""
    wait, is_waiting = Outcome.wait, threading.Event()

    def wait_long(outcome: Outcome, seconds: float) -> None:
        if not outcome._member.is_coordinator and not is_waiting.is_set():
            is_waiting.set()
            heartbeat, beats = outcome._heartbeat, threading.Semaphore(0)
            assert heartbeat is not None, "each of two ranks has one"
            wait_until(lambda: (status := heartbeat.last(0)) is not None and status.operation == 2)
            heartbeat.hooks.append(lambda _: beats.release())
            assert all(beats.acquire(timeout=30) for _ in range(3))
        wait(outcome, seconds)

    def decide(values: list[int]) -> list[int]:
        assert is_waiting.wait(30)
        return values

    def part(ranks: RankGroup) -> list[list[int]]:
        answers = []
        for number in (1, 2):
            with join(ranks, seconds=5.0) as collective:
                answers.append(collective.gather(number, decide))
        return answers

    monkeypatch.setattr(Outcome, "wait", wait_long)
    with rank_threads(2) as them:
        assert [result.value for result in them.run(part)] == 2 * [[[1, 1], [2, 2]]]


def delete_when_seen(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Delete keys of this kind whenever a rank has seen them and is about to read them."""
    get = Client.get

    def deleted(client: Client, key: str) -> bytes:
        if kind in key:
            client.delete([key])
            return b""
        return get(client, key)

    monkeypatch.setattr(Client, "get", deleted)


@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_that_is_deleted_before_it_is_read(monkeypatch: pytest.MonkeyPatch, *, shared: bool) -> None:
    """A rank is slow to read an answer, while the answer is deleted: told that it is behind."""

    def part(ranks: RankGroup) -> object:
        with join(ranks) as collective:
            answer: object = collective.gather(1, sum) if shared else collective.scatter(1, lambda values: values)
        for _ in range(2):  # only the coordinator gets here
            with pytest.raises(ValueError, match="boo"), join(ranks):
                raise ValueError("boo")
        return answer

    delete_when_seen(monkeypatch, "/out")
    with rank_threads(2) as them:
        _, slow = them.run(part)
        assert type(slow.error) is SaveFailedError
        assert "This rank is behind" in plain(slow.error)


def test_an_answer_is_kept_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank reads an answer when the coordinator has already left an operation that failed, and is in the third."""
    add, get, is_third = Client.add, Client.get, threading.Event()

    def noted(client: Client, key: str, number: int) -> int:
        if key.startswith("3-"):
            is_third.set()
        return add(client, key, number)

    def slow(client: Client, key: str) -> bytes:
        if key.startswith("1-") and "/out" in key:
            assert is_third.wait(30)
        return get(client, key)

    def part(ranks: RankGroup) -> list[int]:
        with join(ranks) as collective:
            first = collective.gather(1, sum)
        with pytest.raises(ValueError, match="boo"), join(ranks, "what fails on all ranks"):
            raise ValueError("boo")
        with join(ranks) as collective:
            return [first, collective.gather(1, sum)]

    monkeypatch.setattr(Client, "add", noted)
    monkeypatch.setattr(Client, "get", slow)
    with rank_threads(2) as them:
        assert [repr(result) for result in them.run(part)] == 2 * ["[2, 2]"]


def test_a_verdict_that_is_deleted_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank sees that there is a verdict and is slow to read it: told that it is behind."""

    def part(ranks: RankGroup) -> object:
        if ranks.rank == 0:
            for _ in range(3):
                with pytest.raises(ValueError, match="boo"), join(ranks):
                    raise ValueError("boo")
            return None
        with join(ranks) as collective:
            return collective.gather(1, len)

    delete_when_seen(monkeypatch, "/verdict")
    with rank_threads(2) as them:
        _, slow = them.run(part)
        assert type(slow.error) is SaveFailedError
        assert "This rank is behind" in plain(slow.error) or "has closed" in plain(slow.error), slow


def test_a_rank_that_is_far_behind_is_told_so() -> None:
    """Begin an operation that failed for the others, three operations ago: the same error, at once."""
    with rank_threads(2) as them:
        for step in range(4):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.1), ranks=[0])  # type: ignore[misc]
        (late,) = them.run(lambda ranks: together(ranks, "the save of step 0"), ranks=[1])
        assert type(late.error) is SaveTimeoutError
        assert "Rank 1 did not report by the deadline; the save of step 0" in plain(late.error)


def test_a_rank_that_missed_an_operation_in_which_others_disagreed() -> None:
    """Two ranks were in different operations, and ended both; the next one of all ranks works."""
    with rank_threads(3) as them:
        assert [result.value for result in them.run(together)] == expected(3)
        ended = them.run(lambda ranks: together(ranks, f"the save of step {ranks.rank}"), ranks=[0, 2])
        assert all("Rank 2 did something else" in error for error in errors(ended))
        assert [repr(result) for result in them.run(together)] == [repr(value) for value in expected(3)]


@pytest.mark.parametrize("seed", [6, 11, 17])
def test_after_any_history_all_ranks_meet(seed: int) -> None:
    """Ranks miss operations, raise in them, and disagree on their names; the next one of all ranks works at once."""
    rng = random.Random(seed)
    history = []
    for number in range(rng.randrange(2, 6)):
        what = rng.choice(["the restore", f"the save of step {number}"])
        here = {rank: what if rng.random() < 0.9 else "another" for rank in range(3) if rng.random() < 0.6}
        history.append((here, {rank for rank in here if rng.random() < 0.25}, rng.choice([0.0, 0.1, 0.4])))
    have_all_ended = threading.Barrier(3)

    def part(ranks: RankGroup) -> tuple[int, int]:
        def take_part(what: str, *, is_raising: bool) -> None:
            with join(ranks, what, arrival_seconds=0.25, seconds=3.0) as collective:
                if is_raising:
                    raise ValueError("boo")
                collective.gather(None, len)

        for here, raising, pause_seconds in history:
            if ranks.rank in here:
                Ended(lambda here=here, raising=raising: take_part(here[ranks.rank], is_raising=ranks.rank in raising))  # type: ignore[misc]
            elif ranks.rank == 1:
                time.sleep(pause_seconds)
        have_all_ended.wait(60)
        return together(ranks, "the last")

    with rank_threads(3) as them:
        assert [repr(result) for result in them.run(part)] == [repr(value) for value in expected(3)], history


def test_ranks_that_disagree_on_the_rounds() -> None:
    """One rank has a round more: an error at once, and no answer of another round."""

    def part(ranks: RankGroup) -> int:
        with join(ranks) as collective:
            collective.gather(None, len)
            if ranks.rank == odd:
                collective.gather("one more", len)
        return 1

    with rank_threads(3) as them:
        for odd in (0, 1):
            ended = them.run(part)
            assert type(ended[odd].error) is SaveFailedError
            assert "did something else" in str(ended[odd].error) or "has left" in str(ended[odd].error)
        assert [result.value for result in them.run(together)] == expected(3)


# ---- one rank by itself


def test_a_rank_that_was_suspended_gives_up() -> None:
    """No thread of this process ran for more than `silence_seconds`: the others have given up, so this rank does.

    The time is not counted as silence of the others.
    """
    clock = Clock()
    ranks = RankGroup(0, 2, dist.HashStore(), beat_seconds=60.0, clock=clock)

    def part() -> None:
        with join(ranks, seconds=1000.0, silence_seconds=60.0) as collective:
            clock.now += 59
            collective.check_time_and_store()
            assert collective.cancelled is None
            clock.now += 61
            collective.begin_commit()

    ended = Ended(part)
    ranks.close()
    assert type(ended.error) is SaveFailedError
    assert "Rank 0 ran no code for 61 s" in plain(ended.error)


def test_the_deadline_of_a_rank_alone() -> None:
    """The waiting thread calls `check_time_and_store`; what the operation then raises is a consequence."""
    clock = Clock()

    def part() -> None:
        with join(RankGroup(0, 1, None, clock=clock), seconds=10.0) as collective:
            clock.now += 10 + GRACE_SECONDS - 0.1
            collective.check_time_and_store()
            assert collective.cancelled is None
            clock.now += 0.2
            collective.check_time_and_store()
            assert collective.deadline.expired()
            raise SaveFailedError("In consequence.")

    error = Ended(part).error
    assert type(error) is SaveTimeoutError
    assert isinstance(error.__cause__, SaveFailedError)
