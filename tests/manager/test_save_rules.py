"""Rules for saves that come while one is under way, `when_busy`, and for saves that fail, `on_error`.

Ranks are threads; a store holds up or refuses requests, so that the ranks hear of the end of a save at other moments.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

from dcp_remote import CheckpointManager, PerRank, SavePolicy, load
from dcp_remote.errors import (
    BucketNotFoundError,
    CheckpointExistsError,
    CommitUnknownError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
    PermissionDeniedError,
    SaveFailedError,
    SaveTimeoutError,
    TransientStorageError,
    UnsafeObjectError,
)
from dcp_remote.manager.background_save import may_pass
from dcp_remote.manager.rank_save import RankSaver
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.support.rank_threads import ManagerThreads, manager_threads, wait_until
from tests.support.threads import HookedStore, opened

_Answer = TypeVar("_Answer")

POLICY = SavePolicy(every_steps=1)


def state_of(rank: int, value: int) -> dict[str, Any]:
    """Return a tensor of all ranks, one of this rank and a value of this rank."""
    return {"model": {"shared": torch.arange(500.0), f"rows{rank}": torch.full((10,), value)}, "own": PerRank(value)}


def assert_saved(store: MemoryStore, manager: CheckpointManager, *steps: int) -> None:
    """Check that the run has these checkpoints, each with the state of its step."""
    assert manager.run.steps() == list(steps)
    for step in steps:
        state = load(store, step=step)
        assert {rows[0].item() for name, rows in state["model"].items() if name != "shared"} == {step}
        assert list(state["per_rank"].values()) == [{"own": step}] * len(state["per_rank"])


class Gate:
    """Store of shards that are held up until the gate is opened, or refused."""

    def __init__(self) -> None:
        self.memory, self.gate, self.refuses = MemoryStore(), threading.Event(), False
        self.store = HookedStore(self.memory, self._before)
        self.arrived = threading.Event()

    def _before(self, key: str) -> None:
        if key.startswith("shards/"):
            self.arrived.set()
            if self.refuses:
                raise PermissionDeniedError("not yours")
            opened(self.gate)

    def open_soon(self) -> None:
        """Open the gate from another thread, when the caller waits perhaps."""
        threading.Timer(0.05, self.gate.set).start()


class RefusingStore(WrappedStore):
    """Store that refuses each request while it is down."""

    def __init__(self, store: MemoryStore, down: threading.Event) -> None:
        super().__init__(store)
        self._down = down

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if self._down.is_set():
            raise PermissionDeniedError("not yours")
        return send()


@contextmanager
def managers(gate: Gate, world_size: int = 3, **options: Any) -> Iterator[ManagerThreads]:
    with manager_threads(world_size, gate.store, **options) as threads:
        yield threads


def save_all(threads: ManagerThreads, step: int, **options: Any) -> list[bool | None]:
    """Save on all ranks; return what the calls return."""
    return threads.values(lambda rank, manager: manager.save(step, state_of(rank, step), **options))


# ---- when_busy


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_save_is_left_out_while_another_is_under_way(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Each is counted on all ranks, and logged once; saves go on afterwards, and none of the job is lost."""
    gate = Gate()
    with managers(gate, world_size, when_busy="skip") as threads:
        assert save_all(threads, 1) == [True] * world_size
        assert save_all(threads, 2) == [False] * world_size
        assert save_all(threads, 2, wait="begun") == [False] * world_size
        assert save_all(threads, 3) == [False] * world_size
        gate.gate.set()
        threads.values(lambda _rank, manager: manager.wait())
        assert save_all(threads, 4, wait=True) == [True] * world_size
        assert [manager.skipped_saves for manager in threads.managers] == [3] * world_size
        assert_saved(gate.memory, threads.managers[0], 1, 4)
    assert caplog.text.count("left out") == 1
    assert "the save of step 2 is left out" in caplog.text


def test_a_save_waits_by_default() -> None:
    gate = Gate()
    with managers(gate) as threads:
        assert save_all(threads, 1) == [True] * 3
        gate.open_soon()
        assert save_all(threads, 2) == [True] * 3
        assert threads.managers[0].skipped_saves == 0
        threads.values(lambda _rank, manager: manager.wait())
        assert_saved(gate.memory, threads.managers[0], 1, 2)


def test_a_save_that_is_awaited_is_not_left_out() -> None:
    gate = Gate()
    with managers(gate, when_busy="skip") as threads:
        save_all(threads, 1)
        gate.open_soon()
        assert save_all(threads, 2, wait=True) == [True] * 3
        assert_saved(gate.memory, threads.managers[0], 1, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="has no signals to send")
