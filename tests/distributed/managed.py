"""Functions for a `RankPool` that use a CheckpointManager, and the states that they save."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.distributed.tensor import DTensor, Shard

from dcp_remote import CheckpointManager, PerRank, RandomStates, RemoteLoadPlanner, load
from dcp_remote.coordination import heartbeat
from dcp_remote.coordination.collective import Collective
from dcp_remote.errors import DcpRemoteError, PermissionDeniedError
from dcp_remote.manager.coordinator import Coordinator
from dcp_remote.saving.plan_cache import RunPlanner
from dcp_remote.saving.rank_report import RankReport
from dcp_remote.storage import LocalStore, ObjectStore
from dcp_remote.storage.wrapper import Request, Verb, WrappedStore
from dcp_remote.testing import FaultyStore, RecordingStore, matching
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
    """How a call ended on a rank that raised: what a process of another kind can be told of it.

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


def sharded(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> DTensor:
    """This rank's rows of it, of as many as there are ranks; no collective."""
    members = group if group is not None else dist.group.WORLD
    assert members is not None
    mesh = DeviceMesh.from_group(members, "cpu")
    rows = tensor.chunk(mesh.size())[mesh.get_local_rank()]
    return DTensor.from_local(rows.clone(), mesh, [Shard(0)], run_check=False)


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


def resume_each(strategy: str, urls: Sequence[str], options: dict[str, str] | None) -> list[tuple[Leaves, Leaves]]:
    """Return of each run its newest state, restored by a training of another seed, and that three steps later."""
    training = trained(strategy, seed=100)
    states = []
    for url in urls:
        state = training.state() | {"steps": 0}
        with managing(url, storage_options=options) as manager:
            assert manager.restore(state) == 1
        training.restore(state)
        restored = full(training.state() | {"steps": state["steps"]})
        go_on(training, range(2, 5))
        states.append((restored, full(training.state())))
    for (one, _), (other, _) in pairwise(states):
        assert not torch.equal(one["/model/embedding.weight"], other["/model/embedding.weight"])
    return states


# ---- values of single ranks


def own_values(rank: int) -> list[Any]:
    """Return a value of another type on each rank, one that differs in value only, and one that is equal."""
    different = [{"position": 7, "files": ["a", "b"]}, "a text", np.arange(5), (1, None, 2.5)][rank]
    return [different, [rank] * 3, "the same"]


@dataclass(frozen=True, slots=True)
class Own:
    """Values that belong to one rank alone.

    Attributes:
        step: Step that was restored.
        values: Values as from `own_values`.
        draws: Next random numbers: Python's, numpy's and torch's.
        warnings: What was logged on this rank by the restore.
    """

    step: int | None
    values: list[Any]
    draws: tuple[float, float, float]
    warnings: list[str]


def draws() -> tuple[float, float, float]:
    """The next random numbers."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def own_state(values: Sequence[Any]) -> State:
    return {
        "w": torch.arange(6.0),
        "different": PerRank(values[0]),
        "alike": PerRank(values[1]),
        "same": PerRank(values[2]),
        "random": PerRank(RandomStates()),
    }


def save_empty_dicts(url: Path) -> None:
    """Save twice what is empty on the first rank, on the others, or on all; and restore it."""
    rank, weight = dist.get_rank(), torch.ones(2)
    state: State = {
        "a": {"deeper": {}} if rank == 2 else {"x": weight} if rank else {},
        "b": {},
        "c": [{}, {"x": weight} if rank else {}],
        "d": {"e": {}} if rank == 0 else {},
    }
    with managing(url) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state)
            checkpoints.wait()
        assert checkpoints.restore(state) == 2


def save_own(url: Path, step: int) -> Own:
    """Restore the newest, and save this rank's values and random states."""
    rank = dist.get_rank()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 * step + rank)
    with managing(url, resumed_from=step - 1 if step > 1 else None) as manager:
        manager.save(step, own_state(own_values(rank)))
        manager.wait()
    return Own(step, own_values(rank), draws(), [])


def restore_own(url: Path, step: int | None, seed: int) -> Own:
    """With values of no rank, and random states of a seed."""
    for seeded in (random.seed, np.random.seed, torch.manual_seed):
        seeded(seed + dist.get_rank())
    state = own_state([None, None, None])
    with managing(url) as manager, warnings_kept() as kept:
        restored = manager.restore(state, step)
    values = [state[key].value for key in ("different", "alike", "same")]
    return Own(restored, values, draws(), kept)


# ---- what is sent


