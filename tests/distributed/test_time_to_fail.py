"""Time to fail: a rank that is dead, stopped, stalled, or never comes ends a save on all ranks that live, by name.

Through the manager, on real ranks. Of times only the promise is asserted: five seconds after the deadline. Those who
live and have the whole state save it in a new group of theirs; of shards, a part is missing, and that is said.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dcp_remote.errors import CommitUnknownError, DcpRemoteError, SaveFailedError, SaveTimeoutError
from tests.distributed.failing import (
    CALM_SECONDS,
    DEADLINE_SECONDS,
    PROMISED_SECONDS,
    Case,
    Place,
    Told,
    Way,
    attempt,
    hosted,
)
from tests.support.figures import LONG_SECONDS, count, figures
from tests.support.rank_pool import RankPool, RanksFailedError

pytestmark = [
    pytest.mark.torture(smoke=False),
    pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is stopped"),
]

UPLOADS: tuple[Place, ...] = ("before upload", "in upload", "after upload")
COMMITS: tuple[Place, ...] = ("before manifest", "after manifest", "before swap", "after swap")

LONGEST = "ms after the deadline, until a save had failed on every rank that lives"


def cases(world_size: int) -> Iterator[Case]:
    """All of a world size: the last rank, or the coordinator, or the host of the store."""
    last = (world_size - 1,)
    ways: tuple[Way, ...] = ("killed", "stopped")
    for way in ways:
        for place in UPLOADS:
            yield Case(way, last, place)
        for place in (*UPLOADS[:2], *COMMITS):
            yield Case(way, (0,), place)
        yield Case(way, (), "before upload")
    for victims in (last, (0,)):
        yield Case("idle", victims)
        yield Case("absent", victims)
        yield Case("stalled", victims, "before upload")
    for place in COMMITS:
        if place.startswith("before"):
            yield Case("stalled", (0,), place)
    if world_size > 3:
        yield Case("killed", (1, 3), "in upload")
        yield Case("stopped", (0, 1, 3), "in upload")


# What `make test` tries.
SHORT = [
    (2, Case("stopped", (0,), "before manifest")),
    (3, Case("killed", (2,), "in upload")),
    (3, Case("killed", (), "before upload")),
    (3, Case("idle", (1,))),
]

ALL = [(world_size, case) for world_size in (2, 3, 5) for case in cases(world_size)]


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """As many ranks as are needed; nobody else's, as some are killed, and a group may lose its store."""
    # Those who were killed are started again while the others wait to meet them.
    with RankPool(max(world_size for world_size, _ in ALL), group_timeout_seconds=CALM_SECONDS) as pool:
        yield pool


def survivors(pool: RankPool, path: Path, world_size: int, case: Case) -> list[Told]:
    """How it ended on the ranks that live and save, which all returned before the pool would have ended them."""
    with hosted() if not case.victims else nullcontext() as host:
        if case.way in ("killed", "stopped") and case.victims:
            with pytest.raises(RanksFailedError) as caught:
                pool.run(attempt, path, case, host, ranks=range(world_size))
            # Who was stopped was killed when all others had ended.
            ended = {rank: failure.signal for rank, failure in caught.value.failures.items()}
            assert ended == dict.fromkeys(case.victims, signal.SIGKILL), caught.value
            told = list(caught.value.results.values())
        else:
            told = pool.run(attempt, path, case, host, ranks=range(world_size))
    living = [one for one in told if one is not None]
    assert len(living) == sum(case.saves(rank) for rank in range(world_size))
    return living


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All cases in the long campaign, and a few of them each time."""
    if "case" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("--torture-seconds") >= LONG_SECONDS
        metafunc.parametrize(("world_size", "case"), ALL if is_long else SHORT, ids=str)


def test_time_to_fail(world_size: int, case: Case, pool: RankPool, tmp_path: Path) -> None:
    """Every rank that lives raises by the deadline and five seconds, an error that names who, and what they did."""
    living = survivors(pool, tmp_path / "run", world_size, case)
    figures["saves that a rank failed, through the manager"] += 1
    if case.way in ("killed", "stopped"):
        count(f"ranks {case.way}", len(case.victims))  # type: ignore[arg-type]  # one of two
    longest = max(told.seconds for told in living)
    figures[LONGEST] = max(figures[LONGEST], round(1000 * (longest - DEADLINE_SECONDS)))
    for told in living:
        assert told.seconds < PROMISED_SECONDS, told
        check_what_was_told(case, told)
        if told.steps is not None:
            assert told.steps == [1, 3], told
            assert "model.w" in str(told.refused), told


def check_what_was_told(case: Case, told: Told) -> None:
    """The right class, the right ranks, and what they were last seen doing."""
    error = told.error
    if case.place in ("after upload", "after swap"):
        assert error is None, told  # nobody needs it any more; and who looks for what the coordinator did, sees it
        return
    assert isinstance(error, DcpRemoteError), told
    if case.way == "stalled" and case.place in UPLOADS and "shard" in error.details:
        assert (error.details["rank"], type(error)) == (*case.victims, SaveTimeoutError), told  # its own words
        return
    # A rank that hears nothing from the store blames no other.
    listed = str(error.details["ranks"]).split(", ") if case.victims or "ranks" in error.details else []
    named = {int(rank) for rank in listed}
    if case.victims:
        assert named <= set(case.victims), told
    assert all(f"{rank}: " in str(error.details["last"]) for rank in named), told
    if case.way in ("killed", "stopped"):
        assert ("silent" if case.victims else "store of the process group") in error.what, told
        # Of a coordinator that is gone nobody knows whether it will commit; nor of what it was told.
        kinds = (SaveFailedError, CommitUnknownError) if 0 in case.victims or not case.victims else SaveFailedError
        assert isinstance(error, kinds), told
        assert not isinstance(error, SaveTimeoutError), told
    elif case.way == "stalled" and case.place in COMMITS:
        assert isinstance(error, CommitUnknownError), told
    else:
        assert isinstance(error, SaveTimeoutError), told
    if case.way in ("idle", "absent"):
        last = "has not joined" if case.way == "idle" else "no heartbeat yet"
        assert last in str(error.details["last"]), told
