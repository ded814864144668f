"""Damage of every kind to stored objects: reads raise an error that names the object, and never return wrong data.

Objects are damaged without the store, in the dictionary of a `MemoryStore`. Each damage is read whole, in parts by
another sharding (which uses block tables), and without a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpRemoteError,
)
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest
from dcp_remote.storage import MemoryStore, ObjectStore
from tests.support.manifests import decode
from tests.support.simulated_ranks import LocalShards, State, load_as_ranks, save_as_ranks
from tests.support.strategies import Whole, dealt, random_whole, same_bits

# One shard per rank and top-level key: two matrices of six blocks, a scalar and a text of two blocks.
WHOLES: dict[str, Whole] = {
    "model.large": random_whole(torch.float32, (400, 230), 1),
    "model.small": random_whole(torch.bfloat16, (3, 5), 2),
    "optim.large": random_whole(torch.float32, (400, 230), 3),
}
TEXT = "0123456789" * 10_000


@dataclass(frozen=True)
class Saved:
    """A checkpoint of two ranks in memory, and its manifest."""

    store: MemoryStore
    manifest: Manifest

    def shard(self, number: int) -> bytearray:
        """Return a copy of a shard."""
        return bytearray(self.store.space.objects[self.manifest.shards.keys[number]].data)

    def put(self, key: str, data: bytes | bytearray | None) -> None:
        """Replace an object without the store; None removes it."""
        if data is None:
            del self.store.space.objects[key]
        else:
            self.store.space.objects[key] = replace(self.store.space.objects[key], data=bytes(data))


@pytest.fixture
def saved() -> Saved:
    store = MemoryStore()
    states: list[State] = [
        {"model": {}, "optim": {}, "text": TEXT, "step": 12345678901, "names": ["alpha", "beta"]} for _ in range(2)
    ]
    for name, whole in WHOLES.items():
        top, _, rest = name.partition(".")
        for state, part in zip(
            states, dealt(whole, (2, 1), [(0,), (1,)], world_size=2, layouts=["contiguous"]), strict=True
        ):
            state[top][rest] = part
    save_as_ranks(states, lambda: RemoteWriter(store))
    return Saved(store, decode(store.space.objects[MANIFEST_KEY].data))


def whole_template() -> State:
    """Return a template of the whole state, on one rank."""
    tensors: State = {name: torch.zeros(whole.shape, dtype=whole.dtype) for name, whole in WHOLES.items()}
    return tensors | {"text": "", "step": 0, "names": []}


def column_template() -> State:
    """Return a template of two columns, from both ranks' shards: every block of every piece, which is then cut."""
    columns = {
        name: LocalShards(whole.shape, whole.dtype, [((0, 1), torch.zeros(whole.shape[0], 2, dtype=whole.dtype))])
        for name, whole in WHOLES.items()
    }
    return {**columns, "text": "", "step": 0, "names": []}


def row_template() -> State:
    """Return a template of rows of the second half: one block of three, by the block table, and small pieces whole."""
    rows: State = {}
    for name, whole in WHOLES.items():
        first, count = whole.shape[0] // 2 + 1, max(1, whole.shape[0] // 8)
        chunk = torch.zeros(count, whole.shape[1], dtype=whole.dtype)
        rows[name] = LocalShards(whole.shape, whole.dtype, [((first, 0), chunk)])
    return rows | {"text": "", "step": 0, "names": []}


def check_equal(found: State) -> None:
    """Check that a read without an error returned the saved values."""
    for name, whole in WHOLES.items():
        part = found[name]
        for offsets, chunk in part.chunks if isinstance(part, LocalShards) else [((0, 0), part)]:
            assert same_bits(chunk, whole.cell((offsets, tuple(chunk.shape)))), name
    assert found["text"] == TEXT
    assert found["step"] == 12345678901
    assert found["names"] == ["alpha", "beta"]


def _read(template: Callable[[], State]) -> Callable[[ObjectStore], State]:
    def read(store: ObjectStore) -> State:
        state = template()
        nested: State = {"model": {}, "optim": {}}
        for name, value in state.items():
            top, _, rest = name.partition(".")
            nested.setdefault(top, value) if not rest else nested[top].__setitem__(rest, value)
        load_as_ranks([nested], lambda: RemoteReader(store))
        return flat(nested)

    return read


def flat(nested: State) -> State:
    """Return a state with names as torch makes them."""
    return {
        f"{top}.{rest}" if isinstance(value, dict) else top: inner
        for top, value in nested.items()
        for rest, inner in (value.items() if isinstance(value, dict) else [("", value)])
    }


READS: dict[str, Callable[[ObjectStore], State]] = {
    "whole": _read(whole_template),
    "columns": _read(column_template),
    "rows": _read(row_template),
    "without a template": lambda store: flat(load(store)),
}


def errors(saved: Saved) -> Iterator[tuple[str, DcpRemoteError | None]]:
    """Yield each way of reading with its error; results without an error are checked."""
    for name, read in READS.items():
        try:
            found = read(saved.store)
        except DcpRemoteError as error:
            yield name, error
        else:
            check_equal(found)
            yield name, None


def test_without_damage(saved: Saved) -> None:
    """Without damage all four ways of reading succeed; the counts that the tests below rely on are right."""
    assert [error for _, error in errors(saved)] == [None] * 4
    assert len(saved.manifest.shards.keys) == 5
    assert all(saved.manifest.shards.table_lengths[:2] > 0)


