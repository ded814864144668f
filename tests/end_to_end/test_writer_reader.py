"""Writer and reader through torch's own calls, in one process, as users of torch's checkpoints expect.

`dcp.save` and `dcp.load` are torch's; the store is in memory and records its requests, or is a folder.
"""

from __future__ import annotations

import enum
import io
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, load
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitConflictError,
    DcpRemoteError,
    InvalidArgumentError,
    SaveFailedError,
    UnsafeObjectError,
)
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from dcp_remote.testing import RecordingStore
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks, shard
from tests.support.states import blank_state, equal, state_of_training


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


# torch's planner loads objects into a copy of the state unless given both.
NOT_FLAT = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def failure(call: Callable[[], object]) -> BaseException:
    """Return the error of rank 0, from torch's `CheckpointException`."""
    with pytest.raises(CheckpointException) as caught:
        call()
    return caught.value.failures[0][0]


# ---- the five lines of the README, and their requests


@pytest.mark.parametrize("no_dist", [False, True])
def test_save_and_load(store: RecordingStore, no_dist: bool) -> None:
    """Five lines save and load everything, tensors in place, in a request per shard and two, or one, for the manifest.

    Nothing is ever listed, looked up or deleted.
    """
    state, template = state_of_training(), blank_state()
    weight = template["model"]["weight"]
    metadata = dcp.save(state, storage_writer=RemoteWriter(store), no_dist=no_dist)
    assert isinstance(metadata, Metadata)
    # One shard per top-level key with tensors: parts that are dropped together lie together.
    shards = [key for verb, key in store.calls if key != "manifest.json"]
    assert [verb for verb, _ in store.calls] == ["get", "put", "put", "put"]
    assert store.calls[0] == ("get", "manifest.json")
    assert store.calls[-1] == ("put", "manifest.json")
    assert len(set(shards)) == 2
    store.clear()
    dcp.load(template, storage_reader=RemoteReader(store), no_dist=no_dist)
    assert equal(template, state)
    assert template["model"]["weight"] is weight
    assert [verb for verb, _ in store.calls] == ["get", "get_into", "get_into"]


@pytest.mark.parametrize("size", [100, 300_000])
def test_autograd_sees_that_a_tensor_was_loaded(store: RecordingStore, size: int) -> None:
    """Autograd notices that a tensor was loaded: a gradient of its earlier values would be wrong."""
    dcp.save({"w": torch.ones(size)}, storage_writer=RemoteWriter(store))
    template, other = torch.zeros(size), torch.ones(size, requires_grad=True)
    loss = (template * other).sum()
    dcp.load({"w": template}, storage_reader=RemoteReader(store))
    assert torch.equal(template, torch.ones(size))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loading_into_an_inference_tensor(store: RecordingStore) -> None:
    """A load into an inference tensor, which counts no versions, succeeds."""
    dcp.save({"w": torch.ones(3)}, storage_writer=RemoteWriter(store))
    with torch.inference_mode():
        template = {"w": torch.zeros(3)}
        dcp.load(template, storage_reader=RemoteReader(store))
    assert torch.equal(template["w"], torch.ones(3))


def test_small_tensors_are_read_together(store: RecordingStore) -> None:
    """Small tensors between large ones, as an optimizer's steps, lie together in the shard and are read at once."""
    sizes = [n % 3 or 300_000 for n in range(60)]
    state = {"optim": {str(n): torch.full((size,), float(n)) for n, size in enumerate(sizes)}}
    dcp.save(state, storage_writer=RemoteWriter(store, shard_bytes=64 * 2**20))
    store.clear()
    template = {"optim": {name: torch.zeros_like(tensor) for name, tensor in state["optim"].items()}}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert equal(template, state)
    shards = {key for verb, key in store.calls if verb == "get_into"}
    assert store.count("get_into") == sizes.count(300_000) + 1
    assert len(shards) == 1


