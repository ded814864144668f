"""`load`: reads a checkpoint, or part of it, without a template in one process.

The store is in memory and records its requests.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import CheckpointManager, PerRank, RemoteReader, RemoteWriter, load
from dcp_remote.common.geometry import Box
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.manifest import MANIFEST_KEY, TensorKind
from dcp_remote.format.manifest_json import encode
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.manifests import Layout, build
from tests.support.simulated_ranks import save_as_ranks, shard
from tests.support.states import equal, state_of_training


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


def test_load_chooses_by_names_and_patterns(store: RecordingStore) -> None:
    """Patterns, several of them, and exact names with brackets; nothing else is read."""
    state = state_of_training() | {"odd": {"[x]": torch.tensor(1), "*": torch.tensor(2)}}
    dcp.save(state, storage_writer=RemoteWriter(store))
    store.clear()
    assert equal(load(store, keys="model.*"), {"model": state["model"]})
    assert [verb for verb, _ in store.calls] == ["get", "get_into"]
    assert equal(load(store, keys=["step", "model.b*"]), {"model": {"bias": state["model"]["bias"]}, "step": 3})
    assert equal(load(store, keys="odd.[x]"), {"odd": {"[x]": torch.tensor(1)}})
    assert equal(load(store, keys="*"), state)
    assert equal(load(store), state)
    assert load(store, keys=[]) == {}


def test_load_names_what_is_near(store: RecordingStore) -> None:
    """The error for a mistyped name lists similar names; the error for a pattern lists the top-level keys."""
    dcp.save(state_of_training(), storage_writer=RemoteWriter(store))
    for wrong, near in (("model.wieght", "model.weight"), ("zzz*", None), ("optim.state.weight.exp_av", "exp_avg")):
        with pytest.raises(InvalidArgumentError) as caught:
            load(store, keys=["step", wrong])
        assert caught.value.details["key"] == wrong
        found = caught.value.details["near"]
        assert found is None if near is None else near in str(found)
        assert caught.value.details["top_level"] == "model, optim, schedule, step"


def test_a_name_in_brackets_is_no_pattern(store: RecordingStore) -> None:
    """The text `a[0].w` is the name of one tensor and a pattern for another, `a0.w`: the name wins."""
    state = {"a[0]": {"w": torch.tensor(1)}, "a0": {"w": torch.tensor(2)}, "*": torch.tensor(3)}
    dcp.save(state, storage_writer=RemoteWriter(store))
    assert equal(load(store, keys="a[0].w"), {"a[0]": {"w": torch.tensor(1)}})
    assert equal(load(store, keys="a[0]*"), {"a0": {"w": torch.tensor(2)}})
    assert equal(load(store, keys="*"), {"*": torch.tensor(3)})


def test_load_keeps_the_places_of_a_list(store: RecordingStore) -> None:
    """In a list, entries before the last chosen one are None if not chosen; in a dictionary they are left out."""
    layers = [{"w": torch.tensor(n), "b": n} for n in range(4)]
    dcp.save({"m": {"l": layers}, "step": 1}, storage_writer=RemoteWriter(store))
    assert equal(load(store, keys="m.l.1*"), {"m": {"l": [None, layers[1]]}})
    assert equal(load(store, keys=["m.l.2.w", "m.l.0.b"]), {"m": {"l": [{"b": 0}, None, {"w": torch.tensor(2)}]}})


def test_a_tensor_that_does_not_fit_is_reported_before_anything_is_read(store: RecordingStore) -> None:
    """A tensor of 2**50 bytes, more than an address space: named in the error with its size; the rest loads."""
    whole = Box((0,), (2**48,))
    manifest = build(
        [
            Layout("small", TensorKind("float32"), (0,), (Box((0,), (0,)),), ((),)),
            Layout("model.huge", TensorKind("float32"), (2**48,), (whole,), ((2**50,),)),
        ],
        inline={"step": b"3"},
    )
    store.put(MANIFEST_KEY, [encode(manifest)])
    store.clear()
    with pytest.raises(InvalidArgumentError, match="keys") as caught:
        load(store)
    assert caught.value.details["tensor"] == "model.huge"
    assert caught.value.details["bytes"] == 2**50
    assert store.calls == [("get", MANIFEST_KEY)]
    assert equal(load(store, keys=["small", "step"]), {"small": torch.zeros(0), "step": 3})


def test_load_restores_the_nesting(store: RecordingStore) -> None:
    """Lists and dictionaries at every depth, in their order; keys that are numbers come back as torch's strings."""
    state: dict[str, Any] = {
        "z": [torch.tensor(0), {"a": [1, [torch.tensor(1), 2]], "b": "x"}, 5],
        "a": {"0": torch.tensor(3), 1: torch.tensor(4)},
        "m": (1, 2),
        "dotted.name": {"x.y": torch.tensor(5)},
    }
    dcp.save(state, storage_writer=RemoteWriter(store))
    found = load(store)
    assert equal(found, state | {"a": {"0": torch.tensor(3), "1": torch.tensor(4)}})
    assert list(found) == list(state)


def test_load_puts_sharded_tensors_together(store: RecordingStore) -> None:
    """A tensor that six ranks saved, cut unevenly in two dimensions, comes back whole, in its dtype."""
    whole = torch.randn(5, 7, dtype=torch.float64)
    save_as_ranks([{"m": {"w": part}} for part in shard(whole, 6, (3, 2))], lambda: RemoteWriter(store))
    assert equal(load(store), {"m": {"w": whole}})


def test_a_value_of_one_rank_comes_without_its_tuple(store: RecordingStore) -> None:
    """A value of one rank in a run is unwrapped, however it is chosen; a tuple of the user's stays a tuple."""
    with CheckpointManager(store) as manager:
        manager.save(1, {"own": PerRank({"a": 1}), "pair": PerRank((1,)), "t": (2,)}, wait=True)
    own = {"0": {"own": {"a": 1}, "pair": (1,)}}
    assert load(store) == {"per_rank": own, "t": (2,)}
    assert load(store, keys="per_rank.*") == {"per_rank": own}
    by_itself = MemoryStore()
    state = {"per_rank": {"0": {"own": (3,)}}}
    dcp.save(state, storage_writer=RemoteWriter(by_itself))
    assert load(by_itself) == state


@pytest.mark.parametrize("dtype", [">f4", ">i8", "<i2", ">U3"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_keeps_its_byte_order(dtype: Any, order: Literal["C", "F"], store: RecordingStore) -> None:
    """`load`, `dcp.load` and `restore` keep byte order, values and memory order; the array is writable."""
    array = np.zeros((2, 3), dtype=dtype, order=order)
    array[1] = 7
    with CheckpointManager(store) as manager:
        manager.save(1, {"x": array, "inside": {"list": [array, 1]}, "own": PerRank(array)}, wait=True)
    loaded = load(store)
    found = [loaded["x"], loaded["inside"]["list"][0], loaded["per_rank"]["0"]["own"]]
    template: dict[str, Any] = {"x": None, "inside": {"list": None}}
    dcp.load(template, storage_reader=RemoteReader(store))
    found += [template["x"], template["inside"]["list"][0]]
    state: dict[str, Any] = {"x": None, "inside": {"list": None}, "own": PerRank(None)}
    with CheckpointManager(store) as manager:
        manager.restore(state)
    found += [state["x"], state["inside"]["list"][0], state["own"].value]
    for copy in found:
        assert copy.dtype == array.dtype
        assert (copy == array).all()
        assert copy.flags.writeable
        assert copy.flags.f_contiguous == array.flags.f_contiguous
