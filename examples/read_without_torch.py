"""Read a checkpoint without torch and without dcp_remote: the reference reader, written from FORMAT.md.

    python examples/read_without_torch.py FOLDER-OR-URL [--step STEP]

Lists the entries of a checkpoint, or of the newest one of a run, and reads each, comparing all digests. A URL begins
with http:// or https://, and needs no credentials (a public or presigned prefix). Needs numpy, xxhash and zstandard.

Tensors become arrays: bfloat16 becomes float32, which is exact, and a dtype that numpy lacks becomes unsigned integers
of its size. Streams of torch.save stay bytes. Of section 6 of FORMAT.md only digests, keys and versions are checked;
other damage is read, or raises `UnreadableError` where it is noticed.
"""

from __future__ import annotations

import argparse
import binascii
import contextlib
import io
import itertools
import json
import re
import struct
import sys
import urllib.error
import urllib.request
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID, SafeUUID

import numpy as np
import xxhash
import zstandard

VERSION, FEATURES = "1", {"dcp_remote manifest": ["segments"]}
SHARD_KEY = re.compile(r"shards/[0-9a-f]{2}/(?!.*\.\.)[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")
MANIFEST_KEY = re.compile(r"manifests/(?!.*\.\.)[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.json")
LIST_ENTRIES_MAX = 10_000_000
NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSUV]\d{1,10}(\[\d{0,10}[a-zA-Z]{1,2}\])?", re.ASCII)

# Bytes per element of the dtypes that numpy has under other names, or lacks; all others lack, too, and have one byte.
NUMPY_NAMES = {"bool", *(f"{sign}int{8 * size}" for sign in ("", "u") for size in (1, 2, 4, 8)), "float16", "float32"}
NUMPY_NAMES |= {"float64", "complex64", "complex128"}
LACKING_BYTES = {"bfloat16": 2, "bits16": 2, "complex32": 4, "qint32": 4}

# Read a range of an object: key, first byte, byte after the last (None for the end).
Fetch = Callable[[str, int, int | None], bytes]

# Shard, start, length, first entry in the block table, and digest of a piece.
Piece = tuple[int, int, int, int, bytes]
T = TypeVar("T")


class UnreadableError(Exception):
    """The checkpoint is damaged, or needs a newer reader; the message says which."""


def require(condition: object, message: str) -> None:
    """Raise unless a condition holds."""
    if not condition:
        raise UnreadableError(message)


@contextlib.contextmanager
def unreadable_if_damaged() -> Iterator[None]:
    """Turn every error of forged values into `UnreadableError`; that of a missing object stays an `OSError`."""
    try:
        yield
    except (UnreadableError, OSError):
        raise
    except Exception as error:
        raise UnreadableError(f"a value is damaged: {type(error).__name__}: {error}") from error


def open_source(place: str | Path) -> Fetch:
    """Return the function that reads objects of a folder, or of a prefix behind HTTP."""

    def fetch_file(key: str, first: int, stop: int | None) -> bytes:
        path = Path(place, key).resolve()
        require(path.is_relative_to(Path(place).resolve()), f"{key} leads out of the folder")
        with path.open("rb") as file:
            file.seek(first)
            return file.read(-1 if stop is None else stop - first)

    def fetch_url(key: str, first: int, stop: int | None) -> bytes:
        base, _, query = str(place).partition("?")
        url = f"{base.rstrip('/')}/{key}{'?' * bool(query)}{query}"
        request = urllib.request.Request(url, headers={"Range": f"bytes={first}-{'' if stop is None else stop - 1}"})
        try:
            with urllib.request.urlopen(request) as answer:
                data: bytes = answer.read()
        except urllib.error.HTTPError as error:
            if error.code in (403, 404):
                raise FileNotFoundError(url) from error
            raise
        return data if answer.status == 206 else data[first:stop]

    return fetch_url if re.match("https?://", str(place)) else fetch_file


def from_base64(text: str) -> bytes:
    """Decode base64 with padding, and nothing else in it."""
    return binascii.a2b_base64(text, strict_mode=True)


def column(text: str) -> list[int]:
    """Decode a column of integers."""
    width, _, packed = text.partition(":")
    require(width in ("1", "2", "4", "8"), "a column has an unknown width")
    numbers: list[int] = np.frombuffer(from_base64(packed), f"<i{width}").cumsum(dtype=np.int64).tolist()
    return numbers


def digests(text: str) -> list[bytes]:
    """Split joined digests."""
    data = from_base64(text)
    require(len(data) % 16 == 0, "a digest does not have 16 bytes")
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def list_pieces(pieces: dict[str, str]) -> list[Piece]:
    """Return shard, start, length, first entry in the block table, and digest of each piece."""
    columns = (column(pieces[name]) for name in ("shard", "start", "length", "table"))
    return list(zip(*columns, digests(pieces["digests"]), strict=True))


