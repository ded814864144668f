"""Ranks as threads of this process, connected through one store."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import pytest
import torch.distributed as dist

from dcp_remote import CheckpointManager
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.outcome import Terms
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from dcp_remote.storage import ObjectStore
from tests.support import points

T = TypeVar("T")

WHAT = "the save of step 7"
HEARTBEAT_SECONDS = 0.03

wait_until = points.wait_until


class Clock:
    """Clock that a test sets by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class CountingStore:
    """Store that counts the operations that are asked of it."""

    def __init__(self, store: dist.Store) -> None:
        self.store = store
        self.operations = 0

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name == "clone":
            raise AttributeError(name)

        def ask(*arguments: object) -> object:
            self.operations += 1
            return getattr(self.store, name)(*arguments)

        return ask


class Ended(Generic[T]):
    """Result of a rank's part: the value that it returned, or the error that it raised."""

    def __init__(self, part: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        try:
            self.value = part()
        except BaseException as error:  # noqa: BLE001  # kept for the test
            self.error = error

    def __repr__(self) -> str:
        return repr(self.error if self.error is not None else self.value)


class RankThreads:
    """Group of ranks, all of them in this process."""

    def __init__(
        self, world_size: int, store: dist.Store | None = None, *, beat_seconds: float = HEARTBEAT_SECONDS
    ) -> None:
        self.store = dist.HashStore() if store is None else store
        self.world_size = world_size
        self.ranks = [
            RankGroup(rank, world_size, dist.PrefixStore("group", self.store), beat_seconds=beat_seconds)
            for rank in range(world_size)
        ]

    def run(self, part: Callable[[RankGroup], T], *, ranks: Iterable[int] | None = None) -> list[Ended[T]]:
        """Run the part of all ranks, or of those given, at the same time and each in a thread; return their results."""
        chosen = [self.ranks[rank] for rank in (range(self.world_size) if ranks is None else ranks)]
        ended: dict[int, Ended[T]] = {}

        def act(ranks: RankGroup) -> None:
            ended[ranks.rank] = Ended(lambda: part(ranks))

        threads = [threading.Thread(target=act, args=(group,), daemon=True) for group in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return [ended[group.rank] for group in chosen]

    def left(self) -> list[str]:
        """Return the keys in the store, without those of the heartbeats."""
        return sorted(key.removeprefix("group/") for key in self.store.list_keys() if not key.startswith("group/beat/"))

    def close(self) -> None:
        for group in reversed(self.ranks):  # the coordinator waits for the others
            group.close()


@contextmanager
def rank_threads(
    world_size: int, store: dist.Store | None = None, *, beat_seconds: float = HEARTBEAT_SECONDS
) -> Iterator[RankThreads]:
    """Make a group of ranks, and close them at the end."""
    them = RankThreads(world_size, store, beat_seconds=beat_seconds)
    try:
        yield them
    finally:
        them.close()


def managers_of(
    them: RankThreads, store: ObjectStore | Sequence[ObjectStore], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[CheckpointManager]:
    """Return a manager for each rank; all have one store, or each has its own."""
    managers = []
    stores = store if isinstance(store, Sequence) else [store] * them.world_size
    for ranks, own in zip(them.ranks, stores, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(RankGroup, "from_process_group", lambda *_arguments, ranks=ranks: ranks)
            managers.append(CheckpointManager(own, **options))
    return managers


class ManagerThreads:
    """A manager for each rank, all of them in this process."""

    def __init__(self, groups: RankThreads, managers: list[CheckpointManager]) -> None:
        self.groups, self.managers = groups, managers

    def run(self, call: Callable[[int, CheckpointManager], T], *ranks: int) -> list[Ended[T]]:
        """Make a call on all ranks, or on those given, at the same time; return the results."""
        return self.groups.run(lambda group: call(group.rank, self.managers[group.rank]), ranks=ranks or None)

    def values(self, call: Callable[[int, CheckpointManager], T]) -> list[T | None]:
        """Make a call on all ranks, which succeeds; return the values."""
        ended = self.run(call)
        assert [one.error for one in ended] == [None] * self.groups.world_size
        return [one.value for one in ended]


@contextmanager
def manager_threads(
    world_size: int,
    store: ObjectStore | Sequence[ObjectStore],
    meeting: dist.Store | None = None,
    *,
    beat_seconds: float = HEARTBEAT_SECONDS,
    **options: Any,
) -> Iterator[ManagerThreads]:
    """Make managers of ranks that are threads, and close them at the end."""
    with rank_threads(world_size, meeting, beat_seconds=beat_seconds) as groups, pytest.MonkeyPatch.context() as patch:
        managers = managers_of(groups, store, patch, **options)
        yield ManagerThreads(groups, managers)
        for manager in reversed(managers):  # the coordinator waits for the others
            manager.close()


def join(
    ranks: RankGroup,
    what: str = WHAT,
    *,
    seconds: float = 20.0,
    silence_seconds: float = 20.0,
    arrival_seconds: float = math.inf,
) -> Collective:
    """Prepare a collective operation, and begin it."""
    terms = Terms(SaveFailedError, SaveTimeoutError, seconds, silence_seconds, arrival_seconds)
    collective = ranks.prepare(what, terms)
    ranks.begin(collective)
    return collective


def together(ranks: RankGroup, what: str = WHAT, **terms: float) -> tuple[int, int]:
    """Carry out an operation of two rounds without faults."""
    with join(ranks, what, **terms) as collective:
        total = collective.gather(ranks.rank, sum)
        return total, collective.scatter(10 * ranks.rank, lambda values: [value + 1 for value in values])


def expected(world_size: int) -> list[tuple[int, int]]:
    """Return what `together` returns, by rank."""
    return [(sum(range(world_size)), 10 * rank + 1) for rank in range(world_size)]


@contextmanager
def counted_rounds(rank: int = 1) -> Iterator[Counter[str]]:
    """Count the rounds of one rank, by the name of the operation."""
    counts, scatter = Counter[str](), Collective.scatter

    def scatter_counted(self: Collective, *arguments: Any) -> Any:
        counts[self.what] += self._member.rank == rank
        return scatter(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collective, "scatter", scatter_counted)  # which `gather` calls
        yield counts


def errors(ended: list[Ended[Any]]) -> list[str]:
    return [plain(result.error) for result in ended]


def plain(error: object) -> str:
    """Return the text of an error without the hosts and processes of ranks, and without what this rank was doing."""
    text = str(error)
    return re.sub(r" \([^() ]+, pid \d+\)| process='[^']*'| here=.*", "", text)


def upload(collective: Collective) -> NoReturn:
    """Work until the deadline passes, and raise then, as an upload does."""
    while not collective.deadline.expired():
        time.sleep(0.002)
    raise SaveTimeoutError("The upload did not end by the deadline.", key="shards/1")


class LostStore:
    """Store of a group that stops answering on demand, and records the threads that use it."""

    is_lost = False

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.threads: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        self.threads.add(threading.get_ident())
        if self.is_lost:
            raise dist.DistNetworkError("Broken pipe")
        if name == "clone":
            raise AttributeError(name)
        return getattr(self._store, name)


@contextmanager
def held(ranks: RankGroup) -> Iterator[None]:
    """Stop the heartbeat of these ranks while the block runs, as if their process was stopped."""
    assert ranks.heartbeat is not None
    has_stopped, go_on = threading.Event(), threading.Event()

    def stop(client: object) -> None:
        has_stopped.set()
        go_on.wait(60)

    ranks.heartbeat.hooks.append(stop)
    assert has_stopped.wait(30)
    try:
        yield
    finally:
        ranks.heartbeat.hooks.remove(stop)
        go_on.set()


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def host_command() -> list[str]:
    """Return the command of a process that hosts a store until its standard input is closed, and prints its port."""
    return [sys.executable, "-c", HOST]
