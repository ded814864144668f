"""TorchSource: torch's distributed checkpoint, as FileSystemWriter, FsspecWriter and s3torchconnector write it."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from functools import partial
from types import NoneType
from typing import Any, ClassVar, TypeGuard

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_remote.common.geometry import Box
from dcp_remote.errors import CorruptCheckpointError, DcpRemoteError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.format.columns import VALUE_MAX
from dcp_remote.format.json_tree import COLLISIONS_MAX, DEPTH_MAX
from dcp_remote.format.tiling import Comparisons, why_not_tiled
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.serialization.files import unwrap_marked
from dcp_remote.serialization.restricted_unpickler import DamagedStreamError, UnsafeStreamError
from dcp_remote.serialization.torch_streams import load_restricted, load_trusted
from dcp_remote.transfer.ranges import FileRange, RangeReader, require_range, require_shape
from dcp_remote.transfer.tensor_source import Source
from dcp_remote.transfer.torch_file_source import find_stored, load_layout, require_walkable

TORCH_METADATA_FILE = ".metadata"

_THREADS = 16

# Classes and functions that metadata may name, by module. A prefix would not do: `os.system` is a name in a module of
# torch's.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},  # before torch 2.2
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}

# Opcodes of `.metadata` that make or change objects and dicts, which `_MetadataUnpickler` checks first; and the others.
_CHECKED_OPCODES = (pickle.BUILD, pickle.REDUCE, pickle.NEWOBJ, pickle.SETITEM, pickle.SETITEMS)
_OPCODES = frozenset(
    code[0]
    for code in (
        *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
        *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT),
        *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8, pickle.GLOBAL, pickle.STACK_GLOBAL),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_DICT),
        *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT),
        *(pickle.BINGET, pickle.LONG_BINGET),
    )
)

# Index in a list, beside one per entry: torch leaves out empty dicts of lists, and `set_element` fills up to the index.
_INDEX_MAX = 10_000


class TorchSource(Source):
    """State of torch's distributed checkpoint, under its own keys.

    Attributes:
        object_ranges: Streams of the objects, by name.
    """

    kind = "torch's distributed checkpoint"

    def __init__(self, reader: RangeReader, *, allow_pickle: bool, piece_bytes_max: int) -> None:
        """Read the metadata, the objects, and the beginning and end of large chunks; check that all files are there."""
        super().__init__(reader, piece_bytes_max=piece_bytes_max)
        self._allow_pickle = allow_pickle
        self.object_ranges: dict[str, FileRange] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        try:
            self._open(_load_metadata(reader))
        except (DcpRemoteError, MemoryError):
            raise
        except Exception as error:
            # Metadata whose parts are of other types may raise anything.
            raise CorruptCheckpointError(
                "torch's .metadata are damaged. Copy the file once more.", url=self.url, cause=error
            ) from error

    def _open(self, metadata: Metadata) -> None:
        spans = {index: self._span(index, info) for index, info in metadata.storage_data.items()}
        entries = metadata.state_dict_metadata
        comparisons = Comparisons()
        for name, entry in entries.items():
            if _is_plain(entry):
                require_shape(entry.size, entry.properties.dtype, url=self.url, tensor=name)
                self._dtypes[name] = entry.properties.dtype
                self._require_tiled(name, entry, comparisons)
                # An empty chunk may be listed again.
                boxes = dict.fromkeys(Box(tuple(one.offsets), tuple(one.sizes)) for one in entry.chunks)
                self.chunks[name] = [
                    (box, self._require(spans, MetadataIndex(name, torch.Size(box.offsets)))) for box in boxes
                ]
        self._find_places()
        for name, entry in entries.items():
            if not _is_plain(entry):  # and so stored whole
                offsets = entry.chunks[0].offsets if isinstance(entry, TensorStorageMetadata) else None
                self.object_ranges[name] = self._require(spans, MetadataIndex(name, offsets))
        streams = self.reader.read(list(self.object_ranges.values()))
        values = {
            name: unwrap_marked(self._decode(name, data))
            for name, data in zip(self.object_ranges, streams, strict=True)
        }
        paths = metadata.planner_data or {}
        index_max = _INDEX_MAX + len(entries)
        for name, entry in entries.items():
            value = values.get(name)
            if _is_plain(entry):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            path = paths.get(name, (name,))
            is_bounded = len(path) <= DEPTH_MAX and all(type(part) is str or 0 <= part <= index_max for part in path)
            if not is_bounded or type(path[0]) is not str or ".".join(map(str, path)) != name:
                raise self._corrupt("The metadata give an entry a place in the state that is not its name.", name)
            set_element(self.state, path, value)

    def decode_chunk(self, name: str, box: Box, data: memoryview) -> torch.Tensor:
        """Return the tensor of a small stream, or of one that is no plain tensor."""
        value = self._decode(name, data)
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (box.sizes, self._dtypes[name]):
            raise self._corrupt("A stream does not hold the chunk that the metadata describe.", name)
        return value.resolve_conj().resolve_neg()

    def _span(self, index: MetadataIndex, info: Any) -> FileRange:
        extensions = getattr(info, "transform_descriptors", None)
        if extensions:
            raise InvalidArgumentError(
                "The checkpoint was saved with stream extensions of torch, such as compression, which are not "
                "supported. Load it by torch.distributed.checkpoint, and save it by CheckpointManager.",
                url=self.url,
                extensions=", ".join(map(str, extensions)),
            )
        start, length = getattr(info, "offset", None), getattr(info, "length", None)
        if type(start) is not int or type(length) is not int or start < 0 or length < 1:
            raise self._corrupt("The metadata give an entry no place.", index.fqn)
        file = require_range(self.reader, info.relative_path, stop=start + length, of=TORCH_METADATA_FILE)
        return FileRange(file, start, length)

    def _require(self, spans: Mapping[MetadataIndex, FileRange], index: MetadataIndex) -> FileRange:
        span = spans.get(index)
        if span is None:
            raise self._corrupt("The metadata give an entry no place.", index.fqn)
        return span

    def _require_tiled(self, name: str, entry: TensorStorageMetadata, comparisons: Comparisons) -> None:
        """Check that the chunks of a tensor cover each element once; one that is listed 1000 times is found at once."""
        parts = [part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes)]
        boxes = np.array(parts, dtype=np.int64).reshape(len(entry.chunks), 2, len(entry.size))
        why: str | None = "a chunk reaches outside the tensor"
        if all(type(part) is torch.Size for part in parts) and ((boxes >= 0) & (boxes <= VALUE_MAX)).all():
            why = why_not_tiled(entry.size, boxes[:, 0], boxes[:, 1], comparisons)
        if why is not None:
            raise self._corrupt(f"The chunks of a tensor are not together the tensor: {why}.", name)

    def _find_places(self) -> None:
        """Find the places of the tensors in the streams of large chunks; others are read whole."""
        large = [
            (name, number, box, place)
            for name, chunks in self.chunks.items()
            for number, (box, place) in enumerate(chunks)
            # To decode a stream takes four times its size.
            if isinstance(place, FileRange) and place.length > min(self._piece_bytes_max, RANGE_BYTES_MAX)
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            values = list(pool.map(lambda one: load_layout(self.reader, one[3]), large))
        for (name, number, box, _), value in zip(large, values, strict=True):
            stored = find_stored(value, self.url)
            if stored is not None:
                if (stored.shape, stored.dtype) != (box.sizes, self._dtypes[name]):
                    raise self._corrupt("A stream does not hold the chunk that the metadata describe.", name)
                self.chunks[name][number] = box, stored

    def _decode(self, name: str, data: memoryview) -> Any:
        try:
            value = load_trusted(bytes(data)) if self._allow_pickle else load_restricted(bytes(data))
        except UnsafeStreamError as error:
            raise UnsafeObjectError(
                "An object needs code to load.",
                url=self.url,
                object=name,
                types=", ".join(error.type_names),
                cause=error,
            ).advise(allow_pickle="allow_pickle=True loads it, if you trust the checkpoint") from error
        except DamagedStreamError as error:
            raise self._corrupt(f"A stream of torch.save is damaged: {error}.", name) from error
        require_walkable(value, len(data), url=self.url, object=name)
        return value

    def _corrupt(self, what: str, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{what} Copy the checkpoint once more, or use another one.", url=self.url, entry=name
        )


def _is_plain(entry: object) -> TypeGuard[TensorStorageMetadata]:
    """Return whether an entry is a tensor whose elements are all of it; others are read like objects."""
    if not isinstance(entry, TensorStorageMetadata):
        return False
    return entry.properties.layout == torch.strided and not str(entry.properties.dtype).startswith("torch.q")


def _load_metadata(reader: RangeReader) -> Metadata:
    (data,) = reader.read([FileRange(TORCH_METADATA_FILE, 0, reader.sizes[TORCH_METADATA_FILE])])
    try:
        metadata = _MetadataUnpickler(data).load()
        require_walkable(metadata, len(data))
    except (UnsafeObjectError, MemoryError):
        raise
    except Exception as error:
        # A damaged pickle may raise anything.
        raise CorruptCheckpointError(
            "torch's .metadata are damaged. Copy the file once more.", url=reader.store.url, cause=error
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise CorruptCheckpointError(
            "The file .metadata is none of torch's checkpoints.", url=reader.store.url, type=type(metadata).__name__
        )
    return metadata


def _carry_out(opcode: bytes, unpickler: Any) -> None:
    if not unpickler.is_permitted(opcode):
        raise pickle.UnpicklingError("these are no metadata of torch")
    pickle._Unpickler.dispatch[opcode[0]](unpickler)


class _MetadataUnpickler(pickle._Unpickler):
    """Unpickler of `.metadata`, in time proportional to its length. In Python: the methods of C's cannot be replaced.

    It knows only the opcodes, calls and keys of torch's metadata: a tuple that is doubled 60 times, as a key or an
    argument, would be hashed or formatted for ever.
    """

    stack: list[Any]

    def __init__(self, data: memoryview) -> None:
        super().__init__(io.BytesIO(data))
        self._hashes: Counter[int] = Counter()

    def is_permitted(self, opcode: bytes) -> bool:
        """Return whether an opcode that makes or changes an object finds on the stack what metadata have."""
        if opcode == pickle.BUILD:
            target, state = self.stack[-2:]
            # The attributes of a class or an enum would be changed for the whole process.
            if isinstance(target, type) or not is_dataclass(target):
                raise UnsafeObjectError(
                    "The metadata of this checkpoint change a class or function of this process.", type=repr(target)
                )
            return type(state) is dict or _is_flat(state)
        if opcode == pickle.REDUCE:  # a call with texts and numbers; of `torch.Size`, with a tuple of numbers
            called, given = self.stack[-2:]
            return _is_flat(*given) if called is torch.Size else _is_flat(given)
        if opcode == pickle.NEWOBJ:
            return bool(self.stack[-1] == ())
        return all(map(self._is_key, self.stack[::2] if opcode == pickle.SETITEMS else self.stack[-2:-1]))

    def _is_key(self, key: object) -> bool:
        """Return whether a key is a text, or an index of which few have equal hashes."""
        if type(key) is not MetadataIndex:
            return type(key) is str
        if type(key.fqn) is not str or type(key.offset) not in {torch.Size, NoneType}:
            return False
        if type(key.index) not in {int, NoneType}:
            return False
        self._hashes[hash(key)] += 1
        return self._hashes[hash(key)] <= COLLISIONS_MAX

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if code in _OPCODES},
        **{opcode[0]: partial(_carry_out, opcode) for opcode in _CHECKED_OPCODES},
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata may have."""
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and name not in _KNOWN.get(module, ()):
            raise UnsafeObjectError(
                "The metadata of this checkpoint name a class that is none of torch's checkpoints.",
                type=f"{module}.{name}",
            )
        return super().find_class(module, name)


def _is_flat(value: object) -> bool:
    """Return whether a value is a tuple without containers and objects."""
    return type(value) is tuple and not any(isinstance(one, (tuple, list, dict)) or is_dataclass(one) for one in value)
