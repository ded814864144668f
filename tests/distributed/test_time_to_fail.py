"""Time to fail: a rank that is dead, stopped, stalled, or never comes ends a save on all ranks that live, by name.

Through the manager, on real ranks. The rank strikes itself at a request, so that nothing depends on who is fast. Of
times only the promise is asserted: five seconds after the deadline. `tests/coordination` has a host of the ranks' store
that fails.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import pytest
import torch
import torch.distributed as dist

from dcp_remote import CheckpointManager
from dcp_remote.errors import CommitUnknownError, DcpRemoteError, SaveFailedError, SaveTimeoutError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.support.figures import LONG_SECONDS, count, figures
from tests.support.rank_faults import exchanged, process_state, signal_this_thread
from tests.support.rank_pool import RankPool, RanksFailedError
from tests.support.rank_threads import wait_until

pytestmark = [
    pytest.mark.torture(smoke=False),
    pytest.mark.skipif(sys.platform != "linux", reason="sees in Linux's /proc whether a process is stopped"),
]

_Answer = TypeVar("_Answer")

# Of the save that is tried; ranks say something every second. By then every rank that lives has raised.
SILENCE_SECONDS, DEADLINE_SECONDS = 3.0, 8.0
PROMISED_SECONDS = DEADLINE_SECONDS + 5

# Timeout of the group: those who were killed are started again while the others wait to meet them.
CALM_SECONDS = 60.0

# What a coordinator whose own shards are there waits for a rank that is to be struck when its shards are.
LATE_SECONDS = 1.5

LONGEST = "ms after the deadline, until a save had failed on every rank that lives"

# Prefix of the key, number of the put, and moment. Of the commit's, the coordinator's alone.
PLACES: dict[str, tuple[str, int, Literal["before", "after"]]] = {
    "before upload": ("shards/", 1, "before"),
    "in upload": ("shards/", 1, "after"),
    "after upload": ("shards/", 2, "after"),  # there are two a rank
    "before manifest": ("manifests/", 1, "before"),
    "after manifest": ("manifests/", 1, "after"),
    "before swap": (CATALOG_KEY, 1, "before"),
    "after swap": (CATALOG_KEY, 1, "after"),
}
UPLOADS, COMMITS = tuple(PLACES)[:3], tuple(PLACES)[3:]


@dataclass(frozen=True, slots=True)
class Case:
    """Injected failure.

    Attributes:
        way: "killed", "stopped", or "stalled" by a store that does not answer; "idle" if a rank has a manager and does
            not save, "absent" if it has none.
        victims: Ranks that fail.
        place: Point at which they fail; of ranks that do not save, none is ever reached.
    """

    way: str
    victims: tuple[int, ...]
    place: str = "before upload"

    def __str__(self) -> str:
        return f"{self.way}-{','.join(map(str, self.victims))}-{self.place.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class Told:
    """Seconds that a save took on a rank that lives, from the call on, and its error; None if it was committed."""

    seconds: float
    error: BaseException | None


class StruckStore(WrappedStore):
    """Does something before or after the n-th put of a kind; then goes on, if this thread still does."""

    is_armed = False

    def __init__(self, store: ObjectStore, place: str, action: Callable[[], None]) -> None:
        super().__init__(store)
        self._key, self._left, self._when = PLACES[place]
        self._action, self._lock = action, threading.Lock()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if not self.is_armed or request.verb != "put" or not request.key.startswith(self._key):
            return send()
        if self._when == "before":
            self._count()
            return send()
        answer = send()
        self._count()
        return answer

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._action()


def struck(path: Path, case: Case, released: threading.Event) -> StruckStore:
    """Return the store of this rank, at which the rank fails if it is to fail."""

    def act() -> None:
        number = signal.SIGKILL if case.way == "killed" else signal.SIGSTOP
        if case.way == "stalled":
            released.wait()
        elif case.place == "after upload":
            # When this request has returned, and the rank's report was given.
            threading.Timer(LATE_SECONDS / 3, signal_this_thread, (number,)).start()
        else:
            signal_this_thread(number)

    store, rank = LocalStore(str(path)), dist.get_rank()
    if rank in case.victims:
        return StruckStore(store, case.place, act)
    # Nobody commits before the victim's shards are there, and it is struck.
    is_held = rank == 0 and case.place == "after upload"
    return StruckStore(store, "before upload", lambda: time.sleep(LATE_SECONDS if is_held else 0.0))


def state_of(value: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return the same on every rank: so many tensors that each rank writes two shards."""
    names = [f"w{number}" for number in range(4 * dist.get_world_size())]
    return {key: {name: torch.full((500,), value) for name in names} for key in ("model", "optim")}


