"""How a joint ends: past the point of no return, under which number, and alone. Ranks are threads of this process."""

from __future__ import annotations

import re
import threading
import time
from functools import partial

import pytest
import torch.distributed as dist

from dcp_remote.ending import GRACE_SECONDS, Ending
from dcp_remote.errors import CommitUnknownError, FencedError, SaveFailedError, SaveTimeoutError
from dcp_remote.joint import Joint
from dcp_remote.key_value import Client
from dcp_remote.pulse import Beat
from dcp_remote.ranks import Ranks
from tests.distributed.parties import Clock, Ended, expected, held, join, party, together, wait_until

pytestmark = pytest.mark.usefixtures("no_pulse_is_left")


# ---- the point of no return


def test_who_is_refused_at_the_point_of_no_return_is_not_past_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is past it sees to the shards of a commit that fails; nobody else does."""
    clock, pass_return = Clock(), Ending.pass_return

    def held_up(ending: Ending) -> None:
        pass_return(ending)
        clock.now += 10.0 + GRACE_SECONDS

    monkeypatch.setattr(Ending, "pass_return", held_up)
    with join(Ranks(0, 1, None, clock=clock), seconds=10.0) as joint:
        joint.no_return()
        assert joint.past_return
        assert joint.deadline.expired()

    def too_late(ending: Ending) -> None:
        ending.cancel(SaveFailedError("Interrupted."))
        pass_return(ending)

    monkeypatch.setattr(Ending, "pass_return", too_late)
    with pytest.raises(SaveFailedError, match="Interrupted"), join(Ranks(0, 1, None)) as joint:
        joint.no_return()
    assert joint.ended_before_commit


def test_behind_the_point_of_no_return_nobody_is_needed() -> None:
    """A rank fails, another falls silent; the coordinator commits, and who still listens is told."""
    met = threading.Barrier(4)
    over = threading.Event()

    def part(ranks: Ranks) -> str:
        with join(ranks, silence_seconds=0.5) as joint:

            def commit(values: list[None]) -> str:
                joint.no_return()
                met.wait(30)
                wait_until(lambda: them.store.check(["party/1/failed"]))
                wait_until(lambda: ranks.pulse.silent(0.5))  # type: ignore[union-attr]
                time.sleep(0.2)
                assert joint.cancelled is None
                return "committed"

            if ranks.rank in (1, 2):
                threading.Thread(target=lambda: Ended(lambda: joint.gather(None, len)), daemon=True).start()
                met.wait(30)
                if ranks.rank == 1:
                    raise ValueError("boo")
                with held(ranks):
                    assert over.wait(30)
                return "silent"
            if ranks.rank == 3:
                threading.Thread(target=met.wait, args=(30,), daemon=True).start()
            try:
                return joint.gather(None, commit)
            finally:
                if ranks.rank == 3:
                    over.set()

    with party(4) as them:
        ended = them.run(part)
    assert ended[0].value == "committed"
    assert ended[3].value == "committed"


def test_before_it_a_failure_counts() -> None:
    """The pulse has not looked yet: `no_return` does."""
    failed = threading.Event()

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(None, len)
            if ranks.rank == 1:
                failed.set()
                raise FencedError("Stop.")
            with held(ranks):
                assert failed.wait(30)
                wait_until(lambda: them.store.check(["party/1/failed"]))
                assert joint.cancelled is None
                joint.no_return()

    with party(2) as them:
        ended = them.run(part)
        assert [type(one.error) for one in ended] == 2 * [FencedError]


def test_after_the_deadline_there_is_no_way_there() -> None:
    """Even where nobody has cancelled it yet."""
    clock = Clock()

    def part() -> None:
        with join(Ranks(0, 1, None, clock=clock), seconds=10.0) as joint:
            clock.now += 10.5
            assert joint.cancelled is None
            joint.no_return()

    assert type(Ended(part).error) is SaveTimeoutError


def test_the_deadline_counts_behind_it() -> None:
    """The commit goes on beyond the deadline: the others do not know how it ends; its own error tells the truth."""
    joints: list[Joint] = []

    def part(ranks: Ranks) -> None:
        with join(ranks, seconds=0.3) as joint:
            joints.append(joint)

            def commit(values: list[None]) -> None:
                joint.no_return()
                wait_until(joint.deadline.expired)
                wait_until(ended_others.is_set)
                raise CommitUnknownError("The store never said.")

            try:
                joint.gather(None, commit)
            finally:
                if ranks.rank == 1:
                    ended_others.set()

    ended_others = threading.Event()
    with party(2) as them:
        ended = them.run(part)
    assert [type(one.error) for one in ended] == [CommitUnknownError, SaveTimeoutError]
    assert {joint._party.rank: joint.coordinator_lost for joint in joints} == {0: False, 1: True}


def test_a_commit_that_is_in_time_after_all_is_told() -> None:
    """Behind the deadline, within the grace: nobody has cancelled yet, and all get the answer."""

    def part(ranks: Ranks) -> str:
        with join(ranks, seconds=0.5) as joint:

            def commit(values: list[None]) -> str:
                joint.no_return()
                wait_until(joint.deadline.expired)
                time.sleep(0.2)
                return "committed"

            return joint.gather(None, commit)

    with party(2) as them:
        assert [one.value for one in them.run(part)] == ["committed", "committed"]


def test_another_round_needs_everybody_again() -> None:
    """The commit is to begin again; a rank that falls silent then ends it."""

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:

            def again(values: list[None]) -> str:
                joint.no_return()
                return "again"

            assert joint.gather(None, again) == "again"
            if ranks.rank == 1:
                raise ValueError("boo")
            joint.gather(None, len)

    with party(3) as them:
        ended = them.run(part)
        assert [type(one.error) for one in ended] == [SaveFailedError, ValueError, SaveFailedError]


def test_the_point_of_no_return_and_an_end_exclude_each_other() -> None:
    """Both at once, a hundred times: the coordinator goes on and was not cancelled, or was, and stops."""
    for _ in range(100):
        ranks = Ranks(0, 1, None)
        joint = join(ranks)
        start = threading.Barrier(2)

        def cancel(joint: Joint = joint, start: threading.Barrier = start) -> None:
            start.wait(30)
            joint.cancel(SaveFailedError("No."))

        thread = threading.Thread(target=cancel)
        thread.start()
        start.wait(30)
        ended = Ended(joint.no_return)
        thread.join(30)
        assert (ended.error is None) == (joint.cancelled is None)


# ---- numbers


def test_a_rank_that_missed_what_failed_finds_its_way_back() -> None:
    """It raised before it joined, so that the others failed for want of it: the next thing works, all are in it."""
    with party(3) as them:
        for missing in (2, 0):
            ended = them.run(
                lambda ranks: together(ranks, "the save of step 1", seconds=0.3),
                ranks=[rank for rank in range(3) if rank != missing],
            )
            assert [type(one.error) for one in ended] == 2 * [SaveTimeoutError]
            assert [one.value for one in them.run(lambda ranks: together(ranks, "the save of step 2"))] == expected(3)
        assert [one.value for one in them.run(lambda ranks: together(ranks, "the save of step 2"))] == expected(3)
        assert not [key for key in them.left() if int(re.split("[-/]", key)[0]) < them.ranks[0]._number]


@pytest.mark.parametrize("failing", range(3))
def test_the_same_again_at_once(failing: int) -> None:
    """It failed, and is tried again under the same name before others have seen that: they end the first one first."""

    def part(number: int, ranks: Ranks) -> tuple[int, int]:
        if ranks.rank == failing:
            with pytest.raises(ValueError, match="boo"), join(ranks):
                raise ValueError("boo")
        else:
            first = Ended(lambda: late(number, ranks))
            assert type(first.error) is SaveFailedError
            assert f"rank={failing} cause='ValueError: boo'" in str(first.error)
        return together(ranks)

    with party(3) as them:

        def late(number: int, ranks: Ranks) -> None:
            """Joins in earnest when the coordinator is in the next one, or it knows already."""
            client = Client(dist.PrefixStore("party", them.store))
            with join(ranks) as joint:
                if ranks.rank != 0:
                    wait_until(lambda: Beat.decode(client.get("beat/0")).joint > number or joint.cancelled is not None)
                joint.gather(None, len)

        for number in range(1, 40, 2):
            assert [one.value for one in them.run(partial(part, number))] == expected(3)


def test_a_rank_that_missed_several() -> None:
    """What they were is not even known any more: it takes part when the others are in the same thing."""
    with party(2) as them:
        for step in range(4):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.1), ranks=[0])  # type: ignore[misc]
        arrived = threading.Event()

        def part(ranks: Ranks) -> tuple[int, int]:
            if ranks.rank == 1:
                wait_until(lambda: them.ranks[0]._joint is not None)
                wait_until(lambda: b"of step 9" in Client(dist.PrefixStore("party", them.store)).get("beat/0"))
            arrived.set()
            return together(ranks, "the save of step 9")

        assert [one.value for one in them.run(part)] == expected(2)
        assert [one.value for one in them.run(together)] == expected(2)


def test_a_rank_that_wakes_up_is_told_what_it_slept_through() -> None:
    """It does what the others did two and three things ago: each raises at once, and then it is among them."""
    with party(2) as them:
        for step in (1, 2):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.2), ranks=[0])  # type: ignore[misc]
        for step in (1, 2):
            (late,) = them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}"), ranks=[1])  # type: ignore[misc]
            assert type(late.error) is SaveTimeoutError
            assert f"the save of step {step}" in str(late.error)
        assert [one.value for one in them.run(lambda ranks: together(ranks, "the save of step 3"))] == expected(2)


def sweep(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Keys of this kind vanish whenever somebody has seen them and is about to read them."""
    found = Client._found

    def swept(client: Client, keys: list[str]) -> list[bytes] | None:
        if any(kind in key for key in keys):
            client.delete(keys)
            return None
        return found(client, keys)

    monkeypatch.setattr(Client, "_found", swept)


