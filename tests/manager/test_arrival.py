"""Ranks that do not come to a save or restore of a manager; and states that are collected in the save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import nn

from dcp_remote import CheckpointManager
from dcp_remote.coordination.collective import Collective
from dcp_remote.coordination.group import RankGroup
from dcp_remote.coordination.outcome import Terms
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import Ended, ManagerThreads, manager_threads, wait_until

ARRIVAL_SECONDS = 0.6


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(value)), "step": value}


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


@pytest.fixture
def ranks(store: RecordingStore) -> Iterator[ManagerThreads]:
    """Three ranks, which are waited for briefly."""
    with manager_threads(3, store, arrival_seconds=ARRIVAL_SECONDS) as ranks:
        yield ranks


def assert_not_called(result: Ended[Any], what: str, kind: type[DcpRemoteError] = SaveTimeoutError) -> None:
    assert type(result.error) is kind, result.error
    assert f"not called {what} within" in str(result.error)
    assert "if rank == 0" in str(result.error)


@pytest.mark.parametrize("wait", [True, "begun"])
@pytest.mark.parametrize("present", [[0], [1], [0, 1], [1, 2]])
def test_a_save_under_a_condition_on_the_rank(
    present: list[int], wait: Literal[True, "begun"], ranks: ManagerThreads, store: RecordingStore
) -> None:
    """It fails where it was called, and uploads nothing; later where it was not; then saves and restores work."""
    absent = [rank for rank in range(3) if rank not in present]
    for calling in (present, absent):
        for result in ranks.run(lambda _, one: one.save(1, state_of(1), wait=wait), *calling):
            assert_not_called(result, "the save of step 1")
    assert store.requests == []
    ranks.values(lambda _, one: one.save(2, state_of(2)))
    assert ranks.values(lambda _, one: one.restore(state_of(0))) == [2, 2, 2]
    assert ranks.managers[0].run.steps() == [2]


def test_a_function_is_not_called_before_all_ranks_have_come(ranks: ManagerThreads) -> None:
    """Its collectives of torch would wait for an absent rank; the save fails in the call itself, also without wait."""
    called: list[int] = []

    def make(rank: int) -> dict[str, Any]:
        called.append(rank)
        return state_of(1)

    for result in ranks.run(lambda rank, one: one.save(1, lambda: make(rank)), 0, 2):
        assert_not_called(result, "the save of step 1")
    assert called == []
    ranks.values(lambda rank, one: one.save(2, lambda: make(rank)))
    assert sorted(called) == [0, 1, 2]


def test_a_save_in_the_background_under_a_condition(ranks: ManagerThreads) -> None:
    """The call returns, and the next one raises; the ranks that never came save with the others."""
    for step in range(1, 4):
        (first,) = ranks.run(lambda _, one: one.save(step, state_of(step)), 0)  # noqa: B023  # called at once
        assert first.error is None
        (second,) = ranks.run(lambda _, one: one.wait(), 0)
        assert_not_called(second, f"the save of step {step}")
    ranks.values(lambda _, one: one.save(4, state_of(4), wait=True))


def test_a_save_that_waits_for_its_beginning() -> None:
    """The call returns while the store holds every upload; it raises at once if the run refuses the step."""
    go_on = threading.Event()

    class Held(WrappedStore):
        def _request(self, request: Request, send: Callable[[], Any]) -> Any:
            assert request.verb != "put" or not request.key.startswith("shards/") or go_on.wait(60)
            return send()

    with manager_threads(2, Held(MemoryStore())) as ranks:
        ranks.values(lambda _, one: one.save(5, state_of(5), wait="begun"))
        assert ranks.managers[0].run.steps() == []
        go_on.set()
        ended = ranks.run(lambda _, one: one.save(3, state_of(3), wait="begun"))
        assert all(isinstance(one.error, InvalidArgumentError) for one in ended), ended
        assert ranks.managers[0].run.steps() == [5]
    with CheckpointManager(MemoryStore()) as alone, pytest.raises(InvalidArgumentError, match="begun"):
        alone.save(2, state_of(2), wait="started")  # type: ignore[arg-type]  # a typo


def test_a_restore_under_a_condition(ranks: ManagerThreads) -> None:
    """Its ranks count no restore, so that all ranks can still agree on a step at which to stop."""

    def counted() -> set[int]:
        return {one._preemption.agreement._restores for one in ranks.managers}

    ranks.values(lambda _, one: one.save(1, state_of(1), wait=True))
    for calling in ([0, 1], [2], [1, 2], [0]):
        for result in ranks.run(lambda _, one: one.restore(state_of(0)), *calling):
            assert_not_called(result, "the restore", DcpRemoteError)
        assert counted() == {0}
    assert ranks.values(lambda _, one: one.restore(state_of(0))) == [1, 1, 1]
    assert counted() == {1}


def test_a_state_that_is_slow_to_collect_is_waited_for(ranks: ManagerThreads) -> None:
    """A `Stateful` of one rank takes longer than ranks are waited for that never came."""
    waited = threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            waited.wait(2 * ARRIVAL_SECONDS)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    for slow in (0, 1):
        state = [state_of(1) | {"slow": Slow() if rank == slow else {}} for rank in range(3)]
        ranks.values(lambda rank, one: one.save(1 + slow, state[rank], wait=True))  # noqa: B023  # called at once


def test_how_long_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute; five minutes in the first restore, before which ranks start up."""
    asked: list[float] = []
    prepare = RankGroup.prepare

    def record(group: RankGroup, what: str, terms: Terms) -> Collective:
        if group.rank == 0:
            asked.append(terms.arrival_seconds)
        return prepare(group, what, terms)

    monkeypatch.setattr(RankGroup, "prepare", record)
    with manager_threads(2, MemoryStore()) as ranks:
        ranks.values(lambda _, one: one.restore(state_of(0)))
        ranks.values(lambda _, one: one.save(1, state_of(1), wait=True))
        ranks.values(lambda _, one: one.restore(state_of(0)))
    assert asked == [300.0, 30.0, 30.0]
    with pytest.raises(InvalidArgumentError, match="arrival_seconds"):
        CheckpointManager(MemoryStore(), arrival_seconds=0.0)


