"""Collective operations: answers, and the errors of one rank on the others. Ranks are threads of this process.

`test_collective_processes.py` has ranks that are processes, which are killed and stopped.
"""

from __future__ import annotations

import errno
import itertools
import pickle
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from dcp_remote.coordination import host_link, key_value
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.host_link import HostLink
from dcp_remote.coordination.key_value import _NEVER_STORED as NEVER_STORED
from dcp_remote.coordination.key_value import Client, HelperClient
from dcp_remote.coordination.member import GroupMember
from dcp_remote.coordination.messages import CollectiveKeys
from dcp_remote.errors import CommitConflictError, DcpRemoteError, FencedError, SaveFailedError, SaveTimeoutError
from tests.support.rank_threads import WHAT, errors, expected, join, plain, rank_threads, together, upload, wait_until

pytestmark = pytest.mark.usefixtures("no_heartbeat_is_left")


# ---- answers


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_get_their_answers(world_size: int) -> None:
    """Values reach the coordinator in order of ranks; answers go to all, some or single ranks; in three operations."""
    asked: list[tuple[str, list[object]]] = []

    def part(ranks: RankGroup) -> list[object]:
        name, answers = threading.current_thread().name, list[object]()

        def decide(values: list[int]) -> dict[str, list[int]]:
            asked.append((threading.current_thread().name, list(values)))
            assert threading.current_thread().name == name
            return {"sum": values}

        for number in range(3):
            with join(ranks, f"the save of step {number}") as collective:
                assert collective.gather(ranks.rank + number, decide) == {"sum": [rank + number for rank in everybody]}
                answers.append(collective.scatter(ranks.rank, lambda values: [-value for value in values]))
                some = collective.scatter(ranks.rank, share_by_parity)
                assert some == list(everybody)[ranks.rank % 2 :: 2]
                assert collective.gather(None, len) == world_size
                assert collective.cancelled is None
        return answers

    everybody = range(world_size)
    with rank_threads(world_size) as them:
        assert [result.value for result in them.run(part)] == [[-rank] * 3 for rank in everybody]
    assert [values for _, values in asked] == [[rank + number for rank in everybody] for number in range(3)]


def share_by_parity(values: list[int]) -> list[list[int]]:
    both = values[0::2], values[1::2]
    return [both[value % 2] for value in values]


def test_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty ranks, of whose contributions seven are read at a time, and whose answers are put in blocks of three."""
    monkeypatch.setattr("dcp_remote.coordination.messages._PARTS_PER_READ", 7)
    monkeypatch.setattr("dcp_remote.coordination.messages._BLOCK_BYTES", 3 * len(pickle.dumps(11)))
    with rank_threads(20, beat_seconds=0.2) as them:
        assert [result.value for result in them.run(together)] == expected(20)
        assert [result.value for result in them.run(together)] == expected(20)


class CountedStore:
    """Connection to a store that counts the operations on the keys of rounds, but for looks that find nothing new."""

    _lock = threading.Lock()  # of the counts, which the ranks' connections have in common

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        self._store = store
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        def call(keys: str | list[str], *arguments: Any) -> Any:
            answer = getattr(self._store, name)(keys, *arguments)
            key = keys if isinstance(keys, str) else keys[0]
            if re.match(r"\d+-\w+/\d+/", key) and answer not in (False, NEVER_STORED) and arguments != (0,):
                with self._lock:
                    self._counts[name] += 2 if name == "multi_get" else 1
            return answer

        return call


@pytest.mark.parametrize(("world_size", "reading"), [(2, 1), (8, 1 + 2), (64, 4 + 2)])
def test_operations_on_the_store(world_size: int, reading: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four for each rank and round, three more, and those that read the parts; none that ask for verdicts."""
    counts, connect = Counter[str](), key_value.open_connection
    monkeypatch.setattr(key_value, "open_connection", lambda store: CountedStore(connect(store), counts))
    read_verdicts, asked = Collective._read_verdicts, list[int]()

    def read_verdicts_noted(collective: Collective, client: Client) -> None:
        asked.append(collective.keys.number)
        read_verdicts(collective, client)

    monkeypatch.setattr(Collective, "_read_verdicts", read_verdicts_noted)
    barrier, found = threading.Barrier(world_size), list[Counter[str]]()
    others = world_size - 1

    def part(ranks: RankGroup) -> None:
        for number in (1, 2):
            with join(ranks) as collective:
                rounds: list[Callable[[], object]] = [
                    lambda: collective.gather(ranks.rank, len),
                    lambda: collective.scatter(ranks.rank, lambda values: values),
                    lambda: collective.scatter(ranks.rank, lambda values: [values] * len(values)),
                ]
                for round_number, take_part in enumerate([rounds[0], *rounds], start=1):
                    series = f"group/{CollectiveKeys(number, WHAT).parts(round_number)}"
                    parts = [f"{series}/{slot}" for slot in range(1, others + 1)]
                    barrier.wait(30)
                    if ranks.rank == 0:
                        wait_until(lambda parts=parts: them.store.check(parts))  # type: ignore[misc]
                    take_part()
                    barrier.wait(30)
                    if ranks.rank == 0:
                        found.append(counts.copy())
                        counts.clear()

    with rank_threads(world_size, beat_seconds=60.0) as them:
        assert [result.error for result in them.run(part)] == [None] * world_size
    assert sorted(asked) == [1] * world_size + [2]
    for count in found[1:4] + found[5:]:
        assert count == {
            "add": others,
            "set": others + 1,
            "delete_key": others + 2,
            **({"compare_set": 1 + reading} if world_size == 2 else {}),
            **({"compare_set": others, "check": reading - 2, "multi_get": 2} if world_size > 2 else {}),
        }