@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_that_is_swept_before_it_is_read(monkeypatch: pytest.MonkeyPatch, *, shared: bool) -> None:
    """A rank that sees its answer and is slow to read it, while the coordinator is two joints on: told that it is."""

    def part(ranks: Ranks) -> object:
        with join(ranks) as joint:
            answer: object = joint.gather(1, sum) if shared else joint.scatter(1, lambda values: values)
        for _ in range(2):  # the coordinator alone comes so far
            with pytest.raises(ValueError, match="boo"), join(ranks):
                raise ValueError("boo")
        return answer

    sweep(monkeypatch, "/out")
    with party(2) as them:
        _, slow = them.run(part)
        assert type(slow.error) is SaveFailedError
        assert "This rank is behind" in str(slow.error)


def test_an_end_that_is_swept_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sees that there is a verdict and is slow to read it: no error but that it is behind."""

    def part(ranks: Ranks) -> object:
        if ranks.rank == 0:
            for _ in range(3):  # alone
                with pytest.raises(ValueError, match="boo"), join(ranks):
                    raise ValueError("boo")
            return None
        with join(ranks) as joint:
            return joint.gather(1, len)

    sweep(monkeypatch, "/verdict")
    with party(2) as them:
        _, slow = them.run(part)
        assert type(slow.error) is SaveFailedError
        assert "This rank is behind" in str(slow.error) or "has closed" in str(slow.error), slow


def test_a_rank_that_is_far_behind_is_told_so() -> None:
    """What it asks for is over, and nothing of it is left."""
    with party(2) as them:
        for step in range(4):
            them.run(lambda ranks, step=step: together(ranks, f"the save of step {step}", seconds=0.1), ranks=[0])  # type: ignore[misc]
        (late,) = them.run(lambda ranks: together(ranks, "the save of step 0"), ranks=[1])
        assert type(late.error) is SaveFailedError
        assert "This rank is behind: the save of step 0 is over for the others" in str(late.error)


def test_a_rank_that_does_something_else_meanwhile() -> None:
    """Ranks disagree on how many rounds there are: an error, no answer of another round, no wait for the deadline."""

    def part(ranks: Ranks) -> int:
        with join(ranks) as joint:
            joint.gather(None, len)
            if ranks.rank == odd:
                joint.gather("one more", len)
        return 1

    with party(3) as them:
        for odd in (0, 1):
            ended = them.run(part)
            assert type(ended[odd].error) is SaveFailedError
            assert "did something else" in str(ended[odd].error) or "has left" in str(ended[odd].error)
        assert [one.value for one in them.run(together)] == expected(3)


# ---- alone


def test_a_rank_that_was_asleep_itself_gives_up() -> None:
    """No thread of this process ran for longer than the others' patience: they have given it up, so it goes no further.

    Neither does it count those hours as silence of the others.
    """
    clock = Clock()
    ranks = Ranks(0, 2, dist.HashStore(), beat_seconds=60.0, clock=clock)

    def part() -> None:
        with join(ranks, seconds=1000.0, silence_seconds=60.0) as joint:
            clock.now += 59
            joint.look()
            assert joint.cancelled is None
            clock.now += 61
            joint.no_return()

    ended = Ended(part)
    ranks.close()
    assert type(ended.error) is SaveFailedError
    assert "Rank 0 was stopped or stuck for 61 s" in str(ended.error)


def test_the_deadline_of_a_rank_alone() -> None:
    """Whoever waits for its thread looks; what the thread then raises is a consequence."""
    clock = Clock()

    def part() -> None:
        with join(Ranks(0, 1, None, clock=clock), seconds=10.0) as joint:
            clock.now += 10 + GRACE_SECONDS - 0.1
            joint.look()
            assert joint.cancelled is None
            clock.now += 0.2
            joint.look()
            assert joint.deadline.expired()
            raise SaveFailedError("In consequence.")

    error = Ended(part).error
    assert type(error) is SaveTimeoutError
    assert isinstance(error.__cause__, SaveFailedError)
