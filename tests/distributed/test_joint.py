"""What ranks do together: answers, and what the others hear of a rank that raises. Ranks are threads of this process.

`test_joint_processes.py` does it with processes that are killed and stopped.
"""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from dcp_remote.errors import CommitConflictError, DcpRemoteError, FencedError, SaveFailedError, SaveTimeoutError
from dcp_remote.ranks import Ranks
from tests.distributed.parties import WHAT, errors, expected, join, party, together, upload, wait_until

pytestmark = pytest.mark.usefixtures("no_pulse_is_left")


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


def test_errors_of_joints_cross_ranks() -> None:
    """They pickle, as all of ours."""
    with party(2) as them:
        (one,) = them.run(lambda ranks: together(ranks, seconds=0.1), ranks=[0])
        assert isinstance(one.error, SaveTimeoutError)
        assert str(pickle.loads(pickle.dumps(one.error))) == str(one.error)
