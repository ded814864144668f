"""Who is named when ranks wait in vain: who is late, and who is silent. Ranks are threads of this process."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from dcp_remote.joint import Joint
from dcp_remote.ranks import Ranks
from tests.distributed.parties import WHAT, Ended, expected, held, join, party, together, upload, wait_until

pytestmark = pytest.mark.usefixtures("no_pulse_is_left")


# ---- the deadline


def test_ranks_that_never_come_are_named_at_the_deadline() -> None:
    """One has a manager and does something else, one has none; those that came raise together."""

    def part(ranks: Ranks) -> None:
        with join(ranks, seconds=0.6) as joint:
            joint.note(f"asking, as number {ranks.rank}")
            joint.gather(None, len)

    store = dist.HashStore()
    made = [Ranks(rank, 4, dist.PrefixStore("party", store), beat_seconds=0.03) for rank in (0, 1, 3)]
    made[1].pulse.note("training")  # type: ignore[union-attr]
    try:
        ended: dict[int, Ended[None]] = {}
        threads = [
            threading.Thread(target=lambda one=one: ended.update({one.rank: Ended(lambda: part(one))}))
            for one in (made[0], made[2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        for one in made:
            one.close()
    for rank in (0, 3):
        error = ended[rank].error
        assert type(error) is SaveTimeoutError
        assert str(error) == (
            f"Ranks 1, 2 did not report by the deadline; {WHAT} was given up. "
            "ranks='1, 2' last='1: not here yet, training; 2: never heard of'"
        )


def test_what_late_ranks_do_is_told() -> None:
    """One uploads for ever, the coordinator too: by name, with the note of each."""

    def part(ranks: Ranks) -> None:
        with join(ranks, seconds=0.5) as joint:
            joint.note(f"uploading, {ranks.rank} of 40 shards")
            if ranks.rank != 1:
                wait_until(lambda: joint.cancelled)  # deaf to the deadline
            joint.gather(None, len)

    with party(3) as them:
        for one in them.run(part):
            assert type(one.error) is SaveTimeoutError
            assert "Ranks 0, 2 did not report by the deadline" in str(one.error)
            assert "0: uploading, 0 of 40 shards; 2: uploading, 2 of 40 shards" in str(one.error)


def test_many_late_ranks_are_counted() -> None:
    """Sixteen are named."""
    store = dist.HashStore()
    ranks = Ranks(0, 100, store, beat_seconds=0.03)
    try:
        ended = Ended(lambda: together(ranks, seconds=0.3))
    finally:
        ranks.close()
    assert str(ended.error).startswith("Ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 83 more did")
    assert isinstance(ended.error, SaveTimeoutError)
    assert str(ended.error.details["ranks"]).endswith("15, 16, 83 more")
    assert str(ended.error.details["last"]).count("never heard of") == 16


def test_a_coordinator_that_never_comes() -> None:
    """The others give it the grace, and raise by themselves; it has done nothing, and they know."""
    joints: list[Joint] = []

    def part(ranks: Ranks) -> int:
        with join(ranks, seconds=0.3) as joint:
            joints.append(joint)
            return joint.gather(ranks.rank, sum)

    with party(3) as them:
        them.ranks[0].pulse.note("training")  # type: ignore[union-attr]
        ended = them.run(part, ranks=(1, 2))
        for one in ended:
            assert type(one.error) is SaveTimeoutError
            assert "ranks='0' last='0: not here yet, training'" in str(one.error)
        assert [joint.coordinator_lost for joint in joints] == [False, False]
        # What they have to say is said by their pulses, in order, soon after they have raised.
        told = threading.Semaphore(0)
        for rank in (1, 2):
            pulse = them.ranks[rank].pulse
            assert pulse is not None, "of three ranks each has one"
            pulse.tell(lambda _: told.release())
        assert all(told.acquire(timeout=60) for _ in range(2))
        # It comes when all is over, is told at once, and the next thing works.
        late = them.run(part, ranks=[0])[0]
        assert type(late.error) is SaveTimeoutError
        assert "rank=" in str(late.error)
        assert [one.value for one in them.run(together)] == expected(3)


def test_a_decision_that_takes_too_long() -> None:
    """The coordinator itself is the one that is late."""

    def decide(values: list[None]) -> None:
        wait_until(lambda: joints[0].cancelled)

    joints: list[Joint] = []

    def part(ranks: Ranks) -> None:
        with join(ranks, seconds=0.3) as joint:
            if ranks.is_coordinator:
                joints.append(joint)
                joint.note("deciding")
            joint.gather(None, decide)

    with party(2) as them:
        for one in them.run(part):
            assert type(one.error) is SaveTimeoutError
            assert "Rank 0 did not report by the deadline" in str(one.error)
            assert "last='0: deciding'" in str(one.error)


# ---- silence


def test_a_silent_rank_ends_it_by_name() -> None:
    """Its pulse stands still; the others raise when their patience is over, and not at the deadline."""

    def part(ranks: Ranks) -> None:
        with join(ranks, silence_seconds=0.6) as joint:
            joint.gather(None, len)
            joint.note(f"uploading, {ranks.rank} of 40 shards")
            wait_until(lambda: ranks.pulse.last_note.startswith("uploading"))  # type: ignore[union-attr]
            time.sleep(0.2)
            met.wait(30)
            if ranks.rank == 2:
                with held(ranks):
                    wait_until(over.is_set)
            else:
                upload(joint)

    met, over = threading.Barrier(3), threading.Event()

    def watched(ranks: Ranks) -> None:
        try:
            part(ranks)
        finally:
            if ranks.rank != 2:
                over.set()

    with party(3) as them:
        ended = them.run(watched)
    for one in ended[:2]:
        assert type(one.error) is SaveFailedError
        assert "Rank 2 has been silent for 1 s" in str(one.error)
        assert f"{WHAT} was given up" in str(one.error)
        assert "ranks='2' last='2: uploading, 2 of 40 shards'" in str(one.error)


def test_a_silent_coordinator_is_lost() -> None:
    """The others find it out, each by itself; when it goes on, it is told, and may commit nothing."""
    joints: list[Joint] = []
    met, over = threading.Barrier(3), threading.Barrier(3)

    def part(ranks: Ranks) -> None:
        with join(ranks, silence_seconds=20.0 if ranks.is_coordinator else 0.6) as joint:
            joints.append(joint)
            joint.gather(None, len)
            met.wait(30)
            if ranks.is_coordinator:
                with held(ranks):
                    over.wait(30)
                    joint.no_return()
            else:
                try:
                    upload(joint)
                finally:
                    wait_until(lambda: them.store.check(["party/1/failed"]))
                    over.wait(30)

    with party(3) as them:
        ended = them.run(part)
    for one in ended:
        assert type(one.error) is SaveFailedError
        assert "Rank 0 has been silent" in str(one.error)
    assert str(ended[0].error).split(" rank=")[1] in "12"
    assert sorted(joint.coordinator_lost for joint in joints) == [False, True, True]
