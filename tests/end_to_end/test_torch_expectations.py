"""Expectations of users of torch's checkpoints, with torch's own folder format as the oracle.

Where torch succeeds, the values are the same; where it fails, so does this package, with the planner's errors in the
same class and words. Refusals of torch's own faults are named at the test.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter
from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import CheckpointExistsError
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.serialization.test_tags import same
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks
from tests.support.states import blank_state, equal, state_of_training

pytestmark = [
    pytest.mark.torture,
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable or uninitialized:UserWarning"),
]

State: TypeAlias = dict[str, Any]


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore(MemoryStore())


@dataclass(frozen=True)
class Outcome:
    """Outcome of a save and a load: the template after it, or the error."""

    template: State | None
    error: BaseException | None


def outcome(call: Callable[[], State]) -> Outcome:
    try:
        return Outcome(call(), None)
    except CheckpointException as error:
        return Outcome(None, error.failures[0][0])
    except Exception as error:  # noqa: BLE001  # errors that torch raises before any rank works
        return Outcome(None, error)


def of_both(
    folder: Path,
    make_state: Callable[[], State],
    make_template: Callable[[], State],
    save_planner: Callable[[], SavePlanner] = DefaultSavePlanner,
    load_planner: Callable[[], LoadPlanner] = DefaultLoadPlanner,
) -> tuple[Outcome, Outcome]:
    """Save and load with torch's writer and reader, and with this package's."""

    def run(writer: Any, reader: Any) -> State:
        dcp.save(make_state(), storage_writer=writer, planner=save_planner())
        template = make_template()
        dcp.load(template, storage_reader=reader, planner=load_planner())
        return template

    store = MemoryStore()
    folder.mkdir(exist_ok=True)
    theirs = outcome(lambda: run(FileSystemWriter(folder), FileSystemReader(folder)))
    return theirs, outcome(lambda: run(RemoteWriter(store), RemoteReader(store)))


def assert_as_torch(theirs: Outcome, ours: Outcome) -> None:
    """Check that values and types are the same, or class and words of the error."""
    assert type(ours.error) is type(theirs.error), ours.error
    if theirs.error is None:
        assert same(ours.template, theirs.template)
    else:
        assert str(ours.error) == str(theirs.error)


@pytest.mark.parametrize(("place", "kind"), [("{0}/x", str), ("{0}/x/", str), ("file://{0}/x/", str), ("{0}/x", Path)])
def test_a_checkpoint_id_is_what_was_given(place: str, kind: type[str | Path], tmp_path: Path) -> None:
    """A checkpoint_id comes back as given, in any spelling and as path or text, from each call and in `StorageMeta`."""
    where = kind(place.format(tmp_path))
    other = tmp_path / "other"
    writer, reader = RemoteWriter(where), RemoteReader(where)
    dcp.save({"x": 1}, storage_writer=writer)
    dcp.load({"x": 1}, storage_reader=reader)
    for _ in range(2):
        meta, metadata = writer.storage_meta(), reader.read_metadata()
        assert meta is not None
        assert metadata.storage_meta is not None
        for found in (
            writer.checkpoint_id,
            reader.checkpoint_id,
            meta.checkpoint_id,
            metadata.storage_meta.checkpoint_id,
            pickle.loads(pickle.dumps(reader)).checkpoint_id,
        ):
            assert found == where
            assert isinstance(found, kind)
        for one in (writer, reader):
            one.reset(other)
            assert one.checkpoint_id == other
            one.reset(tmp_path / "x")
            assert one.checkpoint_id == tmp_path / "x"
            one.reset(where)


def test_the_version_of_the_metadata_is_torchs(store: RecordingStore, tmp_path: Path) -> None:
    """The version of the metadata is that of torch's writer and reader."""
    dcp.save({"x": torch.ones(2)}, storage_writer=RemoteWriter(store))
    dcp.save({"x": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path))
    version = FileSystemReader(tmp_path).read_metadata().version
    assert RemoteReader(store).read_metadata().version == version == "1.0.0"


def test_an_existing_checkpoint_is_told_in_torchs_words(store: RecordingStore, tmp_path: Path) -> None:
    """An existing checkpoint or step raises the text of FileSystemWriter(overwrite=False), which callers match."""
    words = "Checkpoint already exists"
    for writer in (RemoteWriter(store), FileSystemWriter(tmp_path / "torch", overwrite=False)):
        dcp.save({"x": 1}, storage_writer=writer)
        with pytest.raises(CheckpointException, match=words):
            dcp.save({"x": 1}, storage_writer=writer)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"x": 1}, wait=True)
        with pytest.raises(CheckpointExistsError, match=words):
            manager.save(1, {"x": 1}, exist_ok=False, wait=True)


