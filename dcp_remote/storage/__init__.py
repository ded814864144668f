"""Stores: where the bytes lie. `open_store` gives that of a URL, `open_fsspec_store` that of a file system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dcp_remote.errors import InvalidArgumentError
from dcp_remote.storage.base import (
    Buffer,
    Capabilities,
    Condition,
    Content,
    ObjectInfo,
    ObjectStore,
    Version,
)
from dcp_remote.storage.local import LocalStore
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.url import parse_url

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
    # When first used: it brings fsspec and the clients of the clouds.
    if name == "open_fsspec_store":
        from dcp_remote.storage.fsspec import open_fsspec_store

        return open_fsspec_store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def open_store(url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> ObjectStore:
    """Open the store that a URL names. Sends nothing and creates nothing.

    Args:
        url: See `dcp_remote.url.parse_url`.
        storage_options: Settings of this kind of store. For files: `allow_network_replace` (see `LocalStore`); none
            for memory.

    Raises:
        InvalidArgumentError: The URL or an option is not understood.
    """
    parsed = parse_url(url)
    options = dict(storage_options or {})
    if parsed.scheme == "file":
        _check_options(options, known=("allow_network_replace",), scheme="file")
        allow_network_replace = options.get("allow_network_replace", False)
        if not isinstance(allow_network_replace, bool):
            raise InvalidArgumentError(
                "storage_options['allow_network_replace'] must be True or False.", value=allow_network_replace
            )
        return LocalStore(parsed.path, allow_network_replace=allow_network_replace)
    if parsed.scheme == "memory":
        _check_options(options, known=(), scheme="memory")
        store = MemoryStore(parsed.bucket)
        return store.child(parsed.prefix) if parsed.prefix else store
    # Here, not above: whoever stays local need not import (or have) the clients of the clouds.
    from dcp_remote.storage.cloud import open_cloud_store

    return open_cloud_store(parsed, options)


def _check_options(options: Mapping[str, object], *, known: tuple[str, ...], scheme: str) -> None:
    unknown = sorted(str(name) for name in options if name not in known)
    if unknown:
        # Names only: the value of a misplaced option may be a secret.
        raise InvalidArgumentError(
            f"Unknown storage_options for {scheme} URLs; known: {', '.join(known) or 'none'}.",
            unknown=", ".join(unknown),
        )