def frozen_state(value: float) -> State:
    """Nearly all of it frozen: a tensor that every rank has, and one that is sharded."""
    return {
        "base": {"replicated": torch.arange(50_000.0), "rows": sharded(torch.arange(48_000.0).reshape(48, 1000))},
        "adapter": {"rows": sharded(torch.full((12, 10), float(value)))},
        "n": value,
    }


def sent_by_saves(path: Path, steps: Sequence[int]) -> list[int]:
    """How many bytes of shards this rank put in each of them; of what was restored if there was anything."""
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


# ---- what fails


class UnpicklableError(Exception):
    """Holds what cannot cross to another process."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


class Broken:
    """A `Stateful` that is not in a state to be asked or told, or an object that cannot be copied."""

    def __init__(self, method: str) -> None:
        self._method = method

    def state_dict(self) -> State:
        self._break("state_dict")
        return {"value": 1}

    def load_state_dict(self, state: State) -> None:
        self._break("load_state_dict")

    def _break(self, method: str) -> None:
        if method == self._method:
            raise ZeroDivisionError(f"in {method}")


class Uncopyable:
    """An object that no copy can be made of."""

    def __deepcopy__(self, memo: object) -> Uncopyable:
        raise ZeroDivisionError("in a copy")


class NeedsCode:
    """Object that only code can load."""


class BrokenSavePlanner(RunPlanner):
    """Raises in one of its methods."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()
        self._method, self._error = method, error

    def _break(self, method: str) -> None:
        if method == self._method:
            raise self._error

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self._break("set_up_planner")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> SavePlan:
        self._break("create_local_plan")
        return super().create_local_plan()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._break("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._break("resolve_data")
        return super().resolve_data(write_item)


class SwitchedStore(WrappedStore):
    """Goes through another store, for as long as that is set."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._usual = store

    def switch(self, store: ObjectStore | None) -> None:
        self._store = self._usual if store is None else store


class FlippingStore(WrappedStore):
    """The last bit of every range that is read is another."""

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        super().get_into(key, start, buffer)
        buffer[-1] ^= 1


def is_shard(verb: Verb, key: str, _number: int) -> bool:
    return key.startswith("shards/") and verb in ("put", "get_into")


def is_manifest_read(verb: Verb, key: str, _number: int) -> bool:
    return key.startswith("manifests/") and verb == "get"


def denied() -> PermissionDeniedError:
    return PermissionDeniedError("An injected refusal.")


SAVE_FAILURES = (
    "state_dict",
    "copy",
    "object",
    "upload",
    "set_up_planner",
    "create_local_plan",
    "finish_plan",
    "resolve_data",
    "unpicklable",
)
RESTORE_FAILURES = (
    "load_state_dict",
    "template",
    "read refused",
    "read flipped",
    "manifest refused",
    "create_local_plan",
)


def broken_save(manager: CheckpointManager, store: SwitchedStore, failure: str, step: int, *, wait: bool) -> None:
    """On the rank where it fails."""
    state = state_of(step)
    planner = RunPlanner()
    if failure == "state_dict":
        state["broken"] = Broken("state_dict")
    elif failure == "copy":
        state["broken"] = Uncopyable()
    elif failure == "object":
        state["own"] = PerRank(NeedsCode())
    elif failure == "upload":
        store.switch(FaultyStore(store._usual, [matching(is_shard, "request", persistent=True, error=denied)]))
    elif failure == "unpicklable":
        planner = BrokenSavePlanner("create_local_plan", UnpicklableError("in create_local_plan"))
    else:
        planner = BrokenSavePlanner(failure, ZeroDivisionError(f"in {failure}"))
    with mock.patch.object(manager, "_make_planner", return_value=planner):
        manager.save(step, state, wait=wait)
    manager.wait()


def fail_to_save(path: Path, failure: str, victim: int) -> list[Ended | None]:
    """A save that fails on one rank, in the foreground and in the background; each is tried again at once."""
    store = SwitchedStore(LocalStore(str(path)))

    def attempt(step: int, *, wait: bool) -> None:
        if dist.get_rank() == victim:
            broken_save(manager, store, failure, step, wait=wait)
            return
        manager.save(step, state_of(step), wait=wait)
        manager.wait()

    endings = []
    with managing(store) as manager:
        for step, wait in ((1, True), (2, False)):
            endings.append(ended(partial(attempt, step, wait=wait)))
            store.switch(None)
            manager.save(step, state_of(step), wait=not wait)
            manager.wait()
    return endings


def leave_without_a_verdict(path: Path, victim: int) -> list[Ended | None]:
    """A rank gives up when its report is sent, and hears of no end; the others hear that it failed. Then all save."""
    store = SwitchedStore(LocalStore(str(path)))
    with managing(store) as manager:
        manager.save(1, state_of(1), wait=True)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == victim:
                patch.setattr(Collective, "_contribute", given_up_after_the_report(Collective._contribute))
            elif dist.get_rank() == 0:
                patch.setattr(Coordinator, "commit", when_it_is_over(Coordinator.commit))
            ending = ended(lambda: manager.save(2, state_of(2), wait=True))
        unclear = len(manager._saver._planning.unclear)
        assert unclear == (dist.get_rank() == victim)
        manager.save(3, state_of(3), wait=True)
        assert manager._saver._planning.unclear == []
    return [ending]


def given_up_after_the_report(answer: Callable[..., Any]) -> Callable[..., Any]:
    def answered(self: Collective, value: object, *, shared: bool) -> Any:
        if not (isinstance(value, tuple) and isinstance(value[0], RankReport)):
            return answer(self, value, shared=shared)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Collective, "_receive", interrupted)
            return answer(self, value, shared=shared)

    return answered


def interrupted(_: Collective, *_arguments: object, **_others: object) -> bytes:
    raise ZeroDivisionError("in the last round")


def when_it_is_over(commit: Callable[..., Any]) -> Callable[..., Any]:
    def committed(self: Coordinator, joint: Collective, *arguments: Any) -> Any:
        while joint.cancelled is None:
            joint._outcome.wait(1.0)
        return commit(self, joint, *arguments)

    return committed


def fail_to_restore(path: Path, failure: str, victim: int) -> list[Ended | None]:
    """A restore that fails on one rank; then one that does not, and a save."""
    store = SwitchedStore(LocalStore(str(path)))

    def attempt() -> None:
        state = state_of(0) | {"broken": Broken("nowhere")}
        breaking: AbstractContextManager[Any] = nullcontext()
        if dist.get_rank() != victim:
            pass
        elif failure == "create_local_plan":
            broken = mock.Mock(side_effect=ZeroDivisionError("in create_local_plan"))
            breaking = mock.patch.object(RemoteLoadPlanner, "create_local_plan", broken)
        elif failure == "load_state_dict":
            state["broken"] = Broken("load_state_dict")
        elif failure == "template":
            state["unknown"] = torch.zeros(3)
        elif failure == "read refused":
            store.switch(FaultyStore(store._usual, [matching(is_shard, "request", persistent=True, error=denied)]))
        elif failure == "read flipped":
            store.switch(FlippingStore(store._usual))
        else:
            refused = matching(is_manifest_read, "request", persistent=True, error=denied)
            store.switch(FaultyStore(store._usual, [refused]))
        with breaking:
            manager.restore(state)

    with managing(store) as manager:
        ending = ended(attempt)
        store.switch(None)
        unsaved = ended(lambda: manager.save(5, state_of(5) | {"broken": Broken("nowhere")}, wait=True))
        state = state_of(0) | {"broken": Broken("nowhere")}
        assert manager.restore(state) == 2
        assert_holds(state, 2)
        manager.save(5, state_of(5) | {"broken": Broken("nowhere")})
    return [ending, unsaved]


def save_to_restore(path: Path) -> None:
    with managing(path) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step) | {"broken": Broken("nowhere")})


def ask_for_different_steps(path: Path) -> list[Ended | None]:
    """Save in the foreground and in the background, and restore, with another step on each rank; then with one."""
    rank = dist.get_rank()
    with managing(path) as manager:
        endings = [ended(lambda: manager.save(10 + rank, state_of(1), wait=True))]
        manager.save(1, state_of(1))
        manager.wait()

        def in_the_background() -> None:
            manager.save(10 + rank, state_of(1))
            manager.wait()

        endings.append(ended(in_the_background))
        manager.save(2, state_of(2))
        endings.append(ended(lambda: manager.restore(state_of(0), 1 + rank % 2)))
        state = state_of(0)
        assert manager.restore(state, 2) == 2
        assert_holds(state, 2)
        manager.save(3, state_of(3))
    return endings


def leave_by_an_error(path: Path, raising: Sequence[int], *, before: bool) -> Ended | None:
    """A block that saves; some ranks raise in it, before they save or after."""

    def block() -> None:
        with managing(path, silence_seconds=8.0) as manager:
            if before and dist.get_rank() in raising:
                raise KeyError("mine")
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
        how: "in its block"; "and close it", in a `finally`; "before it is made"; or "without threads" in its block.

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
        assert not manager._background_saves._under_way.is_settled
        store.let_go.set()
        manager.wait()
    return saved, full(training.state()), full(alone.state())


def count_collectives(path: Path) -> tuple[int, int, int]:
    """How many operations the default group and its meshes' began meanwhile, groups were made, and of an all_reduce."""

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