def take(values: Iterator[T], count: int) -> tuple[T, ...]:
    """Take so many values."""
    return tuple(itertools.islice(values, count))


def block_bytes(length: int) -> int:
    """Return the block size of a piece of so many bytes."""
    return next((size for size in (65536, 131072, 262144, 524288) if size * 64 >= length), 1048576)


@unreadable_if_damaged()
def read_document(fetch: Fetch, key: str, form: str) -> dict[str, Any]:
    """Read a manifest or catalog, and check its digest, version and features."""
    data = fetch(key, 0, None)
    if data.startswith(b"\x28\xb5\x2f\xfd"):
        data = zstandard.ZstdDecompressor(max_window_size=2**27).decompress(data, allow_extra_data=False)
    require(data[:47] == b'{"xxh3-128":"%s",' % xxhash.xxh3_128_hexdigest(data[47:]).encode(), f"{key} is damaged")
    document: dict[str, Any] = json.loads(data)
    require(document["format"] == form, f"{key} is no {form}")
    require(document["version"] == VERSION, f"{key} needs a reader of version {document['version']}")
    required = document["requires"]
    require(isinstance(required, list) and all(isinstance(name, str) for name in required), f"{key} is damaged")
    require(set(required).issubset(FEATURES.get(form, ())), f"{key} needs a reader of {required}")
    return document


def read_manifest(fetch: Fetch, step: int | None = None) -> dict[str, Any]:
    """Read the manifest of a checkpoint; in a run, of a step or of the newest checkpoint."""
    manifest = None
    if step is None:
        with contextlib.suppress(FileNotFoundError):  # a checkpoint by itself comes before a run
            manifest = read_document(fetch, "manifest.json", "dcp_remote manifest")
    if manifest is None:
        live = read_document(fetch, "catalog.json", "dcp_remote catalog")["checkpoints"]
        chosen = [entry for entry in live if entry["step"] == step or (step is None and not entry.get("abandoned"))]
        require(chosen, f"the run has no such checkpoint, only {[entry['step'] for entry in live]}")
        require(MANIFEST_KEY.fullmatch(chosen[-1]["manifest"]), "the key of a manifest leads elsewhere")
        manifest = read_document(fetch, chosen[-1]["manifest"], "dcp_remote manifest")
        require(manifest["save_id"] == chosen[-1]["save_id"] and manifest["run"], "the manifest is of another save")
    require(manifest["kind"] == "checkpoint", "there is no checkpoint here")
    require(manifest["digest"] == "xxh3-128", f"the digests are {manifest['digest']}")
    require(("segments" in manifest) == ("segments" in manifest["requires"]), "segments and features contradict")
    return manifest


@dataclass(frozen=True)
class Entry:
    """Entry of a checkpoint: a tensor, or an object if `dtype` is empty; chunks are offsets, sizes and pieces."""

    name: str
    encoding: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    chunks: tuple[tuple[tuple[int, ...], tuple[int, ...], range], ...] = ()
    inline: Any = None


