"""`RemoteLoadPlanner` in `dcp.load`, on simulated ranks: one error for all that does not fit, selection, other names.

The stores are in memory and record their requests.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_remote import CheckpointManager, PerRank, RemoteLoadPlanner, RemoteReader, RemoteWriter, load
from dcp_remote.errors import InvalidArgumentError, StateMismatchError
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from dcp_remote.loading.state_check import StateCheck
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.loading.test_chunks_of_metadata import manifest_of
from tests.support.simulated_ranks import assembled, load_as_ranks, save_as_ranks, shard
from tests.support.states import equal

State = dict[str, Any]


def saved_state() -> State:
    return {
        "model": {"embed": torch.ones(4, 3), "lm_head": torch.ones(2, 3), "norm": torch.ones(3)},
        "optim": {"lm_head": {"m": torch.ones(2, 3)}, "lr": 0.1},
        "step": 7,
    }


def blank_state() -> State:
    return {
        "model": {"embed": torch.zeros(4, 3), "lm_head": torch.zeros(2, 3), "norm": torch.zeros(3)},
        "optim": {"lm_head": {"m": torch.zeros(2, 3)}, "lr": 0.0},
        "step": 0,
    }


@pytest.fixture
def store() -> RecordingStore:
    made = RecordingStore(MemoryStore())
    dcp.save(saved_state(), storage_writer=RemoteWriter(made))
    made.clear()
    return made


def load_by(store: RecordingStore, *states: State, **options: Any) -> None:
    load_as_ranks(states, lambda: RemoteReader(store), lambda: RemoteLoadPlanner(**options))


def misfit() -> State:
    """Return a state in which one value of each kind does not fit."""
    return {
        "model": {"embed": torch.zeros(5, 3), "head": torch.zeros(2, 3), "norm": torch.zeros(3, dtype=torch.float64)},
        "optim": {"lm_head": {}, "lr": torch.zeros(1)},
        "step": 0,
        "epoch": 0,
    }


MESSAGE = """\
The checkpoint does not fit the state; nothing was loaded.
2 values missing in the checkpoint: model.head (near: model.lm_head); epoch
2 values unexpected, not in the state: model.lm_head; optim.lm_head.m
optim.lm_head is empty in the state, and the checkpoint has 1 value below it.
1 value of another shape: model.embed (saved: (4, 3), state: (5, 3))
1 value of another dtype: model.norm (saved: float32, state: float64)
1 value of another kind: optim.lr (saved: an object, state: a tensor)
Options: missing="keep" keeps what the state has; unexpected="ignore" leaves out what the state lacks; \
rename={"name in the checkpoint": "name in the state"} takes names or their first parts; \
dtype="convert" converts to the dtypes of the state; exclude="pattern" leaves values as they are, \
whether saved or not."""


def test_all_that_does_not_fit_is_one_error(store: RecordingStore) -> None:
    """The error lists and counts everything, with URL; nothing but the manifest was read, and nothing has changed."""
    state = misfit()
    with pytest.raises(StateMismatchError) as caught:
        load_by(store, state)
    assert caught.value.message == MESSAGE
    counts = {"missing": 2, "unexpected": 2, "shapes": 1, "dtypes": 1, "kinds": 1}
    assert caught.value.details == {"url": store.url, "step": None} | counts
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert store.calls == [("get", "manifest.json")]
    assert equal(state, misfit())


def test_ranks_that_differ(store: RecordingStore) -> None:
    """Only what no rank has a value for is unexpected; what one rank lacks is an error of all, and names that rank."""
    first, second = blank_state(), blank_state()
    del first["optim"], second["model"]
    load_by(store, first, second)
    assert equal(first | {"optim": second["optim"]}, saved_state())
    second["epoch"] = 0
    del second["optim"]["lr"]
    with pytest.raises(StateMismatchError) as caught:
        load_by(store, first, second, {"step": 0})
    assert {name: value for name, value in caught.value.details.items() if value is not None} == {
        "url": store.url,
        "missing": 1,
        "unexpected": 1,
        "rank": 1,
    }
    assert "missing in the checkpoint: epoch" in caught.value.what
    assert "not in the state: optim.lr" in caught.value.what


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"exclude": "*lm_head*"}, {"model.lm_head", "optim.lm_head.m"}),
        ({"include": ["model.*", "step"]}, {"optim.lm_head.m", "optim.lr"}),
        ({"include": "model.*", "exclude": "model.norm"}, {"model.norm", "optim.lm_head.m", "optim.lr", "step"}),
    ],
)
def test_what_is_not_chosen_stays(store: RecordingStore, options: dict[str, Any], kept: set[str]) -> None:
    """Leave out entries of any shape: they are neither missing nor unexpected, and are not read."""
    state = blank_state()
    state["model"]["lm_head"] = torch.zeros(5, 3) if "model.lm_head" in kept else torch.zeros(2, 3)
    load_by(store, state, **options)
    assert equal(state["model"]["embed"], torch.ones(4, 3))
    for name, value in flatten_state_dict(state)[0].items():
        is_blank = not value.any() if isinstance(value, torch.Tensor) else value == 0
        assert is_blank == (name in kept), name


def test_missing_and_unexpected_values_by_request(store: RecordingStore) -> None:
    """With both options a state of other names keeps its own values and gets those that it has."""
    state: State = {"model": {"embed": torch.zeros(4, 3), "adapter": torch.full((2,), 5.0)}, "epoch": 3}
    load_by(store, state, missing="keep", unexpected="ignore")
    model = {"embed": torch.ones(4, 3), "adapter": torch.full((2,), 5.0)}
    assert equal(state, {"model": model, "epoch": 3})
    with pytest.raises(StateMismatchError, match="No value of the state would be loaded"):
        load_by(store, {"net": {"embed": torch.zeros(4, 3)}}, missing="keep", unexpected="ignore")


def test_empty_dicts_in_lists() -> None:
    """An empty dict in a list, which torch's planner takes for a value, is none; a name that looks like it is."""
    store = RecordingStore(MemoryStore())
    dcp.save({"l": [{}, {"w": torch.ones(1)}], "a": {"b": {}}, "a.b": 1}, storage_writer=RemoteWriter(store))
    state: State = {"l": [{}, {"w": torch.zeros(1)}], "a": {"b": {}}, "a.b": 0}
    load_by(store, state)
    assert equal(state, {"l": [{}, {"w": torch.ones(1)}], "a": {"b": {}}, "a.b": 1})


