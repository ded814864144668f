"""Functions for a `RankPool` that use a CheckpointManager, and the states that they save."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.distributed.tensor import DTensor, Shard

from dcp_remote import CheckpointManager, PerRank, RandomStates, load
from dcp_remote.coordination import heartbeat
from dcp_remote.coordination.collective import Collective
from dcp_remote.errors import DcpRemoteError, PermissionDeniedError
from dcp_remote.manager.rank_save import RankSaver
from dcp_remote.manager.reports import SaveReport
from dcp_remote.manager.save_planning import Task
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.rank_threads import wait_until
from tests.support.training import LENGTH, VOCABULARY, Leaves, Training, full, trained

State: TypeAlias = dict[str, Any]
_Answer = TypeVar("_Answer")

# Of a save; nothing here waits for it to pass.
TIMEOUT_SECONDS = 110.0


@contextmanager
def managing(
    url: str | Path | ObjectStore, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Iterator[CheckpointManager]:
    """A manager whose ranks hear of each other ten times a second: failures are known sooner, and tests are shorter."""
    usual_seconds, heartbeat.HEARTBEAT_SECONDS = heartbeat.HEARTBEAT_SECONDS, 0.1
    try:
        manager = CheckpointManager(url, process_group=group, **{"timeout_seconds": TIMEOUT_SECONDS} | options)
    finally:
        heartbeat.HEARTBEAT_SECONDS = usual_seconds
    with manager:
        yield manager


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a call on a rank that raised, as a process of another kind can be told of it.

    Attributes:
        kind: Name of the class of the error.
        text: What a user reads.
        rank: That the error names; None if it names none.
    """

    kind: str
    text: str
    rank: object = None


def ended(attempt: Callable[[], object]) -> Ended | None:
    """Return the error that a call raised; None if the call returned."""
    try:
        attempt()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test wants to see it
        details = error.details if isinstance(error, DcpRemoteError) else {}
        return Ended(type(error).__name__, str(error), details.get("rank"))
    return None


@contextmanager
def warnings_kept() -> Iterator[list[str]]:
    """Collect the records that this package logs as warnings or errors."""
    kept: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    keeper, logger = Keeper(logging.WARNING), logging.getLogger("dcp_remote")
    logger.addHandler(keeper)
    try:
        yield kept
    finally:
        logger.removeHandler(keeper)


# ---- what is saved


def sharded(tensor: torch.Tensor, group: dist.ProcessGroup | None = None, *, dimension: int = 0) -> DTensor:
    """Return this rank's part of a tensor that is cut along a dimension into as many as there are ranks.

    No collective.
    """
    members = group if group is not None else dist.group.WORLD
    assert members is not None
    mesh = DeviceMesh.from_group(members, "cpu")
    part = tensor.chunk(mesh.size(), dimension)[mesh.get_local_rank()]
    return DTensor.from_local(part.clone(), mesh, [Shard(dimension)], run_check=False)


def state_of(value: float, group: dist.ProcessGroup | None = None) -> State:
    """A frozen tensor that every rank has, rows of which each has some, an object of all and one of this rank alone."""
    return {
        "model": {"frozen": torch.arange(20_000.0), "rows": sharded(torch.full((12, 10), float(value)), group)},
        "n": float(value),
        "own": PerRank([dist.get_rank(group), value]),
    }


def assert_holds(state: State, value: float, group: dist.ProcessGroup | None = None) -> None:
    """That a rank's state is the one of this value."""
    rows = state["model"]["rows"].to_local()
    assert state["n"] == value
    assert bool((rows == value).all())
    assert torch.equal(state["model"]["frozen"], torch.arange(20_000.0))
    assert state["own"].value == [dist.get_rank(group), value]


def assert_saved(url: str | Path, step: int, value: float, *, world_size: int) -> None:
    """That a checkpoint is whole; read by one process, without ranks."""
    state = load(url, step=step)
    assert state["n"] == value
    assert torch.equal(state["model"]["rows"], torch.full((12, 10), float(value)))
    assert torch.equal(state["model"]["frozen"], torch.arange(20_000.0))
    assert state["per_rank"] == {str(rank): {"own": [rank, value]} for rank in range(world_size)}