class Checkpoint:
    """Checkpoint whose entries can be read; `manifest` is the document."""

    @unreadable_if_damaged()
    def __init__(self, place: str | Path, step: int | None = None) -> None:
        """Read the manifest."""
        self.fetch = open_source(place)
        self.manifest = read_manifest(self.fetch, step)
        shards, pieces = self.manifest["shards"], self.manifest["pieces"]
        require(all(SHARD_KEY.fullmatch(key) for key in shards["keys"]), "a shard's key leads elsewhere")
        self._shards = list(
            zip(
                shards["keys"],
                *(column(shards[name]) for name in ("data_starts", "table_lengths")),
                digests(shards["table_digests"]),
                strict=True,
            )
        )
        self._pieces = list_pieces(pieces)
        self._tables: dict[int, list[bytes]] = {}
        chunks = self.manifest["chunks"]
        self._chunks = [column(chunks[name]) for name in ("offsets", "sizes", "pieces")]
        if "segments" in self.manifest["requires"]:
            self._join_segments()
        self.entries = {entry.name: entry for entry in self._list_entries()}

    def _join_segments(self) -> None:
        """Put the chunks of all segments, and their pieces, in their places."""
        table = {name: column(text) for name, text in self.manifest["segments"].items()}
        tensors, shards = iter(table["tensor"]), iter(table["shard"])
        dimensions = column(self.manifest["tensors"]["dimensions"])
        count = len(table["tensors"])
        found: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...], list[Piece]]] = {}
        segment_first = len(self._pieces) - count
        for segment in range(count):
            data = self.read_piece(segment_first + segment)
            document = read_document(lambda *_, data=data: data, f"segment {segment}", "dcp_remote segment")
            chunks, listed = document["chunks"], take(shards, table["shards"][segment])
            numbers, offsets, sizes, counts = (
                iter(column(chunks[name])) for name in ("numbers", "offsets", "sizes", "pieces")
            )
            pieces = iter(list_pieces(document["pieces"]))
            own = take(tensors, table["tensors"][segment])
            for tensor, chunk_count in zip(own, column(chunks["counts"]), strict=True):
                for _ in range(chunk_count):
                    box = take(offsets, dimensions[tensor]), take(sizes, dimensions[tensor])
                    named = [(listed[piece[0]], *piece[1:]) for piece in take(pieces, next(counts))]
                    found[tensor, next(numbers)] = (*box, named)
        require(len(found) == sum(column(self.manifest["tensors"]["chunks"])), "a segment lacks chunks")
        joined = [found[place] for place in sorted(found)]
        self._chunks = [[number for chunk in joined for number in chunk[0]]]
        self._chunks.append([number for chunk in joined for number in chunk[1]])
        self._chunks.append([len(chunk[2]) for chunk in joined])
        self._pieces = [piece for chunk in joined for piece in chunk[2]] + self._pieces[:segment_first]

    def _list_entries(self) -> Iterator[Entry]:
        """Yield the entries in the order of the save."""
        tensors, objects = self.manifest["tensors"], self.manifest["objects"]
        shape, first = iter(column(tensors["shape"])), 0
        offsets, sizes, counts = map(iter, self._chunks)
        listed: list[Entry] = []
        columns = (column(tensors[name]) for name in ("kind", "dimensions", "chunks"))
        for name, kind, dimensions, chunk_count in zip(tensors["names"], *columns, strict=True):
            boxes = []
            for _ in range(chunk_count):
                stop = first + next(counts)
                boxes.append((take(offsets, dimensions), take(sizes, dimensions), range(first, stop)))
                first = stop
            encoding, dtype = tensors["kinds"][kind]["encoding"], tensors["kinds"][kind]["dtype"]
            listed.append(Entry(name, encoding, dtype, take(shape, dimensions), tuple(boxes)))
        others = [Entry(name, "json", inline=text) for name, text in objects["inline"].items()]
        for stored in objects["stored"]:
            stop = first + stored["pieces"]
            others.append(Entry(stored["name"], stored["encoding"], chunks=(((), (), range(first, stop)),)))
            first = stop
        require(first == len(self._pieces), "the number of pieces is wrong")
        placed = dict(zip(column(objects["positions"]), others, strict=True))
        rest = iter(listed)
        for position in range(len(listed) + len(others)):
            yield placed[position] if position in placed else next(rest)

    def read_piece(self, piece: int) -> bytes:
        """Read and verify a piece."""
        shard, start, length, first, digest = self._pieces[piece]
        key, data_start, table_length, table_digest = self._shards[shard]
        data = self.fetch(key, start, start + length)
        size = block_bytes(length)
        blocks = [xxhash.xxh3_128_digest(data[i : i + size]) for i in range(0, length, size)]
        require(xxhash.xxh3_128_digest(b"".join(blocks)) == digest, f"{key} is damaged from byte {start} on")
        if len(blocks) > 1:  # for a reader of parts; who reads all need not look
            if shard not in self._tables:
                table = self.fetch(key, data_start - table_length, data_start)
                require(xxhash.xxh3_128_digest(table) == table_digest, f"the block table of {key} is damaged")
                self._tables[shard] = [table[i : i + 16] for i in range(0, table_length, 16)]
            require(blocks == self._tables[shard][first : first + len(blocks)], f"the block table of {key} is wrong")
        return data

    @unreadable_if_damaged()
    def read(self, name: str) -> Any:
        """Read an entry: an array, a value, or the bytes of a stream."""
        require(name in self.entries, f"there is no entry {name}")
        entry = self.entries[name]
        if entry.dtype and entry.encoding == "raw":
            whole = np.empty(entry.shape, to_array(entry.dtype, (0,), b"").dtype)
            for offsets, sizes, pieces in entry.chunks:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
                whole[box] = to_array(entry.dtype, sizes, b"".join(map(self.read_piece, pieces)))
            return whole
        if not entry.chunks:
            return self._unwrap(name, decode(entry.inline, b""))
        data = b"".join(map(self.read_piece, entry.chunks[0][2]))
        if entry.encoding in ("torch", "pickle"):
            return data
        require(entry.encoding in ("json", "json+raw"), f"{name} needs a reader of the encoding {entry.encoding}")
        stop = 8 + int.from_bytes(data[:8], "little") if entry.encoding == "json+raw" else len(data)
        text = data[8:stop] if entry.encoding == "json+raw" else data
        return self._unwrap(name, decode(json.loads(text), data[stop:]))

    def _unwrap(self, name: str, value: Any) -> Any:
        """Return the value of an entry of one rank, and those of each `Opaque` and `Files`."""
        path = (self.manifest["flatten"] or {}).get(name, [name])
        if self.manifest["run"] and len(path) == 3 and path[0] == "per_rank" and is_tuple(value, 1):
            (value,) = value
        return unwrap_marked(value)

    @unreadable_if_damaged()
    def read_state(self) -> dict[str, Any]:
        """Read all entries into the nested state dict."""
        paths = {name: [name] for name in self.entries} | (self.manifest["flatten"] or {})
        state: Any = {}
        for name, path in paths.items():
            if name not in self.entries and name != ".".join(map(str, [*path, {}])):
                continue
            node = state
            for part, following in itertools.pairwise(path):
                node = put(node, part, {} if isinstance(following, str) else [])
            put(node, path[-1], self.read(name) if name in self.entries else {})
        nested: dict[str, Any] = state
        return nested