def test_shards_of_a_fixed_size(store: RecordingStore) -> None:
    """A tensor of 6 MiB is one shard, or six with `shard_bytes`, in a checkpoint by itself and in a run."""
    state = {"w": torch.arange(6 * 2**18, dtype=torch.float32)}
    given: dict[str, Any] = {"shard_bytes": 2**20}
    for options, shards in (({}, 1), (given, 6)):
        store.clear()
        dcp.save(state, storage_writer=RemoteWriter(store, overwrite=True, **options))
        assert sum(key.startswith("shards/") for verb, key in store.calls if verb == "put") == shards
        run = RecordingStore(MemoryStore())
        with CheckpointManager(run, **options) as checkpoints:
            checkpoints.save(1, state)
        assert sum(key.startswith("shards/") for verb, key in run.calls if verb == "put") == shards
    with pytest.raises(InvalidArgumentError, match=r"^shard_bytes must be"):
        RemoteWriter(store, shard_bytes=128 * 2**20)


def test_objects_alone_cost_no_shard(store: RecordingStore) -> None:
    """Small objects, and an empty state, stand in the manifest: two requests to save, one to load."""
    for state in ({"step": 7, "name": "run"}, {}):
        store.clear()
        dcp.save(dict(state), storage_writer=RemoteWriter(store, overwrite=True))
        assert [verb for verb, _ in store.calls] == ["get", "put"]
        store.clear()
        template = dict.fromkeys(state)
        dcp.load(template, storage_reader=RemoteReader(store))
        assert template == state
        assert [verb for verb, _ in store.calls] == ["get"]


def test_the_manifest_is_put_once_whatever_the_number_of_ranks(store: RecordingStore) -> None:
    """Five ranks with a shard each: a read, five shards, a manifest; each rank's load is its manifest and its shard."""
    whole = torch.arange(20.0)
    save_as_ranks([{"w": part} for part in shard(whole, 5, (5,))], lambda: RemoteWriter(store))
    assert [verb for verb, _ in store.calls] == ["get", *["put"] * 6]
    assert [key for verb, key in store.calls if verb == "put"].count("manifest.json") == 1
    assert store.calls[-1] == ("put", "manifest.json")
    store.clear()
    load_as_ranks([{"w": part} for part in shard(torch.zeros(20), 5, (5,))], lambda: RemoteReader(store))
    assert sorted(verb for verb, _ in store.calls) == [*["get"] * 5, *["get_into"] * 5]


def test_an_object_of_its_own_comes_back_from_a_shard(store: RecordingStore) -> None:
    """A text of 300 KB, too large for a manifest, lies in a shard in several blocks, and loads both ways."""
    state = {"text": "abcde" * 60_000, "pair": [torch.ones(2)] * 2, "small": 1}
    dcp.save(state, storage_writer=RemoteWriter(store), planner=DefaultSavePlanner(flatten_state_dict=False))
    template: dict[str, Any] = {"text": "", "pair": None, "small": 0}
    dcp.load(template, storage_reader=RemoteReader(store), planner=NOT_FLAT)
    assert template["text"] == state["text"]
    assert template["pair"][0] is template["pair"][1]  # shared objects stay shared
    assert equal(load(store, keys="text"), {"text": state["text"]})


# ---- checkpoint_id, reuse, pickling


def test_checkpoint_id_moves_a_writer_and_a_reader(tmp_path: Path) -> None:
    """A writer and a reader move to each checkpoint_id that they are given; with None they keep the last."""
    writer, reader = RemoteWriter(f"file://{tmp_path}/a"), RemoteReader(str(tmp_path / "a"))
    dcp.save({"x": torch.tensor(1)}, storage_writer=writer)
    dcp.save({"x": torch.tensor(2)}, storage_writer=writer, checkpoint_id=f"file://{tmp_path}/b")
    dcp.save({"x": torch.tensor(3)}, storage_writer=writer, checkpoint_id=tmp_path / "c")
    assert failure(lambda: dcp.save({"x": torch.tensor(4)}, storage_writer=writer)).args  # the writer still points to c
    found = []
    for checkpoint_id in (None, str(tmp_path / "b"), f"file://{tmp_path}/c", None):
        template = {"x": torch.tensor(0)}
        dcp.load(template, storage_reader=reader, checkpoint_id=checkpoint_id)
        found.append(int(template["x"]))
    assert found == [1, 2, 3, 3]


