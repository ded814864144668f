"""Ctrl-C, and threads that cannot start, anywhere in a manager's call: no changed state is committed.

KeyboardInterrupt is raised in the main thread at a line of this package or of `threading`, as by a signal's handler.
Each line that an uninterrupted call passes is tried in turn, except those of a `with`: the tracer runs there before a
lock is released, where no signal's handler is ever called.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest
import torch

import dcp_remote
from dcp_remote import CheckpointManager, load
from dcp_remote.errors import DcpRemoteError, SaveFailedError
from dcp_remote.manager.background_save import BackgroundSave
from dcp_remote.storage import MemoryStore
from tests.support.rank_threads import manager_threads

# File, line, and number of passes so far. Lines passed more often are loops that wait.
Place: TypeAlias = tuple[str, int, int]
_PASSES_MAX = 2

FILES = str(Path(dcp_remote.__file__).parent), threading.__file__


@pytest.fixture(autouse=True)
def _rename_leftover_threads() -> Iterator[None]:
    """Rename idle threads that an interrupted close leaves behind, so that other tests ignore them."""
    before = frozenset(threading.enumerate())
    yield
    for thread in frozenset(threading.enumerate()) - before:
        thread.name = "left by an interrupt"


@contextmanager
def at_each_line(visit: Callable[[Place], None]) -> Iterator[None]:
    """Call `visit` at each line that this thread passes; it may raise."""
    passes: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            line = frame.f_code.co_filename, frame.f_lineno
            passes[line] += 1
            visit((*line, passes[line]))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def places_of(call: Callable[[], object]) -> list[Place]:
    """Return the lines at which a call can be interrupted."""
    places: list[Place] = []
    with at_each_line(places.append):
        call()
    return [place for place in places if place[2] <= _PASSES_MAX]


def is_interrupted(call: Callable[[], object], place: Place) -> bool:
    """Interrupt a call at a line; return whether the call raises."""
    was_raised = False

    def interrupt(at: Place) -> None:
        nonlocal was_raised
        if at == place and not was_raised:
            was_raised = True
            raise KeyboardInterrupt

    try:
        with at_each_line(interrupt):
            call()
    except (KeyboardInterrupt, RuntimeError):
        # RuntimeError is raised by `threading.Condition`, which then releases a lock that it does not hold.
        assert was_raised
        return True
    return False


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((1000,), value), "b": torch.full((10,), value)}, "n": value}


def assert_is(state: dict[str, Any], value: float) -> None:
    assert state["n"] == value
    assert all(bool((tensor == value).all()) for tensor in state["model"].values())


def every(places: list[Place], torture_seconds: float) -> list[Place]:
    """Return all lines in a long campaign, otherwise about 150 of them."""
    return places if torture_seconds > 60 else places[:: max(1, len(places) // 150)]


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_is_interrupted_anywhere(torture_seconds: float, *, wait: bool) -> None:
    """An interrupted save raises, then the state changes: the old one is committed or nothing; the next save works."""

    def begin() -> tuple[MemoryStore, CheckpointManager, dict[str, Any]]:
        store = MemoryStore()
        return store, CheckpointManager(store), state_of(1)

    _, checkpoints, state = begin()
    places = places_of(lambda: checkpoints.save(1, state, wait=wait))
    checkpoints.close()
    assert any(place[0] == threading.__file__ for place in places)
    for place in every(places, torture_seconds):
        store, checkpoints, state = begin()
        raised = is_interrupted(lambda: checkpoints.save(1, state, wait=wait), place)  # noqa: B023  # called at once
        assert torch.is_grad_enabled(), place
        for tensor in state["model"].values():
            tensor.fill_(7.0)
        with suppress(DcpRemoteError):
            checkpoints.wait()
        steps = checkpoints.run.steps()
        assert steps == [1] if not raised else steps in ([], [1]), place
        if steps:
            assert_is(load(store, step=1), 1)
        checkpoints.save(2, state_of(2), wait=True)
        assert_is(load(store, step=2), 2)
        checkpoints.close()


def test_a_restore_that_is_interrupted_anywhere(torture_seconds: float) -> None:
    """After an interrupted restore the next one succeeds."""
    store = MemoryStore()
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(1, state_of(1))
    checkpoints = CheckpointManager(store)
    for place in every(places_of(lambda: checkpoints.restore(state_of(0))), torture_seconds):
        is_interrupted(lambda: checkpoints.restore(state_of(0)), place)
        state = state_of(0)
        assert checkpoints.restore(state) == 1, place
        assert_is(state, 1)
    checkpoints.close()


# ---- other ranks


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()], ids=repr)
def test_a_rank_whose_thread_does_not_start(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank raises the reason long before the deadline; both save the next step."""
    start, victim = threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "dcp_remote-save" and threading.current_thread() in victim:
            victim.clear()
            raise error
        start(thread)

    def save(rank: int, manager: CheckpointManager) -> None:
        if rank == 1:
            victim.append(threading.current_thread())
        manager.save(1, state_of(1), wait=True)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with manager_threads(2, MemoryStore()) as ranks:
        first = ranks.run(save)
        ranks.values(lambda _, manager: manager.save(2, state_of(2), wait=True))
        assert ranks.managers[0].run.steps() == [2]
    assert first[1].error is error
    assert isinstance(first[0].error, SaveFailedError)
    assert type(error).__name__ in str(first[0].error) or str(error) in str(first[0].error)


def test_a_rank_alone_leaves_nothing_in_a_store_that_it_has_not() -> None:
    """A single rank has no store of its group, and collects no keys to delete there."""
    with CheckpointManager(MemoryStore()) as checkpoints:
        for step in range(1, 4):
            checkpoints.save(step, state_of(step), wait=True)
        assert checkpoints.restore(state_of(0)) == 3
        assert not checkpoints._ranks._member._leftovers


def test_ctrl_c_before_the_thread_of_a_save_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save interrupted before its thread runs never begins: the next save does not wait for it."""
    released, run = threading.Event(), BackgroundSave._run

    def late(save: BackgroundSave) -> None:
        released.wait(60.0)
        run(save)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(MemoryStore()) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(BackgroundSave, "_run", late)
            patch.setattr(BackgroundSave, "result", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(1, {"w": torch.ones(2)}, wait=True)
        waited = threading.Timer(10.0, released.set)
        waited.start()
        checkpoints.save(2, {"w": torch.ones(2)}, wait=True)
        assert not released.is_set()
        waited.cancel()
        released.set()