def test_a_shard_that_is_cut_off(saved: Saved) -> None:
    """With a shard cut anywhere, whole reads name the shard; partial reads fail or did not need the part."""
    for number, key in enumerate(saved.manifest.shards.keys):
        data = saved.shard(number)
        for twentieth in range(0, 20, 3):
            saved.put(key, data[: len(data) * twentieth // 20])
            found = dict(errors(saved))
            for name in ("whole", "without a template"):
                assert isinstance(found[name], CorruptCheckpointError)
                assert key in str(found[name])
            assert all(error is None or isinstance(error, CorruptCheckpointError) for error in found.values())
        saved.put(key, data[:-1])
        assert isinstance(dict(errors(saved))["whole"], CorruptCheckpointError)
        saved.put(key, data)


def test_a_flipped_bit_in_the_data(saved: Saved) -> None:
    """A flipped bit in any block, first and last byte too, gives an error that names shard and entry."""
    shards = saved.manifest.shards
    for number, key in enumerate(shards.keys):
        data = saved.shard(number)
        start, stop = int(shards.data_starts[number]), len(data)
        for position in {*range(start, stop, 40_009), stop - 1}:
            damaged = bytearray(data)
            damaged[position] ^= 1 << (position % 8)
            saved.put(key, damaged)
            for name, error in errors(saved):
                if error is None:
                    assert name in ("columns", "rows")  # the block was not needed
                    continue
                assert isinstance(error, CorruptCheckpointError)
                assert error.details["shard"] == key
                assert error.details["entry"] in {*WHOLES, "text"}
        saved.put(key, data)


def test_a_flipped_bit_in_a_block_table(saved: Saved) -> None:
    """A flipped bit anywhere in a block table fails partial reads by the table's digest; whole reads do not need it."""
    shards = saved.manifest.shards
    number = next(n for n, key in enumerate(shards.keys) if "rank-00001" in key and shards.table_lengths[n])
    key, data = shards.keys[number], saved.shard(number)
    stop = int(shards.data_starts[number])
    start = stop - int(shards.table_lengths[number])
    assert start < stop
    for position in range(start, stop, 5):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        saved.put(key, damaged)
        check_equal(READS["whole"](saved.store))
        with pytest.raises(CorruptCheckpointError, match="table") as caught:
            READS["rows"](saved.store)
        assert caught.value.details["shard"] == key


def test_shards_that_changed_places(saved: Saved) -> None:
    """Two valid shards of equal size that were exchanged are noticed."""
    keys = saved.manifest.shards.keys
    data = [saved.shard(number) for number in range(len(keys))]
    pairs = [(a, b) for a in range(len(keys)) for b in range(a) if len(data[a]) == len(data[b])]
    assert pairs
    for a, b in pairs:
        saved.put(keys[a], data[b])
        saved.put(keys[b], data[a])
        assert {type(error) for _, error in errors(saved)} == {CorruptCheckpointError}
        saved.put(keys[a], data[a])
        saved.put(keys[b], data[b])


def test_a_foreign_object_in_place_of_a_shard(saved: Saved) -> None:
    """Zeros of the same size, an empty object, a page of HTML and a shard of another checkpoint are noticed."""
    other = MemoryStore()
    dcp.save({"w": torch.ones(300_000)}, storage_writer=RemoteWriter(other))
    foreign = next(found.data for key, found in other.space.objects.items() if key.startswith("shards/"))
    key, data = saved.manifest.shards.keys[0], saved.shard(0)
    for damaged in (bytes(len(data)), b"", b"<html>404</html>", foreign):
        saved.put(key, damaged)
        for name in ("whole", "without a template", "columns"):
            with pytest.raises(CorruptCheckpointError, match=key):
                READS[name](saved.store)


def test_a_missing_shard(saved: Saved) -> None:
    """Each missing shard makes the checkpoint damaged, since its manifest is still there."""
    for number, key in enumerate(saved.manifest.shards.keys):
        data = saved.store.space.objects[key]
        saved.put(key, None)
        for name, error in errors(saved):
            assert error is not None or name == "rows"
            assert error is None or (isinstance(error, CorruptCheckpointError) and key in str(error)), number
        saved.store.space.objects[key] = data


@pytest.mark.parametrize("instead", [None, manifest_json.make_tombstone("0" * 32, ())], ids=["nothing", "a tombstone"])
def test_a_missing_manifest(saved: Saved, instead: bytes | None) -> None:
    """Without a manifest, or with a tombstone of gc, there is no checkpoint; the next save needs no overwrite=True."""
    saved.put(MANIFEST_KEY, instead)
    assert {type(error) for _, error in errors(saved)} == {CheckpointNotFoundError}
    dcp.save({"x": torch.tensor(1)}, storage_writer=RemoteWriter(saved.store))
    assert load(saved.store) == {"x": torch.tensor(1)}


# `tests/attacks` has all of them.
@pytest.mark.parametrize("garbage", [b"", b"{}", b"\x28\xb5\x2f\xfd" + b"x" * 50, b"<html>"])
def test_garbage_in_place_of_a_manifest(saved: Saved, garbage: bytes) -> None:
    """Garbage in place of the manifest is refused by reads; a save replaces it only with overwrite=True."""
    saved.put(MANIFEST_KEY, garbage)
    for _, error in errors(saved):
        assert isinstance(error, CorruptCheckpointError)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"x": 1}, storage_writer=RemoteWriter(saved.store))
    assert isinstance(caught.value.failures[0][0], CheckpointExistsError)
    dcp.save({"x": 1}, storage_writer=RemoteWriter(saved.store, overwrite=True))
    assert load(saved.store) == {"x": 1}
