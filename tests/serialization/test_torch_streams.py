"""Attacks by `torch.save` streams: nothing is run, and memory is bounded by the bytes that are present.

Attacks are given as the pickle opcodes in the bucket.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import CorruptCheckpointError, UnsafeObjectError
from dcp_remote.serialization.objects import EncodedObject, decode_object, encode_object, encode_stream
from dcp_remote.serialization.restricted_unpickler import DamagedStreamError
from dcp_remote.serialization.torch_streams import HEADER_BYTES, find_content, list_records, load_restricted, save

REFUSALS = (CorruptCheckpointError, UnsafeObjectError)


def decode_torch(data: bytes) -> object:
    return decode_object("k", EncodedObject("torch", data))


class Attack:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_does_not_run(tmp_path: pathlib.Path) -> None:
    """Create a folder by `__reduce__`, in each encoding; with allow_pickle it is created, so the attack is real."""
    folder = tmp_path / "made"
    stream = save([Attack(str(folder))])
    for encoded in (EncodedObject("torch", stream), EncodedObject("pickle", stream), EncodedObject("json", stream)):
        with pytest.raises(REFUSALS):
            decode_object("k", encoded)
    with pytest.raises(CorruptCheckpointError):
        decode_torch(pickle.dumps([Attack(str(folder))]))
    with pytest.raises(UnsafeObjectError, match="mkdir"):
        decode_torch(stream)
    assert not folder.exists()
    decode_object("k", EncodedObject("pickle", stream), allow_pickle=True)
    assert folder.exists()


class Widened:
    pass


def test_safe_globals_of_torch_are_ignored() -> None:
    """Add a class to torch's safe globals: torch loads it; we refuse it on save and load, and say why."""
    stream = save([Widened()])
    with torch.serialization.safe_globals([Widened]):
        assert isinstance(torch.load(io.BytesIO(stream), weights_only=True)[0], Widened)
        with pytest.raises(UnsafeObjectError, match="add_safe_globals"):
            encode_stream("k", stream)
        with pytest.raises(UnsafeObjectError, match="add_safe_globals"):
            encode_object("k", [Widened()])
        with pytest.raises(UnsafeObjectError, match="add_safe_globals"):
            decode_torch(stream)