def test_a_plain_checkpoint_id_is_refused_where_the_url_is_none(tmp_path: Path) -> None:
    """A plain checkpoint_id beside a URL is refused, since it would be a local folder; the full URL works."""
    name = uuid.uuid4().hex
    writer, reader = RemoteWriter(f"memory://{name}/a"), RemoteReader(f"memory://{name}/a")
    for checkpoint_id in (tmp_path / "b", str(tmp_path / "b"), "b"):
        for attempt in (
            lambda: dcp.save({"x": 1}, storage_writer=writer, checkpoint_id=checkpoint_id),  # noqa: B023  # called here
            lambda: dcp.load({"x": 1}, storage_reader=reader, checkpoint_id=checkpoint_id),  # noqa: B023
        ):
            error = failure(attempt)
            assert isinstance(error, InvalidArgumentError)
            assert "plain path" in str(error)
    dcp.save({"x": 1}, storage_writer=writer, checkpoint_id=f"memory://{name}/b")
    template = {"x": 0}
    dcp.load(template, storage_reader=reader, checkpoint_id=f"memory://{name}/b")
    assert template == {"x": 1}
    assert list(tmp_path.iterdir()) == []
    assert list(MemoryStore(name).space.objects) == ["b/manifest.json"]


def test_a_store_of_ones_own_stays_in_use(store: RecordingStore) -> None:
    """A checkpoint_id outside of a store given by the user is refused, since the store's wrappers would be lost."""
    given = store.child("a")
    writer, reader = RemoteWriter(given), RemoteReader(given)
    for error in (
        failure(lambda: dcp.save({"x": 1}, storage_writer=writer, checkpoint_id="memory://elsewhere/a")),
        failure(lambda: dcp.load({"x": 1}, storage_reader=reader, checkpoint_id="memory://elsewhere/a")),
    ):
        assert isinstance(error, InvalidArgumentError)
        assert "store" in str(error)
    assert store.calls == []


def test_a_checkpoint_is_not_overwritten_unless_asked(store: RecordingStore) -> None:
    """A second save is refused before any upload; with overwrite=True it replaces the first."""
    dcp.save({"x": torch.tensor(1)}, storage_writer=RemoteWriter(store))
    store.clear()
    error = failure(lambda: dcp.save({"x": torch.tensor(2)}, storage_writer=RemoteWriter(store)))
    assert isinstance(error, CheckpointExistsError)
    assert "overwrite=True" in str(error)
    assert store.count("put") == 0
    assert load(store) == {"x": torch.tensor(1)}
    dcp.save({"x": torch.tensor(2)}, storage_writer=RemoteWriter(store, overwrite=True))
    assert load(store) == {"x": torch.tensor(2)}


def test_they_pickle_their_configuration() -> None:
    """Pickled copies of a writer and a reader, used or not, save and load; a save in progress is not copied."""
    url = f"memory://{uuid.uuid4().hex}"
    writer, reader = RemoteWriter(url, overwrite=True), RemoteReader(url)
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(writer))
        assert copy.save_id is None
        dcp.save({"x": 1}, storage_writer=copy)
        dcp.save({"x": 1}, storage_writer=writer)
        template = {"x": 0}
        dcp.load(template, storage_reader=pickle.loads(pickle.dumps(reader)))
        dcp.load(template, storage_reader=reader)
        assert template == {"x": 1}


def test_their_repr_shows_where_and_nothing_secret(tmp_path: Path) -> None:
    """The repr never has options; torch's logger gets the URL alone."""
    url = f"file://{tmp_path}/a"
    for used in (
        RemoteWriter(url, storage_options={"allow_network_replace": True}),
        RemoteReader(url, storage_options={"allow_network_replace": True}),
    ):
        assert repr(used) == f"{type(used).__name__}({url!r})"
        assert used.checkpoint_id == url


@pytest.mark.parametrize("kind", [RemoteWriter, RemoteReader])
def test_arguments_are_checked_when_made(kind: Any) -> None:
    """An invalid URL, and options beside a store, are refused by the constructor, without a secret in the message."""
    for url in ("ftp://x/y", "", MemoryStore()):
        with pytest.raises(InvalidArgumentError) as caught:
            kind(url, storage_options={"secret": "hunter2"})
        assert "hunter2" not in str(caught.value)
    assert kind.validate_checkpoint_id("s3://bucket/x")
    assert not kind.validate_checkpoint_id("ftp://x")


