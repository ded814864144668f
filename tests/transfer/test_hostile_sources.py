"""Sources that an attacker, or another tool, has written: each is read right, or refused by our own errors."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path, PosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_remote import errors, import_checkpoint, load
from dcp_remote.transfer.source import open_source
from tests.support.foreign_checkpoints import QUIET, by_torch, change_metadata, refused, rewrite


def test_empty_dicts_are_kept(tmp_path: Path) -> None:
    """In dicts and at the end of lists, as a native save keeps them; `SGD` has an empty `state`."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"optimizer": optimizer.state_dict(), "d": {}, "l": [5, {}], "n": {"a": {}, "b": [], "c": [[], {}]}}
    torch.save(state, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    loaded = load(tmp_path / "run")
    assert loaded == state
    optimizer.load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"M\xe8\x03\x85", b"M\xd0\x07\x85"),  # the shape: 2000 elements in a storage of 1000
        (b"M\x00\x01\x85", b"M\x00\x02\x85"),  # a stride of 512 in the place of 256
    ],
)
def test_elements_outside_a_storage(tmp_path: Path, old: bytes, new: bytes) -> None:
    """The bytes behind a storage are those of another tensor."""
    base = torch.arange(1000.0)
    path = tmp_path / "a.pt"
    torch.save({"w": base[::256] if b"\x01" in old else base, "other": torch.ones(9000)}, path)
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused(errors.CorruptCheckpointError, "outside its storage", path, tmp_path)


def test_a_file_that_another_tool_has_packed(tmp_path: Path) -> None:
    """Without memory, torch.load computes places by what torch would have written, and so would read other bytes."""
    state = {"a": torch.arange(1000.0), "b": torch.ones(5000), "c": torch.arange(9.0)}
    torch.save(state, tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", lambda _, data: data)
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    loaded = load(tmp_path / "run")["model"]
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def doubled_lists(times: int, value: Any = 1) -> list[Any]:
    """Return a list that is contained twice in a list, and so on."""
    found = [value]
    for _ in range(times):
        found = [found, found]
    return found


def test_lists_that_contain_one_another(tmp_path: Path) -> None:
    """A file of a few hundred bytes whose lists are 2**40 values; and lists and dicts in themselves."""
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    for value in (doubled_lists(40), deep, itself, doubled_lists(40, torch.ones(1))):
        torch.save({"w": torch.ones(1), "value": value}, tmp_path / "a.pt")
        refused(errors.InvalidArgumentError, "again and again", tmp_path / "a.pt", tmp_path)
    shared = [0.9, 0.999]
    torch.save({"w": torch.ones(1), "groups": [{"betas": shared}] * 100}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "run", step=1, **QUIET)
    assert load(tmp_path / "run")["groups"] == [{"betas": shared}] * 100


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # by torch itself
def test_tensors_that_are_no_plain_ones(tmp_path: Path) -> None:
    """Undamaged files are not called damaged."""
    values = {
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided),
        "meta": torch.empty(3, device="meta"),
        "dimensions": torch.ones([1] * 65),
        "expanded": torch.ones(1).expand(2**50),
    }
    for value in values.values():
        torch.save({"w": value, "e": 1}, tmp_path / "a.pt")
        refused(errors.InvalidArgumentError, "plain|65|dimensions|memory", tmp_path / "a.pt", tmp_path)
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", lambda _, data: data, zipfile.ZIP_DEFLATED)
    refused(errors.CorruptCheckpointError, "compressed record", tmp_path / "a.pt", tmp_path)


