"""Joints one after the other: what is left of them in the store, and how ranks leave. Ranks are threads here."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time

import pytest
import torch.distributed as dist

from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.key_value import Client
from dcp_remote.pulse import Beat
from dcp_remote.ranks import Ranks
from dcp_remote.storage.retrying import Deadline
from tests.distributed.parties import WHAT, Ended, expected, join, party, together, wait_until

pytestmark = pytest.mark.usefixtures("no_pulse_is_left")


# ---- one after the other


def test_one_thing_at_a_time() -> None:
    """A second joint is refused while the first is under way, not once that is cancelled; closed ranks join none."""
    ranks = Ranks(0, 1, None)
    first = join(ranks)
    with pytest.raises(InvalidArgumentError, match="under way"):
        join(ranks, "another")
    first.cancel(SaveFailedError("No."))
    with join(ranks, "another"):
        assert Ended(lambda: first.gather(1, len)).error is first.cancelled
    ranks.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        join(ranks)


def test_closing_ends_what_is_under_way() -> None:
    """In another thread, which waits."""
    with party(2) as them:
        joint = join(them.ranks[0])
        ended: list[Ended[int]] = []

        def wait() -> None:
            with joint:
                joint.gather(1, len)

        thread = threading.Thread(target=lambda: ended.append(Ended(wait)))  # type: ignore[arg-type]
        thread.start()
        them.ranks[0].close()
        thread.join(30)
        assert "Closed in the middle" in str(ended[0].error)


# ---- alone


def test_a_rank_alone() -> None:
    """No store, no thread: answers, errors unchanged, and the deadline."""
    before = threading.active_count()
    ranks = Ranks.of(None, "checkpoints")
    assert (ranks.rank, ranks.world_size, ranks.is_coordinator, ranks.pulse) == (0, 1, True, None)
    assert together(ranks) == (0, 1)
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="boo"), join(ranks):
        raise ValueError("boo")
    with join(ranks) as joint:
        joint.note("committing")
        joint.no_return()
        joint.look()
        assert isinstance(joint.deadline, Deadline)
    ranks.close()


def test_a_group_that_is_none() -> None:
    """A group without torch.distributed."""
    with pytest.raises(InvalidArgumentError, match="not initialized"):
        Ranks.of(object(), "checkpoints")  # type: ignore[arg-type]


# ---- what is left in the store


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_left_of_what_is_long_over(seed: int) -> None:
    """Random endings, one after another: raised before, between and behind the rounds, or in a decision."""
    rng = random.Random(seed)
    with party(3) as them:
        for number in range(1, 16):
            endings = {rng.randrange(3): rng.randrange(5) for _ in range(rng.randrange(3))}

            def part(ranks: Ranks, endings: dict[int, int] = endings, number: int = number) -> None:
                where = endings.get(ranks.rank)
                places = itertools.count()

                def maybe() -> None:
                    if next(places) == where:
                        raise ValueError("boo")

                with join(ranks, f"the save of step {number}", seconds=5.0) as joint:
                    maybe()
                    joint.gather(ranks.rank, len)
                    maybe()
                    joint.scatter(ranks.rank, lambda values: values)
                    joint.deal(ranks.rank, lambda values: (["one", "other"], [1 for _ in values]))
                    maybe()
                    joint.gather(ranks.rank, lambda values: maybe())
                    maybe()

            for one in them.run(part):
                assert one.error is None or isinstance(one.error, ValueError | SaveFailedError), one.error
            assert {int(re.split("[-/]", key)[0]) for key in them.left()} <= {number - 1, number}, them.left()
        assert [one.value for one in them.run(together)] == expected(3)
        them.close()
        assert them.left() == []


def test_nothing_is_posted_once_it_is_cancelled() -> None:
    """A rank that comes out of its upload late contributes nothing any more."""

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            if ranks.rank == 1:
                raise ValueError("boo")
            wait_until(lambda: joint.cancelled)
            joint.gather("late", len)

    with party(3) as them:
        ended = them.run(part)
        assert [type(one.error) for one in ended] == [SaveFailedError, ValueError, SaveFailedError]
        assert them.left() == ["1/failed", "1/verdict"]


# ---- goodbyes


def test_the_host_stays_until_its_last_answer_is_read() -> None:
    """The coordinator closes at once; another rank is slow to read, and reads."""
    closed: list[float] = []
    read: list[float] = []

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(None, len)
            if ranks.rank == 1:
                time.sleep(0.3)
        (read if ranks.rank == 1 else closed).append(time.monotonic())
        ranks.close()
        if ranks.rank == 0:
            closed[0] = time.monotonic()

    with party(2) as them:
        them.run(part)
    assert closed[0] > read[0]


def test_the_dead_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that was killed in the last joint has not left it, and never will: nobody needs what is in the store."""
    monkeypatch.setattr("dcp_remote.pulse._CLOSE_SECONDS", 4.0)
    store = dist.HashStore()
    client = Client(store)
    client.put("beat/1", Beat(3, 1, WHAT, inside=True, note="uploading").encode())
    ranks = Ranks(0, 2, store, beat_seconds=0.03)
    with pytest.raises(ValueError, match="boo"), join(ranks):
        raise ValueError("boo")
    wait_until(lambda: client.has(["1/verdict"]))
    ranks.close()
    assert not client.has(["1/verdict"])  # the goodbyes have not run out of time