def save_steps(url: str | Path, steps: Sequence[int]) -> None:
    """Each with the value of its step, in the background."""
    with managing(url) as manager:
        manager.restore(state_of(0))
        for step in steps:
            manager.save(step, state_of(step))


# ---- training


def go_on(training: Training, steps: Sequence[int]) -> None:
    """Train these steps, each with data that follows from its number."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        training.model(torch.randint(VOCABULARY, (3, LENGTH), generator=generator)).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


def train_through(strategy: str, url: str, seed: int, options: dict[str, str] | None) -> tuple[Leaves, Leaves]:
    """Save in the background while training goes on: the full state as it was saved, and three steps later."""
    training = trained(strategy, seed)
    state = training.state()
    saved = full(state)
    with managing(url, storage_options=options) as manager:
        manager.save(1, state)
        go_on(training, range(2, 5))
        manager.wait()
    return saved, full(training.state())


def resume(strategy: str, url: str, options: dict[str, str] | None) -> tuple[Leaves, Leaves]:
    """Return the newest state of a run, restored by a training of another seed, and that three steps later."""
    training = trained(strategy, seed=100)
    state = training.state() | {"steps": 0}
    with managing(url, storage_options=options) as manager:
        assert manager.restore(state) == 1
    training.restore(state)
    restored = full(training.state() | {"steps": state["steps"]})
    go_on(training, range(2, 5))
    return restored, full(training.state())


# ---- values of single ranks


# ---- what is sent


def frozen_state(value: float) -> State:
    """Nearly all of it frozen: a tensor that every rank has, and one that is sharded."""
    return {
        "base": {"replicated": torch.arange(50_000.0), "rows": sharded(torch.arange(48_000.0).reshape(48, 1000))},
        "adapter": {"rows": sharded(torch.full((12, 10), float(value)))},
        "n": value,
    }


def sent_by_saves(path: Path, steps: Sequence[int]) -> list[int]:
    """Return the bytes of shards that this rank put in each of them; of what was restored if there was anything."""
    store = RecordingStore(LocalStore(str(path)))
    sent = []
    with managing(store) as manager:
        manager.restore(frozen_state(0))
        for step in steps:
            store.clear()
            manager.save(step, frozen_state(step))
            manager.wait()
            sent.append(sum(one.size_bytes for one in store.requests if one.verb == "put" and "shards/" in one.key))
    return sent


# ---- groups


def save_in_groups(urls: Sequence[str], groups: Sequence[Sequence[int]]) -> list[float]:
    """A manager for each URL and group that this rank is of, all of them at work at a time; what each restored."""
    made = [dist.new_group(list(members)) for members in groups]
    mine = [n for n, members in enumerate(groups) if dist.get_rank() in members]
    for n in set(range(len(groups))) - set(mine):
        refusal = ended(partial(CheckpointManager, urls[n], process_group=made[n]))
        assert refusal is not None
        assert refusal.kind == "InvalidArgumentError"
    managers = {n: CheckpointManager(urls[n], process_group=made[n]) for n in mine}
    for step in (1, 2):
        for n, manager in managers.items():
            manager.save(step, state_of(10 * n + step, made[n]))
    values = []
    for n, manager in managers.items():
        manager.wait()
        state = state_of(0, made[n])
        assert manager.restore(state) == 2
        assert_holds(state, 10 * n + 2, made[n])
        values.append(state["n"])
        manager.close()
    return values


# ---- values of single ranks


def own_state(value: object) -> State:
    return {"w": torch.arange(6.0), "own": PerRank(value), "random": PerRank(RandomStates())}


def save_own(path: Path) -> float:
    """Save a value of another type on each rank, and random states; return the number that is drawn next."""
    rank = dist.get_rank()
    random.seed(rank)
    with managing(path) as manager:
        manager.save(1, own_state([{"files": ["a", "b"]}, "a text", (1, None, 2.5)][rank]))
    return random.random()


def restore_own(path: Path) -> tuple[object, float, list[str]]:
    """Return the value that this rank then has, the number that is drawn next, and the warnings."""
    random.seed(100 + dist.get_rank())
    state = own_state("untouched")
    with managing(path) as manager, warnings_kept() as kept:
        manager.restore(state)
    return state["own"].value, random.random(), kept


# ---- what fails


def fail_on_one_rank(path: Path, victim: int) -> list[Ended | None]:
    """Save, and restore, with a store that refuses the shards of one rank; then both without."""
    store = LocalStore(str(path))
    refused = Fault(
        lambda _verb, key, _number: key.startswith("shards/"),
        "request",
        persistent=True,
        error=lambda: PermissionDeniedError("An injected refusal."),
    )
    with managing(FaultyStore(store, [refused] if dist.get_rank() == victim else [])) as manager:
        endings = [ended(partial(manager.save, 1, state_of(1), wait=True))]
    with managing(store) as manager:
        manager.save(1, state_of(1), wait=True)
    with managing(FaultyStore(store, [refused] if dist.get_rank() == victim else [])) as manager:
        endings.append(ended(partial(manager.restore, state_of(0))))
    with managing(store) as manager:
        state = state_of(0)
        assert manager.restore(state) == 1
        assert_holds(state, 1)
    return endings


def leave_by_an_error(path: Path, raising: Sequence[int]) -> Ended | None:
    """A block that saves, in which some ranks then raise."""

    def block() -> None:
        with managing(path, silence_seconds=8.0) as manager:
            manager.save(1, state_of(1))
            if dist.get_rank() in raising:
                raise KeyError("mine")

    return ended(block)


def wait_for_all(where: str) -> None:
    """Wait for all ranks in the store of the group, for longer than its collectives would.

    By looking again and again: `wait` would keep the store's connection, of which other threads make theirs.
    """
    store = _get_default_store()
    store.set(f"{where} {dist.get_rank()}", "")
    wait_until(lambda: store.check([f"{where} {rank}" for rank in range(dist.get_world_size())]))


def guard_a_save(path: Path) -> Ended | None:
    """A save under `if rank == 0` between two saves of all ranks; how it ended."""
    ending = None
    with managing(path, arrival_seconds=1.0) as manager:
        manager.save(1, state_of(1), wait=True)
        if dist.get_rank() == 0:
            ending = ended(lambda: manager.save(2, state_of(2), wait=True))
        wait_for_all(f"after the save of one rank to {path}")
        manager.save(3, state_of(3), wait=True)
    return ending


def miss_a_use(path: Path, raising: Sequence[int], using: Sequence[int], how: str) -> list[Ended | None]:
    """One manager: some ranks raise before they save, some save, the others do neither. Then three saves.

    Args:
        path: Of the run.
        raising: These ranks raise,
        using: these save.
        how: "in its block"; "in its save"; "and close it", in a `finally`; "before it is made"; or "without threads" in
            its block.

    Returns:
        How that ended, and each of the saves, by a manager of its own; all ranks leave one before the next.
    """
    rank = dist.get_rank()
    # The server of torch's store may stand still for five seconds, while it asks for the name of a new client's host.
    seconds = 6.0 if how in {"and close it", "before it is made"} else 60.0

    def block() -> None:
        if how == "before it is made" and rank in raising:
            raise KeyError("mine")
        with managing(path, silence_seconds=8.0, timeout_seconds=seconds) as manager:
            try:
                if rank in raising and how == "without threads":
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(threading.Thread, "start", refuse_to_start)
                        manager.save(1, state_of(1))
                if rank in raising and how == "in its save":
                    manager.save(1, {**state_of(1), "broken": Broken()})
                if rank in raising:
                    raise KeyError("mine")
                if rank in using:
                    manager.save(1, state_of(1))
            finally:
                if how == "and close it":
                    manager.close()

    def save(step: int) -> None:
        with managing(path, start_over=True, timeout_seconds=20.0) as manager:
            manager.save(step, state_of(step), wait=True)

    endings = [ended(block)]
    for step in (2, 3, 4):
        wait_for_all(f"before step {step} of {path}")
        endings.append(ended(partial(save, step)))
    return endings


class Broken:
    """Object whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("mine")

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def refuse_to_start(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def evaluate_beside(path: Path, raising: int) -> list[Ended | None]:
    """One manager saves all along, and others restore; one rank raises before the second of those.

    Returns:
        How each call ended: a save, a restore, and so on.
    """
    endings = []

    def evaluate(number: int) -> None:
        with managing(path, silence_seconds=8.0) as manager:
            if number == 2 and dist.get_rank() == raising:
                raise KeyError("mine")
            manager.restore(state_of(0))

    with managing(path) as main:
        for number in (1, 2, 3):
            wait_for_all(f"save {number} of {path}")
            endings.append(ended(partial(main.save, number, state_of(number), wait=True)))
            wait_for_all(f"restore {number} of {path}")
            endings.append(ended(partial(evaluate, number)))
    return endings


# ---- in the background


class HeldStore(WrappedStore):
    """Carries out nothing whose key begins so before it is let go."""

    def __init__(self, store: ObjectStore, held: str) -> None:
        super().__init__(store)
        self._held = held
        self.asked, self.let_go = threading.Event(), threading.Event()

    def _request(self, request: Request, send: Callable[[], _Answer]) -> _Answer:
        if request.key.startswith(self._held):
            self.asked.set()
            assert self.let_go.wait(TIMEOUT_SECONDS)
        return send()


def train_during_a_save(strategy: str, path: Path, held: str) -> tuple[Leaves, Leaves, Leaves]:
    """The full state as it was saved, and after training meanwhile; and after the same without a save."""
    alone = trained(strategy, seed=1)
    go_on(alone, range(2, 6))
    training = trained(strategy, seed=1)
    state = training.state()
    saved = full(state)
    store = HeldStore(LocalStore(str(path)), held)
    with managing(store) as manager:
        manager.save(1, state)
        if held or dist.get_rank() == 0:  # the coordinator asks first
            assert store.asked.wait(TIMEOUT_SECONDS)
        go_on(training, range(2, 6))
        sums = torch.zeros(30)
        for number in range(30):
            one = torch.tensor(float(dist.get_rank() + number))
            dist.all_reduce(one)
            sums[number] = one
        world_size = dist.get_world_size()
        assert torch.equal(sums, torch.arange(30.0) * world_size + sum(range(world_size)))
        dist.barrier()
        assert manager._background_saves._under_way is not None
        assert not manager._background_saves._under_way.settled.is_set()
        store.let_go.set()
        manager.wait()
    return saved, full(training.state()), full(alone.state())


def skip_saves(path: Path, seed: int) -> tuple[list[bool], list[int], int]:
    """Return which of twenty saves were begun, the steps of the run, and how many were left out.

    Each rank comes to a save, and hears of its end, at random moments of its own.
    """
    chance, save, pauses = random.Random(f"{seed} {dist.get_rank()}"), RankSaver.save, threading.Event()

    def end_late(self: RankSaver, collective: Collective, task: Task) -> SaveReport:
        report = save(self, collective, task)
        pauses.wait(chance.random() * 0.05)
        return report

    with pytest.MonkeyPatch.context() as patch, managing(path, when_busy="skip") as manager:
        patch.setattr(RankSaver, "save", end_late)
        state, begun = state_of(seed), list[bool]()
        for step in range(1, 21):
            pauses.wait(chance.random() * 0.02)
            begun.append(manager.save(step, state))
        manager.wait()
        return begun, manager.run.steps(), manager.skipped_saves


def count_collectives(path: Path) -> tuple[int, int, int]:
    """Return how many operations the default group and its meshes' began, groups were made, and of an all_reduce."""

    def operations() -> int:
        return sum(cast("Any", group)._get_sequence_number_for_group() for group in _world.pg_map)

    first, second, template = state_of(1), state_of(2), state_of(0)
    before, groups = operations(), len(_world.pg_map)
    with managing(path) as manager:
        manager.save(1, first)
        manager.save(2, second, wait=True)
        manager.restore(template)
        assert not manager.reached_preemption(2)
        manager.save(3, second)
        ended(lambda: manager.save(3, second, wait=True))
    assert_holds(template, 2)
    counted, made = operations() - before, len(_world.pg_map) - groups
    before = operations()
    dist.all_reduce(torch.ones(1))
    return counted, made, operations() - before


def look_and_save(url: str) -> None:
    """Rank 0 makes managers of its own beforehand and in between, to look at the run; nobody waits for them."""
    looking = []
    for step in (1, 2):
        if dist.get_rank() == 0:
            looking.append(CheckpointManager(url))
            assert looking[-1].run.steps() == list(range(1, step))
        with managing(url, resumed_from=step - 1 if step > 1 else None) as manager:
            manager.save(step, state_of(step), wait=True)
    with managing(url) as manager:
        state = state_of(0)
        assert manager.restore(state) == 2
        assert_holds(state, 2)
    for one in looking:
        one.close()
