"""Saves that return while the state is being copied: no checkpoint mixes two states, and no change goes unnoticed."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, AdamW, Optimizer

from dcp_remote import CheckpointManager, load
from dcp_remote.common.units import MiB
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.manager import updates
from dcp_remote.saving import plan_cache, staging
from dcp_remote.saving.device_copy import ElementRange, host_views
from dcp_remote.saving.late_copies import LateCopies
from dcp_remote.storage import MemoryStore
from tests.support.rank_threads import manager_threads
from tests.support.states import equal


class HeldBack:
    """Copies that the thread of a save does not begin before `release`; and the bytes that `save` copied itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = threading.Event()
        self.early_bytes: list[int] = []
        finish, copy = LateCopies.finish, staging._copy

        def finish_late(late: LateCopies) -> None:
            assert not late.is_protecting or self.release.wait(20)  # a save with `wait=True` has nothing to hold back
            finish(late)

        def counted(each: Any) -> None:
            self.early_bytes.append(len(each.into))
            copy(each)

        monkeypatch.setattr(LateCopies, "finish", finish_late)
        monkeypatch.setattr(staging, "_copy", counted)


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldBack]:
    held = HeldBack(monkeypatch)
    yield held
    held.release.set()


def trained(kind: Callable[..., Optimizer] = AdamW, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Return a model of two large weights, a small bias each and statistics, and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def clones(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return what the checkpoint of a model and its optimizer must hold."""
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.save(0, {"model": model, "optim": optimizer}, wait=True)
    return load(store)


WEIGHT_BYTES = 4 * 256 * 256


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}])
def test_training_goes_on_while_the_state_is_copied(held_back: HeldBack, options: dict[str, Any]) -> None:
    """The step makes the copies that have not begun; the forward pass before changes statistics at once."""
    model, optimizer = trained(**options)
    store = MemoryStore()
    expected = {}
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        checkpoints.watch(optimizer)
        for step in (1, 2):
            expected[step] = clones(model, optimizer)
            held_back.release.clear()
            held_back.early_bytes.clear()
            checkpoints.save(step, {"model": model, "optim": optimizer})
            assert max(held_back.early_bytes) < WEIGHT_BYTES
            train(model, optimizer)
            held_back.release.set()
            checkpoints.wait()
        assert checkpoints.last_save is not None
        weights = 2 * WEIGHT_BYTES * (4 if "amsgrad" in options else 3)
        assert weights < checkpoints.last_save.copied_bytes < 1.1 * weights
    assert not equal(expected[1], expected[2])
    for step, state in expected.items():
        assert equal(load(store, step=step), state)


def test_a_save_that_waits_for_the_other_ranks_does_not_wait_for_the_copies(held_back: HeldBack) -> None:
    """Nor does a save of the same step again, which copies nothing and adds its name."""
    model, optimizer = trained()
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        for step in (1, 2):
            expected = clones(model, optimizer)
            for name in ("first", "second"):
                held_back.early_bytes.clear()
                checkpoints.save(
                    step, {"model": model, "optim": optimizer}, name=f"{name}-{step}", exist_ok=True, wait="begun"
                )
                assert max(held_back.early_bytes) < WEIGHT_BYTES
                if name == "first":
                    held_back.release.set()
                    checkpoints.wait()
                    held_back.release.clear()
            train(model, optimizer)
            checkpoints.wait()
            assert equal(load(store), expected)
        assert checkpoints.run.checkpoints()[-1].names == ("first-2", "second-2")


@pytest.mark.parametrize("wait", [False, "begun"])
def test_ranks_that_hold_the_same_wait_for_no_copy(
    held_back: HeldBack, monkeypatch: pytest.MonkeyPatch, wait: Literal[False, "begun"]
) -> None:
    """Under DDP the first save compares values once they are copied, after it has returned; the next one never does."""
    digested: list[int] = []

    def counted(ranges: Sequence[ElementRange]) -> list[memoryview]:
        views = host_views(ranges)
        digested.extend(len(view) for view in views)
        return views

    monkeypatch.setattr(plan_cache, "host_views", counted)
    held: list[tuple[nn.Module, Optimizer]] = []
    for _ in range(2):
        torch.manual_seed(0)
        large = nn.Linear(256, 1100)
        held.append((large, AdamW(large.parameters())))
        train(*held[-1])
    store = MemoryStore()
    with manager_threads(2, store, progress=False, shard_bytes=MiB) as ranks:
        for (_, optimizer), checkpoints in zip(held, ranks.managers, strict=True):
            checkpoints.watch(optimizer)
        for step in (1, 2):
            expected = clones(*held[0])
            held_back.release.clear()
            held_back.early_bytes.clear()
            ranks.values(partial(save_as_rank, held, step, wait))
            assert max(held_back.early_bytes) < MiB
            assert not digested
            for model, optimizer in held:
                torch.manual_seed(step)
                train(model, optimizer)
            held_back.release.set()
            ranks.values(lambda _rank, checkpoints: checkpoints.wait())
            assert equal(load(store, step=step), expected)
            assert bool(digested) == (step == 1)
            digested.clear()


def save_as_rank(
    held: Sequence[tuple[nn.Module, Optimizer]],
    step: int,
    wait: Literal[False, "begun"],
    rank: int,
    checkpoints: CheckpointManager,
) -> None:
    """Save the model and the optimizer of a rank."""
    model, optimizer = held[rank]
    checkpoints.save(step, {"model": model, "optim": optimizer}, wait=wait)


def test_the_wait_of_a_step_for_the_copies_is_in_the_report(held_back: HeldBack) -> None:
    """It blocks training, though not the call of `save`."""
    model, optimizer = trained()
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        for is_in_the_way in (True, False):
            held_back.release.clear()
            checkpoints.save(1 + (not is_in_the_way), {"model": model, "optim": optimizer})
            if is_in_the_way:
                train(model, optimizer)
            held_back.release.set()
            checkpoints.wait()
            assert checkpoints.last_save is not None
            seconds = checkpoints.last_save.seconds
            assert (seconds.copying > 0) == is_in_the_way
            assert seconds.blocked == seconds.waiting + seconds.staging + seconds.copying


def test_all_is_copied_at_once_without_a_watched_optimizer(held_back: HeldBack) -> None:
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer}
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.save(1, state)
        assert held_back.early_bytes.count(WEIGHT_BYTES) == 6
        held_back.release.set()
        checkpoints.wait()
        checkpoints.before_update()
        held_back.early_bytes.clear()
        held_back.release.clear()
        checkpoints.save(2, state)
        assert WEIGHT_BYTES not in held_back.early_bytes
        held_back.release.set()


def test_the_copies_of_another_optimizer_end_before_save_returns(held_back: HeldBack) -> None:
    """A model and its adversary, of which one optimizer is watched; averaged weights belong to none."""
    (model, optimizer), (adversary, other) = trained(), trained(SGD)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    state = {"model": model, "optim": optimizer, "adversary": adversary, "other": other, "average": average}
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        checkpoints.save(1, state)
        assert held_back.early_bytes.count(WEIGHT_BYTES) == 4  # of the adversary, and the averaged
        expected = clones(adversary, other)
        train(adversary, other)
        torch._foreach_add_(average, 1.0)
        held_back.release.set()
    found = load(store)
    assert equal({"model": found["adversary"], "optim": found["other"]}, expected)


class Reborn(SGD):
    """Optimizer whose `id` is always the same, as if each was made at the address of the one before."""


def test_a_new_optimizer_at_the_address_of_a_dead_one(held_back: HeldBack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its step waits for what it owns, and not for what the dead one owned."""
    monkeypatch.setattr(updates, "id", lambda value: 1 if isinstance(value, Reborn) else id(value), raising=False)
    (model, dead), (adversary, optimizer) = trained(Reborn), trained(SGD)
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(dead)
        checkpoints.watch(optimizer)
        expected = clones(adversary, optimizer)
        checkpoints.save(1, {"model": adversary, "optim": optimizer, "other": model})
        del dead
        gc.collect()
        new = Reborn(adversary.parameters(), lr=0.1)
        checkpoints.watch(new)
        train(adversary, new)
        held_back.release.set()
    found = load(store)
    assert equal({"model": found["model"], "optim": found["optim"]}, expected)


def step_unwatched(model: nn.Module, _optimizer: Optimizer) -> None:
    SGD(model.parameters(), lr=1.0).step()


def fused_unwatched(model: nn.Module, _optimizer: Optimizer) -> None:
    AdamW(model.parameters(), lr=1.0, fused=True).step()


def load_others(model: nn.Module, _optimizer: Optimizer) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


@torch.no_grad()
def one_row(model: nn.Module, _optimizer: Optimizer) -> None:
    model[2].weight[3] += 1  # type: ignore[index]


@torch.no_grad()
def through_a_view(model: nn.Module, _optimizer: Optimizer) -> None:
    model[2].weight.view(-1)[5:6].zero_()  # type: ignore[index]


def by_way_of_data(model: nn.Module, _optimizer: Optimizer) -> None:
    model[2].weight.data.mul_(1.5)  # type: ignore[index]


def moments(_model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(2)


@pytest.mark.parametrize(
    "change",
    [step_unwatched, fused_unwatched, load_others, one_row, through_a_view, by_way_of_data, moments],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_a_change_that_comes_too_early_is_noticed(
    held_back: HeldBack, monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, Optimizer], None], when: str
) -> None:
    """Each save fails that could hold a mix; the next is made as usual."""
    model, optimizer = trained()
    model(torch.randn(8, 256)).square().mean().backward()
    store = MemoryStore()
    committing, changed = threading.Event(), threading.Event()
    require = LateCopies.require_unchanged

    def look(late: LateCopies) -> None:
        require(late)
        committing.set()
        assert changed.wait(20)

    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        if when == "after the copy":
            monkeypatch.setattr(LateCopies, "require_unchanged", look)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        if when == "after the copy":
            held_back.release.set()
            assert committing.wait(20)
        change(model, optimizer)
        changed.set()
        held_back.release.set()
        with pytest.raises(
            SaveFailedError, match=r"before_update\(\).*tensor='(model\.2\.|model\.0\.|optim\.)"
        ) as raised:
            checkpoints.wait()
        raised.value.reword({})  # as for a user of a framework, who has no such methods
        assert "committed. tensor=" in str(raised.value)
        assert not checkpoints.run.checkpoints()
        expected = clones(model, optimizer)
        checkpoints.save(2, {"model": model, "optim": optimizer})
        train(model, optimizer)
    assert equal(load(store), expected)


def test_other_values_that_are_put_in_for_a_while_are_noticed(held_back: HeldBack) -> None:
    """As averaged weights for an evaluation, by way of `.data`, which raises no counter."""
    model, optimizer = trained()
    weight = model[2].weight  # type: ignore[index]
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        trained_values = weight.detach().clone()
        weight.data.zero_()
        late = checkpoints._stager.late
        for key in list(late._waiting):
            late._make(key)
        weight.data.copy_(trained_values)
        held_back.release.set()
        with pytest.raises(SaveFailedError, match=r"tensor='(model\.2\.weight|optim\..*)'"):
            checkpoints.wait()


@pytest.mark.parametrize("change", [load_others, one_row, by_way_of_data], ids=lambda change: change.__name__)
def test_changes_after_before_update(held_back: HeldBack, change: Callable[[nn.Module, Optimizer], None]) -> None:
    model, optimizer = trained()
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        expected = clones(model, optimizer)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        checkpoints.before_update()
        change(model, optimizer)
        held_back.release.set()
    assert equal(load(store), expected)


def test_parameters_that_are_replaced(held_back: HeldBack) -> None:
    """The memory of the earlier ones is alive until it is copied."""
    model, optimizer = trained()
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        expected = clones(model, optimizer)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        model[0].weight = nn.Parameter(torch.zeros(256, 256))  # type: ignore[index]
        model[2].weight.data = torch.zeros(256, 256)  # type: ignore[index]
        optimizer.state.clear()
        gc.collect()
        held_back.release.set()
    assert equal(load(store), expected)


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16], ids=["double", "bfloat16"])
def test_other_memory_before_the_step(held_back: HeldBack, change: Callable[[nn.Module], nn.Module]) -> None:
    """A step that changes the new memory of a parameter changes nothing that is being copied."""
    model, optimizer = trained(SGD)
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        expected = clones(model, optimizer)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        for parameter in change(model).parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        held_back.release.set()
    assert equal(load(store), expected)


