"""States of trainings on real ranks: saved under one wrapper, restored under another at another world size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.optim import AdamW
from torch.utils import _pytree as pytree

from dcp_remote import PerRank, RandomStates, training_state
from dcp_remote.errors import DcpRemoteError
from dcp_remote.saving import late_copies
from dcp_remote.saving.late_copies import Copy, LateCopies
from tests.distributed.managed import managing
from tests.support.rank_pool import RankPool
from tests.support.rank_threads import counted_rounds
from tests.support.training import STRATEGIES, Leaves, Transformer, assert_same, full, gathered

PAIR = (0, 1)


def compiled(model: Transformer) -> nn.Module:
    """DDP below torch.compile, whose names have two prefixes."""
    return torch.compile(STRATEGIES["ddp-2"].parallelize(model), backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[Transformer], nn.Module]] = {
    "fsdp": STRATEGIES["fsdp-3"].parallelize,
    "ddp": STRATEGIES["ddp-2"].parallelize,
    "tp": STRATEGIES["tp-2"].parallelize,
    "compiled": compiled,
    "plain": STRATEGIES["plain"].parallelize,
}


def older_fsdp(model: Transformer) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def parts(wrapper: str, seed: int, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model, its optimizer with two groups, and the state; the states are bare on one wrapper."""
    torch.manual_seed(seed)
    model = (WRAPPERS | {"older fsdp": older_fsdp})[wrapper](Transformer())
    named = list(model.named_parameters())
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    others = [parameter for name, parameter in named if not name.endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": biases, "weight_decay": 0.0}, {"params": others}]
    optimizer = AdamW(groups, lr=0.01 / seed, foreach=False)
    for _ in range(steps):
        model(torch.zeros(1, 5, dtype=torch.int64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    bare = {"model": model, "optim": optimizer, "random": PerRank(RandomStates())}
    return model, optimizer, bare if wrapper == "ddp" else training_state(model=model, optimizer=optimizer)


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Leaves:
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    return full(gathered({key: value.state_dict() for key, value in state.items()}))


def save(wrapper: str, url: str, steps: int) -> Leaves:
    """Save in the background after some steps; return the whole state."""
    model, optimizer, state = parts(wrapper, 1, steps=steps)
    with managing(url) as checkpoints:
        checkpoints.save(1, state)
    assert bool(optimizer.state) == bool(steps)
    return whole_state(model, optimizer) if steps else {}


def restore(wrapper: str, url: str, steps: int) -> Leaves:
    """Restore into a fresh optimizer, in three rounds, and four under the older FSDP; return the whole state."""
    model, optimizer, state = parts(wrapper, 2, steps=0)
    with managing(url) as checkpoints, counted_rounds(dist.get_rank()) as rounds:
        assert checkpoints.restore(state) == 1
    assert rounds == {"the restore": 4 if wrapper == "older fsdp" else 3}
    assert bool(optimizer.state) == bool(steps)
    return whole_state(model, optimizer) if steps else {}


@pytest.fixture(scope="module", autouse=True)
def started(rank_pool: RankPool) -> None:
    """Start all ranks at once, where one that imports torch alone would keep others waiting."""
    rank_pool.run(dist.get_rank)


def test_another_wrapper_and_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """Save by FSDP2 on two ranks; restore a bare state under DDP, and by FSDP2 on three: names and bits stay."""
    url = tmp_path.as_uri()
    expected = rank_pool.run(save, "fsdp", url, 2, ranks=PAIR)[0]
    for loader, ranks in (("ddp", PAIR), ("fsdp", (0, 1, 2))):
        for found in rank_pool.run(restore, loader, url, 2, ranks=ranks):
            assert_same(found, expected, loader)


def test_the_older_fsdp(rank_pool: RankPool, tmp_path: Path) -> None:
    """Its states are taken by collectives of torch, so that ranks meet once more."""
    rank_pool.run(save, "older fsdp", tmp_path.as_uri(), 2, ranks=PAIR)
    rank_pool.run(restore, "older fsdp", tmp_path.as_uri(), 2, ranks=PAIR)


@pytest.mark.torture(smoke=False)
@pytest.mark.parametrize("saver", WRAPPERS)
def test_any_wrapper_and_world_size(saver: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Save by each wrapper, restore by each, on one to three ranks."""
    url = tmp_path.as_uri()
    expected = rank_pool.run(save, saver, url, 2, ranks=range(1) if saver == "plain" else PAIR)[0]
    for loader, ranks in {"fsdp": 3, "ddp": 2, "tp": 2, "compiled": 3, "plain": 1}.items():
        for found in rank_pool.run(restore, loader, url, 2, ranks=range(ranks)):
            assert_same(found, expected, f"{saver} {loader}")


def test_before_the_first_step(rank_pool: RankPool, tmp_path: Path) -> None:
    """Save an FSDP2 training without a step: the optimizer is empty afterwards, and after a restore by three ranks."""
    url = tmp_path.as_uri()
    rank_pool.run(save, "fsdp", url, 0, ranks=PAIR)
    rank_pool.run(restore, "fsdp", url, 0, ranks=(0, 1, 2))


# ---- copies that end later


def save_while_training(wrapper: str, url: str) -> tuple[Leaves, int]:
    """Train on before the thread of a save copies anything; return the state at the save, and the late copies."""
    model, optimizer, state = parts(wrapper, 1, steps=1)
    at_save = whole_state(model, optimizer)
    stepped, copies = threading.Event(), list[Copy]()
    finish = LateCopies.finish

    def finish_late(late: LateCopies) -> None:
        assert stepped.wait(60)
        finish(late)

    def begin(late: LateCopies, of_state: Sequence[Copy]) -> None:
        copies.extend(of_state)
        usual_begin(late, of_state)

    usual_begin = LateCopies.begin
    with pytest.MonkeyPatch.context() as patched, managing(url) as checkpoints:
        patched.setattr(late_copies, "_LATE_BYTES_MIN", 1)
        patched.setattr(LateCopies, "finish", finish_late)
        patched.setattr(LateCopies, "begin", begin)
        checkpoints.watch(optimizer)
        checkpoints.save(1, state)
        for _ in range(2):
            model(torch.zeros(1, 5, dtype=torch.int64)).square().mean().backward()
            optimizer.step()
        stepped.set()
    return at_save, len(copies)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp", "tp", "older fsdp"])
def test_training_goes_on_while_the_state_is_copied(wrapper: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """The checkpoint holds the state at the save, on ranks that step before their copies have begun.

    The older FSDP returns copies as its state, which no optimizer owns: these are copied before `save` returns.
    """
    url = tmp_path.as_uri()
    saved = rank_pool.run(save_while_training, wrapper, url, ranks=PAIR)
    assert {bool(copies) for _, copies in saved} == {wrapper != "older fsdp"}
    for found in rank_pool.run(restore, wrapper, url, 1, ranks=PAIR):
        assert_same(found, saved[0][0], wrapper)


# ---- the older FSDP


def fsdp1(seed: int, *, steps: int) -> dict[str, Any]:
    """Layers so small that of three ranks some own nothing of a tensor."""
    torch.manual_seed(seed)
    cpu = torch.device("cpu")
    inner = FullyShardedDataParallel(nn.Linear(2, 2), device_id=cpu, use_orig_params=True)
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)), device_id=cpu, use_orig_params=True)
    optimizer = AdamW(model.parameters(), lr=0.01 / seed)
    for _ in range(steps):
        model(torch.ones(1, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return training_state(model=model, optimizer=optimizer, random_states=False)


def through_fsdp1(url: str, saves: bool) -> Leaves:
    """Save after a step, or restore into a fresh training; return the whole state."""
    state = fsdp1(1 if saves else 2, steps=1 if saves else 0)
    with managing(url) as checkpoints:
        if saves:
            checkpoints.save(1, state, wait=True)
        else:
            checkpoints.restore(state)
    return full(gathered({key: value.state_dict() for key, value in state.items()}))


@pytest.mark.filterwarnings("ignore")
def test_the_older_fsdp_where_a_rank_owns_nothing(rank_pool: RankPool, tmp_path: Path) -> None:
    """Save on two ranks, restore on three: the states are equal, groups included."""
    url = tmp_path.as_uri()
    expected = rank_pool.run(through_fsdp1, url, True, ranks=PAIR)[0]
    for found in rank_pool.run(through_fsdp1, url, False, ranks=(0, 1, 2)):
        assert_same(found, expected)


def optimizer_of(state: dict[str, Any]) -> AdamW:
    optimizer: AdamW = state["optim"]._optimizers[0]
    return optimizer


def restore_fsdp1_in_part(url: str, exclude: str) -> tuple[int, float, float]:
    """Restore into a fresh training but for states; return their number, the learning rate, and steps after a step."""
    state = fsdp1(2, steps=0)
    with managing(url) as checkpoints:
        checkpoints.restore(state, exclude=exclude)
    optimizer = optimizer_of(state)
    found = len(optimizer.state), float(optimizer.param_groups[0]["lr"])
    state["model"].model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
    return (*found, max(float(inner["step"]) for inner in optimizer.state.values()))


def save_fresh(url: str, kind: str) -> int:
    """Save a training before its first step, with a scheduler; return the number of states that its optimizer has."""
    if kind == "plain":
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        state = training_state(model=model, optimizer=AdamW(model.parameters(), lr=0.25), random_states=False)
    else:
        state = fsdp1(1, steps=0)
    torch.optim.lr_scheduler.StepLR(optimizer_of(state), 1)
    with managing(url) as checkpoints:
        checkpoints.save(1, state, wait=True)
    return len(optimizer_of(state).state)


def restore_stateless(url: str) -> tuple[int, float]:
    state = fsdp1(2, steps=1)
    with managing(url) as checkpoints:
        checkpoints.restore(state)
    return len(optimizer_of(state).state), optimizer_of(state).param_groups[0]["initial_lr"]


@pytest.mark.filterwarnings("ignore")
def test_the_older_fsdp_makes_no_states_that_are_not_loaded(rank_pool: RankPool, tmp_path: Path) -> None:
    """Exclude the states, save before the first step, restore a checkpoint without states: the optimizer has none."""
    trained, fresh, plain = ((tmp_path / name).as_uri() for name in ("trained", "fresh", "plain"))
    rank_pool.run(through_fsdp1, trained, True, ranks=PAIR)
    assert set(rank_pool.run(restore_fsdp1_in_part, trained, "optim.*", ranks=PAIR)) == {(0, 0.005, 1.0)}
    assert set(rank_pool.run(restore_fsdp1_in_part, trained, "optim.state.*", ranks=PAIR)) == {(0, 0.01, 1.0)}
    assert rank_pool.run(save_fresh, fresh, "fsdp1", ranks=PAIR) == [0, 0]
    rank_pool.run(save_fresh, plain, "plain", ranks=range(1))
    assert rank_pool.run(restore_stateless, plain, ranks=PAIR) == [(0, 0.25)] * 2


def through_evaluation(url: str) -> Any:
    """Save, or restore if there is a checkpoint, right after an evaluation; return model and optimizer, whole."""
    torch.manual_seed(dist.get_world_size())
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not any(isinstance(parameter, DTensor) for parameter in model[0].parameters())  # the root's
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    with managing(url) as checkpoints:
        if checkpoints.restore(state) is None:
            checkpoints.save(1, state, wait=True)
    return full({"model": state["model"].state_dict(), "optim": state["optim"].state_dict()})


def test_a_save_after_an_evaluation(rank_pool: RankPool, tmp_path: Path) -> None:
    """After a forward pass alone, FSDP2's root module has whole parameters, which no optimizer has."""
    url = tmp_path.as_uri()
    saved = rank_pool.run(through_evaluation, url, ranks=PAIR)[0]
    for found in rank_pool.run(through_evaluation, url, ranks=(0, 1, 2)):
        assert_same(found, saved)


# ---- parameters with other names


def through_renamed(url: str, name: str) -> Any:
    """Save a sharded training, or restore it into a layer of another name; return the optimizer's whole state."""
    torch.manual_seed(len(name))
    model = nn.Sequential(OrderedDict([(name, nn.Linear(4, 3)), ("body", nn.Linear(3, 4))]))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = AdamW(model.parameters(), foreach=False)
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    with managing(url) as checkpoints:
        if name == "head":
            checkpoints.restore(state, rename={"model.old": "model.head"})
        else:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            checkpoints.save(1, state, wait=True)
    return full({"optim": state["optim"].state_dict()})


def test_a_renamed_layer_on_other_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    """Save on two ranks, restore on three under another name: the states of the optimizer are those of the layer."""
    url = tmp_path.as_uri()
    saved = rank_pool.run(through_renamed, url, "old", ranks=PAIR)[0]
    expected = {name.replace("old.", "head."): value for name, value in saved.items() if ".state." in name}
    for found in rank_pool.run(through_renamed, url, "head", ranks=(0, 1, 2)):
        assert_same({name: value for name, value in found.items() if ".state." in name}, expected)


# ---- states of another dtype than their parameters


class Moments(torch.optim.Optimizer):
    """Optimizer with moments of fp32, and counts of int64, over any weights."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["count"] = torch.tensor(1_000_000)
                state["moment"] += parameter.grad.float() / 3
                state["count"] += 1
                parameter.sub_(state["moment"], alpha=self.param_groups[0]["lr"])


def moments(wrapper: str, url: str, saves: bool) -> tuple[Leaves, dict[str, torch.dtype]]:
    """Save a bf16 training after two steps, or restore into a fresh one; return its whole states, and their dtypes."""
    torch.manual_seed(1 if saves else 2)
    linear = nn.Linear(4, 6, bias=False).bfloat16()
    if wrapper == "fsdp1":
        model: Any = FullyShardedDataParallel(linear, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = fully_shard(linear, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Moments(model.parameters())
    for _ in range(2 if saves else 0):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = training_state(model=model, optimizer=optimizer, random_states=False)
    with managing(url) as checkpoints:
        if saves:
            checkpoints.save(1, state, wait=True)
        else:
            assert checkpoints.restore(state) == 1
    dtypes = {key: value.dtype for one in optimizer.state.values() for key, value in one.items()}
    return full(gathered({"optim": state["optim"].state_dict()})), dtypes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrapper", ["fsdp", "fsdp1"])
def test_states_keep_their_dtypes_when_they_are_resharded(wrapper: str, rank_pool: RankPool, tmp_path: Path) -> None:
    """Save fp32 moments of bf16 weights on two ranks, restore on three."""
    url = tmp_path.as_uri()
    expected, _ = rank_pool.run(moments, wrapper, url, True, ranks=PAIR)[0]
    for found, dtypes in rank_pool.run(moments, wrapper, url, False, ranks=(0, 1, 2)):
        assert_same(found, expected)
        assert dtypes == {"moment": torch.float32, "count": torch.int64}


class Weight(torch.Tensor):
    """Wrapper of a weight that changes how it is multiplied, as torchao's for float8 training under FSDP."""

    __module__ = "torchao.float8"
    elements: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["elements"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no func
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*pytree.tree_map_only(cls, lambda one: one.elements, args), **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, wrap, found)


def wrap(elements: torch.Tensor) -> Any:
    made: Any = torch.Tensor._make_wrapper_subclass(
        Weight, elements.shape, dtype=elements.dtype, strides=elements.stride()
    )
    made.elements = elements
    return made


def wrapped_weights(url: str, of: str) -> list[torch.Tensor]:
    """Save sharded weights of a wrapper class, and restore them into such ones, and into plain ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(fill: float, *, is_wrapped: bool) -> dict[str, Any]:
        elements = torch.arange(6.0).reshape(3, 2) * fill + dist.get_rank()
        local = wrap(elements) if is_wrapped else elements
        model = nn.Module()
        model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        return {"model": model if of == "module" else {"weight": model.weight.detach()}}

    def elements_of(state: dict[str, Any]) -> torch.Tensor:
        model: Any = state["model"]
        weight: Any = model.weight if isinstance(model, nn.Module) else model["weight"]
        local = weight.detach()._local_tensor
        elements: torch.Tensor = getattr(local, "elements", local)
        return elements

    found = []
    with managing(url) as checkpoints:
        checkpoints.save(1, state(1.0, is_wrapped=True), wait=True)
        for is_wrapped in (True, False):
            restored = state(0.0, is_wrapped=is_wrapped)
            checkpoints.restore(restored)
            found.append(elements_of(restored))
    return found


@pytest.mark.parametrize("of", ["module", "dict"])
def test_a_weight_in_a_wrapper_is_saved_as_its_elements(of: str, rank_pool: RankPool, tmp_path: Path) -> None:
    for rank, found in enumerate(rank_pool.run(wrapped_weights, tmp_path.as_uri(), of, ranks=PAIR)):
        for elements in found:
            assert torch.equal(elements, torch.arange(6.0).reshape(3, 2) + rank)


def refuse_partial(url: str) -> list[str]:
    """Save, also as a module's buffer, and restore into, a DTensor with a Partial placement; return the messages."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    with managing(url) as checkpoints:
        checkpoints.save(1, {"x": {"w": torch.ones(4)}}, wait=True)
        partial = {"x": {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}}
        module = nn.Module()
        module.register_buffer("w", partial["x"]["w"])
        calls: list[Callable[[], object]] = [
            lambda: checkpoints.save(2, partial, wait=True),
            lambda: checkpoints.save(2, {"x": module}, wait=True),
            lambda: checkpoints.restore(partial),
        ]
        for call in calls:
            with pytest.raises(DcpRemoteError) as caught:
                call()
            found.append(str(caught.value))
    return found


def test_a_partial_placement_is_refused_by_name(rank_pool: RankPool, tmp_path: Path) -> None:
    for messages in rank_pool.run(refuse_partial, tmp_path.as_uri(), ranks=PAIR):
        assert all("redistribute" in message and "x.w" in message for message in messages)
