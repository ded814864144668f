"""What ranks do together: answers, errors, silence, deadlines, and what is left. Ranks are threads of this process.

`test_joint_processes.py` does it with processes that are killed and stopped.
"""

from __future__ import annotations

import itertools
import pickle
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from dcp_remote.errors import (
    CommitConflictError,
    CommitUnknownError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    SaveFailedError,
    SaveTimeoutError,
)
from dcp_remote.joint import GRACE_SECONDS, Joint, Ranks
from dcp_remote.pulse import Beat, Client
from dcp_remote.storage.retrying import Deadline
from tests.distributed.parties import (
    WHAT,
    Ended,
    expected,
    held,
    join,
    party,
    together,
    wait_until,
)


def errors(ended: list[Ended[Any]]) -> list[str]:
    return [str(one.error) for one in ended]


def upload(joint: Joint) -> NoReturn:
    """What takes long, and goes by its deadline, as uploads do."""
    while not joint.deadline.expired():
        time.sleep(0.002)
    raise SaveTimeoutError("The upload did not end by the deadline.", key="shards/1")


# ---- answers


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_get_their_answers(world_size: int) -> None:
    """Values in order of ranks to the coordinator alone; one answer to all, to some, or to each; joint after joint."""
    asked: list[tuple[str, list[object]]] = []

    def part(ranks: Ranks) -> list[object]:
        name, answers = threading.current_thread().name, list[object]()

        def decide(values: list[int]) -> dict[str, list[int]]:
            asked.append((threading.current_thread().name, list(values)))
            assert threading.current_thread().name == name
            return {"sum": values}

        for number in range(3):
            with join(ranks, f"the save of step {number}") as joint:
                assert joint.gather(ranks.rank + number, decide) == {"sum": [one + number for one in everybody]}
                answers.append(joint.scatter(ranks.rank, lambda values: [-one for one in values]))
                some = joint.deal(
                    ranks.rank, lambda values: ([values[0::2], values[1::2]], [one % 2 for one in values])
                )
                assert some == list(everybody)[ranks.rank % 2 :: 2]
                assert joint.gather(None, len) == world_size
                assert joint.cancelled is None
        return answers

    everybody = range(world_size)
    with party(world_size) as them:
        assert [one.value for one in them.run(part)] == [[-rank] * 3 for rank in everybody]
    assert [values for _, values in asked] == [[rank + number for rank in everybody] for number in range(3)]


def test_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are read at a time."""
    monkeypatch.setattr("dcp_remote.joint._RANKS_PER_READ", 7)
    with party(20, beat_seconds=0.2) as them:
        assert [one.value for one in them.run(together)] == expected(20)
        assert [one.value for one in them.run(together)] == expected(20)


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_other_stores(kind: str, tmp_path: Path) -> None:
    """Those that processes meet in: each thread has a connection of its own, and nothing is left in them either."""
    store: dist.Store = dist.FileStore(str(tmp_path / "store"), 3)
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with party(3, store) as them:
        for number in range(3):
            assert [one.value for one in them.run(together)] == expected(3)
            ended = them.run(lambda ranks: fail(ranks, 1))
            assert [type(one.error) for one in ended] == [FencedError] * 3
            assert number == 0 or not [key for key in them.left() if re.match(rf"{2 * number - 1}[-/]", key)]


def fail(ranks: Ranks, failing: int) -> None:
    with join(ranks) as joint:
        if ranks.rank == failing:
            raise FencedError("Stop.")
        joint.gather(None, len)


def test_large_values() -> None:
    """Contributions and answers of 9 MiB over a TCPStore, which takes no more than 8 at a time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def part(ranks: Ranks) -> bool:
        mine = bytes([ranks.rank]) * (9 * 2**20)
        with join(ranks) as joint:
            everything = joint.gather(mine, b"".join)
            own = joint.scatter(mine, lambda values: [2 * value for value in values])
            dealt = joint.deal(mine, lambda values: (values[::-1], [1, 0]))
        return own == 2 * dealt == 2 * mine and len(everything) == 2 * len(mine)

    with party(2, store) as them:
        assert [one.value for one in them.run(part)] == [True, True]
        assert [one.value for one in them.run(together)] == expected(2)
        assert [key for key in store.list_keys() if "beat" not in key and "/2/" not in key] == []