class Scaled:
    """Object that computes from its tensor when it is copied."""

    def __init__(self, weight: torch.Tensor, total: float = 0.0) -> None:
        self.weight, self.total = weight, total

    def __deepcopy__(self, memo: dict[int, Any]) -> Scaled:
        weight = copy.deepcopy(self.weight, memo)
        return Scaled(weight, float(weight.sum()))


def test_objects_that_compute_while_they_are_copied(held_back: HeldBack) -> None:
    weight = nn.Parameter(torch.ones(256, 256))
    optimizer = SGD([weight], lr=1.0)
    store = MemoryStore()
    with CheckpointManager(store, progress=False, allow_pickle=True) as checkpoints:
        checkpoints.watch(optimizer)
        for step in (1, 2):
            held_back.release.clear()
            checkpoints.save(step, {"weight": weight, "object": Scaled(weight.detach())})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            held_back.release.set()
            checkpoints.wait()
            assert load(store, step=step, allow_pickle=True)["object"].total == (2 - step) * 256 * 256


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_save_in_inference_mode(is_watched: bool) -> None:
    """As in an evaluation; the buffers are used again by saves outside of it."""
    model, optimizer = trained()
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        if is_watched:
            checkpoints.watch(optimizer)
        for step in (1, 2, 3):
            expected = clones(model, optimizer)
            with torch.inference_mode(step < 3):
                checkpoints.save(step, {"model": model, "optim": optimizer})
            train(model, optimizer)
            checkpoints.wait()
            assert equal(load(store, step=step), expected)


