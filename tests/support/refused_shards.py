"""Refusals of the shards of some saves by the bucket, in programs that train with a framework."""

from __future__ import annotations

import threading
from typing import Any

from dcp_remote.errors import PermissionDeniedError
from dcp_remote.storage.cloud.store import CloudStore


def refuse_shards() -> threading.Event:
    """Let the stores of this process refuse shards; return the event that is set while they do."""
    refuses, put = threading.Event(), CloudStore.put

    def put_or_refuse(store: CloudStore, key: str, *arguments: Any, **options: Any) -> Any:
        if refuses.is_set() and key.startswith("shards/"):
            raise PermissionDeniedError("not yours")
        return put(store, key, *arguments, **options)

    CloudStore.put = put_or_refuse  # type: ignore[assignment,method-assign]
    return refuses
