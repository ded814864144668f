"""Object stores: the contract (`base`), local folders, memory, clouds, and wrappers that retry, count or reread.

`open_store` opens the store of a URL, `open_fsspec_store` that of an fsspec file system.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_remote.common.arrays import Buffer
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.base import Capabilities, Condition, Content, ObjectInfo, ObjectStore, Version
from dcp_remote.storage.limits import LIMIT_OPTIONS, limit_store, take_limits
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.local_files import require_folder
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.storage.url import ParsedUrl, parse_url

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
        storage_options: Settings of this kind of store, and limits (`StoreLimits`). For files: `allow_network_replace`
            (see `LocalStore`); for memory: none.

    Raises:
        InvalidArgumentError: The URL or an option is invalid, or the URL is that of a file or lies below one.
    """
    limits, options = take_limits(storage_options or {})
    return limit_store(_open(parse_url(url), options), limits)


def _open(parsed: ParsedUrl, options: Mapping[str, object]) -> ObjectStore:
    if parsed.scheme == "file":
        _check_options(options, known=("allow_network_replace",), scheme="file")
        allow_network_replace = options.get("allow_network_replace", False)
        if not isinstance(allow_network_replace, bool):
            raise InvalidArgumentError(
                "storage_options['allow_network_replace'] must be True or False.", value=allow_network_replace
            )
        require_folder(parsed.path, url=parsed.canonical)
        return LocalStore(parsed.path, allow_network_replace=allow_network_replace)
    if parsed.scheme == "memory":
        _check_options(options, known=(), scheme="memory")
        store = MemoryStore(parsed.bucket)
        return store.child(parsed.prefix) if parsed.prefix else store
    # Imported here, so that local use needs no cloud client.
    from dcp_remote.storage.cloud.store import open_cloud_store

    return open_cloud_store(parsed, options)


def _check_options(options: Mapping[str, object], *, known: tuple[str, ...], scheme: str) -> None:
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        # Only names are shown, since the value of a misplaced option may be a secret.
        raise InvalidArgumentError(
            f"Unknown name in storage_options for {scheme} URLs. Known: {', '.join(sorted([*known, *LIMIT_OPTIONS]))}.",
            unknown=", ".join(unknown),
        )