def test_a_forked_process_does_not_wait(held_back: HeldBack) -> None:
    """It has none of the threads: a lock that the thread of the save held is held for ever there."""
    model, optimizer = trained()
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        checkpoints.save(1, {"model": model, "optim": optimizer})
        late = checkpoints._stager.late
        with late._lock:
            child = os.fork()
            if child == 0:
                checkpoints.before_update()
                checkpoints._updates._before_step(optimizer, (), {})
                os._exit(7)
        seconds = 0.0
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and seconds < 20:
            time.sleep(0.05)
            seconds += 0.05
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        held_back.release.set()
    assert os.waitstatus_to_exitcode(ended[1]) == 7
    assert ended[0] == child


def test_before_update_of_a_watched_training_makes_no_other_state_late(held_back: HeldBack) -> None:
    """An optimizer that is made anew, and not watched."""
    model, optimizer = trained()
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        checkpoints.before_update()
        del optimizer
        gc.collect()
        other = SGD(model.parameters(), lr=0.1)
        checkpoints.save(1, {"model": model})
        train(model, other)
        held_back.release.set()


@pytest.mark.parametrize("has_number", [True, False])
def test_a_number_is_copied_at_once_with_the_memory_that_it_lies_in(held_back: HeldBack, has_number: bool) -> None:
    """Ranks send a digest of it with the question for the step, before the copies end."""
    large = torch.arange(2.0 * WEIGHT_BYTES)
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.before_update()
        checkpoints.save(1, {"large": large} | ({"number": large[7]} if has_number else {}), wait="begun")
        assert held_back.early_bytes == [large.nbytes] * has_number
        held_back.release.set()


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_watched", [True, False])
def test_foreach_operations_on_dtensors(held_back: HeldBack, mesh: Any, is_watched: bool) -> None:
    """They raise no version counter, and are noticed by the bytes that they change."""
    weight = nn.Parameter(distribute_tensor(torch.randn(256, 256), mesh, [Shard(0)]))
    optimizer = AdamW([weight], lr=0.1, foreach=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    versions = weight._version
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.before_update()
        if is_watched:
            checkpoints.watch(optimizer)
        assert isinstance(weight, DTensor)
        expected = weight.to_local().clone()
        checkpoints.save(1, {"weight": weight, "optim": optimizer.state[weight]["exp_avg"]})
        optimizer.step()
        assert weight._version == versions
        held_back.release.set()
        if not is_watched:
            with pytest.raises(SaveFailedError, match="before_update"):
                checkpoints.wait()
    if is_watched:
        assert torch.equal(load(store)["weight"], expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules, imported by `torch.compile`
def test_a_compiled_step(held_back: HeldBack) -> None:
    model, optimizer = trained()
    compiled = torch.compile(optimizer.step, backend="eager")
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)
        for step in (1, 2):
            held_back.release.clear()
            expected = clones(model, optimizer)
            checkpoints.save(step, {"model": model, "optim": optimizer})
            model(torch.randn(8, 256)).square().mean().backward()
            compiled()
            held_back.release.set()
            checkpoints.wait()
            assert equal(load(store, step=step), expected)


def test_tensors_without_a_version_are_copied_at_once(held_back: HeldBack) -> None:
    with torch.inference_mode():
        tensor = torch.ones(WEIGHT_BYTES // 4)
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.before_update()
        checkpoints.save(1, {"x": tensor})
        assert held_back.early_bytes == [WEIGHT_BYTES]
        held_back.release.set()


def test_a_save_that_cannot_begin_leaves_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started: the step that follows does not wait for ever, and the next save is right."""
    model, optimizer = trained()
    store = MemoryStore()
    with CheckpointManager(store, progress=False) as checkpoints:
        checkpoints.watch(optimizer)

        def refuse(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                checkpoints.save(1, {"model": model, "optim": optimizer})
        train(model, optimizer)
        expected = clones(model, optimizer)
        checkpoints.save(2, {"model": model, "optim": optimizer})
        train(model, optimizer)
    assert equal(load(store, step=2), expected)


def test_nothing_is_held_after_a_save(held_back: HeldBack) -> None:
    model, optimizer = trained()
    held_back.release.set()
    checkpoints = CheckpointManager(MemoryStore(), progress=False)
    checkpoints.watch(optimizer)
    checkpoints.save(1, {"model": model, "optim": optimizer})
    checkpoints.wait()
    held = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer
    gc.collect()
    assert not any(each() is not None for each in held)
    checkpoints.close()


def test_two_managers_and_a_closed_one(held_back: HeldBack) -> None:
    model, optimizer = trained()
    stores = [MemoryStore(), MemoryStore()]
    with CheckpointManager(stores[0], progress=False) as one:
        with CheckpointManager(stores[1], progress=False) as two:
            expected = clones(model, optimizer)
            for checkpoints in (one, two):
                checkpoints.watch(optimizer)
                checkpoints.save(1, {"model": model, "optim": optimizer})
            train(model, optimizer)
            held_back.release.set()
        train(model, optimizer)
        two.before_update()
    assert all(equal(load(store), expected) for store in stores)
    assert not optimizer._optimizer_step_pre_hooks


class Wrapper(Optimizer):
    """Optimizer around another, as of accelerate."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_watch_takes_optimizers_and_wrappers_of_them() -> None:
    _, optimizer = trained()
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        checkpoints.watch(Wrapper(optimizer))
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        for wrong in (nn.Linear(1, 1), Wrapper(None)):  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match=r"before_update\(\)"):
                checkpoints.watch(wrong)  # type: ignore[arg-type]


def test_lack_of_memory_is_said_before(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(staging, "available_memory_bytes", lambda: 5 * 1024)
    with CheckpointManager(MemoryStore(), progress=False) as checkpoints:
        state = {"x": torch.ones(1000), "y": torch.ones(1000)}
        checkpoints.save(1, state)
        assert "needs 7.8 KiB of memory, and 5.0 KiB is free" in caplog.text
        caplog.clear()
        checkpoints.save(2, state)  # into the same memory
    assert "memory" not in caplog.text
