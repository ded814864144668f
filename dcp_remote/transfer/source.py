"""`open_source`: the checkpoint of another format that lies at a URL, path or store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import join_some
from dcp_remote.common.units import MiB
from dcp_remote.errors import CheckpointNotFoundError, InvalidArgumentError, ObjectNotFoundError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run.foreign_checkpoints import describe_keys
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.base import ObjectInfo
from dcp_remote.storage.local_files import version_of
from dcp_remote.storage.location import Location
from dcp_remote.storage.retrying import RANGE_RETRY_SECONDS, RetryingStore
from dcp_remote.storage.url import parse_url
from dcp_remote.transfer.checkpoint import LOOK_SECONDS
from dcp_remote.transfer.ranges import RangeReader
from dcp_remote.transfer.safetensors_source import SafetensorsSource
from dcp_remote.transfer.tensor_source import Source
from dcp_remote.transfer.torch_file_source import TorchFileSource
from dcp_remote.transfer.torch_source import TORCH_METADATA_FILE, TorchSource

# Bytes of a tensor that are read at once.
PIECE_BYTES_MAX = 32 * MiB

_SAFETENSORS = ".safetensors"
_TORCH_FILES = (".pt", ".pth", ".ckpt", ".bin")


def open_source(
    source: str | os.PathLike[str] | ObjectStore,
    *,
    storage_options: Mapping[str, object] | None = None,
    allow_pickle: bool = False,
    piece_bytes_max: int = PIECE_BYTES_MAX,
    retry_seconds: float = RANGE_RETRY_SECONDS,
) -> Source:
    """Open a checkpoint by what lies there; reads no tensor, but for those that are no plain ones.

    The source is a folder that torch's distributed checkpoint or Hugging Face wrote, or a file of safetensors or
    `torch.save`. One request is repeated for `retry_seconds`; `piece_bytes_max` bytes of a tensor are read at once.
    """
    store, files, file = _look(source, storage_options, Deadline(min(LOOK_SECONDS, retry_seconds)))
    reader = RangeReader(store, files, retry_seconds=retry_seconds)
    if file is not None and not file.endswith(_SAFETENSORS):
        return TorchFileSource(reader, file, piece_bytes_max=piece_bytes_max)
    if TORCH_METADATA_FILE in reader.sizes:
        return TorchSource(reader, allow_pickle=allow_pickle, piece_bytes_max=piece_bytes_max)
    if any(key.endswith(_SAFETENSORS) for key in reader.sizes):
        return SafetensorsSource(reader, file, piece_bytes_max=piece_bytes_max)
    keys = list(reader.sizes)
    if MANIFEST_KEY in keys or CATALOG_KEY in keys:
        raise InvalidArgumentError(
            "This is a checkpoint of dcp_remote, or a run of its checkpoints, which is not imported. Load it by "
            "RemoteReader into a state, and save that by CheckpointManager; or copy all objects of a run.",
            url=store.url,
        )
    raise CheckpointNotFoundError(
        "Nothing that can be imported lies here: neither torch's .metadata, nor files of safetensors; a file of "
        f"torch.save is named itself. {describe_keys(keys, store.url) or ''}".rstrip(),
        url=store.url,
        found=join_some(keys) or "nothing",
    )


def _look(
    source: str | os.PathLike[str] | ObjectStore, options: Mapping[str, object] | None, deadline: Deadline
) -> tuple[ObjectStore, list[ObjectInfo], str | None]:
    """Return the store of a folder, the files in it, and the name of the one that is meant; None for all of them."""
    if isinstance(source, ObjectStore):
        return source, _list_files(source, deadline), None
    parsed = parse_url(source)
    if parsed.scheme != "file":
        return _look_in_cloud(Location.of(source, options).store, options, deadline)
    path = Path(parsed.path)
    if path.is_file():
        store = Location.of(path.parent, options).store
        return store, [store.head(path.name)], path.name
    store = Location.of(path, options).store
    if not path.is_dir():
        raise CheckpointNotFoundError("There is no such folder or file.", path=str(path))
    # Not by the store, which leaves out links: in the cache of Hugging Face all files are links.
    found = [(one.name, one.stat()) for one in sorted(path.iterdir()) if one.is_file()]
    changed = [max(one.st_mtime_ns, one.st_ctime_ns) / 1e9 for _, one in found]  # as the store's `head` gives it
    files = zip(found, changed, strict=True)
    return store, [ObjectInfo(name, one.st_size, version_of(one), at) for (name, one), at in files], None


def _look_in_cloud(
    store: ObjectStore, options: Mapping[str, object] | None, deadline: Deadline
) -> tuple[ObjectStore, list[ObjectInfo], str | None]:
    """Return the result of `_look`. A name that ends with `.ckpt` is that of a file, or of a folder of Lightning."""
    parent, _, name = store.url.rpartition("/")

    def find_file() -> tuple[ObjectStore, list[ObjectInfo], str | None] | None:
        if parent.endswith("/"):  # of a bucket
            return None
        folder = Location.of(parent, options).store
        with contextlib.suppress(ObjectNotFoundError):
            return folder, [RetryingStore(folder, deadline).head(name)], name
        return None

    is_likely = name.endswith((_SAFETENSORS, *_TORCH_FILES))
    if is_likely and (file := find_file()):
        return file
    files = _list_files(store, deadline)
    if not files and not is_likely and (file := find_file()):
        return file
    return store, files, None


def _list_files(store: ObjectStore, deadline: Deadline) -> list[ObjectInfo]:
    return [info for info in RetryingStore(store, deadline).list() if "/" not in info.key]