def unwrap_marked(value: Any) -> Any:
    """Return a value in which the entry of each `Opaque` and `Files` has become its value, also in lists and dicts."""
    if is_tuple(value, 2) and isinstance(value[0], str) and value[0] in ("dcp_remote.Opaque", "dcp_remote.Files"):
        return value[1]
    if type(value) in (list, dict, OrderedDict, defaultdict):
        for key, inner in list(enumerate(value) if isinstance(value, list) else value.items()):
            value[key] = unwrap_marked(inner)
    return value


def is_tuple(value: Any, length: int) -> bool:
    """Return whether a value is a plain tuple of so many items."""
    return type(value) is tuple and len(value) == length


def put(node: Any, part: str | int, value: Any) -> Any:
    """Put a value into a dict or list, unless there is one, and return the one that is there."""
    if isinstance(part, int):
        require(0 <= part < LIST_ENTRIES_MAX, "a list in the state is too long")
        node.extend([None] * (part + 1 - len(node)))
        if node[part] is None:
            node[part] = value
        return node[part]
    return node.setdefault(part, value)


def to_array(dtype: str, shape: tuple[int, ...] | list[int], data: bytes) -> np.ndarray[Any, Any]:
    """Return the elements of a tensor as an array."""
    kind = np.dtype(dtype if dtype in NUMPY_NAMES else f"uint{8 * LACKING_BYTES.get(dtype, 1)}").newbyteorder("<")
    array = np.frombuffer(data, kind)
    if dtype == "bfloat16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(shape)


