"""Tests that large buffers of objects are neither encoded nor copied, on the way out and back."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_remote import CheckpointManager, PerRank, RemoteReader, RemoteWriter, load
from dcp_remote.common.units import MiB
from dcp_remote.errors import SaveFailedError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.manifest_json import decode
from dcp_remote.format.raw_buffers import ALONE_BYTES_MIN, RAW_BYTES_MIN, TEXT_BYTES_MAX, Segments, split
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object, encode_stream
from dcp_remote.serialization.torch_streams import save
from dcp_remote.storage import MemoryStore
from dcp_remote.storage.wrapper import Request, WrappedStore
from tests.serialization.test_tags import same
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def stored(encoded: EncodedObject) -> memoryview:
    """Return all bytes in new memory, as a reader does."""
    return memoryview(bytearray(b"".join([encoded.data, *encoded.buffers])))


def again(encoded: EncodedObject) -> Any:
    return decode_object("k", EncodedObject(encoded.encoding, b"", (stored(encoded),)))


def address(of: memoryview | np.ndarray[Any, Any] | torch.Tensor) -> int:
    if isinstance(of, torch.Tensor):
        return of.data_ptr()
    return int(np.frombuffer(of, dtype=np.uint8).ctypes.data) if isinstance(of, memoryview) else int(of.ctypes.data)


LONG: dict[str, Any] = {
    "arrays": [
        *(np.ones((40, 999), code) for code in "?bBhHiIlLefdFDmMSU"),
        np.arange(60_000).reshape(200, 300).T,
        np.arange(60_000, dtype=">u4"),
        np.asfortranarray(np.arange(6000, dtype="<c16").reshape(20, 30, 10)),
        np.zeros((3000, 2), "V3"),
    ],
    "tensors": [
        torch.arange(60_000.0).reshape(200, 300).T,
        torch.arange(60_000.0)[7::2],
        torch.ones(60_000, requires_grad=True),
        torch.nn.Parameter(torch.ones(60_000, dtype=torch.bfloat16)),
        torch.ones(60_001, dtype=torch.bool),
    ],
    "bytes": [b"ab" * 50_000, bytearray(b"a" * 50_001)],
    "many": [[*(np.full(n, n % 251, dtype=np.uint8) for n in range(2000, 2100)), np.ones(70_001), b"x" * 70_002]],
    "nested": [{"a": (torch.ones(9000), {"b": np.ones(9000), "short": np.ones(3), 3: b"x" * 3000})}],
    "states": [{"python": np.ones(5000), "torch": torch.get_rng_state(), "list": [1.5] * 3000}],
}


@pytest.mark.parametrize("name", LONG)
def test_comes_back_exactly(name: str) -> None:
    """Encode each value live and from its stream: types, order and bits are equal."""
    for value in LONG[name]:
        stock = torch.load(io.BytesIO(save(value)), weights_only=False)
        for encoded, expected in ((encode_object("k", value), value), (encode_stream("k", save(value)), stock)):
            assert encoded.encoding == "json+raw"
            assert encoded.length_bytes == len(stored(encoded))
            assert same(again(encoded), expected)


def test_arrays_with_gaps_are_compacted() -> None:
    """Encode every third item of an array, and items that share one place in memory."""
    transposed = np.ones((30, 40, 50)).transpose(1, 0, 2)
    for value in (np.arange(60_000)[::3], np.broadcast_to(np.arange(5), (3000, 5)), transposed):
        assert same(again(encode_object("k", value)), np.ascontiguousarray(value))


@pytest.mark.parametrize("name", [name for name in ITEM_BYTES if not name.startswith(("qint", "quint"))])
def test_tensors_of_every_dtype_keep_their_bytes(name: str) -> None:
    """Encode zeros and ones, of sizes whose memory is shared after loading and of sizes that are copied."""
    for size in (ALONE_BYTES_MIN, TEXT_BYTES_MAX + 16):
        tensor = (torch.arange(size) % 2).to(torch.uint8).view(getattr(torch, name))
        decoded = again(encode_object("k", tensor))
        assert (decoded.dtype, decoded.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(decoded.view(torch.uint8), tensor.view(torch.uint8))


def test_nothing_is_copied() -> None:
    """Compare addresses: buffers are the object's memory, and long values share the memory that was read into."""
    value: dict[str, Any] = {
        "array": np.arange(50_000),
        "fortran": np.asfortranarray(np.ones((300, 200))),
        "tensor": torch.ones(50_000),
        "parameter": torch.nn.Parameter(torch.ones(50_000)),
        "short": np.ones(1000),
        "bytes": b"x" * 100_000,
        "bytearray": bytearray(100_000),
    }
    encoded = encode_object("k", value)
    sent = {address(buffer) for buffer in encoded.buffers}
    views = [memoryview(value["bytes"]), memoryview(value["bytearray"])]
    assert sent == {address(each) for each in (*(v for v in value.values() if hasattr(v, "dtype")), *views)}
    assert len(encoded.data) < 1000
    data = stored(encoded)
    decoded: Any = decode_object("k", EncodedObject("json+raw", b"", (data,)))
    places = {name: address(one) - address(data) for name, one in decoded.items() if hasattr(one, "dtype")}
    inside = {name: 0 <= place < len(data) for name, place in places.items()}
    assert inside == {"array": True, "fortran": True, "tensor": True, "parameter": True, "short": False}
    decoded["array"][0] = 7
    decoded["tensor"][0] = 7
    assert decoded["array"].flags.aligned