def rezipped(stream: bytes, changes: Mapping[str, bytes | None], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a stream with records replaced, added, or (None) left out."""
    with zipfile.ZipFile(io.BytesIO(stream)) as archive:
        records: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
    records |= {f"archive/{name}": data for name, data in changes.items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", compression) as archive:
        for name, data in records.items():
            if data is not None:
                archive.writestr(name, data)
    return packed.getvalue()


def program(body: bytes) -> bytes:
    """Return a stream whose pickle is `body`, between protocol and stop."""
    return rezipped(save(None), {"data.pkl": b"\x80\x02" + body + b"."})


def call(module: str, name: str, arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + arguments + b"R"


def word(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def long(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def doubled(levels: int) -> bytes:
    """Return a list of two lists of two lists ..., which is 2**levels values for whoever walks it."""
    return b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(levels))


STORAGE = b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word("0") + word("cpu") + long(2**40) + b"tQ"
SHAPE = long(2**40) + b"\x85"
ATTRIBUTES = b"}(" + b"".join(word(f"a{n}") + b"N" for n in range(250)) + b"uq\x00"
PROGRAMS: dict[str, bytes] = {
    "bytes of a terabyte": call("__builtin__", "bytearray", long(2**40) + b"\x85"),
    "tensor of a terabyte": call("torch", "FloatTensor", long(2**40) + b"\x85"),
    "legacy tensor": call("torch", "Tensor", long(2**40) + b"\x85"),
    "new object": b"ctorch\nTensor\n" + long(2**40) + b"\x85\x81",
    "inflating codec": call("_codecs", "encode", word("a") + word("unicode_escape") + b"\x86"),
    "code": call("os", "system", word("true") + b"\x85"),
    "builtin": call("__builtin__", "eval", word("1") + b"\x85"),
    "call of a made value": call("__builtin__", "set", b"]\x85") + b")R",
    "call of a string": word("x") + b")R",
    "method of a string": b"\x8c\x01a\x8c\x01b\x93)R",
    "wrong rebuild": call("torch._tensor", "_rebuild_from_type_v2", b"(cos\nsystem\nctorch\nTensor\n)Nt"),
    "wrong class": call("torch._tensor", "_rebuild_from_type_v2", b"(ctorch\nSize\nctorch\nfloat32\n)}t"),
    "state of a tensor": call("torch", "Size", b")\x85") + b"}b",
    "items of a tensor": call("torch", "Size", b")\x85") + word("a") + b"Ns",
    "append to a set": call("__builtin__", "set", b"]\x85") + b"Na",
    "storage larger than its record": STORAGE,
    "quantized from nothing": call("torch._utils", "_rebuild_qtensor", b"(NK\x00" + SHAPE + SHAPE + b"N\x89Nt"),
    "sparse tensor of doubled lists": call(
        "torch._utils",
        "_rebuild_sparse_tensor",
        call("torch.serialization", "_get_layout", word("torch.sparse_coo") + b"\x85")
        + b"("
        + doubled(60)
        + b"NNt\x86",
    ),
    "quantized by doubled lists": call(
        "torch._utils",
        "_rebuild_qtensor",
        b"(" + STORAGE[:-1].replace(long(2**40), b"K\x01") + b"QK\x00))" + doubled(60) + b"\x85\x89Nt",
    ),
    "one state of many parameters": ATTRIBUTES
    + call(
        "torch._utils",
        "_rebuild_tensor_v2",
        b"(" + STORAGE.replace(long(2**40), b"K\x01") + b"K\x00K\x01\x85K\x01\x85\x89Nt",
    )
    + b"q\x01]("
    + call("torch._utils", "_rebuild_parameter_with_state", b"(h\x01\x89Nh\x00t") * 1000
    + b"e",
    "one state of many dicts": ATTRIBUTES + b"](" + (b"ccollections\nOrderedDict\n)Rh\x00b" * 30_000) + b"e",
    "wrapper": call("torch._utils", "_rebuild_wrapper_subclass", b"(t"),
    "empty stack": b"R",
    "no mark": b"t",
    "unknown memo": b"h\x07",
    "memo of a terabyte": b"Nr\xff\xff\xff\xff",
    "unhashable key": b"}]Ns",
    "odd items": b"}(Nu",
    "cut": b"X\xff\xff\xff\xff",
    "persistent string": word("storage") + b"Q",
    "float as size": b"(" + word("storage") + b"ctorch\nFloatStorage\n" + word("0") + word("cpu") + b"\x89tQ",
    "nothing at all": b"",
    "deep": b"]" * 1000 + b"a" * 999,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_torch_save_does_not_write_is_refused(name: str) -> None:
    """Decode valid zips with one storage of 4 bytes and a hostile program; several would take a terabyte."""
    with pytest.raises((CorruptCheckpointError, UnsafeObjectError)) as caught:
        decode_torch(rezipped(program(PROGRAMS[name]), {"data/0": b"1234"}))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_zips_that_torch_save_does_not_write_are_corrupt() -> None:
    """Decode compressed, foreign, duplicate, missing records, two folders, TorchScript, protocol 4, no zip."""
    good = save([torch.ones(2).to_sparse(), [1]])
    assert decode_torch(rezipped(good, {})) is not None
    doubled = io.BytesIO(good)
    elsewhere = io.BytesIO(rezipped(good, {"version": None}))
    with zipfile.ZipFile(elsewhere, "a") as archive:
        archive.writestr("elsewhere/version", b"3")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(doubled, "a") as archive:
        archive.writestr("archive/version", b"3")
    bad = [
        rezipped(good, {}, compression=zipfile.ZIP_DEFLATED),
        rezipped(good, {"constants.pkl": b"x"}),
        rezipped(good, {"data.pkl": None}),
        elsewhere.getvalue(),
        rezipped(good, {"data/0": None}),
        rezipped(good, {"version": b"not a number"}),
        rezipped(good, {"byteorder": b"middle"}),
        doubled.getvalue(),
        good[:-10],
        good[10:],
        b"",
        b"PK\x03\x04",
        pickle.dumps([1]),
    ]
    for stream in bad:
        with pytest.raises(CorruptCheckpointError):
            decode_torch(stream)
    with pytest.raises(UnsafeObjectError, match="protocol"):
        decode_torch(rezipped(good, {"data.pkl": pickle.dumps(1, 4)}))


def test_sparse_indices_are_checked() -> None:
    """Decode an index beyond the shape, which torch would use unchecked; torch's switch is reset afterwards."""
    value = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1), (2,), is_coalesced=True, check_invariants=True)
    stream = save(value)
    assert isinstance(decode_torch(stream), torch.Tensor)
    with pytest.raises(CorruptCheckpointError):
        decode_torch(rezipped(stream, {"data/0": (10**6).to_bytes(8, "little")}))
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


