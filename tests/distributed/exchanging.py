"""Functions for a `RankPool` that restore with reads shared between ranks, and their results."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp_remote import LoadReport, PerRank
from dcp_remote.loading import peers, read_plan
from dcp_remote.loading.downloads import FAR_DOWNLOADS_IN_FLIGHT
from dcp_remote.loading.peers import PeerExchange, PeerServer
from dcp_remote.manager import rank_restore
from dcp_remote.storage import LocalStore
from dcp_remote.storage.base import Content
from dcp_remote.testing import RecordingStore
from tests.distributed.managed import Ended, State, ended, managing, sharded, warnings_kept
from tests.support.states import equal
from tests.support.threads import PATIENCE_SECONDS

ROWS, COLUMNS = 1200, 4092
# Parts of a read that another rank is to give are many, and none is large.
REPLICATED = 3_000_000


@dataclass(frozen=True, slots=True)
class Got:
    """Requests and result of a restore on one rank.

    Attributes:
        ranges: Ranges of shards read from the store: key, first byte, length in bytes.
        manifests: Number of reads of a manifest.
        received_bytes: Bytes received from other ranks.
        fallback_bytes: Bytes read from the store in place of other ranks.
        unreached_ranks: Number of ranks that were not reached.
        ending: Error that was raised; None if there was none.
        warnings: Warnings that were logged.
    """

    ranges: tuple[tuple[str, int, int], ...]
    manifests: int
    received_bytes: int
    fallback_bytes: int
    unreached_ranks: int
    ending: Ended | None = None
    warnings: tuple[str, ...] = ()

    @property
    def read_bytes(self) -> int:
        """Bytes of shards read from the store."""
        return sum(length for _, _, length in self.ranges)


class _Noting(RecordingStore):
    """Keeps where each range began, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(LocalStore(str(path)))
        self.ranges: list[tuple[str, int, int]] = []

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        if key.startswith("shards/"):
            self.ranges.append((key, start, len(buffer)))
        super().get_into(key, start, buffer)