def test_a_slow_rank_is_waited_for() -> None:
    """It comes later than the others' patience with the silent; but it is not silent."""

    def part(ranks: Ranks) -> int:
        with join(ranks, silence_seconds=0.5) as joint:
            if ranks.rank == 1:
                time.sleep(1.2)
            return joint.gather(ranks.rank, sum)

    with party(3) as them:
        assert [one.value for one in them.run(part)] == [3, 3, 3]


# ---- a rank raises


class OwnError(DcpRemoteError):
    """Of a user, which pickles."""


class OddError(Exception):
    """Comes back from a pickle as nothing."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("odd")


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def local_error() -> DcpRemoteError:
    class LocalError(DcpRemoteError):
        """Pickles nowhere."""

    return LocalError("Local.", key="k")


class DemandingError(DcpRemoteError):
    """Cannot be made of its message and details."""

    def __init__(self, what: str, *, code: int, **details: object) -> None:
        super().__init__(what, **details)
        self.code = code


class OneWayError(DcpRemoteError):
    """Pickles, and explodes where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def explode() -> NoReturn:
    raise ValueError("no")


RAISED: dict[str, tuple[Callable[[], BaseException], type[DcpRemoteError], str]] = {
    "ours": (lambda: FencedError("Stop.", newest=3), FencedError, "Stop. newest=3 rank={rank}"),
    "a user's of ours": (lambda: OwnError("Own."), OwnError, "Own. rank={rank}"),
    "ours with a rank": (lambda: SaveFailedError("No.", rank=77), SaveFailedError, "No. rank={rank}"),
    "another": (lambda: ValueError("boo"), SaveFailedError, "rank={rank} cause='ValueError: boo'"),
    "not to be pickled": (lambda: OddError(1, 2), SaveFailedError, "cause='OddError: odd'"),
    "of a class that nobody finds": (local_error, SaveFailedError, "cause=\"LocalError: Local. key='k'\""),
    "not to be unpickled": (lambda: OneWayError("No."), SaveFailedError, "cause='OneWayError: No.'"),
    "not to be made again": (lambda: DemandingError("No.", code=3), SaveFailedError, "cause='DemandingError: No.'"),
    "not to be printed": (UnsayableError, SaveFailedError, "cause='<UnsayableError>'"),
    "very large": (lambda: OwnError("x" * 2**21), SaveFailedError, "cause='OwnError: xxx"),
    "Ctrl-C": (KeyboardInterrupt, SaveFailedError, "cause='KeyboardInterrupt: '"),
    "the end": (lambda: SystemExit(3), SaveFailedError, "cause='SystemExit: 3'"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_an_error_of_one_rank_is_all_the_others_error(kind: str) -> None:
    """Raised by the coordinator, or another, in the block: unchanged there, told to the others, which are uploading."""
    make, of, text = RAISED[kind]

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(None, len)
            if ranks.rank == raising:
                raise own
            upload(joint)

    with party(3) as them:
        for raising in (0, 2):
            own = make()
            ended = them.run(part)
            assert ended[raising].error is own
            for one in ended[:raising] + ended[raising + 1 :]:
                assert type(one.error) is of
                assert text.format(rank=raising) in str(one.error)
                assert of is not SaveFailedError or kind == "ours with a rank" or WHAT in str(one.error)
        assert [one.value for one in them.run(together)] == expected(3)


def test_what_a_decision_raises_all_raise() -> None:
    """And the ranks after it."""

    def decide(values: list[int]) -> int:
        raise CommitConflictError("Another save won.", step=7)

    def part(ranks: Ranks) -> int:
        with join(ranks) as joint:
            return joint.gather(ranks.rank, decide)

    with party(3) as them:
        ended = them.run(part)
        assert [type(one.error) for one in ended] == 3 * [CommitConflictError]
        assert errors(ended) == ["Another save won. step=7"] + 2 * ["Another save won. step=7 rank=0"]


def test_what_cannot_be_pickled_fails_all() -> None:
    """A contribution that cannot be sent, one that cannot be read, an answer that cannot be sent."""

    def sending(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(threading.Lock() if ranks.rank == 1 else 0, len)

    def reading(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(Unreadable() if ranks.rank == 1 else 0, len)

    def answering(ranks: Ranks) -> None:
        with join(ranks) as joint:
            joint.gather(0, lambda values: threading.Lock())

    with party(3) as them:
        for part, text in ((sending, "cannot pickle"), (reading, "What rank 1 said"), (answering, "cannot pickle")):
            ended = them.run(part)
            assert all(text in one for one in errors(ended)), ended


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def test_what_follows_from_the_end_is_not_what_is_raised() -> None:
    """A rank whose upload fails because the joint was cancelled raises the cause, and keeps its own behind it."""

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            if ranks.rank == 1:
                raise FencedError("Stop.")
            if ranks.rank == 2:
                upload(joint)
            if ranks.rank == 3:
                wait_until(joint.deadline.expired)
                raise KeyboardInterrupt
            joint.gather(None, len)

    with party(4) as them:
        ended = them.run(part)
        assert [type(one.error) for one in ended] == [FencedError, FencedError, FencedError, KeyboardInterrupt]
        cause = ended[2].error.__cause__ if ended[2].error else None
        assert isinstance(cause, SaveTimeoutError)
        assert cause.details == {"key": "shards/1"}


def test_the_first_error_is_the_one_that_is_told() -> None:
    """Two ranks raise; all others raise one of the two, and the same."""

    def part(ranks: Ranks) -> None:
        with join(ranks) as joint:
            if ranks.rank in (1, 2):
                raise OwnError("Own.", of=ranks.rank)
            upload(joint)

    with party(5) as them:
        ended = them.run(part)
        assert len({str(ended[rank].error) for rank in (0, 3, 4)}) == 1
        assert type(ended[0].error) is OwnError


def test_a_block_that_ends_well_has_ended_well() -> None:
    """A rank fails behind the last exchange: those that have left know nothing of it."""
    left = threading.Event()

    def part(ranks: Ranks) -> int:
        with join(ranks) as joint:
            answer = joint.gather(ranks.rank, sum)
            if ranks.rank == 1:
                assert left.wait(30)
                raise ValueError("too late")
        left.set()
        return answer

    with party(2) as them:
        ended = them.run(part)
        assert ended[0].value == 1
        assert isinstance(ended[1].error, ValueError)


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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- the point of no return


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
    assert {joint._ranks.rank: joint.coordinator_lost for joint in joints} == {0: False, 1: True}


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
            joint._cancel(SaveFailedError("No."))

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


@pytest.mark.parametrize("shared", [True, False])
def test_an_answer_that_is_swept_before_it_is_read(monkeypatch: pytest.MonkeyPatch, *, shared: bool) -> None:
    """A rank that sees its answer and is slow to read it, while the coordinator is two joints on: told that it is."""
    of_values = Client.get_many

    def slowly(client: Client, keys: list[str]) -> list[bytes]:
        if any("/out" in key for key in keys):
            client.delete(keys)
            return [b"" for _ in keys]  # what a TCPStore gives if they go while it looks for them
        return of_values(client, keys)

    def part(ranks: Ranks) -> object:
        with join(ranks) as joint:
            answer: object = joint.gather(1, sum) if shared else joint.scatter(1, lambda values: values)
        for _ in range(2):  # the coordinator alone comes so far
            with pytest.raises(ValueError, match="boo"), join(ranks):
                raise ValueError("boo")
        return answer

    monkeypatch.setattr(Client, "get_many", slowly)
    with party(2) as them:
        _, slow = them.run(part)
        assert type(slow.error) is SaveFailedError
        assert "This rank is behind" in str(slow.error)


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


def test_one_thing_at_a_time() -> None:
    """A second joint is refused while the first is under way, not once that is cancelled; closed ranks join none."""
    ranks = Ranks(0, 1, None)
    first = join(ranks)
    with pytest.raises(InvalidArgumentError, match="under way"):
        join(ranks, "another")
    first._cancel(SaveFailedError("No."))
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


def test_errors_of_joints_cross_ranks() -> None:
    """They pickle, as all of ours."""
    with party(2) as them:
        (one,) = them.run(lambda ranks: together(ranks, seconds=0.1), ranks=[0])
        assert isinstance(one.error, SaveTimeoutError)
        assert str(pickle.loads(pickle.dumps(one.error))) == str(one.error)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    """Of a pulse; those that a test has left behind end by themselves."""
    yield
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "dcp_remote pulse"])


def test_a_group_that_is_none() -> None:
    """A group without torch.distributed."""
    with pytest.raises(InvalidArgumentError, match="not initialized"):
        Ranks.of(object(), "checkpoints")  # type: ignore[arg-type]