def test_operations_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of four ranks: those of the first are linked but for the coordinator; a part and an answer for each."""
    monkeypatch.setattr(host_link, "_MERGE_SECONDS", 30.0)
    counts, connect = Counter[str](), key_value.open_connection
    monkeypatch.setattr(key_value, "open_connection", lambda store: CountedStore(connect(store), counts))
    barrier, name = threading.Barrier(8), uuid.uuid4().hex

    def part(ranks: RankGroup) -> None:
        ranks._member._link_name = lambda: f"{name}-{ranks.rank // 4}"
        series = f"group/{CollectiveKeys(1, WHAT).parts(2)}"
        with join(ranks) as collective:
            collective.gather(None, len)
            barrier.wait(30)
            if ranks.rank == 0:
                counts.clear()
            barrier.wait(30)
            if ranks.rank == 0:
                wait_until(lambda: them.store.check([f"{series}/1", f"{series}/2"]))
            own = collective.scatter(ranks.rank, lambda values: [10 * value for value in values])
            assert own == 10 * ranks.rank

    with rank_threads(8, beat_seconds=60.0) as them:
        assert [result.error for result in them.run(part)] == [None] * 8
        assert counts == {"add": 2, "set": 3, "check": 1, "multi_get": 2, "compare_set": 2, "delete_key": 4}


def assert_two_operations_of_linked_ranks() -> None:
    name = uuid.uuid4().hex

    def part(ranks: RankGroup) -> object:
        ranks._member._link_name = lambda: name
        return together(ranks)

    with rank_threads(4) as them:
        for _ in range(2):
            assert [result.value for result in them.run(part)] == expected(4)


def test_ranks_that_can_have_no_link_ask_over_the_connections_of_their_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No descriptor is free for the link of a rank, nor for another connection."""
    taken: list[int] = []
    take_client = GroupMember.take_client

    def take_noted(member: GroupMember) -> HelperClient:
        taken.append(member.rank)
        return take_client(member)

    monkeypatch.setattr(HostLink, "begin", lambda *_: False)
    monkeypatch.setattr(GroupMember, "take_client", take_noted)
    assert_two_operations_of_linked_ranks()
    assert set(taken) == {0}


