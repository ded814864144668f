"""Ranks that are threads of this process and meet in one store: what they say to each other needs no process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import pytest
import torch.distributed as dist

from dcp_remote import CheckpointManager
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from dcp_remote.joint import Joint
from dcp_remote.ranks import Ranks
from dcp_remote.storage import ObjectStore

T = TypeVar("T")

WHAT = "the save of step 7"
BEAT_SECONDS = 0.03


class Clock:
    """One that goes on by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ended(Generic[T]):
    """How a rank's part ended: what it returned, or raised."""

    def __init__(self, part: Callable[[], T]) -> None:
        self.value: T | None = None
        self.error: BaseException | None = None
        try:
            self.value = part()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            self.error = error

    def __repr__(self) -> str:
        return repr(self.error if self.error is not None else self.value)


class Party:
    """So many ranks.

    Args:
        world_size: How many.
        store: Where they meet; by default one of this process.
    """

    def __init__(self, world_size: int, store: dist.Store | None = None, *, beat_seconds: float = BEAT_SECONDS) -> None:
        self.store = dist.HashStore() if store is None else store
        self.world_size = world_size
        self.ranks = [
            Ranks(rank, world_size, dist.PrefixStore("party", self.store), beat_seconds=beat_seconds)
            for rank in range(world_size)
        ]

    def run(self, part: Callable[[Ranks], T], *, ranks: Iterable[int] | None = None) -> list[Ended[T]]:
        """Each rank's part, all at once, in a thread each; of those ranks."""
        chosen = [self.ranks[rank] for rank in (range(self.world_size) if ranks is None else ranks)]
        ended: dict[int, Ended[T]] = {}

        def act(one: Ranks) -> None:
            ended[one.rank] = Ended(lambda: part(one))

        threads = [threading.Thread(target=act, args=(one,), daemon=True) for one in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return [ended[one.rank] for one in chosen]

    def left(self) -> list[str]:
        """What lies in the store, but for the heartbeats."""
        return sorted(key.removeprefix("party/") for key in self.store.list_keys() if not key.startswith("party/beat/"))

    def close(self) -> None:
        for one in reversed(self.ranks):  # the coordinator waits for the others
            one.close()


@contextmanager
def party(world_size: int, store: dist.Store | None = None, *, beat_seconds: float = BEAT_SECONDS) -> Iterator[Party]:
    """And all of them leave."""
    made = Party(world_size, store, beat_seconds=beat_seconds)
    try:
        yield made
    finally:
        made.close()


def managers_of(
    them: Party, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[CheckpointManager]:
    """One for each rank."""
    managers = []
    for ranks in them.ranks:
        with monkeypatch.context() as patch:
            patch.setattr(Ranks, "of", lambda *_arguments, ranks=ranks: ranks)
            managers.append(CheckpointManager(store, **options))
    return managers


def join(ranks: Ranks, what: str = WHAT, *, seconds: float = 20.0, silence_seconds: float = 20.0) -> Joint:
    return ranks.join(
        what, seconds=seconds, silence_seconds=silence_seconds, failed=SaveFailedError, timed_out=SaveTimeoutError
    )


def together(ranks: Ranks, what: str = WHAT, **terms: float) -> tuple[int, int]:
    """A joint in which nothing goes wrong."""
    with join(ranks, what, **terms) as joint:
        return joint.gather(ranks.rank, sum), joint.scatter(10 * ranks.rank, lambda values: [one + 1 for one in values])


def expected(world_size: int) -> list[tuple[int, int]]:
    """What `together` returns."""
    return [(sum(range(world_size)), 10 * rank + 1) for rank in range(world_size)]


def errors(ended: list[Ended[Any]]) -> list[str]:
    return [str(one.error) for one in ended]


def upload(joint: Joint) -> NoReturn:
    """What takes long, and goes by its deadline, as uploads do."""
    while not joint.deadline.expired():
        time.sleep(0.002)
    raise SaveTimeoutError("The upload did not end by the deadline.", key="shards/1")


@contextmanager
def held(ranks: Ranks) -> Iterator[None]:
    """Its pulse stands still meanwhile, as that of a process that is stopped."""
    assert ranks.pulse is not None
    stands, go_on = threading.Event(), threading.Event()

    def stand(client: object) -> None:
        stands.set()
        go_on.wait(60)

    ranks.pulse.add_hook(stand)
    assert stands.wait(30)
    try:
        yield
    finally:
        ranks.pulse.remove_hook(stand)
        go_on.set()


def wait_until(condition: Callable[[], Any]) -> None:
    """Half a minute at most."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


HOST = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def host_command() -> list[str]:
    """A process that hosts a store until its standard input is closed, and says at which port."""
    return [sys.executable, "-c", HOST]