# ---- calls


def test_the_deprecated_calls_take_them_by_position(store: RecordingStore) -> None:
    """`save_state_dict(state, writer)` and `load_state_dict(state, reader)` work; both reset without an argument."""
    state, template = state_of_training(), blank_state()
    with pytest.warns(FutureWarning):
        dcp.save_state_dict(state, RemoteWriter(store), None, 0, True)
    with pytest.warns(FutureWarning):
        dcp.load_state_dict(template, RemoteReader(store), None, 0, True)
    assert equal(template, state)


def test_a_reset_without_a_place_stays_where_it_was(store: RecordingStore) -> None:
    """`reset(None)` and `reset()` before a load keep the place, as torch's loader of optimizers needs."""
    writer, reader = RemoteWriter(store), RemoteReader(store)
    writer.reset(None)
    writer.reset()
    dcp.save({"x": torch.ones(2)}, storage_writer=writer)
    first = reader.read_metadata()
    reader.reset()
    template = {"x": torch.zeros(2)}
    dcp.load(template, storage_reader=reader)
    reader.reset(None)
    again = reader.read_metadata()
    assert equal(template, {"x": torch.ones(2)})
    assert first.storage_meta is not None
    assert again.storage_meta is not None
    assert first.storage_meta.save_id == again.storage_meta.save_id == writer.save_id
    assert first.storage_meta.load_id != again.storage_meta.load_id == reader.load_id


@pytest.mark.parametrize("keys", [None, {"model"}, {"model.weight", "step"}, {"optim.param_groups"}, {"nowhere"}])
def test_loading_without_a_template(keys: set[str] | None, store: RecordingStore, tmp_path: Path) -> None:
    """`_EmptyStateDictLoadPlanner`, with and without keys as in torch's converters, finds what torch finds."""
    dcp.save(state_of_training(), storage_writer=FileSystemWriter(tmp_path))
    dcp.save(state_of_training(), storage_writer=RemoteWriter(store))
    found: list[State] = []
    for reader in (FileSystemReader(tmp_path), RemoteReader(store)):
        state: State = {}
        planner = _EmptyStateDictLoadPlanner(keys=keys)
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
        found += [state, _load_state_dict_from_keys(keys, storage_reader=reader)]
    assert bool(found[0]) is (keys != {"nowhere"})
    assert all(same(one, found[0]) for one in found)


# ---- planners of users, as in torch's documentation


class SavedWithPrefix(DefaultSavePlanner):
    """`RenamePlanner` of the documentation of `SavePlanner`."""

    def set_up_planner(
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class LoadedWithPrefix(DefaultLoadPlanner):
    """`RenamePlanner` of the documentation of `LoadPlanner`, reading only objects that need no code."""

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flatten_state_dict({"foo_" + k: v for k, v in state_dict.items()})
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=True)


class InHalf(DefaultSavePlanner):
    """`FP16Planner` of the documentation of `SavePlanner`."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        item = super().resolve_data(write_item)
        return item if isinstance(item, io.BytesIO) else item.to(torch.float16)


class Replacing(DefaultSavePlanner):
    """Planner that looks up other values than the state's, of equal shapes; also a tensor where there was none."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        return found + 1 if isinstance(found, torch.Tensor) else torch.ones(2)


class Transforming(DefaultSavePlanner):
    """Planner that transforms tensors, and leaves objects to torch."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002  # torch's name
        changed = object * 2 if isinstance(object, torch.Tensor) else {"was": object}
        return super().transform_object(write_item, changed)


class LoadedElsewhere(DefaultLoadPlanner):
    """Planner that resolves other tensors than the state's, and copies from those when they are complete."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(super().transform_tensor(read_item, tensor), -1.0, dtype=torch.float64)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().transform_tensor(read_item, self.lookup_tensor(read_item.dest_index)).copy_(tensor * 10)