def test_damaged_programs(tmp_path: Path) -> None:
    """Each byte of the pickle program in turn; every error is one of ours."""
    torch.save({"w": torch.arange(3.0), "e": [1]}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        program = archive.read("whole/data.pkl")
    outcomes: Counter[str] = Counter()
    for place in range(len(program)):
        shutil.copy(tmp_path / "whole.pt", tmp_path / "a.pt")
        wrong = program[:place] + bytes([program[place] ^ 0x2A]) + program[place + 1 :]
        rewrite(tmp_path / "a.pt", lambda name, data, wrong=wrong: wrong if name.endswith("data.pkl") else data)  # type: ignore[misc]  # bound at once
        try:
            open_source(tmp_path / "a.pt")
        except errors.DcpRemoteError as error:
            outcomes[type(error).__name__] += 1
    assert outcomes["CorruptCheckpointError"] > 10
    assert outcomes["UnsafeObjectError"] > 10


def write_safetensors(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("shape", [[1] * 100_000, [2**62, 2**62, 0], [2**63 - 1, 0], [0, 2**63 - 1, 2**63 - 1]])
def test_shapes_that_no_checkpoint_holds(tmp_path: Path, shape: list[int]) -> None:
    """At once, before torch sees the shape."""
    length = 0 if 0 in shape else 1
    header = {"a": {"dtype": "U8", "shape": shape, "data_offsets": [0, length]}}
    path = write_safetensors(tmp_path / "a.safetensors", header, b"\0" * length)
    began_seconds = time.monotonic()
    refused(errors.InvalidArgumentError, "dimensions or", path, tmp_path)
    assert time.monotonic() - began_seconds < 10


def set_path(path: tuple[Any, ...]) -> Callable[[Any], None]:
    return lambda metadata: metadata.planner_data.update(w=path)


def set_chunks(*chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    """Return a change to chunks of other offsets and sizes, all in the place of the whole tensor."""

    def change(metadata: Any) -> None:
        place = next(info for index, info in metadata.storage_data.items() if index.fqn == "w")
        found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
        metadata.state_dict_metadata["w"].chunks = found
        metadata.storage_data.update({MetadataIndex("w", chunk.offsets): place for chunk in found})

    return change


CHANGES: dict[str, Callable[[Any], object]] = {
    "through an entry": set_path(("o", "x")),
    "of another entry": set_path(("o", 0)),
    "another name": set_path(("../../x",)),
    "a number first": set_path((0, "w")),
    "empty": set_path(()),
    "bytes": set_path((b"w",)),
    "overlap": set_chunks(((0, 0), (3, 4)), ((1, 0), (2, 4))),
    "the same twice": set_chunks(((0, 0), (3, 4)), ((0, 0), (3, 4))),
    "negative": set_chunks(((0, 0), (-3, -4))),
    "outside": set_chunks(((0, 0), (4, 4))),
    "dimensions": set_chunks(((0,), (12,))),
    "listed 10,000 times": lambda metadata: setattr(
        metadata.state_dict_metadata["w"], "chunks", metadata.state_dict_metadata["w"].chunks * 10_000
    ),
    "too few": lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size((2**40, 4))),
    "above 64 bits in sum": set_chunks(((2**63 - 1, 0), (3, 4))),
    "negative size": lambda metadata: setattr(metadata.state_dict_metadata["w"], "size", torch.Size((-3, 4))),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_metadata_of_torch_that_contradict_themselves(tmp_path: Path, change: str) -> None:
    refused(
        errors.CorruptCheckpointError,
        "damaged|chunk|not its name",
        by_torch(tmp_path / "torch", CHANGES[change]),
        tmp_path,
    )


def test_an_index_that_fills_the_memory(tmp_path: Path) -> None:
    """Torch fills a list with None up to the index."""

    def change(metadata: Any) -> None:
        for values in (metadata.state_dict_metadata, metadata.planner_data):
            values["o.1000000000000"] = values.pop("o.0")
        metadata.planner_data["o.1000000000000"] = ("o", 10**12)
        for index in list(metadata.storage_data):
            if index.fqn == "o.0":
                metadata.storage_data[MetadataIndex("o.1000000000000")] = metadata.storage_data.pop(index)

    refused(errors.CorruptCheckpointError, "not its name", by_torch(tmp_path / "torch", change), tmp_path)


@pytest.mark.parametrize("value", ["cpathlib\nPosixPath\n", "ctorch.serialization\n_get_layout\n"])
def test_metadata_of_torch_that_change_a_class(tmp_path: Path, value: str) -> None:
    """The state of a class is set as that of any object, for the whole process."""
    folder = by_torch(tmp_path / "torch")
    program = value.encode() + b"N}X\x0b\x00\x00\x00is_absoluteK\x07s\x86b."
    (folder / ".metadata").write_bytes(b"\x80\x02" + program)
    before = PosixPath.is_absolute
    refused(errors.UnsafeObjectError, "change a class", folder, tmp_path)
    assert PosixPath.is_absolute is before


def doubled(times: int) -> bytes:
    """Return the program of a tuple that is contained twice in a tuple, and so on: 2**times values."""
    return b"K\x01\x85q\x00" + b"".join(b"h%c\x86q%c" % (number, number + 1) for number in range(times))


def test_a_length_of_torch_save_that_fills_the_memory(tmp_path: Path) -> None:
    """`bytearray(10**12)`, which torch's restricted unpickler calls."""
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3)}, path)
    program = b"\x80\x02}X\x01\x00\x00\x00bcbuiltins\nbytearray\n\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85Rs."
    rewrite(path, lambda name, data: program if name.endswith("data.pkl") else data)
    refused(errors.UnsafeObjectError, "bytearray", path, tmp_path)