# ---- torch's protocol


def test_use_collectives_false_is_refused(store: RecordingStore) -> None:
    """`use_collectives=False` is refused on every rank, in set-up, before any request."""
    with pytest.raises(InvalidArgumentError, match="use_collectives"):
        dcp.save({"x": 1}, storage_writer=RemoteWriter(store), use_collectives=False)
    with pytest.raises(InvalidArgumentError, match="use_collectives"):
        RemoteWriter(store).set_up_storage_writer(False, rank=3, use_collectives=False)
    assert store.calls == []


def test_storage_meta_names_the_save_and_the_load(store: RecordingStore) -> None:
    """Planners get the id of the save that is committed; a reader returns this id, and an id of the load."""
    seen: list[StorageMeta | None] = []

    class Planner(DefaultSavePlanner):
        def set_up_planner(
            self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
        ) -> None:
            seen.append(storage_meta)
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    writer, reader = RemoteWriter(store), RemoteReader(store)
    dcp.save({"x": 1}, storage_writer=writer, planner=Planner())
    metadata = reader.read_metadata()
    assert seen[0] is not None
    assert metadata.storage_meta is not None
    assert seen[0].save_id == writer.save_id == metadata.storage_meta.save_id
    assert metadata.storage_meta.load_id == reader.load_id
    assert reader.load_id
    assert metadata.storage_meta.checkpoint_id == store.url
    reader.read_metadata()
    assert metadata.storage_meta.load_id != reader.load_id


def test_metadata_comes_back_as_it_was_saved(store: RecordingStore) -> None:
    """A reader's metadata equals that of torch's plan: names in order, chunks, properties, flatten mapping."""
    state: dict[str, Any] = {
        **state_of_training(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "image": torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(1, dtype=torch.uint16),
        "nothing": torch.zeros(0, 4),
    }
    saved = dcp.save(state, storage_writer=RemoteWriter(store))
    found = RemoteReader(store).read_metadata()
    assert list(found.state_dict_metadata) == list(saved.state_dict_metadata)
    assert found.state_dict_metadata == saved.state_dict_metadata
    assert found.planner_data == saved.planner_data
    assert found.storage_data is None


@pytest.fixture
def clean_plan_cache() -> Iterator[None]:
    """Clear the plans that torch caches on its class, by name, for the life of the process."""
    caches: list[dict[str, Any]] = [
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


@pytest.mark.usefixtures("clean_plan_cache")
def test_cached_plans(store: RecordingStore) -> None:
    """Three saves with one cached plan load; a changed dtype, which torch does not see, is refused and not committed.

    A changed shape gives a new plan, and is saved.
    """
    writer = RemoteWriter(store, overwrite=True)

    def save(state: dict[str, Any]) -> None:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))

    for value in range(3):
        save({"x": torch.full((5,), float(value)), "n": value})
        assert equal(load(store), {"x": torch.full((5,), float(value)), "n": value})
    error = failure(lambda: save({"x": torch.full((5,), 3, dtype=torch.float64), "n": 3}))
    assert isinstance(error, SaveFailedError)
    assert error.details["tensor"] == "x"
    assert (error.details["dtype"], error.details["planned_dtype"]) == ("float64", "float32")
    assert equal(load(store), {"x": torch.full((5,), 2.0), "n": 2})
    save({"x": torch.full((6,), 4.0), "n": 4})
    assert equal(load(store), {"x": torch.full((6,), 4.0), "n": 4})


def async_save(state: dict[str, Any], writer: RemoteWriter) -> None:
    """Save in a new thread, and wait."""
    response = dcp.async_save(state, storage_writer=writer, no_dist=True)
    assert isinstance(response, Future)
    response.result()


