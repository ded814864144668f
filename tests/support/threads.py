"""Stores and gates that control the order of requests in worker threads; and a process that can start one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from dcp_remote.common.arrays import Buffer
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.wrapper import WrappedStore

PATIENCE_SECONDS = 60.0


class HookedStore(WrappedStore):
    """Store that calls a function with the key before each `put` or `get_into`, and one after it."""

    def __init__(
        self,
        store: ObjectStore,
        before: Callable[[str], None] = lambda key: None,
        after: Callable[[str], None] = lambda key: None,
    ) -> None:
        super().__init__(store)
        self._before = before
        self._after = after

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        self._before(key)
        version = self._store.put(key, buffers, condition=condition)
        self._after(key)
        return version

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        self._before(key)
        self._store.get_into(key, start, buffer)
        self._after(key)


def opened(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_SECONDS), "the gate was never opened"


def workers(kind: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"dcp_remote-{kind}")]


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only one thread of the pool start; the next start fails after its call was queued."""
    start = threading.Thread.start
    begun: list[str] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("dcp_remote-"):
            if begun:
                threading._limbo.pop(thread, None)  # type: ignore[attr-defined]  # as CPython does itself
                raise RuntimeError("can't start new thread")
            begun.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