class _Far(LocalStore):
    """Store that knows its latency after a `get`, and answers ranges of shards once 32 of them are under way."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.latency_seconds = 0.0
        self.barrier = threading.Barrier(FAR_DOWNLOADS_IN_FLIGHT)

    def get(self, key: str, *, limit_bytes: int) -> Content:
        self.latency_seconds = 0.1
        return super().get(key, limit_bytes=limit_bytes)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        self.barrier.wait(PATIENCE_SECONDS)
        super().get_into(key, start, buffer)


def state_of(kind: str, *, filled: bool) -> State:
    """Tensors that all ranks have, rows, or columns of one; objects in shards and in the manifest."""
    factor = 1.0 if filled else 0.0
    grid = (torch.arange(ROWS * COLUMNS, dtype=torch.float32) * factor).reshape(ROWS, COLUMNS)
    if kind in {"rows", "columns"}:
        return {"grid": sharded(grid, dimension=0 if kind == "rows" else 1)}
    state: dict[str, Any] = {
        "large": torch.arange(REPLICATED, dtype=torch.float64) * factor,
        "small": {str(n): torch.full((n + 1,), n * factor) for n in range(40)},
        "turned": torch.zeros(1000, 300).t().copy_(torch.arange(300_000.0).reshape(300, 1000) * factor),
        "objects": [list(range(20_000)) if filled else None, "a text" if filled else ""],
    }
    if kind == "mixed":
        state |= {"rows": sharded(grid), "own": PerRank(dist.get_rank() if filled else None)}
    return state


def local(value: Any) -> Any:
    """Return a state with what this rank has of its DTensors, and with the values of its `PerRank`s."""
    if isinstance(value, dict):
        return {key: local(inner) for key, inner in value.items()}
    if isinstance(value, PerRank):
        return value.value
    return value.to_local() if isinstance(value, DTensor) else value


def save(path: Path, kind: str) -> None:
    with managing(path) as manager:
        manager.save(1, state_of(kind, filled=True), wait=True)


def healthy(path: Path, kind: str) -> Got:
    """Restore without any trouble."""
    return restore(path, kind, "", -1, 2**28)


def restore(path: Path, kind: str, trouble: str, victim: int, budget_bytes: int) -> Got:
    """And compare; with a trouble on one rank."""
    state, store = state_of(kind, filled=False), _Noting(path)
    troubled = trouble if dist.get_rank() == victim else ""
    threads = set(threading.enumerate())
    with (
        impatient() if trouble else nullcontext(),
        managing(store, memory_budget_bytes=budget_bytes, silence_seconds=3.0) as manager,
        warnings_kept() as kept,
        _TROUBLES[troubled](store),
    ):
        ending = ended(partial(manager.restore, state))
        left = {thread.name for thread in set(threading.enumerate()) - threads}
        assert left <= {f"dcp_remote-{name}" for name in ("heartbeat", "store_0", "host")}, left
        report = manager.last_load
    if ending is None:
        assert equal(local(state), local(state_of(kind, filled=True)))
    return _got(store, report, ending, kept)


def many_rows(*, filled: bool) -> State:
    factor = 1.0 if filled else 0.0
    return {"rows": {str(n): sharded(torch.arange(4000.0) * factor) for n in range(FAR_DOWNLOADS_IN_FLIGHT)}}


def save_many_rows(path: Path) -> None:
    with managing(path) as manager:
        manager.save(1, many_rows(filled=True), wait=True)


def restore_from_afar(path: Path) -> float:
    """Restore 32 ranges, which wait for each other; return the latency that this rank has measured itself."""
    state, store = many_rows(filled=False), _Far(path)
    with _replaced(read_plan, "SEPARATE_BYTES_MIN", 1000), managing(store) as manager:
        manager.restore(state)
    assert equal(local(state), local(many_rows(filled=True)))
    return store.latency_seconds


def _got(store: _Noting, report: LoadReport | None, ending: Ended | None, kept: list[str]) -> Got:
    manifests = sum(verb == "get" and key.startswith("manifests/") for verb, key in store.calls)
    figures = (0, 0, 0) if report is None else (report.received_bytes, report.fallback_bytes, report.unreached_ranks)
    return Got(tuple(store.ranges), manifests, *figures, ending, tuple(kept))


def restore_by(path: Path, kind: str, rank_sockets: tuple[bool, ...]) -> Got:
    """Restore and compare, with the `rank_sockets` of each rank; where that is False, a server fails the restore."""

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("no socket may be opened")

    state, store, mine = state_of(kind, filled=False), _Noting(path), rank_sockets[dist.get_rank()]
    with (
        managing(store, rank_sockets=mine) as manager,
        warnings_kept() as kept,
        nullcontext() if mine else _replaced(PeerServer, "__init__", refuse),
    ):
        manager.restore(state)
        report = manager.last_load
    assert equal(local(state), local(state_of(kind, filled=True)))
    return _got(store, report, None, kept)


@contextmanager
def impatient() -> Iterator[None]:
    """A second without a byte is too long."""
    usual_seconds, peers.PATIENCE_SECONDS = peers.PATIENCE_SECONDS, 1.0
    try:
        yield
    finally:
        peers.PATIENCE_SECONDS = usual_seconds


# ---- troubles


@contextmanager
def _nothing(_store: _Noting) -> Iterator[None]:
    yield


@contextmanager
def _replaced(of: object, name: str, function: Any) -> Iterator[None]:
    usual = getattr(of, name)
    setattr(of, name, function)
    try:
        yield
    finally:
        setattr(of, name, usual)


@contextmanager
def _deaf(_store: _Noting) -> Iterator[None]:
    """Let the rank offer no unit, and decline no request."""
    with _replaced(PeerServer, "offer", lambda *_args, **_options: None):
        yield


@contextmanager
def _gone(_store: _Noting) -> Iterator[None]:
    """Close the server of the rank once its address is known to the others."""
    usual = PeerExchange.listen

    def tell(exchange: PeerExchange, *args: Any) -> Any:
        told = usual(exchange, *args)
        assert exchange._server is not None
        exchange._server.close()
        return told

    with _replaced(PeerExchange, "listen", tell):
        yield


@contextmanager
def _lying(_store: _Noting) -> Iterator[None]:
    """Flip the last bit of every unit that the rank offers."""
    usual = PeerServer.offer

    def offer(giver: PeerServer, number: int, data: memoryview, **options: Any) -> None:
        wrong = bytearray(data)
        wrong[-1] ^= 1
        usual(giver, number, memoryview(wrong), **options)

    with _replaced(PeerServer, "offer", offer):
        yield


@contextmanager
def _refused(store: _Noting) -> Iterator[None]:
    """Let the store of the rank refuse to read shards."""

    def refuse(*_args: Any) -> None:
        raise PermissionError("An injected refusal.")

    with _replaced(type(store), "get_into", refuse):
        yield


@contextmanager
def _large(_store: _Noting) -> Iterator[None]:
    """The manifest is too large for the store of the group; the coordinator says so."""
    with _replaced(rank_restore, "_MANIFESTS_BYTES_MAX", 0):
        yield


@contextmanager
def _killed(_store: _Noting) -> Iterator[None]:
    """At its first gift."""
    with _replaced(PeerServer, "offer", lambda *_args, **_options: os.kill(os.getpid(), signal.SIGKILL)):
        yield


@contextmanager
def _stopped(_store: _Noting) -> Iterator[None]:
    """At its first gift, for two seconds: a process of its own wakes it up."""
    usual = PeerServer.offer

    def offer(giver: PeerServer, number: int, data: memoryview, **options: Any) -> None:
        if number >= 0 and not stopped:
            stopped.append(number)
            me = os.getpid()
            if os.fork() == 0:
                time.sleep(2.0)
                os.kill(me, signal.SIGCONT)
                os._exit(0)
            os.kill(me, signal.SIGSTOP)
            os.wait()
        usual(giver, number, data, **options)

    stopped: list[int] = []
    with _replaced(PeerServer, "offer", offer):
        yield


_TROUBLES = {
    "": _nothing,
    "deaf": _deaf,
    "gone": _gone,
    "lying": _lying,
    "refused": _refused,
    "large": _large,
    "killed": _killed,
    "stopped": _stopped,
}