def test_values_without_memory_cannot_be_kept(store: RecordingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on the meta device has no value that could stay; it is listed."""
    # torch asks the process group on which device to allocate, and there is none.
    monkeypatch.setattr(dist.distributed_c10d, "_get_pg_default_device", lambda: torch.device("cpu"))
    state = blank_state()
    state["model"]["adapter"] = torch.zeros(2, device="meta")
    with pytest.raises(StateMismatchError, match=r"meta device, with no value to keep: model\.adapter"):
        load_by(store, state, missing="keep")
    filled = blank_state()
    filled["model"]["embed"] = torch.zeros(4, 3, device="meta")
    load_by(store, filled, missing="keep")
    assert equal(filled, saved_state())


def test_what_a_load_keeps_and_leaves_out_is_logged(store: RecordingStore, caplog: pytest.LogCaptureFixture) -> None:
    """Load by `dcp.load` on two ranks: the coordinator alone warns, with counts and names."""
    state = {"model": {"embed": torch.zeros(4, 3), "adapter": torch.zeros(2)}}
    load_by(store, state, copy.deepcopy(state), missing="keep", unexpected="ignore")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    expected = (
        f"Load of {store.url}: Kept 1 value that the checkpoint lacks: model.adapter. Left out 5 values of the "
        "checkpoint: model.lm_head; model.norm; optim.lm_head.m; optim.lr; step."
    )
    assert warnings == [expected]


def test_renamed(store: RecordingStore) -> None:
    """Values are read into the names of the state: tensors in place, objects too; sharded ones from each rank."""
    state = blank_state()
    state["net"] = state.pop("model")
    state["n"] = state.pop("step")
    embed = state["net"]["embed"]
    load_by(store, state, rename={"model": "net", "step": "n"})
    expected = saved_state()
    assert equal(state, {"optim": expected["optim"], "net": expected["model"], "n": 7})
    assert state["net"]["embed"] is embed

    whole = torch.randn(5, 7)
    sharded = RecordingStore(MemoryStore())
    save_as_ranks([{"a": part} for part in shard(whole, 3, (3, 1))], lambda: RemoteWriter(sharded))
    states = [{"b": part} for part in shard(torch.zeros(5, 7), 2, (1, 2))]
    load_by(sharded, *states, rename=lambda name: {"a": "b"}[name])
    assert torch.equal(assembled(states, "b"), whole)


def test_other_dtypes(store: RecordingStore) -> None:
    """A tensor of another dtype is refused, or converted as `copy_` does; torch's planner converts as ever."""
    state = blank_state()
    state["model"]["embed"] = torch.zeros(4, 3, dtype=torch.bfloat16)
    with pytest.raises(StateMismatchError, match=r"another dtype: model\.embed \(saved: float32, state: bfloat16\)"):
        load_by(store, state)
    for planner in (RemoteLoadPlanner(dtype="convert"), DefaultLoadPlanner()):
        state["model"]["embed"].zero_()
        dcp.load(state, storage_reader=RemoteReader(store), planner=planner)
        assert equal(state["model"]["embed"], torch.ones(4, 3, dtype=torch.bfloat16))


KEEPING = [
    (torch.tensor([3], dtype=torch.int8), torch.int64),
    (torch.tensor([3]), torch.float32),
    (torch.tensor([True]), torch.int64),
    (torch.tensor([3.0]), torch.complex64),
    (torch.tensor([3.0]), torch.float8_e4m3fn),
]
LOSING = [
    (torch.tensor([1.5]), torch.int64),
    (torch.tensor([0.3]), torch.bool),
    (torch.tensor([1 + 2j]), torch.float32),
    (torch.tensor([300]), torch.int8),
    (torch.tensor([-1]), torch.uint64),
]


@pytest.mark.parametrize(
    ("saved", "dtype", "is_kept"), [*((*one, True) for one in KEEPING), *((*one, False) for one in LOSING)]
)
def test_conversions(saved: torch.Tensor, dtype: torch.dtype, *, is_kept: bool) -> None:
    """`dtype="convert"` widens integers, and rounds; what loses more is refused, and the option is not advised."""
    store = RecordingStore(MemoryStore())
    save_as_ranks([{"a": saved}], lambda: RemoteWriter(store))
    state = {"a": torch.zeros(1, dtype=dtype)}
    if is_kept:
        load_by(store, state, dtype="convert")
        assert equal(state["a"], saved.to(dtype))
        return
    for options in ({}, {"dtype": "convert"}):
        with pytest.raises(StateMismatchError, match="cannot hold such values") as caught:
            load_by(store, state, **options)
        assert "dtype=" not in caught.value.what
    assert not state["a"].any()


@pytest.mark.parametrize(("option", "pattern"), [("include", "modle.*"), ("exclude", "model.lm_haed")])
def test_a_pattern_that_matches_nothing(store: RecordingStore, option: str, pattern: str) -> None:
    """It is refused with similar names, unless it matches something on another rank."""
    with pytest.raises(InvalidArgumentError, match="nor the state") as caught:
        load_by(store, blank_state(), **{option: pattern})
    assert caught.value.details["key"] == pattern
    assert caught.value.details["top_level"] == "model, optim, step"
    load_by(store, blank_state(), blank_state() | {"own": 1}, exclude="own")


def test_options_of_a_reader_need_its_planner(store: RecordingStore) -> None:
    """With any other planner a load with options is refused; without options any planner may be used."""
    reader = RemoteReader(store, exclude="*lm_head*")
    for planner in (None, DefaultLoadPlanner(), RemoteLoadPlanner()):
        with pytest.raises(CheckpointException, match=r"reader\.planner\(\)"):
            dcp.load(blank_state(), storage_reader=reader, planner=planner)
    state = blank_state()
    state["model"]["lm_head"] = torch.zeros(9, 3)
    for _ in range(2):
        dcp.load(state, storage_reader=reader, planner=reader.planner())
    assert equal(state["model"]["embed"], torch.ones(4, 3))
    dcp.load(blank_state(), storage_reader=RemoteReader(store), planner=RemoteLoadPlanner())
    with pytest.raises(InvalidArgumentError, match="missing"):
        RemoteReader(store, missing="none")  # type: ignore[arg-type]  # that is the test


def test_ranks_with_planners_of_several_classes(store: RecordingStore) -> None:
    """They are refused by the coordinator."""
    planners = iter([RemoteLoadPlanner(), DefaultLoadPlanner()])
    with pytest.raises(InvalidArgumentError, match="planner"):
        load_as_ranks([blank_state(), blank_state()], lambda: RemoteReader(store), lambda: next(planners))


def test_values_of_single_ranks_in_a_run() -> None:
    """A plain `dcp.load` from a run cannot take `PerRank` values, and is told of them."""
    store = RecordingStore(MemoryStore())
    with CheckpointManager(store) as checkpoints:
        checkpoints.save(4, {"w": torch.ones(2), "own": PerRank(1)}, wait=True)
    with pytest.raises(StateMismatchError, match=r"not in the state: per_rank\.0\.own") as caught:
        load_by(store, {"w": torch.zeros(2)})
    assert caught.value.details["step"] == 4
    state = {"w": torch.zeros(2)}
    load_by(store, state, exclude="per_rank.*")
    assert equal(state, {"w": torch.ones(2)})


# ---- scale


def test_what_a_rank_sends_is_small() -> None:
    """A rank that has one tensor of 2,000 sends a bitmap of them, not their names."""
    manifest = manifest_of([((2,), (1,))] * 2_000)

    def plan_of(state: State) -> LoadPlan:
        planner = RemoteLoadPlanner()
        planner.set_up_planner(state, to_dcp_metadata(manifest), is_coordinator=True)
        return planner.create_local_plan()

    plan = plan_of({"t7": torch.zeros(2)})
    assert isinstance(plan.planner_data, StateCheck)
    assert not plan.planner_data.is_plain
    assert len(pickle.dumps(plan.planner_data)) < 450
    whole = plan_of({f"t{n}": torch.zeros(2) for n in range(2_000)})
    assert whole.planner_data.is_plain


def test_the_message_is_bounded_and_printable() -> None:
    """Show ten of thousands of names, cut and escaped, and count the rest."""
    store = RecordingStore(MemoryStore())
    dcp.save({f"layer{n}" + "\x1b[31m" + "x" * 999: n for n in range(1200)}, storage_writer=RemoteWriter(store))
    with pytest.raises(StateMismatchError) as caught:
        load_by(store, {f"other{n}": torch.zeros(1) for n in range(1100)})
    assert len(str(caught.value)) < 6_000
    assert str(caught.value).replace("\n", "").isprintable()
    assert re.search(
        r"^1000 values or more missing in the checkpoint: other0; .*; and 990 more$", caught.value.what, re.MULTILINE
    )
    assert caught.value.details["unexpected"] == 1200


# ---- load


def test_load_with_the_same_options(store: RecordingStore) -> None:
    """`include` is `keys`; patterns take new names; empty dicts and objects are renamed with the rest."""
    expected = saved_state()
    found = load(store, include="net.*", exclude="*norm", rename={"model": "net"})
    assert equal(found, {"net": {name: expected["model"][name] for name in ("embed", "lm_head")}})
    assert load(store, include=["n"], rename={"step": "n"}) == {"n": 7}
    by_itself = RecordingStore(MemoryStore())
    with CheckpointManager(by_itself) as checkpoints:
        state = {"a": {"x.y": torch.ones(1), "e": {}, "l": [torch.ones(1), {"b": 1}]}}
        checkpoints.save(1, state, wait=True)
    assert equal(load(by_itself, rename={"a": "b.c"}), {"b.c": state["a"]})
    assert equal(load(by_itself, rename={"a.x": "a.z"}, exclude="a.l*"), {"a": {"z.y": torch.ones(1), "e": {}}})
    for wrong, options in (
        ("key='model.*'", {"include": "model.*", "rename": {"model": "net"}}),
        ("two names", {"include": "model.*", "keys": "model.*"}),
        ("one name", {"rename": {"optim.lr": "step"}}),
        ("entry='optim.lr' other='step'", {"rename": {"optim.lr": "step.x"}}),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            load(store, **options)
        assert wrong in str(caught.value)


def test_load_converts_floating_point_tensors() -> None:
    """`dtype` applies to floating-point tensors, sparse ones too; others, and all without it, stay as they were."""
    store = RecordingStore(MemoryStore())
    state = {
        "w": torch.tensor([1.5, 2.0]),
        "b": torch.zeros(2).half(),
        "n": torch.tensor([1]),
        "s": torch.eye(2).to_sparse(),
    }
    dcp.save(state, storage_writer=RemoteWriter(store))
    found = load(store, dtype=torch.bfloat16)
    assert {name: value.dtype for name, value in found.items()} == {
        "w": torch.bfloat16,
        "b": torch.bfloat16,
        "n": torch.int64,
        "s": torch.bfloat16,
    }
    assert torch.equal(found["w"].float(), state["w"])
    assert torch.equal(found["s"].to_dense().float(), torch.eye(2))
    for wrong in (torch.int64, "bfloat16"):
        with pytest.raises(InvalidArgumentError, match="dtype"):
            load(store, dtype=wrong)  # type: ignore[arg-type]  # that is the test


def test_keys_that_are_no_text() -> None:
    """Objects come back under the keys of the state, beside which torch's planner puts others of text."""
    memory = MemoryStore()
    dcp.save({"optim": {0: {"step": 5}, 1: [{2: "b"}]}}, storage_writer=RemoteWriter(memory))
    state: State = {"optim": {0: {"step": 0}, 1: [{2: ""}]}}
    load_as_ranks([state], lambda: RemoteReader(memory), RemoteLoadPlanner)
    assert state == {"optim": {0: {"step": 5}, 1: [{2: "b"}]}}


def test_an_empty_dict_with_the_name_of_a_value() -> None:
    """A key has a dot, and an empty dict the same keys apart: the value comes back where it was."""
    memory = MemoryStore()
    dcp.save({"m": {"a.b": 5, "a": {"b": {}}}}, storage_writer=RemoteWriter(memory))
    state: State = {"m": {"a.b": 0, "a": {"b": {}}}}
    load_as_ranks([state], lambda: RemoteReader(memory), RemoteLoadPlanner)
    assert state == {"m": {"a.b": 5, "a": {"b": {}}}}


def test_a_mapping_that_is_no_dict(store: RecordingStore) -> None:
    """Refused by its name; torch's loader makes None of it, though its values stay as they are."""
    state = {**blank_state(), "config": UserDict({"lr": 1.0})}
    with pytest.raises(InvalidArgumentError, match=r"A mapping in the state is no dict.*where='config'"):
        load_by(store, state, exclude="config.*")
    assert state["config"] == {"lr": 1.0}


def test_objects_inside_of_kept_values(store: RecordingStore) -> None:
    """They stay as they are, where torch's planner makes None of objects of types that it does not know."""
    kept, state = object(), blank_state()
    state["extra"] = (1, {"held": kept}, [kept])
    load_by(store, state, exclude="extra")
    assert state["extra"] == (1, {"held": kept}, [kept])
    assert equal({name: state[name] for name in saved_state()}, saved_state())