CHECKPOINT = b"ctorch.distributed.checkpoint."
INDEX = CHECKPOINT + b"metadata\nMetadataIndex\n)\x81}X\x03\x00\x00\x00fqn"

# Metadata with a tuple of 2**60 values that is hashed as a key, an index or an argument, or printed as a value.
WALKED_FOR_EVER = {
    "key": b"}" + doubled(60) + b"K\x01s",
    "index": b"}" + INDEX + doubled(60) + b"sbK\x01s",
    "argument": CHECKPOINT + b"metadata\n_MEM_FORMAT_ENCODING\n" + doubled(60) + b"\x85R",
    "sizes": b"ctorch\nSize\n" + doubled(60) + b"\x85R",
    "state": CHECKPOINT + b"metadata\nTensorProperties\n)\x81(NN" + doubled(60) + b"Nt\x85b",
    "pairs": b"ccollections\nOrderedDict\n]" + doubled(60) + b"K\x01\x86a\x85R",
    "set": b"\x8f(" + doubled(60) + b"\x90",
    "value": CHECKPOINT
    + b"metadata\nMetadata\n)\x81}(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}"
    + INDEX
    + b"X\x01\x00\x00\x00wsb"
    + CHECKPOINT
    + b"filesystem\n_StorageInfo\n)\x81}X\x0d\x00\x00\x00relative_path"
    + doubled(60)
    + b"sbsub",
    "list": b"]q\x00" + 20_000 * b"(h\x00h\x00e",
    "index that is changed": b"}}"
    + INDEX
    + b"X\x01\x00\x00\x00wsbr\x63\x00\x00\x00K\x01sX\x01\x00\x00\x00ih\x63}X\x03\x00\x00\x00fqn"
    + doubled(60)
    + b"sbs",
}


def test_sources_that_would_crash_or_never_end(tmp_path: Path) -> None:
    """Imported by the command line in a process of its own: no signal reaches torch's code, and some of it ends by one.

    A tensor without memory whose bytes are swapped (SIGSEGV), programs of a few hundred bytes that are walked for ever,
    objects that torch's planner takes apart.
    """
    said: dict[str, str] = {}

    def torch_save(name: str, record: str, content: bytes, message: str = "damaged") -> None:
        torch.save({"w": torch.ones(3)}, tmp_path / name)
        rewrite(tmp_path / name, lambda found, data: content if found.endswith(record) else data)
        said[name] = message

    torch_save("order.pt", "byteorder", b"big" if sys.byteorder == "little" else b"little", "another order of bytes")
    for suffix in ("pt", "ckpt", "bin"):
        torch_save(f"key.{suffix}", "data.pkl", b"\x80\x02}" + doubled(60) + b"K\x01s.")
    for name, program in WALKED_FOR_EVER.items():
        (by_torch(tmp_path / name) / ".metadata").write_bytes(b"\x80\x04" + program + b".")
        said[name] = "damaged"
    key = "x" * 100_000  # stored once
    for name, value in (("lists", doubled_lists(60)), ("keys", {number: {key: 1} for number in range(400)})):
        torch.save(value, stream := io.BytesIO())
        by_torch(tmp_path / name, partial(set_object, data=stream.getvalue(), file="object"))
        (tmp_path / name / "object").write_bytes(stream.getvalue())
        said[name] = "again and again"
    code = """
import sys
from dcp_remote.cli import main
for source in sys.argv[2:]:
    print(f"== {source}", file=sys.stderr, flush=True)
    assert main(["import", source, sys.argv[1], "--step", "1"]) in (1, 2)
"""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        code,
        str(tmp_path / "run"),
        *(str(tmp_path / name) for name in said),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended
    found = dict(part.split("\n", 1) for part in ended.stderr.split("== ")[1:])
    assert [name for name, message in said.items() if message not in found[str(tmp_path / name)]] == []


def set_object(metadata: Any, *, data: bytes, file: str) -> None:
    """Let the objects of a checkpoint lie in another file."""
    for index, info in metadata.storage_data.items():
        if index.fqn != "w":
            info.relative_path, info.offset, info.length = file, 0, len(data)