@pytest.mark.parametrize("size_bytes", [1, 40_000])
def test_a_linked_rank_has_one_connection(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts of four ranks: their heartbeats' and the coordinator's, with answers in blocks too.

    A rank that comes late to an operation that was given up without it has none more for its look at the verdict, nor
    has a rank for a question to the coordinator.
    """
    opened, connect = list[dist.Store](), key_value.open_connection

    def open_noted(store: dist.Store) -> dist.Store:
        opened.append(store)
        return connect(store)

    monkeypatch.setattr(key_value, "open_connection", open_noted)
    name = uuid.uuid4().hex

    def part(ranks: RankGroup, what: str = WHAT) -> int:
        ranks._member._link_name = lambda: f"{name}-{ranks.rank // 4}"
        with join(ranks, what, arrival_seconds=0.5) as collective:
            collective.gather(None, len)
            return len(collective.scatter(b"x" * size_bytes, lambda values: [value[:] + b"y" for value in values]))

    def ask(ranks: RankGroup) -> bool:
        return ranks.ask_coordinator("q", lambda: True, seconds=30.0, left_seconds=lambda: 30.0)

    with rank_threads(8) as them:
        assert [result.value for result in them.run(part)] == [size_bytes + 1] * 8
        assert len(opened) == 8 + 1
        early = [*range(7)]
        assert all("has not called" in error for error in errors(them.run(part, ranks=early)))
        assert [result.value for result in them.run(lambda ranks: part(ranks, "another"))] == [size_bytes + 1] * 8
        assert [result.value for result in them.run(ask)] == [True] * 8
        assert len(opened) == 8 + 1


def test_a_rank_that_comes_late_to_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part does not wait for long: the late rank is in a second one. It is linked from the next round on."""
    monkeypatch.setattr(host_link, "_MERGE_SECONDS", 0.05)
    name, parts = uuid.uuid4().hex, list[list[int]]()
    put = Client.put

    def put_noted(client: Client, key: str, value: bytes) -> None:
        if "/in/" in key:
            parts.append(sorted(pickle.loads(value)))
        put(client, key, value)

    monkeypatch.setattr(Client, "put", put_noted)

    def part(ranks: RankGroup) -> tuple[int, int]:
        ranks._member._link_name = lambda: name
        if ranks.rank == 3:
            wait_until(lambda: sorted(itertools.chain(*parts)) == [1, 2])
        return together(ranks)

    with rank_threads(4) as them:
        assert [result.value for result in them.run(part)] == expected(4)
        assert parts[-1] == [1, 2, 3] or len(parts) > 3
        assert [3] in parts


def test_a_link_that_loses_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's error reaches the rank that speaks for its host, and ends the operation there."""
    name = uuid.uuid4().hex

    def part(ranks: RankGroup) -> tuple[int, int]:
        ranks._member._link_name = lambda: name
        return together(ranks)

    with rank_threads(3) as them:
        assert [result.value for result in them.run(part)] == expected(3)
        monkeypatch.setattr(Client, "add", lose)
        ended = them.run(part)
    assert any("lost the connection" in error for error in errors(ended)), ended


def test_a_link_whose_thread_fails() -> None:
    """The rank goes on over its own connection, in the round that is open and in the next ones."""
    name = uuid.uuid4().hex

    def fail() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def part(ranks: RankGroup) -> tuple[int, int]:
        ranks._member._link_name = lambda: name
        if ranks.rank == 0 and links:
            wait_until(lambda: all(link._awaited for link in links))
            links.pop()._order(fail)
            links.clear()
        return together(ranks)

    links: list[HostLink] = []
    with rank_threads(3) as them:
        assert [result.value for result in them.run(part)] == expected(3)
        links += [link for link in (ranks._member.link() for ranks in them.ranks[1:]) if link is not None]
        assert len(links) == 2
        for _ in range(2):
            assert [result.value for result in them.run(part)] == expected(3)


def test_looks_go_on_while_a_host_waits_for_an_answer() -> None:
    """The heartbeat of the rank that speaks for its host asks for the answer again and again, and looks as well."""
    looks, name = Counter[int](), uuid.uuid4().hex

    def part(ranks: RankGroup) -> tuple[int, int]:
        ranks._member._link_name = lambda: name
        if ranks.rank == 0 and looks:
            before = looks.copy()
            wait_until(lambda: all(looks[rank] > before[rank] + 3 for rank in (1, 2)))
        return together(ranks)

    with rank_threads(3, beat_seconds=60.0) as them:
        assert [result.value for result in them.run(part)] == expected(3)
        for ranks in them.ranks:
            ranks.looks.append(partial(looks.update, [ranks.rank]))
        wait_until(lambda: len(looks) == 3)
        assert [result.value for result in them.run(part)] == expected(3)


def lose(client: Client, key: str, number: int) -> NoReturn:
    raise dist.DistStoreError("wait timeout")


def test_a_part_that_is_never_put_and_one_that_is_put_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank dies before it puts its part, another repeats the request: ranks are waited for, and all is deleted."""
    monkeypatch.setattr("dcp_remote.coordination.messages._PARTS_PER_READ", 2)
    with rank_threads(4) as them:
        client, series = Client(dist.PrefixStore("group", them.store)), CollectiveKeys(1, WHAT).parts(1)
        client.add(series, 1)
        client.append(series, pickle.dumps({1: pickle.dumps(1), 2: pickle.dumps(2)}))
        client.add(series, 1)
        client.append(series, pickle.dumps({2: pickle.dumps(2)}))
        assert [result.value for result in them.run(together)] == expected(4)
        assert them.left() == [CollectiveKeys(1, WHAT).answer(2)]


def test_answers_are_put_before_the_contributions_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose contribution was read, and which is behind another that speaks for it, finds its answer."""
    put, seen = Client.put, list[bool]()

    def put_noted(client: Client, key: str, value: bytes) -> None:
        if key.endswith("/out"):
            seen.append(client.has([key.removesuffix("out") + "in/1"]))
        put(client, key, value)

    monkeypatch.setattr(Client, "put", put_noted)
    with rank_threads(2) as them:
        assert [result.value for result in them.run(together)] == expected(2)
    assert seen == [True, True]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_other_stores(kind: str, tmp_path: Path) -> None:
    """Stores for several processes: each thread has a connection of its own, and no old key is left."""
    store: dist.Store = dist.FileStore(str(tmp_path / "store"), 3)
    if kind == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with rank_threads(3, store) as them:
        for number in range(3):
            assert [result.value for result in them.run(together)] == expected(3)
            ended = them.run(lambda ranks: fail(ranks, 1))
            assert [type(result.error) for result in ended] == [FencedError] * 3
            assert number == 0 or not [key for key in them.left() if re.match(rf"{2 * number - 1}[-/]", key)]


def fail(ranks: RankGroup, failing: int) -> None:
    with join(ranks) as collective:
        if ranks.rank == failing:
            raise FencedError("Stop.")
        collective.gather(None, len)


def test_large_values() -> None:
    """Contributions and answers of 9 MiB over a TCPStore, which takes no more than 8 MiB at a time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def part(ranks: RankGroup) -> bool:
        mine = bytes([ranks.rank]) * (9 * 2**20)
        with join(ranks) as collective:
            everything = collective.gather(mine, b"".join)
            own = collective.scatter(mine, lambda values: [2 * value for value in values])
            swapped = collective.scatter(mine, lambda values: values[::-1])
        return own == 2 * mine and swapped == bytes([1 - ranks.rank]) * len(mine) and len(everything) == 2 * len(mine)

    with rank_threads(2, store) as them:
        assert [result.value for result in them.run(part)] == [True, True]
        assert [result.value for result in them.run(together)] == expected(2)
        assert [key for key in store.list_keys() if "beat" not in key and "/2/" not in key] == []


def test_a_slow_rank_is_waited_for() -> None:
    """A rank contributes after more than `silence_seconds`, but its heartbeat goes on."""

    def part(ranks: RankGroup) -> int:
        with join(ranks, silence_seconds=2.0) as collective:
            if ranks.rank == 1:
                time.sleep(3.0)
            return collective.gather(ranks.rank, sum)

    with rank_threads(3) as them:
        assert [result.value for result in them.run(part)] == [3, 3, 3]


# ---- a rank raises


class OwnError(DcpRemoteError):
    """Error of a user's class, which pickles."""


class OddError(Exception):
    """Error that pickles, and cannot be unpickled."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def local_error() -> DcpRemoteError:
    class LocalError(DcpRemoteError):
        """Error of a local class, which cannot be pickled."""

    return LocalError("Local.", key="k")


class DemandingError(DcpRemoteError):
    """Error that cannot be made from its message and details alone."""

    def __init__(self, what: str, *, code: int, **details: object) -> None:
        super().__init__(what, **details)
        self.code = code


class OneWayError(DcpRemoteError):
    """Error that pickles, and raises when it is unpickled."""

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
    """The coordinator or another rank raises in the block: unchanged there, and told to the others, which upload."""
    make, of, text = RAISED[kind]

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(None, len)
            if ranks.rank == raising:
                raise own
            upload(collective)

    with rank_threads(3) as them:
        for raising in (0, 2):
            own = make()
            ended = them.run(part)
            assert ended[raising].error is own
            for result in ended[:raising] + ended[raising + 1 :]:
                assert type(result.error) is of
                assert text.format(rank=raising) in plain(result.error)
                assert of is not SaveFailedError or kind == "ours with a rank" or WHAT in plain(result.error)
        assert [result.value for result in them.run(together)] == expected(3)


def test_what_a_decision_raises_all_raise() -> None:
    """The coordinator raises in `decide`; all other ranks raise the same error."""

    def decide(values: list[int]) -> int:
        raise CommitConflictError("Another save won.", step=7)

    def part(ranks: RankGroup) -> int:
        with join(ranks) as collective:
            return collective.gather(ranks.rank, decide)

    with rank_threads(3) as them:
        ended = them.run(part)
        assert [type(result.error) for result in ended] == 3 * [CommitConflictError]
        assert errors(ended) == ["Another save won. step=7"] + 2 * ["Another save won. step=7 rank=0"]


def test_what_cannot_be_pickled_fails_all() -> None:
    """A contribution cannot be pickled, another not unpickled, an answer cannot be pickled."""

    def sending(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(threading.Lock() if ranks.rank == 1 else 0, len)

    def reading(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(Unreadable() if ranks.rank == 1 else 0, len)

    def answering(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            collective.gather(0, lambda values: threading.Lock())

    with rank_threads(3) as them:
        for part, text in ((sending, "cannot pickle"), (reading, "what rank 1 sent"), (answering, "cannot pickle")):
            ended = them.run(part)
            assert all(text in error for error in errors(ended)), ended


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return explode, ()


def test_consequences_of_a_cancellation_are_not_raised() -> None:
    """A rank whose upload fails because the operation was cancelled raises the cause, chained to its own error."""

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            if ranks.rank == 1:
                raise FencedError("Stop.")
            if ranks.rank == 2:
                upload(collective)
            if ranks.rank == 3:
                wait_until(collective.deadline.expired)
                raise KeyboardInterrupt
            collective.gather(None, len)

    with rank_threads(4) as them:
        ended = them.run(part)
        assert [type(result.error) for result in ended] == [FencedError, FencedError, FencedError, KeyboardInterrupt]
        cause = ended[2].error.__cause__ if ended[2].error else None
        assert isinstance(cause, SaveTimeoutError)
        assert cause.details == {"key": "shards/1"}


def test_the_first_error_is_the_one_that_is_told() -> None:
    """Two ranks raise; all others raise the same one of the two errors."""

    def part(ranks: RankGroup) -> None:
        with join(ranks) as collective:
            if ranks.rank in (1, 2):
                raise OwnError("Own.", of=ranks.rank)
            upload(collective)

    with rank_threads(5) as them:
        ended = them.run(part)
        assert len({str(ended[rank].error) for rank in (0, 3, 4)}) == 1
        assert type(ended[0].error) is OwnError


def test_a_failure_after_the_last_round_is_not_told() -> None:
    """A rank fails after the last round: ranks that have left the operation do not raise."""
    left = threading.Event()

    def part(ranks: RankGroup) -> int:
        with join(ranks) as collective:
            answer = collective.gather(ranks.rank, sum)
            if ranks.rank == 1:
                assert left.wait(30)
                raise ValueError("too late")
        left.set()
        return answer

    with rank_threads(2) as them:
        ended = them.run(part)
        assert ended[0].value == 1
        assert isinstance(ended[1].error, ValueError)


def test_errors_of_operations_pickle() -> None:
    """The error of a deadline is pickled and unpickled."""
    with rank_threads(2) as them:
        (result,) = them.run(lambda ranks: together(ranks, seconds=0.1), ranks=[0])
        assert isinstance(result.error, SaveTimeoutError)
        assert str(pickle.loads(pickle.dumps(result.error))) == str(result.error)