def decode(encoded: Any, raw: bytes) -> Any:
    """Decode the JSON of an object; the content of a tag is decoded first, as if it were an object itself."""
    if isinstance(encoded, list):
        return [decode(item, raw) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {name: decode(inner, raw) for name, inner in encoded.items()}
    content = decode(encoded[tag], raw)
    if tag in DATA_TAGS:
        data = content["data"] if isinstance(content, dict) else content
        return DATA_TAGS[tag](from_base64(data) if isinstance(data, str) else raw[data[0] : sum(data)], content)
    require(tag in TAGS, f"an object needs a reader of the tag {tag}")
    return TAGS[tag](content)


def to_zone(content: list[Any] | None) -> timezone | None:
    """Return a time zone of an offset and a name."""
    if content is None:
        return None
    offset = timedelta(microseconds=content[0])
    return timezone(offset) if content[1] is None else timezone(offset, content[1])


def numpy_dtype(content: Any) -> np.dtype[Any]:
    """Return a dtype of numpy."""
    if isinstance(content, str):
        require(NUMPY_DTYPE.fullmatch(content), f"{content} is no dtype")
        return np.dtype(content)
    if "base" in content:
        return np.dtype((numpy_dtype(content["base"]), tuple(content["shape"])))
    names, formats, offsets = ([field[i] for field in content["fields"]] for i in range(3))
    kinds = [numpy_dtype(kind) for kind in formats]
    fields: Any = {"names": names, "formats": kinds, "offsets": offsets, "itemsize": content["item_bytes"]}
    structure: np.dtype[Any] = np.dtype(fields, align=content["aligned"])
    return structure


def numpy_array(data: bytes, content: Any) -> np.ndarray[Any, Any]:
    """Return an array of numpy."""
    items = np.frombuffer(data, numpy_dtype(content["dtype"]))
    return items.reshape(content.get("shape", [1]), order=content.get("order", "C"))


def array_items(data: bytes, content: Any) -> np.ndarray[Any, Any]:
    """Return the items of an array of the module array."""
    code = content["typecode"]
    return np.frombuffer(data, f"<{'f' if code in 'fd' else 'i' if code.islower() else 'u'}{content['item_bytes']}")


def stream(data: bytes, content: Any) -> io.BytesIO:
    """Return a stream at a position."""
    opened = io.BytesIO(data)
    opened.seek(content["position"])
    return opened


def tensor(data: bytes, content: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as an array."""
    return to_array(content["dtype"], content["shape"], data)


FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple)}

# By tag: function of the decoded content. A type of torch, or a class of the user, becomes its parts: a namedtuple a
# dict, a member of an enumeration its name, a generator its state.
TAGS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda c: int(c, 16),
    "$float": lambda c: struct.unpack(">d", bytes.fromhex(c))[0] if len(c) == 16 else float(c),
    "$complex": lambda c: complex(*c),
    "$str": lambda c: from_base64(c).decode("utf-8", "surrogatepass"),
    "$Decimal": Decimal,
    "$Fraction": lambda c: Fraction(*c),
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$OrderedDict": OrderedDict,
    "$Counter": lambda c: Counter(dict(c)),
    "$defaultdict": lambda c: defaultdict(FACTORIES.get(c["factory"]), c["items"]),
    "$deque": lambda c: deque(c["items"], c["maxlen"]),
    "$slice": lambda c: slice(*c),
    "$range": lambda c: range(*c),
    "$Namespace": lambda c: SimpleNamespace(**dict(c)),
    "$SimpleNamespace": lambda c: SimpleNamespace(**dict(c)),
    "$namedtuple": lambda c: dict(zip(c["fields"], c["items"], strict=True)),
    "$Enum": lambda c: ".".join([*c["class"], c.get("name") or c["bits"]]),
    "$date": date.fromisoformat,
    "$datetime": lambda c: datetime.fromisoformat(c["local"]).replace(fold=c["fold"], tzinfo=to_zone(c["zone"])),
    "$time": lambda c: time.fromisoformat(c["local"]).replace(fold=c["fold"], tzinfo=to_zone(c["zone"])),
    "$timedelta": lambda c: timedelta(*c),
    "$UUID": lambda c: UUID(c["uuid"], is_safe=SafeUUID(c["is_safe"])),
    "$Path": lambda c: (PurePosixPath if c["flavor"] == "posix" else PureWindowsPath)(c["path"]),
    "$numpy.dtype": numpy_dtype,
    "$numpy.str": str,
    "$numpy.bytes": from_base64,
    "$numpy.longdouble": lambda c: complex(*np.frombuffer(from_base64(c), "<f8")),
    "$numpy.RandomState": dict,
    "$numpy.Generator": lambda c: c["state"],
    "$torch.Size": tuple,
    "$torch.dtype": str,
    "$torch.layout": str,
    "$torch.device": str,
    "$torch.Generator": from_base64,
}
# The same for tags whose content is data, or has a field `data`.
DATA_TAGS: dict[str, Callable[[bytes, Any], Any]] = {
    "$bytes": lambda data, _: data,
    "$bytearray": lambda data, _: bytearray(data),
    "$BytesIO": stream,
    "$array": array_items,
    "$numpy.scalar": lambda data, c: numpy_array(data, c)[0],
    "$numpy.ndarray": numpy_array,
    "$torch.Tensor": tensor,
    "$torch.Parameter": tensor,
}


def main() -> int:
    """List and read the entries."""
    parser = argparse.ArgumentParser(description="List the entries of a checkpoint, and read and verify each.")
    parser.add_argument("place", metavar="FOLDER-OR-URL")
    parser.add_argument("--step", type=int, help="step of the checkpoint in a run; by default the newest")
    arguments = parser.parse_args()
    try:
        checkpoint = Checkpoint(arguments.place, arguments.step)
        for name, entry in checkpoint.entries.items():
            value = checkpoint.read(name)
            what = f"{entry.dtype} {list(entry.shape)}" if entry.dtype else f"{type(value).__name__} {value!r:.60}"
            print(f"{name}: {what}" if entry.encoding in ("raw", "json", "json+raw") else f"{name}: a stream")
    except (UnreadableError, FileNotFoundError) as error:
        print(f"{arguments.place} cannot be read: {error}", file=sys.stderr)
        return 1
    print(f"{len(checkpoint.entries)} entries, all digests right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
