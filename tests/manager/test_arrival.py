"""Ranks that do not come to a save or restore of a manager; and states that are collected in the save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from torch import nn

from dcp_remote import CheckpointManager
from dcp_remote.coordination.group import RankGroup
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError, SaveFailedError, SaveTimeoutError
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.rank_threads import Ended, RankThreads, managers_of, rank_threads, wait_until

ARRIVAL_SECONDS = 0.6


def state_of(value: float) -> dict[str, Any]:
    return {"weight": torch.full((10,), float(value)), "step": value}


class Managers:
    """A manager for each of three ranks, which are threads.

    Args:
        them: Ranks.
        monkeypatch: Gives each manager its rank.
        options: Options of the managers.
    """

    def __init__(self, them: RankThreads, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self._them = them
        self.store = RecordingStore(MemoryStore())
        self.managers = managers_of(them, self.store, monkeypatch, **{"arrival_seconds": ARRIVAL_SECONDS} | options)

    def run(self, call: Callable[[CheckpointManager], Any], *ranks: int) -> list[Ended[Any]]:
        """Make a call on some ranks at a time, by default on all."""
        return self._them.run(lambda group: call(self.managers[group.rank]), ranks=ranks or None)

    def close(self) -> None:
        for manager in reversed(self.managers):
            manager.close()


def assert_not_called(result: Ended[Any], what: str, kind: type[DcpRemoteError] = SaveTimeoutError) -> None:
    assert type(result.error) is kind, result.error
    assert f"not called {what} within" in str(result.error)
    assert "if rank == 0" in str(result.error)


@pytest.mark.parametrize("wait", [True, "begun"])
@pytest.mark.parametrize("present", [[0], [1], [0, 1], [1, 2]])
def test_a_save_under_a_condition_on_the_rank(
    present: list[int], wait: Literal[True, "begun"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails where it was called, and uploads nothing; later where it was not; then saves and restores work."""
    absent = [rank for rank in range(3) if rank not in present]
    with rank_threads(3) as them:
        managers = Managers(them, monkeypatch)
        for result in managers.run(lambda one: one.save(1, state_of(1), wait=wait), *present):
            assert_not_called(result, "the save of step 1")
        for result in managers.run(lambda one: one.save(1, state_of(1), wait=wait), *absent):
            assert_not_called(result, "the save of step 1")
        assert managers.store.requests == []
        state = [state_of(0) for _ in range(3)]
        assert [one.error for one in managers.run(lambda one: one.save(2, state_of(2)))] == [None] * 3
        restored = them.run(lambda group: managers.managers[group.rank].restore(state[group.rank]))
        assert [one.value for one in restored] == [2, 2, 2]
        assert managers.managers[0].run.steps() == [2]
        managers.close()


def test_a_function_is_not_called_before_all_ranks_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives of torch would wait for an absent rank; the save fails in the call itself, also without wait."""
    called: list[int] = []

    def make(rank: int) -> dict[str, Any]:
        called.append(rank)
        return state_of(1)

    with rank_threads(3) as them:
        managers = Managers(them, monkeypatch)
        ended = them.run(lambda group: managers.managers[group.rank].save(1, lambda: make(group.rank)), ranks=[0, 2])
        for result in ended:
            assert_not_called(result, "the save of step 1")
        assert called == []
        ended = them.run(lambda group: managers.managers[group.rank].save(2, lambda: make(group.rank)))
        assert [one.error for one in ended] == [None] * 3
        assert sorted(called) == [0, 1, 2]
        managers.close()


def test_a_save_in_the_background_under_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns, and the next one raises; the ranks that never came save with the others."""
    with rank_threads(3) as them:
        managers = Managers(them, monkeypatch)
        for step in range(1, 4):
            (first,) = managers.run(lambda one, step=step: one.save(step, state_of(step)), 0)  # type: ignore[misc]
            assert first.error is None
            (second,) = managers.run(CheckpointManager.wait, 0)
            assert_not_called(second, f"the save of step {step}")
        assert [one.error for one in managers.run(lambda one: one.save(4, state_of(4), wait=True))] == [None] * 3
        managers.close()


