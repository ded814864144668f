"""Checkpoints of other formats as states: tensors are on the meta device, and are read piece by piece."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from dcp_remote.common.geometry import Box, boxes_of_run
from dcp_remote.common.units import MiB
from dcp_remote.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidArgumentError, UnsafeObjectError
from dcp_remote.serialization.files import Files
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.location import Location

# Bytes of a tensor that are read at once, where the format allows it.
PIECE_BYTES_MAX = 32 * MiB

_INDEX_FILE = "model.safetensors.index.json"
_TORCH_METADATA_FILE = ".metadata"
_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_METADATA_BYTES_MAX = 2**31
_FILE_BYTES_MAX = 64 * MiB

# Small files beside the weights that `from_pretrained` reads.
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".md")

# safetensors' names of dtypes.
SAFETENSORS_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Source(Protocol):
    """Checkpoint to read from.

    Attributes:
        kind: Name of the format, for messages.
        state: State, nested as it was saved; tensors are on the meta device, unless `read` is not needed for them.
    """

    kind: str
    state: dict[str, Any]

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the boxes of a tensor that are read one at a time; together they are the whole tensor."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a box that `pieces` has returned, on the CPU."""
        ...


def open_source(
    source: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    allow_pickle: bool = False,
) -> Source:
    """Open a checkpoint by what lies there; reads no tensor.

    Args:
        source: URL or path of a folder that torch's distributed checkpoint or Hugging Face wrote, or path of a file of
            `torch.save`.
        storage_options: Options of the store.
        allow_pickle: True to load objects that need code.

    Raises:
        CheckpointNotFoundError: Nothing of these lies there.
        UnsafeObjectError: An object needs code to load, and `allow_pickle` is False.
        CorruptCheckpointError: A header is not of its format.
    """
    path = Path(source) if "://" not in str(source) else None
    if path is not None and path.is_file() and path.suffix != ".safetensors":
        return TorchFileSource(path, allow_pickle=allow_pickle)
    store, only = Location.of(source, storage_options).store, None
    if str(source).endswith(".safetensors"):
        folder, _, only = str(source).rpartition("/")
        store = Location.of(folder or ".", storage_options).store
    keys = [only] if only is not None else [info.key for info in store.list() if "/" not in info.key]
    if _TORCH_METADATA_FILE in keys:
        return TorchSource(store, allow_pickle=allow_pickle)
    if any(key.endswith(".safetensors") for key in keys):
        return SafetensorsSource(store, keys)
    raise CheckpointNotFoundError(
        "Neither a checkpoint of torch (.metadata), nor safetensors, nor a file of torch.save lies here.",
        url=store.url,
        found=", ".join(keys[:5]) or "nothing",
    )


