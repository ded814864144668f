"""Where a reader or writer was told to go: from what users pass to a store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.url import parse_url


def open_location(url: str | os.PathLike[str] | ObjectStore, options: Mapping[str, object] | None) -> ObjectStore:
    """The store of a URL, or the one given."""
    if isinstance(url, ObjectStore):
        if options:
            raise InvalidArgumentError("storage_options go with a URL; this store has its own.", url=url.url)
        return url
    return open_store(url, options)


def reopen_location(
    store: ObjectStore, checkpoint_id: str | os.PathLike[str], options: Mapping[str, object] | None, *, given: bool
) -> ObjectStore:
    """The store of another URL, for a reader or writer that was made for one.

    Raises:
        InvalidArgumentError: A plain path, where the other one is a URL; or `store` was given as such, so that nothing
            is known of how to open another like it.
    """
    parsed = parse_url(checkpoint_id)
    if parsed.canonical == store.url:
        return store
    if given:
        raise InvalidArgumentError(
            "checkpoint_id is not the URL of the store that this reader or writer was given. Give it the other store.",
            checkpoint_id=parsed.canonical,
            url=store.url,
        )
    plain = isinstance(checkpoint_id, Path) or "://" not in os.fspath(checkpoint_id)
    if plain and not store.url.startswith("file:"):
        raise InvalidArgumentError(
            "checkpoint_id is a plain path, but this reader or writer is for a URL. Pass the whole URL.",
            checkpoint_id=os.fspath(checkpoint_id),
            url=store.url,
        )
    return open_store(checkpoint_id, options)


def is_location(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether it can be parsed."""
    try:
        parse_url(checkpoint_id)
    except DcpRemoteError:
        return False
    return True


def require_shared(store: ObjectStore) -> None:
    """Refuse a store that other ranks cannot see.

    Raises:
        InvalidArgumentError: There are several processes, and the store is of this one alone.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if several and not store.capabilities.shared:
        raise InvalidArgumentError(
            "This store is seen by one process alone, and the job has several.",
            url=store.url,
            world_size=dist.get_world_size(),
        )


def require_positive(**values: float) -> None:
    """Refuse a number that would wait for nothing, or hold nothing.

    Raises:
        InvalidArgumentError: One of them is not above zero; names it.
    """
    for name, value in values.items():
        if not value > 0:
            raise InvalidArgumentError(f"{name} must be above zero.", value=value)