def test_a_save_that_waits_for_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call returns while the store holds every upload; it raises at once if the run refuses the step."""
    go_on = threading.Event()

    class Held(WrappedStore):
        def _request(self, request: Request, send: Callable[[], Any]) -> Any:
            if request.verb == "put" and request.key.startswith("shards/"):
                assert go_on.wait(60)
            return send()

    with rank_threads(2) as them:
        store = MemoryStore()
        managers = managers_of(them, Held(store), monkeypatch)
        for step in (5, 3):
            ended = them.run(lambda group, step=step: managers[group.rank].save(step, state_of(step), wait="begun"))  # type: ignore[misc]  # mypy infers no default
            if step == 5:
                assert [one.error for one in ended] == [None, None]
                assert managers[0].run.steps() == []
                go_on.set()
            else:
                assert all(isinstance(one.error, InvalidArgumentError) for one in ended), ended
        assert managers[0].run.steps() == [5]
        for manager in reversed(managers):
            manager.close()
    alone = CheckpointManager(MemoryStore())
    alone.save(1, state_of(1), wait="begun")
    with pytest.raises(InvalidArgumentError, match="begun"):
        alone.save(2, state_of(2), wait="started")  # type: ignore[arg-type]  # a typo
    alone.close()


def test_a_restore_under_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks count no restore, so that all ranks can still agree on a step at which to stop."""
    with rank_threads(3) as them:
        managers = Managers(them, monkeypatch)
        managers.run(lambda one: one.save(1, state_of(1), wait=True))
        for present in ([0, 1], [1, 2]):
            for result in managers.run(lambda one: one.restore(state_of(0)), *present):
                assert_not_called(result, "the restore", DcpRemoteError)
            restores = {one._preemption._agreement._restores for one in managers.managers}
            assert restores == {0}
            absent = [rank for rank in range(3) if rank not in present]
            for result in managers.run(lambda one: one.restore(state_of(0)), *absent):
                assert_not_called(result, "the restore", DcpRemoteError)
            assert {one._preemption._agreement._restores for one in managers.managers} == {0}
        assert [one.value for one in managers.run(lambda one: one.restore(state_of(0)))] == [1, 1, 1]
        assert {one._preemption._agreement._restores for one in managers.managers} == {1}
        managers.close()


def test_a_state_that_is_slow_to_collect_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `Stateful` of one rank takes longer than ranks are waited for that never came."""
    waited = threading.Event()

    class Slow:
        def state_dict(self) -> dict[str, Any]:
            waited.wait(2 * ARRIVAL_SECONDS)
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise NotImplementedError

    with rank_threads(2) as them:
        managers = Managers(them, monkeypatch)

        def save(group: RankGroup) -> None:
            state = state_of(1) | {"slow": Slow() if group.rank == slow else {}}
            managers.managers[group.rank].save(step, state, wait=True)

        for step, slow in ((1, 0), (2, 1)):  # noqa: B007  # read by the ranks
            assert [one.error for one in them.run(save)] == [None, None]
        managers.close()


def test_how_long_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute; five minutes in the first restore, before which ranks start up."""
    asked: list[float] = []
    prepare = RankGroup.prepare

    def record(group: RankGroup, what: str, *, arrival_seconds: float, **terms: Any) -> Any:
        if group.rank == 0:
            asked.append(arrival_seconds)
        return prepare(group, what, arrival_seconds=arrival_seconds, **terms)

    monkeypatch.setattr(RankGroup, "prepare", record)
    with rank_threads(2) as them:
        managers = Managers(them, monkeypatch, arrival_seconds=30.0)
        for call in (
            lambda one: one.restore(state_of(0)),
            lambda one: one.save(1, state_of(1), wait=True),
            lambda one: one.restore(state_of(0)),
        ):
            assert [one.error for one in managers.run(call)] == [None, None]
        managers.close()
    assert asked == [300.0, 30.0, 30.0]
    with pytest.raises(InvalidArgumentError, match="arrival_seconds"):
        CheckpointManager(MemoryStore(), arrival_seconds=0.0)


# ---- a function that returns the state


@pytest.mark.parametrize("wait", [True, False, "begun"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_state_that_one_rank_cannot_collect(
    victim: int, wait: bool | Literal["begun"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank raises its own error, the others one that names the rank; nothing is uploaded; the next save works."""
    with rank_threads(3) as them:
        managers = Managers(them, monkeypatch)

        def collect(rank: int) -> dict[str, Any]:
            if rank == victim:
                raise ZeroDivisionError("in the model")
            return state_of(1)

        def save(group: RankGroup) -> None:
            manager = managers.managers[group.rank]
            manager.save(1, lambda: collect(group.rank), wait=wait)
            if not wait:
                manager.wait()

        for rank, result in enumerate(them.run(save)):
            if rank == victim:
                assert type(result.error) is ZeroDivisionError
            else:
                assert type(result.error) is SaveFailedError
                assert result.error.details["rank"] == victim
                assert "ZeroDivisionError: in the model" in str(result.error)
        assert managers.store.requests == []
        saved = managers.run(lambda one: one.save(1, lambda: state_of(1), wait=wait))
        assert [one.error for one in saved] == [None] * 3
        wait_until(lambda: managers.managers[0].run.steps() == [1])
        managers.close()


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
        with pytest.raises(Exception, match="state"):
            manager.save(2, lambda: [1])  # type: ignore[arg-type, return-value]
        module = nn.Linear(1, 1)
        module.forward = make  # type: ignore[assignment]
        with suppress(Exception):  # it may be refused, or saved, but is never called
            manager.save(2, module, wait=True)
        assert calls == [1]