def test_where_a_writer_was_told_to_go_holds_everywhere(tmp_path: Path) -> None:
    """After a `reset`, also to an invalid URL, no save, in any thread or by a copy, goes to the former place."""
    writer = RemoteWriter(tmp_path / "former", overwrite=True)
    writer.reset(tmp_path / "a")
    async_save({"x": torch.ones(2)}, writer)
    dcp.save({"x": torch.ones(2)}, storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True)
    assert not (tmp_path / "former").exists()
    dcp.save({"x": torch.ones(2)}, storage_writer=writer, no_dist=True)
    writer.reset("nowhere://else")
    for attempt in (
        lambda: dcp.save({"x": torch.zeros(2)}, storage_writer=writer, no_dist=True),
        lambda: async_save({"x": torch.zeros(2)}, writer),
        lambda: dcp.save({"x": torch.zeros(2)}, storage_writer=pickle.loads(pickle.dumps(writer)), no_dist=True),
    ):
        error = failure(attempt)
        assert isinstance(error, InvalidArgumentError)
        assert "nowhere" in str(error)
    assert bool((load(tmp_path / "a")["x"] == 1).all())
    writer.reset(tmp_path / "a")
    dcp.save({"x": torch.zeros(2)}, storage_writer=writer, no_dist=True)