PLANNERS: dict[str, tuple[Callable[[], SavePlanner], Callable[[], LoadPlanner]]] = {
    "renamed": (SavedWithPrefix, LoadedWithPrefix),
    "in half precision": (InHalf, DefaultLoadPlanner),
    "looked up": (Replacing, DefaultLoadPlanner),
    "transformed": (Transforming, DefaultLoadPlanner),
    "loaded elsewhere": (DefaultSavePlanner, LoadedElsewhere),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_of_users(name: str, tmp_path: Path) -> None:
    """Each planner gives the same template with torch's writer and reader and with this package's."""

    def state() -> State:
        return {"w": torch.arange(6.0).reshape(2, 3), "s": torch.tensor(2.0), "text": "a", "n": 1}

    theirs, ours = of_both(
        tmp_path, state, lambda: {k: type(v)() for k, v in state().items()} | zeros(), *PLANNERS[name]
    )
    assert theirs.error is None
    assert_as_torch(theirs, ours)


def zeros() -> State:
    return {"w": torch.zeros(2, 3), "s": torch.tensor(0.0)}


class Balancing(DefaultSavePlanner):
    """`DDPLoadBalancingPlanner` of torch's documentation: replicas are dealt to the ranks in turn."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iterators = [iter(all_plans[0].items)] * len(all_plans)
        dealt = zip(*itertools.zip_longest(*iterators), strict=True)
        kept = [[item for item in items if item is not None] for items in dealt]
        plans = [replace(plan, items=items) for plan, items in zip(all_plans, kept, strict=True)]
        return super().create_global_plan(plans)


def test_a_planner_that_deals_out_what_all_ranks_have(store: RecordingStore) -> None:
    """Seven tensors and objects on three ranks: each rank writes its share, and all load on two."""
    state: State = {f"t{n}": torch.full((4,), float(n)) for n in range(5)} | {"a": 1, "b": "x" * 20_000}
    save_as_ranks([state] * 3, lambda: RemoteWriter(store), Balancing)
    assert len({key.split("-")[1] for verb, key in store.calls if verb == "put" and "rank" in key}) == 3
    loaded: list[State] = [{k: torch.zeros(4) if k[0] == "t" else None for k in state} for _ in range(2)]
    load_as_ranks(loaded, lambda: RemoteReader(store))
    assert all(equal(one, state) for one in loaded)


def save_and_load(store: RecordingStore, state: State, template: State, planner: SavePlanner | None = None) -> State:
    dcp.save(state, storage_writer=RemoteWriter(store), planner=planner)
    dcp.load(template, storage_reader=RemoteReader(store))
    return template


def load_into(store: RecordingStore, template: State, planner: LoadPlanner | None = None) -> State:
    dcp.load(template, storage_reader=RemoteReader(store), planner=planner)
    return template


@pytest.mark.parametrize("flatten", list(itertools.product([False, True], repeat=4)))
def test_planners_that_flatten_and_do_not(flatten: Sequence[bool], tmp_path: Path) -> None:
    """`flatten_state_dict` and `flatten_sharded_tensors`, on or off on either side, act as with torch's own."""

    def planner(kind: Any, state_dict: bool, sharded_tensors: bool) -> Any:
        return kind(flatten_state_dict=state_dict, flatten_sharded_tensors=sharded_tensors)

    theirs, ours = of_both(
        tmp_path,
        lambda: {"w": torch.ones(2), "deep": {"t": torch.ones(3), "n": [1, {"a": 2}]}, "n": 5},
        lambda: {"w": torch.zeros(2), "deep": {"t": torch.zeros(3), "n": [0, {"a": 0}]}, "n": 0},
        lambda: planner(DefaultSavePlanner, *flatten[:2]),
        lambda: planner(DefaultLoadPlanner, *flatten[2:]),
    )
    assert_as_torch(theirs, ours)


def test_copies_that_a_lookup_makes_count_against_the_budget(store: RecordingStore) -> None:
    """A planner's clones in `lookup_object` count against the budget; tensors without clones do not."""

    class Cloning(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return super().lookup_object(index).clone()

    class Claims(Uploads[Any]):
        claimed = 0

        def claim(self, size_bytes: int) -> None:
            self.claimed += size_bytes
            super().claim(size_bytes)

    state = {f"t{n}": torch.zeros(2**16) for n in range(4)}
    for planner, expected_bytes in ((Cloning(), 4 * 2**18), (DefaultSavePlanner(), 0)):
        planner.set_up_planner(state, None, True)
        with Claims(store, rank=0, deadline=Deadline(60), memory_budget_bytes=2**30) as uploads:
            plan = planner.create_local_plan()
            write_shards(plan, planner, uploads, allow_pickle=False)
        assert uploads.claimed == expected_bytes
