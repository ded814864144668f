"""SafetensorsSource: weights in the layout of Hugging Face, and the small files beside them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch

from dcp_remote.common.geometry import Box
from dcp_remote.common.text import escape_unprintable, format_count, join_some
from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.format.dtypes import SAFETENSORS_NAMES
from dcp_remote.format.json_text import from_text
from dcp_remote.format.shard import METADATA_NAME
from dcp_remote.serialization.files import FILES_BYTES_MAX, FILES_MAX, Files
from dcp_remote.serialization.tensors import parse_dtype
from dcp_remote.transfer.ranges import FileRange, RangeReader, require_range, require_shape
from dcp_remote.transfer.tensor_source import Source, StoredTensor

logger = logging.getLogger(__name__)

# Name of the only file of weights, where there are other files of safetensors beside it.
WEIGHTS_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# Names of dtypes; the last ones are new in safetensors, and no names of the format of dcp_remote.
DTYPES = {name: parse_dtype(dtype) for dtype, name in SAFETENSORS_NAMES.items()} | {
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}

# Index of a variant, too: `diffusion_pytorch_model.safetensors.index.fp16.json`.
_INDEX = re.compile(r".*\.safetensors\.index(\.[\w-]+)?\.json")
_PART = re.compile(r".*-\d{5}-of-\d{5}(\.[\w-]+)?\.safetensors")

# Key of the state below which the weights are.
_KEY = "model"

# Key of torch's HuggingFaceStorageWriter for the places of the parts in their tensors, and names of its files.
_SHARDING = "DCP_SHARDING_INFO"
_SHARD = re.compile(r"shard-\d{5}-.*\.safetensors")

_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit
_FILE_BYTES_MAX = 64 * MiB

# Small files beside the weights that `from_pretrained` reads.
_SIDE_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".py", ".md")


class SafetensorsSource(Source):
    """Weights of Hugging Face as `model`, and the small files beside them as `files`."""

    kind = "safetensors"

    def __init__(self, reader: RangeReader, named: str | None, *, piece_bytes_max: int) -> None:
        """Read the header of each file of weights, or of the one that is `named`, and the small files."""
        super().__init__(reader, piece_bytes_max=piece_bytes_max)
        self._indexed: dict[str, object] = {}
        if named is not None and _SHARD.fullmatch(named):
            raise self._parts_of_tensors([named])
        weights = self._find_weights() if named is None else [named]
        places: dict[str, StoredTensor] = {}
        for file in weights:
            for name, place in self._read_header(file).items():
                if name in places:
                    raise CorruptCheckpointError(
                        "Two files have a tensor of this name. Name one file of the folder.",
                        url=self.url,
                        tensor=name,
                        files=f"{places[name].storage.file}, {file}",
                    )
                places[name] = place
        for name in self._indexed:
            if name not in places:
                raise CorruptCheckpointError("No file has a tensor of the index.", url=self.url, tensor=name)
        self.chunks = {
            f"{_KEY}.{name}": [(Box((0,) * len(place.shape), place.shape), place)] for name, place in places.items()
        }
        self.state[_KEY] = {
            name: torch.empty(place.shape, dtype=place.dtype, device="meta") for name, place in places.items()
        }
        others = [file for file in self._visible if file not in weights and not _INDEX.fullmatch(file)]
        sides = self._choose_sides(file for file in others if file.endswith(_SIDE_SUFFIXES))
        # An object without bytes and suffix is the marker of a folder, as some consoles create it.
        left = [file for file in others if file not in sides and (reader.sizes[file] or "." in file)]
        if left:
            logger.warning(
                "left out of the import: %s, such as %s",
                format_count(len(left), "file"),
                join_some([*map(escape_unprintable, left)]),
            )
        if sides:
            self.state["files"] = Files(dict(zip(sides, map(bytes, self._read_files(sides)), strict=True)))

    def _find_weights(self) -> list[str]:
        """Return the files of weights: those of an index, the usual one, or all."""
        indexes = [file for file in self._visible if _INDEX.fullmatch(file)]
        index = f"{_KEY}{INDEX_SUFFIX}"
        if indexes and index not in indexes:
            if len(indexes) > 1:
                raise InvalidArgumentError(
                    "The folder has several indexes of weights. Copy the files of one of them into another folder.",
                    url=self.url,
                    files=join_some([*map(escape_unprintable, indexes)]),
                )
            (index,) = indexes
        if indexes:
            document = self._parse(index, *self._read_files([index]))
            found = document.get("weight_map")
            if not isinstance(found, dict) or not found:
                raise self._corrupt(index, "it has no weight_map")
            self._indexed = found
            return [
                require_range(self.reader, file, stop=8, of=index) for file in dict.fromkeys(map(str, found.values()))
            ]
        files = [file for file in self._visible if file.endswith(".safetensors")]
        if shards := [file for file in files if _SHARD.fullmatch(file)]:
            raise self._parts_of_tensors(shards)
        if parts := [file for file in files if _PART.fullmatch(file)]:
            raise CorruptCheckpointError(
                "Files of weights in several parts have no index, so that some may be missing. Copy all files.",
                url=self.url,
                files=join_some([*map(escape_unprintable, parts)]),
            )
        return [WEIGHTS_FILE] if WEIGHTS_FILE in files else files

    @property
    def _visible(self) -> list[str]:
        """Files of the folder but hidden ones, such as `._model.safetensors` of macOS."""
        return [file for file in self.reader.sizes if not file.startswith(".")]

    def _choose_sides(self, files: Iterable[str]) -> list[str]:
        """Return the small files that an entry of `Files` can hold."""
        chosen: list[str] = []
        taken: set[str] = set()
        left_bytes = FILES_BYTES_MAX
        for file in files:
            folded, size_bytes = unicodedata.normalize("NFC", file).casefold(), self.reader.sizes[file]
            if size_bytes > min(_FILE_BYTES_MAX, left_bytes) or folded in taken or len(chosen) == FILES_MAX:
                continue
            with contextlib.suppress(InvalidArgumentError):
                Files({file: b""})
                chosen.append(file)
                taken.add(folded)
                left_bytes -= size_bytes
        return chosen

    def _read_header(self, file: str) -> dict[str, StoredTensor]:
        """Return the places of the tensors of a file, in the order of their bytes."""
        size_bytes = self.reader.sizes[file]
        if size_bytes < 8:  # noqa: PLR2004  # the length of the header
            raise self._corrupt(file, "it is empty or cut off")
        (data,) = self.reader.read([FileRange(file, 0, 8)])
        length = int.from_bytes(data, "little")
        if length > min(_HEADER_BYTES_MAX, size_bytes - 8):
            raise self._corrupt(file, "its header does not fit into it")
        (data,) = self.reader.read([FileRange(file, 8, length)])
        header = self._parse(file, data)
        metadata = header.pop(METADATA_NAME, None)
        if isinstance(metadata, dict) and _has_parts(metadata.get(_SHARDING)):
            raise self._parts_of_tensors([file])
        found = {name: self._place(file, name, entry, 8 + length) for name, entry in header.items()}
        places = dict(sorted(found.items(), key=lambda item: (item[1].storage.start, item[1].storage.length)))
        position = 8 + length
        for name, place in places.items():
            if place.storage.start != position:
                raise self._corrupt(file, "its tensors overlap, or leave a gap", tensor=name)
            position += place.storage.length
        if position != size_bytes:
            raise self._corrupt(file, f"it has {size_bytes} bytes where its header tells {position}")
        return places

    def _place(self, file: str, name: str, entry: object, base: int) -> StoredTensor:
        if not isinstance(entry, dict):
            raise self._corrupt(file, "an entry is no dict", tensor=name)
        given, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or not isinstance(given, str):  # noqa: PLR2004  # begin and end
            raise self._corrupt(file, "an entry has a wrong shape, dtype or data_offsets", tensor=name)
        dtype = DTYPES.get(given)
        if dtype is None:
            raise InvalidArgumentError(
                "A tensor has a dtype that cannot be imported.",
                url=self.url,
                file=file,
                tensor=name,
                dtype=given,
            )
        require_shape(shape, dtype, url=self.url, file=file, tensor=name)
        length = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != length:
            raise self._corrupt(file, "the bytes of a tensor are not those of its shape", tensor=name)
        return StoredTensor(FileRange(file, base + offsets[0], length), 0, tuple(shape), None, dtype)

    def _read_files(self, files: Sequence[str]) -> list[memoryview]:
        for file in files:
            if self.reader.sizes[file] > _FILE_BYTES_MAX:
                raise self._corrupt(file, "it is larger than 64 MiB")
        return self.reader.read([FileRange(file, 0, self.reader.sizes[file]) for file in files])

    def _parse(self, file: str, data: memoryview) -> dict[str, Any]:
        try:
            document = from_text(file, data)
        except CorruptCheckpointError as error:
            raise self._corrupt(file, "its JSON is damaged", cause=error) from error
        if not isinstance(document, dict):
            raise self._corrupt(file, "its JSON is no dict")
        return document

    def _parts_of_tensors(self, files: Sequence[str]) -> InvalidArgumentError:
        return InvalidArgumentError(
            "These files have parts of tensors, as torch's HuggingFaceStorageWriter saves them on each rank. Put them "
            "together first: pass enable_consolidation=True to it, or use consolidate_safetensors_files of torch.",
            url=self.url,
            files=join_some([*map(escape_unprintable, files)]),
        )

    def _corrupt(self, file: str, why: str, **details: object) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"A file of safetensors is damaged: {why}. Copy it once more.",
            url=self.url,
            file=file,
            **details,
        )


def _has_parts(sharding: object) -> bool:
    """Return whether a text of torch's HuggingFaceStorageWriter gives a tensor a place but the first."""
    if sharding is None:
        return False
    try:
        return any(any(place["saved_offsets"]) for place in json.loads(str(sharding)).values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return True


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    """Return whether this is a list of integers of at least 0."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