def test_planners_are_called_from_one_thread(store: RecordingStore) -> None:
    """All calls of planners come from the thread that called `dcp.save` or `dcp.load`."""
    threads: set[int] = set()

    class Saving(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            threads.add(threading.get_ident())
            return super().resolve_data(write_item)

    class Loading(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> Any:
            threads.add(threading.get_ident())
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            threads.add(threading.get_ident())

        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            threads.add(threading.get_ident())
            super().load_bytes(read_item, value)

    state = {f"t{n}": torch.full((300, 1000), float(n)) for n in range(12)} | {"text": "x" * 100_000}
    dcp.save(state, storage_writer=RemoteWriter(store), planner=Saving())
    template: dict[str, Any] = {name: torch.zeros(300, 1000) for name in state if name != "text"} | {"text": ""}
    dcp.load(template, storage_reader=RemoteReader(store), planner=Loading())
    assert equal(template, state)
    assert threads == {threading.get_ident()}


class NotANumber(enum.Enum):
    """Enum whose member equals no value, not even its own, by which pickle names members."""

    NAN = float("nan")


def test_objects_reach_the_state_without_a_pickle(store: RecordingStore) -> None:
    """Values that torch's pickle changes load unchanged: the byte order of an array, the fold of a time, an enum."""
    state = {
        "a": np.arange(5, dtype=">u4"),
        "t": (datetime(2024, 1, 1, fold=1), np.zeros(2, dtype=">f8")),
        "e": NotANumber.NAN,
    }
    dcp.save(state, storage_writer=RemoteWriter(store))
    template: dict[str, Any] = {"a": None, "t": None, "e": None}
    dcp.load(template, storage_reader=RemoteReader(store))
    assert (template["a"].dtype, template["t"][1].dtype) == (np.dtype(">u4"), np.dtype(">f8"))
    assert template["t"][0].fold == 1
    assert template["e"] is NotANumber.NAN
    np.testing.assert_array_equal(template["a"], np.arange(5))


def test_every_tensor_is_resolved_and_committed_once(store: RecordingStore) -> None:
    """A planner with staging tensors gets each item whole, in the tensor that it gave, and commits it once."""
    given: dict[str, torch.Tensor] = {}
    taken: dict[str, torch.Tensor] = {}

    class Staging(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            assert read_item.dest_index.fqn not in given
            given[read_item.dest_index.fqn] = torch.full(tuple(read_item.lengths), -1.0)
            return given[read_item.dest_index.fqn]

        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            assert tensor.data_ptr() == given[read_item.dest_index.fqn].data_ptr()
            taken[read_item.dest_index.fqn] = tensor.clone()

    state = {"large": torch.randn(1500, 1000), "small": torch.randn(3), "scalar": torch.tensor(2.0)}
    dcp.save(state, storage_writer=RemoteWriter(store))
    dcp.load({n: torch.zeros_like(t) for n, t in state.items()}, storage_reader=RemoteReader(store), planner=Staging())
    assert equal(taken, state)


class SlowStore(WrappedStore):
    """Store with slow puts, so that work that does not wait for them gets ahead."""

    def _request(self, request: Request, send: Callable[[], Any]) -> Any:
        if request.verb == "put":
            time.sleep(0.02)
        return send()


def test_copies_that_a_planner_makes_count_against_the_budget(store: RecordingStore) -> None:
    """40 tensors of 1 MiB, copied by the planner, a budget of 3 MiB and a slow store: few copies are alive.

    These are one shard being sent, one being freed, one being packed, and the tensor that does not fit into it.
    """
    alive: set[str] = set()
    most = 0

    class Converting(DefaultSavePlanner):
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
            nonlocal most
            copy = object.clone()
            alive.add(write_item.index.fqn)
            weakref.finalize(copy, alive.discard, write_item.index.fqn)
            most = max(most, len(alive))
            return copy

    state = {f"t{n:02}": torch.full((2**18,), float(n)) for n in range(40)}
    dcp.save(state, storage_writer=RemoteWriter(SlowStore(store), memory_budget_bytes=3 * 2**20), planner=Converting())
    assert most <= 3 * 3 + 1
    assert equal(load(store), state)


def test_a_planner_that_does_not_plan_what_it_writes_is_refused(store: RecordingStore) -> None:
    """An item of another dtype, shape or kind than planned is named in the error, and not committed."""

    def planner(change: Callable[[Any], Any]) -> SavePlanner:
        class Planner(DefaultSavePlanner):
            def resolve_data(self, write_item: WriteItem) -> Any:
                return change(super().resolve_data(write_item))

        return Planner()

    changes: list[tuple[dict[str, Any], Callable[[Any], Any], type[DcpRemoteError]]] = [
        ({"thing": torch.ones(3)}, lambda t: t.double(), SaveFailedError),
        ({"thing": torch.ones(3)}, lambda t: t[:2], SaveFailedError),
        ({"thing": torch.ones(3)}, lambda t: io.BytesIO(b"x"), InvalidArgumentError),
        ({"thing": "text"}, lambda t: torch.ones(1), InvalidArgumentError),
        ({"thing": "text"}, lambda t: io.BytesIO(b"no stream of torch.save"), UnsafeObjectError),
    ]
    for state, change, kind in changes:
        error = failure(lambda: dcp.save(state, storage_writer=RemoteWriter(store), planner=planner(change)))  # noqa: B023  # called here
        assert isinstance(error, kind)
        assert "thing" in str(error)
    with pytest.raises(CheckpointNotFoundError):
        load(store)


def test_a_gap_is_found_before_the_commit(store: RecordingStore) -> None:
    """A planner that leaves out a planned item fails the save before its commit, by the name of the entry."""
    for name in ("w", "n"):

        class Forgetful(DefaultSavePlanner):
            def finish_plan(self, new_plan: SavePlan) -> SavePlan:
                plan = super().finish_plan(new_plan)
                return replace(plan, items=[item for item in plan.items if item.index.fqn != name])  # noqa: B023  # called here

        parts = shard(torch.ones(4), 2, (2,))
        with pytest.raises(SaveFailedError, match="nothing was committed") as caught:
            save_as_ranks([{"w": part, "n": 1} for part in parts], lambda: RemoteWriter(store), Forgetful)
        assert name in (caught.value.details.get("tensor"), caught.value.details.get("object"))
    assert store.calls.count(("put", "manifest.json")) == 0


def test_templates_that_ask_for_what_is_not_there(store: RecordingStore) -> None:
    """A name or shape that was not saved is named in torch's error; partial loading leaves such names unchanged."""
    dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=RemoteWriter(store))

    def loading(template: dict[str, Any]) -> str:
        return str(failure(lambda: dcp.load(template, storage_reader=RemoteReader(store))))

    assert "missing" in loading({"w": torch.zeros(3), "missing": torch.zeros(1)})
    assert all(word in loading({"w": torch.zeros(4)}) for word in ("Size mismatch", "w", "[3]", "[4]"))
    assert "w" in loading({"w": 1})
    template = {"w": torch.zeros(3), "missing": torch.full((2,), 5.0)}
    dcp.load(template, storage_reader=RemoteReader(store), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert equal(template, {"w": torch.ones(3), "missing": torch.full((2,), 5.0)})


def test_a_checkpoint_that_is_not_there(store: RecordingStore, tmp_path: Path) -> None:
    """A missing checkpoint is named with its URL: by `load`, by `dcp.load`, and by metadata at its first use."""
    for where in (store, f"file://{tmp_path}/nowhere"):
        calls: list[Callable[[], object]] = [
            lambda: load(where),  # noqa: B023  # called here
            lambda: RemoteReader(where).read_metadata().state_dict_metadata,  # noqa: B023
            lambda: RemoteReader(where).read_metadata().planner_data,  # noqa: B023
        ]
        errors: list[BaseException] = []
        for call in calls:
            with pytest.raises(CheckpointNotFoundError) as caught:
                call()
            errors.append(caught.value)
        errors += [
            failure(lambda: dcp.load({}, storage_reader=RemoteReader(where), planner=planner))  # noqa: B023
            for planner in (DefaultLoadPlanner(), _EmptyStateDictLoadPlanner())
        ]
        for error in errors:
            assert isinstance(error, CheckpointNotFoundError)
            assert isinstance(error, FileNotFoundError)
            assert (where if isinstance(where, str) else where.url) in str(error)


def test_a_reader_forgets_what_it_read_before(store: RecordingStore) -> None:
    """After a load, a load of a missing checkpoint shows nothing of the first."""
    dcp.save({"x": 1}, storage_writer=RemoteWriter(store))
    reader = RemoteReader(store)
    dcp.load({"x": 0}, storage_reader=reader)
    store.delete(["manifest.json"])
    assert isinstance(failure(lambda: dcp.load({"x": 0}, storage_reader=reader)), CheckpointNotFoundError)
    with pytest.raises(InvalidArgumentError, match="no load under way"):
        reader.prepare_local_plan(LoadPlan([]))


class Counter:
    """Counter with torch's `Stateful` protocol."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.w = torch.full((3,), float(n))

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.w = state["w"]


def test_stateful_objects(store: RecordingStore) -> None:
    """Modules, optimizers and objects with `state_dict` are saved as given, and loaded in place."""
    model = torch.nn.Linear(3, 2)
    dcp.save({"model": model, "counter": Counter(5)}, storage_writer=RemoteWriter(store))
    loaded = torch.nn.Linear(3, 2)
    counter = Counter(0)
    dcp.load({"model": loaded, "counter": counter}, storage_reader=RemoteReader(store))
    assert equal(dict(loaded.state_dict()), dict(model.state_dict()))
    assert counter.n == 5
    assert torch.equal(counter.w, torch.full((3,), 5.0))


# ---- async


def test_async_save_fails_in_its_future(store: RecordingStore) -> None:
    """An object that cannot be stored fails the future."""
    future = dcp.async_save({"bad": {"f": Counter.state_dict}}, storage_writer=RemoteWriter(store), no_dist=True)
    assert isinstance(future, Future)
    assert isinstance(failure(future.result), UnsafeObjectError)


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """Initialize a gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_with_a_process_group(store: RecordingStore) -> None:
    """Saves and loads work with torch's collectives, in the foreground and in a thread."""
    state = state_of_training()
    dcp.save(state, storage_writer=RemoteWriter(store))
    future = dcp.async_save(state, storage_writer=RemoteWriter(store, overwrite=True))
    assert isinstance(future, Future)
    future.result()
    template = blank_state()
    dcp.load(template, storage_reader=RemoteReader(store))
    assert equal(template, state)


# ---- replacement during a load


def test_a_checkpoint_that_is_replaced_while_it_is_read(store: RecordingStore) -> None:
    """A load whose checkpoint was overwritten and collected meanwhile fails with the advice to load again.

    Ranks that read different manifests notice before they read shards.
    """
    dcp.save({"w": torch.ones(3)}, storage_writer=RemoteWriter(store))
    reader, other = RemoteReader(store), RemoteReader(store)
    metadata = reader.read_metadata()
    old = [key for _, key in store.calls if key.startswith("shards/")]
    dcp.save({"w": torch.zeros(3)}, storage_writer=RemoteWriter(store, overwrite=True))
    other.read_metadata()
    plans = [one.prepare_local_plan(LoadPlan([])) for one in (reader, other)]
    with pytest.raises(CommitConflictError, match="Load again"):
        reader.prepare_global_plan(plans)
    store.delete(old)
    planner = DefaultLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(3)}, metadata)
    with pytest.raises(CheckpointNotFoundError, match="Load again"):
        reader.read_data(planner.create_local_plan(), planner)
