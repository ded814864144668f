"""Object stores: the contract (`base`), local folders, memory, clouds, and wrappers that retry, count or reread.

`open_store` opens the store of a URL, `open_fsspec_store` that of an fsspec file system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_remote.common.arrays import Buffer
from dcp_remote.storage.base import Capabilities, Condition, Content, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.limits import limit_store
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.local_files import require_folder
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.storage.options import LocalOptions, StoreOptions, parse_options
from dcp_remote.storage.url import parse_url

if TYPE_CHECKING:
    from dcp_remote.storage.fsspec import open_fsspec_store

__all__ = [
    "Buffer",
    "Capabilities",
    "Condition",
    "Content",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "ObjectStore",
    "Version",
    "open_fsspec_store",
    "open_store",
]


def __getattr__(name: str) -> object:
    # Imported on first use, since it imports fsspec and the cloud clients.
    if name == "open_fsspec_store":
        from dcp_remote.storage.fsspec import open_fsspec_store

        return open_fsspec_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> ObjectStore:
    """Open the store of a URL. Sends no request and creates nothing.

    Args:
        url: URL or path, as `dcp_remote.storage.url.parse_url` takes it.
        storage_options: Settings of this kind of store, and limits (`StoreOptions`). For files: `allow_network_replace`
            (see `LocalStore`); for memory: none.

    Raises:
        InvalidArgumentError: The URL or an option is invalid, or the URL is that of a file or lies below one.
    """
    parsed, options = parse_url(url), storage_options or {}
    store: ObjectStore
    if parsed.scheme == "file":
        allow_network_replace = parse_options(LocalOptions, options, scheme="file").allow_network_replace
        require_folder(parsed.path, url=parsed.canonical)
        store = LocalStore(parsed.path, allow_network_replace=allow_network_replace)
    elif parsed.scheme == "memory":
        parse_options(StoreOptions, options, scheme="memory")
        store = MemoryStore(parsed.bucket, parsed.prefix)
    else:
        # Imported here, so that local use needs no cloud client.
        from dcp_remote.storage.cloud.store import open_cloud_store

        store = open_cloud_store(parsed, options)
    return limit_store(store, options)