def test_indexes_with_equal_hashes(tmp_path: Path) -> None:
    """The hash of -1 is that of -2, so 4,096 tuples of 12 of them have one hash; a dict of them is quadratic."""

    def change(metadata: Any) -> None:
        [(index, info)] = [item for item in metadata.storage_data.items() if item[0].fqn == "w"][:1]
        for number in range(4096):
            offset = torch.Size([-1 - (number >> bit & 1) for bit in range(12)])
            metadata.storage_data[MetadataIndex(index.fqn, offset)] = info

    refused(errors.CorruptCheckpointError, "damaged", by_torch(tmp_path / "torch", change), tmp_path)


def test_a_header_with_a_key_twice(tmp_path: Path) -> None:
    """Readers differ in which of the two tensors counts; in an entry and in an index of weights as well."""
    once = '"w":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}'
    for header in (f"{{{once},{once}}}", once.replace('"I8"', '"I8","dtype":"U8"').join("{}")):
        (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        refused(errors.CorruptCheckpointError, "a name twice", tmp_path / "a.safetensors", tmp_path)


@pytest.mark.parametrize(
    "state",
    [{1: 1, "1": 2}, {"w": torch.ones(1), "d": {1: 1, "1": 2}}, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}],
)
def test_values_with_one_name(tmp_path: Path, state: dict[Any, Any]) -> None:
    """Keys that are equal as text, or once the parts of a path are joined."""
    torch.save(state, tmp_path / "a.pt")
    refused(errors.InvalidArgumentError, "same name|have one name", tmp_path / "a.pt", tmp_path)


@pytest.mark.parametrize("record", ["data.pkl", "version", "byteorder", ".storage_alignment"])
def test_compressed_records(tmp_path: Path, record: str) -> None:
    """Refused by the directory of the zip: torch inflates such a record before anything can be checked."""
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, data in records.items():
            is_bomb = name.endswith(f"/{record}")
            kind = zipfile.ZIP_DEFLATED if is_bomb else zipfile.ZIP_STORED
            archive.writestr(name, data + bytes(16 << 20) * is_bomb, kind)
    refused(errors.CorruptCheckpointError, "compressed record", tmp_path / "a.pt", tmp_path)


def test_a_long_key_in_many_dicts(tmp_path: Path) -> None:
    """A key that is stored once becomes a name in each dict; the names are bounded before they are built."""
    key = "x" * 100_000
    torch.save({"w": torch.ones(1), "a": {number: {key: 1} for number in range(400)}}, tmp_path / "a.pt")
    tracemalloc.start()
    refused(errors.InvalidArgumentError, "long keys", tmp_path / "a.pt", tmp_path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10 << 20
    history = {"a_rather_long_name_of_a_callback": {"values_by_step": dict.fromkeys(range(20_000), 1)}}
    torch.save({"w": torch.ones(1), "callbacks": history}, tmp_path / "a.pt")
    open_source(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "program",
    [
        b"\x8d" + (2**40).to_bytes(8, "little") + b"x",  # BINUNICODE8
        b"\x95" + (2**62).to_bytes(8, "little"),  # FRAME
        b"Nr" + (2**31).to_bytes(4, "little"),  # LONG_BINPUT
        b"\x8a\xff" + b"\x7f" * 255,  # LONG1
        b"\x8a\xff\x7f",
    ],
)
def test_metadata_of_torch_with_lengths_that_are_none(tmp_path: Path, program: bytes) -> None:
    folder = by_torch(tmp_path / "torch")
    (folder / ".metadata").write_bytes(b"\x80\x04" + program + b".")
    refused(errors.CorruptCheckpointError, "damaged|none of torch", folder, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_empty_chunks(tmp_path: Path) -> None:
    """Undamaged: ranks that have no part of a tensor list an empty chunk, at times the same one."""
    folder = by_torch(tmp_path / "torch", set_chunks(((0, 0), (3, 4)), ((3, 0), (0, 4)), ((3, 0), (0, 4))))
    source = open_source(folder)
    assert len(source.pieces("w")) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("elements", [3, 3_000_000])  # a stream that is read whole, and one that is read in pieces
@pytest.mark.parametrize("name", ["w", "per_rank.0.w"])
def test_metadata_of_torch_with_another_dtype(tmp_path: Path, name: str, elements: int) -> None:
    """The values are not converted, nor those of a single rank, which are read before the save."""
    value = torch.arange(elements)
    state = {"w": value} if name == "w" else {"per_rank": {"0": {"w": value}}}
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata[name].properties.dtype = torch.int32

    change_metadata(tmp_path / "torch", change)
    refused(errors.CorruptCheckpointError, "does not hold the chunk", tmp_path / "torch", tmp_path)