class SafetensorsSource:
    """Weights of Hugging Face, and the small files beside them.

    Args:
        store: Store of the folder.
        keys: Names of the files in the folder.
    """

    kind = "safetensors"

    def __init__(self, store: ObjectStore, keys: Sequence[str]) -> None:
        """Read the header of each file."""
        self._store = store
        # File, first byte and shape by name of the tensor.
        self._places: dict[str, tuple[str, int, tuple[int, ...], torch.dtype]] = {}
        model: dict[str, torch.Tensor] = {}
        for key in self._weight_files(keys):
            for name, dtype, shape, start in self._read_header(key):
                if name in model:
                    raise CorruptCheckpointError("Two files have a tensor of this name.", url=store.url, tensor=name)
                self._places[name] = key, start, shape, dtype
                model[name] = torch.empty(shape, dtype=dtype, device="meta")
        self.state: dict[str, Any] = {"model": model}
        sides = {key: self._read_all(key) for key in keys if key.endswith(_SIDE_SUFFIXES) and key != _INDEX_FILE}
        if sides:
            self.state["files"] = Files(sides)

    def pieces(self, name: str) -> Sequence[Box]:
        """Return boxes of at most 32 MiB, each contiguous in the file."""
        _, _, shape, dtype = self._places[name.removeprefix("model.")]
        elements = math.prod(shape)
        if elements == 0:
            return [Box((0,) * len(shape), shape)]
        per_piece = max(1, PIECE_BYTES_MAX // dtype.itemsize)
        return [
            box
            for start in range(0, elements, per_piece)
            for _, box in boxes_of_run(shape, start, min(start + per_piece, elements))
        ]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values of a box; one GET."""
        key, start, shape, dtype = self._places[name.removeprefix("model.")]
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
        data = bytearray(math.prod(box.sizes) * dtype.itemsize)
        if data:
            self._store.get_into(key, start + first * dtype.itemsize, memoryview(data))
        return torch.frombuffer(data, dtype=dtype).view(box.sizes) if data else torch.empty(box.sizes, dtype=dtype)

    def _weight_files(self, keys: Sequence[str]) -> list[str]:
        if _INDEX_FILE not in keys:
            return sorted(key for key in keys if key.endswith(".safetensors"))
        index = json.loads(self._read_all(_INDEX_FILE))
        return list(dict.fromkeys(index["weight_map"].values()))

    def _read_header(self, key: str) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
        """Return name, dtype, shape and first byte of each tensor of a file, in the order of the file."""
        length = int.from_bytes(self._read_range(key, 0, 8), "little")
        if length > _HEADER_BYTES_MAX:
            raise CorruptCheckpointError("This is no file of safetensors.", url=self._store.url, file=key)
        header = json.loads(self._read_range(key, 8, length))
        header.pop("__metadata__", None)
        found = []
        for name, entry in header.items():
            dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
            if dtype is None:
                raise InvalidArgumentError("torch has no such dtype.", file=key, tensor=name, dtype=entry["dtype"])
            found.append((name, dtype, tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]))
        return sorted(found, key=lambda one: one[3])

    def _read_all(self, key: str) -> bytes:
        return self._store.get(key, limit_bytes=_FILE_BYTES_MAX).data

    def _read_range(self, key: str, start: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._store.get_into(key, start, memoryview(data))
        return bytes(data)


class TorchSource:
    """Checkpoint of torch's `FileSystemWriter`, `FsspecWriter`, or s3torchconnector.

    Args:
        store: Store of the folder.
        allow_pickle: True to load objects that need code.
    """

    kind = "torch's distributed checkpoint"

    def __init__(self, store: ObjectStore, *, allow_pickle: bool) -> None:
        """Read the metadata, and the objects."""
        self._store, self._allow_pickle = store, allow_pickle
        data = store.get(_TORCH_METADATA_FILE, limit_bytes=_METADATA_BYTES_MAX).data
        self._metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        self._infos: Mapping[MetadataIndex, Any] = self._metadata.storage_data
        flat = {name: self._value(name, entry) for name, entry in self._metadata.state_dict_metadata.items()}
        paths = self._metadata.planner_data or {name: (name,) for name in flat}
        self.state: dict[str, Any] = unflatten_state_dict(flat, paths)

    def pieces(self, name: str) -> Sequence[Box]:
        """Return the chunks that were saved."""
        entry = self._metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        return [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a chunk; one GET."""
        tensor = self._load(MetadataIndex(name, torch.Size(box.offsets)))
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _value(self, name: str, entry: object) -> Any:
        if isinstance(entry, BytesStorageMetadata):
            return self._load(MetadataIndex(name))
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def _load(self, index: MetadataIndex) -> Any:
        info = self._infos[index]
        if getattr(info, "transform_descriptors", None):
            raise InvalidArgumentError(
                "This checkpoint was saved with stream extensions of torch, such as compression, which are not "
                "supported.",
                url=self._store.url,
                extensions=", ".join(info.transform_descriptors),
            )
        data = bytearray(info.length)
        self._store.get_into(info.relative_path, info.offset, memoryview(data))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not self._allow_pickle)
        except pickle.UnpicklingError as error:
            raise UnsafeObjectError(
                "An object needs code to load. Pass allow_pickle=True if you trust the checkpoint.",
                url=self._store.url,
                object=index.fqn,
                cause=error,
            ) from error


class TorchFileSource:
    """File of `torch.save`, mapped into memory: a state dict, or a dict with one.

    Args:
        path: Path of the file.
        allow_pickle: True to load objects that need code.
    """

    kind = "torch.save"

    def __init__(self, path: Path, *, allow_pickle: bool) -> None:
        """Map the file."""
        try:
            value = torch.load(path, map_location="cpu", mmap=True, weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            raise UnsafeObjectError(
                "An object needs code to load. Pass allow_pickle=True if you trust the file.", path=path, cause=error
            ) from error
        if not isinstance(value, dict):
            raise InvalidArgumentError(
                "The file holds no dict of tensors.", path=str(path), type=type(value).__qualname__
            )
        is_state_dict = all(isinstance(one, torch.Tensor) for one in value.values())
        self.state: dict[str, Any] = {"model": dict(value)} if is_state_dict else dict(value)

    def pieces(self, name: str) -> Sequence[Box]:
        """Return nothing: the tensors are in memory."""
        return []

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Not called."""
        raise NotImplementedError


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler of `.metadata`, of classes of torch's checkpoints alone."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that metadata may have."""
        is_known = module.startswith("torch.distributed.checkpoint.") or (module, name) in {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("pathlib", "PosixPath"),
        }
        if not (is_known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))):
            raise UnsafeObjectError(
                "The metadata of this checkpoint name a class that is none of torch's checkpoints.",
                type=f"{module}.{name}",
            )
        return super().find_class(module, name)
