"""Incarnations of a process group over one store, and the numbers of its uses in them; without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from dcp_remote.coordination import incarnation
from dcp_remote.coordination.heartbeat import Heartbeat, RankStatus
from dcp_remote.coordination.incarnation import Incarnation
from dcp_remote.coordination.key_value import Client
from dcp_remote.coordination.use_counter import UseCounter
from tests.support.rank_threads import CountingStore, wait_until


class Process:
    """Process of a rank, as far as this matters here: what it knows of the group."""

    def __init__(self, store: dist.Store, rank: int, world_size: int = 2) -> None:
        self.store, self.rank, self._world_size = store, rank, world_size
        self._joined: dict[str, Incarnation] = {}
        self.make_group()

    def make_group(self) -> None:
        """Make the process group, again after the first time."""
        self._group: Any = type("Group", (), {})()  # torch's own cannot be made without a backend
        self.incarnation = Incarnation(self._group, self.rank, self._joined)

    def find(self) -> str | None:
        return self.incarnation.find(Client(self.store), self.store)

    def use(self) -> UseCounter:
        return UseCounter(self.incarnation, self.store, "run", self.rank, self._world_size)

    def number(self, *, is_confirmed: bool = True) -> int:
        """Begin a use, and return its number."""
        uses = self.use()
        opened = number_of(wait_for(uses.begin()))
        if is_confirmed:
            uses.confirm()
        else:
            uses.mark_doubtful()
        return opened


def number_of(store: dist.Store) -> int:
    assert isinstance(store, dist.PrefixStore)
    store.set("number", "")
    underlying = store.underlying_store
    assert isinstance(underlying, dist.HashStore)
    keys = [key for key in underlying.list_keys() if key.endswith("/number")]
    for key in keys:
        underlying.delete_key(key)
    (key,) = keys
    return int(key.split("/")[2])


def wait_for(look: Callable[[], Any]) -> Any:
    """Look until there is an answer."""
    found: list[Any] = []

    def is_found() -> bool:
        found.append(look())
        return found[-1] is not None

    wait_until(is_found)
    return found[-1]


@pytest.fixture(autouse=True)
def lives(no_heartbeat_is_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Heartbeat]]:
    """Signs of life of the coordinators that a test makes; to close one is to kill its process."""
    made: list[Heartbeat] = []

    class Sign(Heartbeat):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(incarnation, "Heartbeat", Sign)
    monkeypatch.setattr(incarnation, "_SIGN_SECONDS", 0.01)
    yield made
    for sign in made:
        sign.close()


def test_a_rank_joins_the_coordinator_that_lives(lives: list[Heartbeat]) -> None:
    """Join a coordinator that is late or early, and never the name that a dead one has left."""
    store = dist.HashStore()
    early, first = Process(store, 1), Process(store, 0)
    assert [early.find() for _ in range(3)] == [None] * 3
    name = first.find()
    assert early.find() == name
    late = Process(store, 1)
    assert late.find() is None
    assert wait_for(late.find) == name
    lives[0].close()
    new = Process(store, 1)
    assert [new.find() for _ in range(3)] == [None] * 3
    second = Process(store, 0).find()
    assert second not in {name, None}
    assert new.find() == second
    assert early.find() == second  # a survivor goes over to the new coordinator


def test_a_coordinator_that_was_replaced_is_not_joined(lives: list[Heartbeat]) -> None:
    """It lives on, as on a host that was cut off, and says so no more."""
    store = dist.HashStore()
    old, new = Process(store, 0), Process(store, 0)
    old.find()
    name = new.find()
    wait_until(lambda: lives[0]._thread is not None and not lives[0]._thread.is_alive())
    old.find()
    assert wait_for(Process(store, 1).find) == name


def test_a_group_that_was_made_again_shows_no_life(lives: list[Heartbeat], monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroy a group: a late rank still finds its name, since its last save may be under way."""
    store = dist.HashStore()
    old = Process(store, 0)
    name = old.find()
    del old._group
    assert wait_for(Process(store, 1).find) == name
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    wait_until(lambda: lives[0]._thread is not None and not lives[0]._thread.is_alive())
    with pytest.raises(dist.DistNetworkError, match="made again"):
        old.find()


def test_a_rank_that_makes_its_group_again_first(lives: list[Heartbeat]) -> None:
    """Wait for the new name while the old one shows life, whoever was its coordinator; a new process may join it."""
    store = dist.HashStore()
    ranks = [Process(store, rank, 3) for rank in range(3)]
    old = ranks[0].find()
    assert [wait_for(rank.find) for rank in ranks] == [old] * 3
    ranks[1].make_group()
    assert wait_for(Process(store, 1).find) == old
    signs = set[bytes]()
    while len(signs) < 3:
        assert ranks[1].find() is None
        signs.add(Client(store).get("incarnation"))
    # The ranks change their places: the process that was the coordinator is not any more.
    ranks[2].rank, ranks[0].rank = 0, 2
    for rank in (2, 0):
        ranks[rank].make_group()
    assert ranks[0].find() is None
    new = ranks[2].find()
    assert [wait_for(rank.find) for rank in ranks] == [new] * 3
    assert new != old


def test_numbers_begin_with_the_incarnation(lives: list[Heartbeat]) -> None:
    """Begin with any counts of earlier processes, however these ended."""
    store = dist.HashStore()
    ranks = [Process(store, 0), Process(store, 1)]
    assert [ranks[0].number(is_confirmed=False) for _ in range(3)] == [1, 2, 3]
    lives[0].close()
    ranks = [Process(store, 0), Process(store, 1)]
    for number in (1, 2, 3):
        assert [rank.number() for rank in ranks] == [number, number]


def test_a_rank_that_is_new_among_survivors() -> None:
    """It takes part in the use in which they are, whatever its rank had counted; in the next if that is closed."""
    store = dist.HashStore()
    for is_closed in (False, True):
        coordinator, dead = Process(store, 0), Process(store, 1)
        for number in (1, 2):
            assert [rank.number() for rank in (coordinator, dead)] == [number, number]
        assert coordinator.number() == 3
        if is_closed:
            status = RankStatus(1, is_closed=True)
            Client(dist.PrefixStore(f"{coordinator.find()}/run/3", store)).put("beat/0", status.encode())
        new = Process(store, 1)
        assert new.number() == 3 + is_closed
        assert [rank.number() for rank in (coordinator, new)] == ([4, 4] if not is_closed else [4, 5])


def test_what_an_incarnation_costs(lives: list[Heartbeat]) -> None:
    """One operation for each look; none for a coordinator but its signs."""
    store: Any = CountingStore(dist.HashStore())
    rank, coordinator = Process(store, 1), Process(store, 0)
    for number in range(5):
        rank.find()
        assert store.operations == number + 1
    coordinator.find()
    lives[0].close()
    before = store.operations
    assert coordinator.find() is not None
    assert store.operations == before


def test_what_a_number_costs() -> None:
    """One operation; none is asked for the counts of others while this rank's is not doubtful."""
    store: Any = CountingStore(dist.HashStore())
    rank = Process(store, 1)
    numbers = [rank.use()._number_use(Client(store), "run", is_missed=False) for _ in range(3)]
    assert numbers == [1, 2, 3]
    assert store.operations == 3
    assert Process(store, 0).use()._number_use(Client(store), "run", is_missed=True) == 1
    assert store.operations == 4