def test_the_save_of_a_preemption_is_not_left_out() -> None:
    gate = Gate()
    with CheckpointManager(gate.store, when_busy="skip") as checkpoints:
        assert not checkpoints.reached_preemption(1)
        assert checkpoints.save(1, state_of(0, 1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert checkpoints.reached_preemption(2)
        gate.open_soon()
        assert checkpoints.save(2, state_of(0, 2))
        checkpoints.wait()
        assert_saved(gate.memory, checkpoints, 1, 2)


def test_wrong_arguments_of_a_save_that_would_be_left_out() -> None:
    gate = Gate()
    with CheckpointManager(gate.store, when_busy="skip") as checkpoints:
        checkpoints.save(1, state_of(0, 1))
        with pytest.raises(InvalidArgumentError, match="name"):
            checkpoints.save(2, state_of(0, 2), name="")
        assert checkpoints.skipped_saves == 0
        gate.gate.set()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_save_that_failed_is_not_hidden(world_size: int) -> None:
    """The next call raises its error on all ranks, and is not left out."""
    gate = Gate()
    gate.refuses = True
    with managers(gate, world_size, when_busy="skip") as threads:
        save_all(threads, 1)
        wait_until(lambda: not threads.managers[0]._background_saves.is_busy)
        ended = threads.run(lambda rank, manager: manager.save(2, state_of(rank, 2)))
        assert [type(one.error) for one in ended] == [SaveFailedError] * world_size
        gate.refuses = False
        gate.gate.set()
        assert save_all(threads, 2, wait=True) == [True] * world_size
        assert [manager.skipped_saves for manager in threads.managers] == [0] * world_size


def test_the_last_save_that_is_left_out_is_told(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    with CheckpointManager(gate.store, when_busy="skip") as checkpoints:
        checkpoints.save(1, state_of(0, 1))
        checkpoints.save(2, state_of(0, 2))
        gate.gate.set()
    assert "the last save of this job was left out; pass wait=True in it" in caplog.text


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_hear_of_the_end_at_different_moments(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold up each rank's end of a save, and its call of the next one, by random times: all ranks do the same."""
    chances = [random.Random(f"{seed} {rank}") for rank in range(4)]
    save = RankSaver.save

    def end_late(self: RankSaver, *arguments: Any) -> Any:
        report = save(self, *arguments)
        time.sleep(chances[self._ranks.rank].random() * 0.03)
        return report

    monkeypatch.setattr(RankSaver, "save", end_late)
    with manager_threads(4, MemoryStore(), when_busy="skip") as threads:

        def train(rank: int, manager: CheckpointManager) -> list[bool]:
            own = random.Random(f"{seed} training {rank}")
            answers = []
            for step in range(1, 16):
                time.sleep(own.random() * 0.03)
                answers.append(manager.save(step, state_of(rank, step)))
            manager.wait()
            return answers

        answers = threads.values(train)
        assert answers[1:] == answers[:1] * 3
        assert answers[0] is not None
        assert threads.managers[0].run.steps() == [step for step, begun in enumerate(answers[0], 1) if begun]
        assert {manager.skipped_saves for manager in threads.managers} == {answers[0].count(False)}


def test_a_coordinator_that_comes_late_waits_as_the_others_do() -> None:
    """Ranks that have waited for its answer in vain save, and it does so as well, though a save is under way."""
    gate = Gate()
    with managers(gate, when_busy="skip", arrival_seconds=0.3) as threads:
        save_all(threads, 1)
        asked = threading.Event()

        def save_late(rank: int, manager: CheckpointManager) -> bool:
            if rank == 0:
                opened(asked)
                gate.open_soon()
            else:
                # Returns once the answer is given up; the save then waits for that of step 1.
                answer = threads.groups.ranks[rank].ask_coordinator(
                    "skip 2", lambda: True, seconds=0.3, left_seconds=lambda: 1.0
                )
                assert not answer
                threads.groups.ranks[rank]._asked -= 1
                asked.set()
            return manager.save(2, state_of(rank, 2))

        assert threads.values(save_late) == [True] * 3
        threads.values(lambda _rank, manager: manager.wait())
        assert_saved(gate.memory, threads.managers[0], 1, 2)


# ---- on_error


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_goes_on_after_a_save_that_failed(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks go on, count it, and save next; the error that ends no job is logged, and `close` raises none."""
    gate = Gate()
    gate.gate.set()
    with caplog.at_level(logging.INFO, "dcp_remote"), managers(gate, world_size, on_error="warn") as threads:
        assert save_all(threads, 1) == [True] * world_size
        threads.values(lambda _rank, manager: manager.wait())
        gate.refuses = True
        for step in (2, 3):
            assert save_all(threads, step) == [True] * world_size
        reports = threads.values(lambda _rank, manager: manager.wait())
        assert [report.step for report in reports if report is not None] == [1] * world_size
        gate.refuses = False
        assert save_all(threads, 3) == [True] * world_size
        assert [manager.failed_saves for manager in threads.managers] == [2] * world_size
        threads.values(lambda _rank, manager: manager.wait())
        assert_saved(gate.memory, threads.managers[0], 1, 3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("training goes on without step 2" in text for text in warnings) == 1
    assert sum("failed_saves=2: Rank 0 could not write a shard" in text for text in warnings) == 1
    assert caplog.text.count("training goes on without step 2") == world_size  # on other ranks at INFO


def test_the_error_of_the_last_save_is_raised_in_the_end() -> None:
    """Though a call of `wait` has let it pass; and by a save of the caller who waits."""
    gate = Gate()
    gate.refuses = True
    checkpoints = CheckpointManager(gate.store, on_error="warn")
    with pytest.raises(SaveFailedError):
        checkpoints.save(1, state_of(0, 1), wait=True)
    assert checkpoints.save(1, state_of(0, 1))
    assert checkpoints.wait() is None
    with pytest.raises(SaveFailedError, match="not yours"):
        checkpoints.close()
    assert checkpoints.failed_saves == 1


def test_a_failure_that_passes_holds_no_state() -> None:
    """The frames of its traceback would keep the state, and the caller's own, until the next failure."""
    down = threading.Event()
    down.set()
    checkpoints = CheckpointManager(RefusingStore(MemoryStore(), down), on_error="warn", progress=False)
    checkpoints.save(1, state_of(0, 1))
    wait_until(lambda: not checkpoints._background_saves.is_busy)
    down.clear()
    state = state_of(0, 2) | {"large": torch.ones(1000)}
    held = weakref.ref(state["large"])
    checkpoints.save(2, state)  # which meets the error of the save before
    checkpoints.wait()
    del state
    gc.collect()
    assert checkpoints.failed_saves == 1
    assert held() is None
    checkpoints.close()


def test_a_store_that_is_down_when_a_save_begins() -> None:
    """The call returns False on all ranks, with `wait="begun"` at once; `should_save` then names the step again."""
    memory, down = MemoryStore(), threading.Event()
    with manager_threads(3, RefusingStore(memory, down), on_error="warn", save_policy=POLICY) as threads:
        assert save_all(threads, 1, wait="begun") == [True] * 3
        threads.values(lambda _rank, manager: manager.wait())
        down.set()
        assert save_all(threads, 2) == [True] * 3
        assert save_all(threads, 3, wait="begun") == [False] * 3
        assert [manager.failed_saves for manager in threads.managers] == [2] * 3
        down.clear()
        schedules = [manager._schedule for manager in threads.managers]
        assert [schedule.should_save(3) for schedule in schedules if schedule is not None] == [True] * 3
        assert save_all(threads, 3, wait="begun") == [True] * 3
        threads.values(lambda _rank, manager: manager.wait())
        assert_saved(memory, threads.managers[0], 1, 3)


def test_the_last_save_is_tried_after_one_that_failed() -> None:
    """Outage, and SIGTERM once it is over: the save at the step of `reached_preemption` commits; others raise first."""
    memory, down = MemoryStore(), threading.Event()
    store = RefusingStore(memory, down)

    def fail(step: int) -> None:
        down.set()
        checkpoints.save(step, state_of(0, step))
        wait_until(lambda: not checkpoints._background_saves.is_busy)
        down.clear()

    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state_of(0, 1), wait=True)
        fail(2)
        with pytest.raises(PermissionDeniedError, match="not yours"):
            checkpoints.save(3, state_of(0, 3))
        fail(3)
        checkpoints._preemption.install()
        checkpoints._preemption.record_signal()
        assert checkpoints.reached_preemption(4)
        checkpoints.save(4, state_of(0, 4))
    assert_saved(memory, checkpoints, 1, 4)
    checkpoints = CheckpointManager(store, resumed_from=4)
    fail(5)
    checkpoints._preemption.record_signal()
    assert checkpoints.reached_preemption(6)
    fail(6)
    with pytest.raises(PermissionDeniedError, match="not yours"):
        checkpoints.close()


def test_a_fenced_job_ends() -> None:
    store = MemoryStore()
    with CheckpointManager(store, on_error="warn", when_busy="skip") as first:
        first.save(1, state_of(0, 1), wait=True)
        with CheckpointManager(store) as second:
            second.restore(state_of(0, 0))
            second.save(2, state_of(0, 2), wait=True)
        first.save(3, state_of(0, 3))
        wait_until(lambda: not first._background_saves.is_busy)
        with pytest.raises(FencedError):
            first.save(4, state_of(0, 4))
        assert first.failed_saves == 0


def test_a_state_that_cannot_be_saved_ends_a_job() -> None:
    with CheckpointManager(MemoryStore(), on_error="warn") as checkpoints:
        checkpoints.save(1, {"x": object()})
        with pytest.raises(UnsafeObjectError):
            checkpoints.save(2, {"x": 1})


def test_an_error_of_one_rank_in_its_call_ends_all() -> None:
    """A function of the caller raises on one rank: that rank raises the error, and the others by the next call."""
    with manager_threads(3, MemoryStore(), on_error="warn") as threads:

        def make_state(rank: int) -> dict[str, Any]:
            if rank == 1:
                raise ZeroDivisionError("mine")
            return state_of(rank, 1)

        def train(rank: int, manager: CheckpointManager) -> None:
            manager.save(1, lambda: make_state(rank))
            manager.save(2, state_of(rank, 2))

        ended = threads.run(train)
        assert [type(one.error) for one in ended] == [InvalidArgumentError, ZeroDivisionError, InvalidArgumentError]
        assert "mine" in str(ended[0].error)


def test_a_rank_that_ends_in_its_call_ends_all() -> None:
    """By `sys.exit` in a function of the caller: the others must not train on without it."""
    with manager_threads(3, MemoryStore(), on_error="warn") as threads:

        def make_state(rank: int) -> dict[str, Any]:
            if rank == 1:
                sys.exit(3)
            return state_of(rank, 1)

        def train(rank: int, manager: CheckpointManager) -> None:
            manager.save(1, lambda: make_state(rank))
            manager.save(2, state_of(rank, 2))

        ended = threads.run(train)
        assert [type(one.error) for one in ended] == [InvalidArgumentError, SystemExit, InvalidArgumentError]


@pytest.mark.parametrize(("on_error", "kind"), [("warn", InvalidArgumentError), ("raise", SaveFailedError)])
@pytest.mark.parametrize("call", ["save", "close"])
def test_ctrl_c_on_one_rank_ends_all(
    call: str, on_error: str, kind: type[DcpRemoteError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a save that is under way, or twice in `close`: the others raise the cause, and commit nothing."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    def train(rank: int, manager: CheckpointManager) -> None:
        if rank == 1 and call == "save":
            monkeypatch.setattr(manager._background_saves, "wait_until_begun", interrupted)
        manager.save(1, state_of(rank, 1), wait="begun")
        if rank == 1:
            monkeypatch.setattr(manager._background_saves, "wait", interrupted)
            manager.close()
        manager.wait()

    gate = Gate()
    with managers(gate, 3, on_error=on_error) as threads:
        ended = threads.run(train)
        gate.gate.set()
        assert [type(one.error) for one in ended] == [kind, KeyboardInterrupt, kind]
        assert all("KeyboardInterrupt" in str(one.error) and "rank=1" in str(one.error) for one in ended[::2])
        assert [manager.failed_saves for manager in threads.managers] == [0] * 3
        assert threads.managers[0].run.steps() == []


def test_a_rank_that_does_not_come_may_pass() -> None:
    """The others go on, also where the state is a function, whose call waits for all ranks."""
    with manager_threads(3, MemoryStore(), on_error="warn", arrival_seconds=0.5) as threads:
        save_all(threads, 1, wait=True)
        ended = threads.run(lambda rank, manager: manager.save(2, lambda: state_of(rank, 2)), *[0, 2])
        assert [one.value for one in ended] == [False, False]
        late = threads.run(lambda rank, manager: manager.save(2, lambda: state_of(rank, 2)), *[1])
        assert [one.value for one in late] == [False]
        assert save_all(threads, 3, wait=True) == [True] * 3
        assert [manager.failed_saves for manager in threads.managers] == [1] * 3


@pytest.mark.parametrize(
    ("kinds", "passes"),
    [
        ([SaveFailedError, SaveTimeoutError, TransientStorageError, PermissionDeniedError, CommitUnknownError], True),
        ([FencedError, InvalidArgumentError, CheckpointExistsError, UnsafeObjectError, BucketNotFoundError], False),
    ],
)
def test_which_errors_may_pass(kinds: Sequence[type[DcpRemoteError]], *, passes: bool) -> None:
    assert {may_pass(kind("No.")) for kind in kinds} == {passes}
    assert may_pass(ZeroDivisionError())
    assert not may_pass(KeyboardInterrupt())


@pytest.mark.parametrize(
    "option",
    [
        {"when_busy": "drop"},
        {"on_error": "ignore"},
        {"replicas": "all"},
        {"shard_bytes": 1000},
        {"shard_bytes": "8MiB"},
    ],
)
def test_wrong_rules(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{next(iter(option))} must be"):
        CheckpointManager(MemoryStore(), **option)