def attempt(path: Path, case: Case) -> Told | None:
    """Make a save that goes well, and one that does not; None on a rank that lives and does not save."""
    pids, released = exchanged(os.getpid()), threading.Event()
    is_absent = case.way in ("idle", "absent") and dist.get_rank() in case.victims
    if is_absent and case.way == "absent":
        wait_until(lambda: have_ended(path.parent, case))
        return None
    store = struck(path, case, released)
    checkpoints = CheckpointManager(store, timeout_seconds=DEADLINE_SECONDS, silence_seconds=SILENCE_SECONDS)
    if case.way != "absent":
        checkpoints.save(1, state_of(1), wait=True)
    if is_absent:
        wait_until(lambda: have_ended(path.parent, case))
        checkpoints.close()
        return None
    store.is_armed, error, began = True, None, time.monotonic()
    try:
        checkpoints.save(2, state_of(2), wait=True)
    except DcpRemoteError as raised:
        error = raised
    seconds = time.monotonic() - began
    released.set()
    checkpoints.close()
    (path.parent / f"ended-{dist.get_rank()}").touch()
    if case.way == "stopped" and have_ended(path.parent, case):
        for rank in case.victims:  # the pool would wait for a process that is stopped
            if process_state(pids[rank]) == "T":
                os.kill(pids[rank], signal.SIGKILL)
    return Told(seconds, error)


def have_ended(folder: Path, case: Case) -> bool:
    """Return whether all ranks that live and save have noted their end in a file; the group's store may have failed."""
    return len(list(folder.glob("ended-*"))) == dist.get_world_size() - len(case.victims)


def cases(world_size: int) -> Iterator[Case]:
    """Yield the cases of a world size: the last rank, or the coordinator, or several."""
    last = (world_size - 1,)
    for way in ("killed", "stopped"):
        for place in UPLOADS:
            yield Case(way, last, place)
        for place in (*UPLOADS[:2], *COMMITS):
            yield Case(way, (0,), place)
    for victims in (last, (0,)):
        yield Case("idle", victims)
        yield Case("absent", victims)
        yield Case("stalled", victims, "before upload")
    yield Case("stalled", (0,), "before manifest")
    yield Case("stalled", (0,), "before swap")
    if world_size > 3:
        yield Case("killed", (1, 3), "in upload")
        yield Case("stopped", (0, 1, 3), "in upload")


SHORT = [
    (2, Case("stopped", (0,), "before manifest")),
    (3, Case("killed", (2,), "in upload")),
    (3, Case("idle", (1,))),
]
ALL = [(world_size, case) for world_size in (2, 3, 5) for case in cases(world_size)]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """As many ranks as are needed; nobody else's, as some are killed."""
    with RankPool(max(world_size for world_size, _ in ALL), group_timeout_seconds=CALM_SECONDS) as pool:
        yield pool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try all cases in the long campaign, and a few of them each time."""
    if "case" in metafunc.fixturenames:
        is_long = metafunc.config.getoption("--torture-seconds") >= LONG_SECONDS
        metafunc.parametrize(("world_size", "case"), ALL if is_long else SHORT, ids=str)


def test_time_to_fail(world_size: int, case: Case, pool: RankPool, tmp_path: Path) -> None:
    """Every rank that lives raises by the deadline and five seconds, an error that names who, and what they did."""
    if case.way not in ("killed", "stopped"):
        told_each = pool.run(attempt, tmp_path / "run", case, ranks=range(world_size))
    else:
        with pytest.raises(RanksFailedError) as caught:
            pool.run(attempt, tmp_path / "run", case, ranks=range(world_size))
        ended = {rank: failure.signal for rank, failure in caught.value.failures.items()}
        assert ended == dict.fromkeys(case.victims, signal.SIGKILL), caught.value
        told_each = list(caught.value.results.values())
        count("ranks killed" if case.way == "killed" else "ranks stopped", len(case.victims))
    living = [told for told in told_each if told is not None]
    assert len(living) == world_size - (0 if case.way == "stalled" else len(case.victims))
    figures["saves that a rank failed, through the manager"] += 1
    longest = max(told.seconds for told in living)
    figures[LONGEST] = max(figures[LONGEST], round(1000 * (longest - DEADLINE_SECONDS)))
    for told in living:
        assert told.seconds < PROMISED_SECONDS, told
        check_what_was_told(case, told)


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
    named = {int(rank) for rank in str(error.details["ranks"]).split(", ")}
    assert named <= set(case.victims), told
    assert all(f"{rank}: " in str(error.details["last"]) for rank in named), told
    if case.way not in ("killed", "stopped"):
        assert isinstance(error, CommitUnknownError if case.place in COMMITS else SaveTimeoutError), told
        last = {"idle": "has not joined", "absent": "no heartbeat yet"}.get(case.way, "")
        assert last in str(error.details["last"]), told
        return
    assert "silent" in error.what, told
    # Of a coordinator that is gone nobody knows whether it will commit.
    assert isinstance(error, (SaveFailedError, CommitUnknownError) if 0 in case.victims else SaveFailedError), told
    assert not isinstance(error, SaveTimeoutError), told