def test_short_objects_stay_text() -> None:
    """Encode buffers of a few KiB: base64 in the manifest; longer ones are raw, and aligned for their type."""
    assert encode_object("k", np.zeros(TEXT_BYTES_MAX, dtype=np.uint8)).encoding == "json"
    assert encode_object("k", [bytes(RAW_BYTES_MIN - 1 - n) for n in range(40)]).encoding == "json"
    encoded = encode_object("k", [np.ones(n, dtype) for n in (2051, 4003) for dtype in ("u1", "<f8", "<c16", "<u2")])
    data = stored(encoded)
    text, raw = split(data)
    assert (address(raw) - address(data)) % 64 == 0
    for item in json.loads(bytes(text)):
        encoded_array = item["$numpy.ndarray"]
        assert encoded_array["data"][0] % np.dtype(encoded_array["dtype"]).itemsize == 0


def test_sets_of_long_values_are_sorted() -> None:
    """Encode equal sets in different orders in memory: equal bytes."""
    values = [bytes([n]) * 9000 for n in range(5)]
    assert {bytes(stored(encode_object("k", set(order)))) for order in (values, values[::-1])} == {
        bytes(stored(encode_object("k", {*values})))
    }
    assert again(encode_object("k", {*values})) == {*values}


# ---- through a checkpoint


@pytest.mark.parametrize("per_rank", [True, False])
def test_saving_takes_no_memory_and_restoring_that_of_the_value(tmp_path: Path, *, per_rank: bool) -> None:
    """Count the peak of allocations by Python and numpy for values with 16 MiB."""
    values = {"array": np.arange(MiB), "tensor": torch.arange(MiB)}
    size = 16 * MiB

    def state(inner: object) -> dict[str, Any]:
        return {"x": PerRank(inner) if per_rank else (inner,)}

    def peak_of(action: Any) -> int:
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with CheckpointManager(tmp_path, memory_budget_bytes=64 * MiB) as checkpoints:
        checkpoints.save(1, {"warm": 1}, wait=True)
        given = state({**values, "n": 1})
        assert peak_of(lambda: checkpoints.save(2, given, wait=True)) < 0.3 * size
        found = state(None)
        assert peak_of(lambda: checkpoints.restore(found)) < 1.3 * size
    restored = found["x"].value if per_rank else found["x"][0]
    assert all(bool((restored[name] == value).all()) for name, value in values.items())


def test_unchanged_arrays_are_not_sent_again(tmp_path: Path) -> None:
    """Save an object with two long arrays again: nothing is sent, and then only the array that changed."""
    first, second = np.arange(100_000), np.arange(200_000)
    value: dict[str, Any] = {"first": first, "second": second, "note": "a"}
    written = []
    with CheckpointManager(tmp_path) as checkpoints:
        for step in range(4):
            first[0] -= step == 2
            value["note"] = "b" if step == 3 else "a"
            checkpoints.save(step, {"x": PerRank(value)}, wait=True)
            assert checkpoints.last_save is not None
            written.append(checkpoints.last_save.written_bytes)
    # Each shard has a header and a block table beside them.
    assert written[0] > first.nbytes + second.nbytes
    assert written[1] == 0
    assert first.nbytes < written[2] < first.nbytes + 5000
    assert written[3] < 5000
    for step, changed in enumerate((0, 0, 1, 1)):
        found = load(tmp_path, step=step)["per_rank"]["0"]["x"]
        assert (int(found["first"][0]), found["note"]) == (-changed, "b" if step == 3 else "a")
        np.testing.assert_array_equal(found["second"], second)


class Meddling(WrappedStore):
    """Store that changes memory before a shard is put."""

    def __init__(self, store: MemoryStore, values: np.ndarray[Any, Any]) -> None:
        super().__init__(store)
        self.values = values

    def _request(self, request: Request, send: Callable[[], Any]) -> Any:
        if request.key.startswith("shards/"):
            self.values += 1
        return send()


def test_an_array_that_is_changed_while_it_is_sent_fails_the_save() -> None:
    """Change an array during the put: its digest does not match what was sent, as for a tensor."""
    values = np.zeros(100_000)
    with pytest.raises(Exception, match="changed while it was being saved") as caught:
        save_as_ranks([{"x": (values,)}], lambda: RemoteWriter(Meddling(MemoryStore(), values)))
    assert isinstance(caught.value, SaveFailedError) or "SaveFailedError" in str(caught.value)


def test_large_objects_are_cut_at_shards() -> None:
    """Save one buffer that fills several shards, and short neighbors in one piece."""

    def make_writer() -> RemoteWriter:
        writer = RemoteWriter(store)
        writer._shard_bytes = 100_000
        return writer

    store = MemoryStore()
    short = [np.full(3000, n, dtype=np.uint8) for n in range(50)]
    value = {"a": np.arange(50_000), "b": short, "c": torch.arange(33_333)}
    save_as_ranks([{"x": (value,)}], make_writer)
    assert same(load(store)["x"], (value,))
    template: dict[str, Any] = {"x": None}
    load_as_ranks([template], lambda: RemoteReader(store))
    assert same(template["x"], (value,))
    manifest = decode(store.space.objects["manifest.json"].data)
    assert manifest is not None
    assert manifest.stored[0].encoding == "json+raw"
    assert len(manifest.shards.keys) >= 6


def test_slices_of_segments() -> None:
    """Compare every slice with that of the joined bytes; runs join only short neighbors."""
    parts = [b"abc", b"", b"defgh", b"i"]
    segments, whole = Segments([memoryview(part) for part in parts]), b"".join(parts)
    for start in range(len(whole)):
        for stop in range(start + 1, len(whole) + 1):
            assert bytes(segments[start:stop]) == whole[start:stop]
    long = b"x" * ALONE_BYTES_MIN
    runs = [*Segments([memoryview(part) for part in (b"a", b"b", long, b"c", long, long)]).runs()]
    assert [[view.nbytes for view in run.views] for run in runs] == [[1, 1], [len(long)], [1], [len(long)], [len(long)]]