# ---- a function that returns the state


@pytest.mark.parametrize("wait", [True, False, "begun"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_state_that_one_rank_cannot_collect(
    victim: int, wait: bool | Literal["begun"], ranks: ManagerThreads, store: RecordingStore
) -> None:
    """That rank raises its own error, the others one that names the rank; nothing is uploaded; the next save works."""

    def collect(rank: int) -> dict[str, Any]:
        if rank == victim:
            raise ZeroDivisionError("in the model")
        return state_of(1)

    def save(rank: int, manager: CheckpointManager) -> None:
        manager.save(1, lambda: collect(rank), wait=wait)
        manager.wait()

    for rank, result in enumerate(ranks.run(save)):
        if rank == victim:
            assert type(result.error) is ZeroDivisionError
        else:
            assert type(result.error) is SaveFailedError
            assert result.error.details["rank"] == victim
            assert "ZeroDivisionError: in the model" in str(result.error)
    assert store.requests == []
    ranks.values(lambda _, one: one.save(1, lambda: state_of(1), wait=wait))
    wait_until(lambda: ranks.managers[0].run.steps() == [1])


@pytest.mark.parametrize("odd", [0, 1])
def test_a_function_on_one_rank_and_a_state_on_another(odd: int, ranks: ManagerThreads) -> None:
    """The rounds of the two differ: all ranks say so, and the next save works."""
    results = ranks.run(lambda rank, one: one.save(1, (lambda: state_of(1)) if rank == odd else state_of(1), wait=True))
    for result in results:
        assert "pass a function as the state" in str(result.error), result
    ranks.values(lambda _, one: one.save(1, state_of(1), wait=True))
    assert ranks.managers[0].run.steps() == [1]


def test_a_function_that_returns_the_state() -> None:
    """It is called once, inside the save; what it returns is checked as a state is. A module is no function."""
    calls: list[int] = []

    def make() -> dict[str, Any]:
        calls.append(1)
        return state_of(7)

    with CheckpointManager(MemoryStore()) as manager:
        manager.save(1, make)
        state = state_of(0)
        assert manager.restore(state) == 1
        assert state["step"] == 7
        assert calls == [1]
        with pytest.raises(InvalidArgumentError, match="state"):
            manager.save(2, lambda: [1])  # type: ignore[arg-type, return-value]
        module = nn.Linear(1, 1)
        module.forward = make  # type: ignore[assignment]
        with suppress(Exception):  # it may be refused, or saved, but is never called
            manager.save(2, module, wait=True)
        assert calls == [1]
