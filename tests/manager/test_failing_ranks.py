"""A failure of one rank is that of all, by name, and the next call works. Ranks are threads, each with its own store.

`tests/distributed/test_manager.py` has one failure of each kind on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch

from dcp_remote import CheckpointManager, PerRank, load
from dcp_remote.coordination.collective import Collective
from dcp_remote.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    PermissionDeniedError,
    SaveFailedError,
    StateMismatchError,
    UnsafeObjectError,
)
from dcp_remote.manager.coordinator import Coordinator
from dcp_remote.run.gc import find_orphans
from dcp_remote.saving.plan_cache import RunPlanner
from dcp_remote.saving.rank_report import SentReport
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.support.rank_threads import Ended, ManagerThreads, manager_threads

State = dict[str, Any]
_Answer = TypeVar("_Answer")

RANKS = range(3)


class TroubledStore(WrappedStore):
    """Store of one rank, which fails as it is told."""

    trouble = ""

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        is_shard = request.key.startswith("shards/")
        if (
            (self.trouble == "upload" and is_shard and request.verb == "put")
            or (self.trouble == "read refused" and is_shard and request.verb == "get_into")
            or (self.trouble == "manifest refused" and request.key.startswith("manifests/") and request.verb == "get")
        ):
            raise PermissionDeniedError("An injected refusal.")
        return send()

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        super().get_into(key, start, buffer)
        if self.trouble == "read flipped":
            buffer[-1] ^= 1


class Ranks(ManagerThreads):
    """Managers of three ranks, over one memory."""

    def __init__(self, threads: ManagerThreads, memory: MemoryStore, stores: Sequence[TroubledStore]) -> None:
        super().__init__(threads.groups, threads.managers)
        self.memory, self.stores = memory, stores

    def save(self, step: int, *, wait: bool = True) -> None:
        """Save on all ranks, without a failure."""
        for store in self.stores:
            store.trouble = ""
        self.values(lambda rank, manager: saved(manager, step, state_of(rank, step), wait=wait))

    def assert_saved(self, *steps: int) -> None:
        """Check that these checkpoints are whole, and that no shard is left of another save."""
        assert self.managers[0].run.steps() == list(steps)
        for step in steps:
            state = load(self.memory, step=step)
            assert state["n"] == step
            assert [state["model"][f"rows{rank}"][0].item() for rank in RANKS] == [step] * 3
            assert state["per_rank"] == {str(rank): {"own": [rank, step]} for rank in RANKS}
        assert find_orphans(self.memory, grace_seconds=0).old == ()


@contextmanager
def ranks_over(memory: MemoryStore) -> Iterator[Ranks]:
    stores = [TroubledStore(memory) for _ in RANKS]
    with manager_threads(3, stores) as threads:
        yield Ranks(threads, memory, stores)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with ranks_over(MemoryStore()) as ranks:
        yield ranks


def state_of(rank: int, value: float) -> State:
    """Return a tensor that every rank has, one of this rank, an object of all and one of this rank."""
    model = {"frozen": torch.arange(2_000.0), f"rows{rank}": torch.full((10,), float(value))}
    return {"model": model, "n": float(value), "own": PerRank([rank, value])}


def saved(manager: CheckpointManager, step: int, state: State, *, wait: bool) -> None:
    manager.save(step, state, wait=wait)
    manager.wait()


def assert_named(
    ended: Sequence[Ended[Any]], victim: int, kind: type[Exception], word: str, others: type[Exception]
) -> None:
    """Check that every rank raised: the victim its own error, the others one that names the victim and says why."""
    for rank, one in enumerate(ended):
        assert type(one.error) is (kind if rank == victim else others), (rank, one)
        assert word in str(one.error), (rank, one)
        if rank != victim:
            assert isinstance(one.error, DcpRemoteError)
            assert one.error.details["rank"] == victim, (rank, one)


# ---- saves


class UnpicklableError(Exception):
    """Error that cannot cross to another process."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Broken:
    """`Stateful` that cannot be asked, or told."""

    def __init__(self, method: str = "") -> None:
        self._method = method

    def state_dict(self) -> State:
        self._break("state_dict")
        return {"value": 1}

    def load_state_dict(self, _state: State) -> None:
        self._break("load_state_dict")

    def _break(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError(f"in {method}")


class Uncopyable:
    """Object that no copy can be made of."""

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise ZeroDivisionError("in a copy")


class NeedsCode:
    """Object that only code can load."""


@contextmanager
def planner_of(manager: CheckpointManager, method: str, error: Exception) -> Iterator[None]:
    """Let the planner of the next save raise in one of its methods."""
    planner = RunPlanner()
    with (
        mock.patch.object(planner, method, side_effect=error),
        mock.patch.object(manager, "_make_planner", return_value=planner),
    ):
        yield


PLANNER_METHODS = ("set_up_planner", "create_local_plan", "finish_plan", "resolve_data")
# What the victim raises, a word of it, and what the others raise; by default an error of a method.
SAVE_FAILURES: dict[str, tuple[type[Exception], str, type[Exception]]] = {
    "object": (UnsafeObjectError, "NeedsCode", UnsafeObjectError),
    "copy": (UnsafeObjectError, "Uncopyable", UnsafeObjectError),
    "upload": (SaveFailedError, "An injected refusal", SaveFailedError),
    "unpicklable": (UnpicklableError, "in create_local_plan", SaveFailedError),
    **{method: (ZeroDivisionError, f"in {method}", SaveFailedError) for method in ("state_dict", *PLANNER_METHODS)},
}


def broken_save(ranks: Ranks, rank: int, failure: str, step: int, *, wait: bool) -> None:
    """Save on the rank that fails."""
    manager, state = ranks.managers[rank], state_of(rank, step)
    if failure in ("upload", "object", "copy", "state_dict"):
        ranks.stores[rank].trouble = failure
        if failure != "upload":
            broken: Any = {"object": PerRank(NeedsCode()), "copy": Uncopyable(), "state_dict": Broken(failure)}[failure]
            state["own" if failure == "object" else "broken"] = broken
        saved(manager, step, state, wait=wait)
        return
    method = "create_local_plan" if failure == "unpicklable" else failure
    error = UnpicklableError if failure == "unpicklable" else ZeroDivisionError
    with planner_of(manager, method, error(f"in {method}")):
        saved(manager, step, state, wait=wait)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("failure", SAVE_FAILURES)
def test_a_save_that_fails_on_one_rank(failure: str, victim: int, ranks: Ranks) -> None:
    """In the foreground and in the background: every rank raises; tried again at once, it succeeds."""
    for step, wait in ((1, True), (2, False)):

        def attempt(rank: int, manager: CheckpointManager, step: int = step, wait: bool = wait) -> None:
            if rank == victim:
                broken_save(ranks, rank, failure, step, wait=wait)
            else:
                saved(manager, step, state_of(rank, step), wait=wait)

        assert_named(ranks.run(attempt), victim, *SAVE_FAILURES[failure])
        ranks.save(step, wait=not wait)
    ranks.assert_saved(1, 2)


def test_a_rank_that_hears_of_no_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank gives up when its report is sent: at the next save the coordinator finds out if it was committed."""
    ranks.save(1)
    contribute, wait_for, commit = Collective._contribute, Collective._wait_for, Coordinator.commit
    given_up: list[Collective] = []

    def report_and_give_up(self: Collective, value: object) -> Any:
        if self._member.rank == 2 and isinstance(value, tuple) and isinstance(value[0], SentReport):
            given_up.append(self)
        return contribute(self, value)

    def raise_if_given_up(self: Collective, *arguments: Any, **others: Any) -> Any:
        if self in given_up:
            raise ZeroDivisionError("in the last round")
        return wait_for(self, *arguments, **others)

    def commit_when_it_is_over(self: Coordinator, collective: Collective, *arguments: Any) -> Any:
        while collective.cancelled is None:
            collective.wait(1.0)
        return commit(self, collective, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Collective, "_contribute", report_and_give_up)
        patch.setattr(Collective, "_wait_for", raise_if_given_up)
        patch.setattr(Coordinator, "commit", commit_when_it_is_over)
        ended = ranks.run(lambda rank, manager: manager.save(2, state_of(rank, 2), wait=True))
    assert all(one.error is not None for one in ended)
    ranks.save(3)
    ranks.assert_saved(1, 3)


# ---- restores


RESTORE_FAILURES: dict[str, tuple[type[Exception], str, type[Exception]]] = {
    "load_state_dict": (ZeroDivisionError, "in load_state_dict", DcpRemoteError),
    "template": (StateMismatchError, "unknown", StateMismatchError),
    "read refused": (PermissionDeniedError, "An injected refusal", PermissionDeniedError),
    "read flipped": (CorruptCheckpointError, "shards/", CorruptCheckpointError),
    "manifest refused": (PermissionDeniedError, "An injected refusal", PermissionDeniedError),
}


@pytest.mark.parametrize(
    ("failure", "victim"),
    [
        (failure, victim)
        for failure in RESTORE_FAILURES
        for victim in (0, 2)
        if victim == 0 or "manifest" not in failure
    ],
)
def test_a_restore_that_fails_on_one_rank(failure: str, victim: int) -> None:
    """Every rank raises; nothing counts as restored, until a restore that succeeds on all."""

    def with_broken(rank: int, value: float, method: str = "") -> State:
        return state_of(rank, value) | {"broken": Broken(method)}

    memory = MemoryStore()
    with ranks_over(memory) as ranks:
        ranks.values(lambda rank, manager: saved(manager, 1, with_broken(rank, 1), wait=True))
    with ranks_over(memory) as ranks:

        def attempt(rank: int, manager: CheckpointManager) -> None:
            state = with_broken(rank, 0, failure if rank == victim else "")
            if rank == victim:
                ranks.stores[rank].trouble = failure
                state |= {"unknown": torch.zeros(3)} if failure == "template" else {}
            manager.restore(state)

        assert_named(ranks.run(attempt), victim, *RESTORE_FAILURES[failure])
        ranks.stores[victim].trouble = ""
        unsaved = ranks.run(lambda rank, manager: manager.save(5, with_broken(rank, 5), wait=True))
        assert {type(one.error) for one in unsaved} == {CheckpointExistsError}
        states = [with_broken(rank, 0) for rank in RANKS]
        assert ranks.values(lambda rank, manager: manager.restore(states[rank])) == [1] * 3
        assert [(state["own"].value, state["n"]) for state in states] == [([rank, 1], 1.0) for rank in RANKS]


def test_ranks_that_ask_for_different_steps(ranks: Ranks) -> None:
    """Save or restore different steps: refused on all ranks, with the steps; with one step the call works."""
    for wait in (True, False):
        for one in ranks.run(lambda rank, manager: saved(manager, 10 + rank, state_of(rank, 1), wait=wait)):  # noqa: B023
            assert isinstance(one.error, SaveFailedError), one
            assert "instead of the save of step 10" in str(one.error)
        ranks.save(1 if wait else 2)
    for restored in ranks.run(lambda rank, manager: manager.restore(state_of(rank, 0), 1 + rank % 2)):
        assert isinstance(restored.error, InvalidArgumentError)
        assert "rank 0: {'step': 1}; rank 1: {'step': 2}" in str(restored.error)
    assert ranks.values(lambda rank, manager: manager.restore(state_of(rank, 0), 2)) == [2] * 3
    ranks.save(3)
    ranks.assert_saved(1, 2, 3)