class Hooked:
    """Parameter whose hook is no function; torch's `backward` would call it, and end the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_parameter, (torch.ones(1), True, OrderedDict([(1, 2)]))


def test_hooks_of_a_parameter_are_left_out() -> None:
    """Decode a parameter with a hook, which torch.save never writes."""
    value = decode_torch(save(Hooked()))
    assert isinstance(value, torch.nn.Parameter)
    assert not value._backward_hooks


def test_views_of_an_empty_tensor() -> None:
    """Decode two views of an empty tensor with different dtypes, which torch stores as one storage."""
    empty = torch.zeros(0)
    decoded = decode_torch(save([empty, empty.view(torch.int32)]))
    assert [value.dtype for value in decoded] == [torch.float32, torch.int32]  # type: ignore[attr-defined]  # a list


STREAMS = [save([torch.ones(3).to_sparse(), [1], "text", {1, 2}, b"ab"]), save({"a": torch.ones(3), "b": 2.5})]


@given(st.sampled_from(STREAMS), st.data())
def test_damaged_streams_give_an_object_or_one_of_three_errors(sample: bytes, data: st.DataObject) -> None:
    """Replace a few bytes of a valid stream, most of them in the program."""
    damaged = bytearray(sample)
    end = data.draw(st.sampled_from([600, len(damaged)]))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(*REFUSALS):
        decode_torch(bytes(damaged))


def test_a_storage_shorter_than_its_record() -> None:
    """Refused as by torch, whose storages have the size of their records."""
    stream, changed = io.BytesIO(), io.BytesIO()
    torch.save(torch.arange(100.0)[:50], stream)
    with zipfile.ZipFile(stream) as archive, zipfile.ZipFile(changed, "w") as other:
        for entry in archive.infolist():
            other.writestr(entry.filename, archive.read(entry) + b"1234" * entry.filename.endswith("/data/0"))
    assert isinstance(load_restricted(stream.getvalue()), torch.Tensor)
    with pytest.raises(DamagedStreamError, match="another size than its record"):
        load_restricted(changed.getvalue())


def test_the_directory_is_found_in_the_end_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are those in the stream, which newer Pythons compare with its length (gh-139700)."""
    stream = save({str(number): torch.full((1000,), number) for number in range(100)})
    usual = zipfile._EndRecData  # type: ignore[attr-defined]  # private

    def end_record(file: Any) -> Any:
        assert file.seek(0, os.SEEK_END) == file.tell() == len(stream)
        file.seek(-20, os.SEEK_END)
        assert file.tell() == len(stream) - 20
        return usual(file)

    monkeypatch.setattr(zipfile, "_EndRecData", end_record)
    whole = list_records(stream, len(stream))
    part = list_records(stream[-20_000:], len(stream))
    assert {name: one.header_offset for name, one in part.items()} == {
        name: one.header_offset for name, one in whole.items()
    }
    entry = part["data/7"]
    start = find_content(entry, stream[entry.header_offset :][:HEADER_BYTES])
    assert stream[start:][: entry.file_size] == bytes(torch.full((1000,), 7).numpy())
    with pytest.raises(ValueError, match="no header"):
        find_content(entry, bytes(HEADER_BYTES))
