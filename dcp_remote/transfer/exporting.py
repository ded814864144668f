"""`export_checkpoint`: writes a checkpoint of a run as safetensors, or as torch's distributed checkpoint."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from dcp_remote.common.units import MiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.loading.load import load
from dcp_remote.reader import RemoteReader
from dcp_remote.serialization.files import Files
from dcp_remote.serialization.tensors import narrow
from dcp_remote.storage import open_store
from dcp_remote.transfer.sources import SAFETENSORS_DTYPES, TorchSource

# Size of one file of weights, as in Transformers.
FILE_BYTES_MAX = 5_000_000_000

# Bytes of tensors that are read at once.
_BATCH_BYTES_MAX = 256 * MiB

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Tensor to write.

    Attributes:
        name: Name in the checkpoint.
        title: Name in the file.
        shape: Shape.
        dtype: dtype in the file.
    """

    name: str
    title: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def export_checkpoint(
    url: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    kind: Literal["safetensors", "torch"] = "safetensors",
    step: int | str | None = None,
    key: str = "model",
    dtype: torch.dtype | None = None,
    file_bytes_max: int = FILE_BYTES_MAX,
    storage_options: Mapping[str, object] | None = None,
) -> None:
    """Write a checkpoint to a local folder, in one process, and read back what was written.

    Holds 256 MiB of tensors at once, or the largest one.

    Args:
        url: URL of a run or of a checkpoint.
        folder: Folder to write to; made if it does not exist, and must be empty.
        kind: "safetensors" writes the tensors below `key`, in files of at most `file_bytes_max` bytes with an index,
            and the checkpoint's files (`files`), such as config.json; "torch" writes all entries as
            `torch.distributed.checkpoint.FileSystemWriter` does.
        step: Step or name of the checkpoint of a run; None is the newest.
        key: Top-level key of the weights; "" takes all tensors by their whole names.
        dtype: Floating-point type to convert to; None keeps each.
        file_bytes_max: Size of one file of weights in bytes; a larger tensor has a file of its own.
        storage_options: Options of the store.

    Raises:
        InvalidArgumentError: The folder is not empty, or there is no tensor below `key`.
        CorruptCheckpointError: Bytes read back differ.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise InvalidArgumentError("The folder is not empty. Name another one.", folder=str(target))
    if kind == "torch":
        _export_torch(url, target, step=step, dtype=dtype, storage_options=storage_options)
        return
    metadata = _read_metadata(url, step, storage_options)
    prefix = f"{key}." if key else ""
    tensors = [
        _Tensor(name, name.removeprefix(prefix), tuple(entry.size), _target_dtype(entry.properties.dtype, dtype))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    ]
    if not tensors:
        raise InvalidArgumentError(
            "The checkpoint has no tensors below this key.", url=str(url), key=key, has=", ".join(_top_keys(metadata))
        )
    groups = _split(tensors, file_bytes_max)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        with (target / file).open("xb+") as opened:
            _write_file(opened, group, url, step=step, storage_options=storage_options)
        weight_map |= {tensor.title: file for tensor in group}
    if len(groups) > 1:
        total = sum(tensor.size_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if "files" in metadata.state_dict_metadata:
        files = load(url, step=step, keys=["files"], storage_options=storage_options)["files"]
        assert isinstance(files, Files)
        files.write(target)


def _write_file(
    opened: BinaryIO,
    tensors: list[_Tensor],
    url: str | os.PathLike[str],
    *,
    step: int | str | None,
    storage_options: Mapping[str, object] | None,
) -> None:
    """Write a file of safetensors: length of the header, header, bytes of the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        header[tensor.title] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, begin + tensor.size_bytes],
        }
        begin += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    opened.write(len(text).to_bytes(8, "little") + text)
    for batch in _batches(tensors):
        values = _values_of(load(url, step=step, keys=[one.name for one in batch], storage_options=storage_options))
        start, written = opened.tell(), []
        for tensor, value in zip(batch, values, strict=True):
            written.append(value.to(tensor.dtype).contiguous().flatten().view(torch.uint8).numpy())
            opened.write(written[-1].data)
        opened.flush()
        os.fsync(opened.fileno())
        opened.seek(start)
        for tensor, data in zip(batch, written, strict=True):
            if opened.read(data.nbytes) != data.tobytes():
                raise CorruptCheckpointError("Bytes read back differ.", file=opened.name, tensor=tensor.title)


def _values_of(nested: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested state, in its order."""
    if isinstance(nested, torch.Tensor):
        return [nested]
    values = nested.values() if isinstance(nested, dict) else nested or ()
    return [tensor for value in values for tensor in _values_of(value)]


def _batches(tensors: list[_Tensor]) -> Iterator[list[_Tensor]]:
    yield from _split(tensors, _BATCH_BYTES_MAX)


def _split(tensors: list[_Tensor], bytes_max: int) -> list[list[_Tensor]]:
    """Return the tensors in groups of at most some bytes, in order."""
    groups: list[list[_Tensor]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        if groups[-1] and used_bytes + tensor.size_bytes > bytes_max:
            groups.append([])
            used_bytes = 0
        groups[-1].append(tensor)
        used_bytes += tensor.size_bytes
    return groups


def _export_torch(
    url: str | os.PathLike[str],
    target: Path,
    *,
    step: int | str | None,
    dtype: torch.dtype | None,
    storage_options: Mapping[str, object] | None,
) -> None:
    metadata = _read_metadata(url, step, storage_options)
    entries, paths = metadata.state_dict_metadata, metadata.planner_data or {}
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    objects = [name for name in entries if name not in tensors]
    state = load(url, step=step, keys=objects, storage_options=storage_options) if objects else {}
    for name, entry in tensors.items():
        own = _target_dtype(entry.properties.dtype, dtype)
        set_element(state, paths.get(name, (name,)), torch.empty(entry.size, dtype=own, device="meta"))
    planner = _RunPlanner(url, step, dtype, storage_options, set(tensors))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: this is one process
        dcp.save(state, storage_writer=FileSystemWriter(target), planner=planner, no_dist=True)
    written = TorchSource(open_store(target), allow_pickle=False)
    for name in tensors:
        (value,) = _values_of(load(url, step=step, keys=[name], dtype=dtype, storage_options=storage_options))
        for box in written.pieces(name):
            if not _is_same(written.read(name, box), narrow(value, box)):
                raise CorruptCheckpointError("Bytes read back differ.", file=str(target), tensor=name)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)))


class _RunPlanner(DefaultSavePlanner):
    """Planner whose tensors are read from a run when they are written."""

    def __init__(self, url: Any, step: Any, dtype: Any, storage_options: Any, names: set[str]) -> None:
        super().__init__()
        self._options = {"step": step, "dtype": dtype, "storage_options": storage_options}
        self._url, self._names = url, names

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn not in self._names:
            return super().resolve_data(write_item)
        (value,) = _values_of(load(self._url, keys=[write_item.index.fqn], **self._options))
        return value


def _read_metadata(url: Any, step: int | str | None, storage_options: Mapping[str, object] | None) -> Metadata:
    reader = RemoteReader(url, step=step, storage_options=storage_options)
    return reader.read_metadata()


def _target_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return own if dtype is None or not own.is_floating_point else dtype


def _top_keys(metadata: Metadata) -> list[str]:
    return sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
