"""Memory and requests of a save and a load beyond the state, for states from nothing to 6 GiB.

Memory is measured as the peak of the resident memory of a fresh process, which is reset through Linux's /proc before
each save and load.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.cli import main
from dcp_remote.common.units import KiB, MiB
from dcp_remote.format.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX
from dcp_remote.loading.downloads import RANGE_BYTES_MAX
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.figures import LONG_SECONDS
from tests.support.rank_pool import RankPool
from tests.support.simulated_ranks import load_as_ranks, save_as_ranks
from tests.support.states import equal

pytestmark = pytest.mark.torture(smoke=False)

logger = logging.getLogger(__name__)

State: TypeAlias = dict[str, Any]

NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is reset through Linux's /proc"
)

BUDGET_BYTES = 64 * MiB

# Stacks, malloc's arenas and the copies in progress in eight threads.
SLACK_BYTES = 32 * MiB

# Memory per entry, for very many entries, in the plans of torch, its metadata and ours. torch's own file system writer
# and reader take 3.5 and 3.1 KiB.
ENTRY_BYTES = 4.5 * KiB

CALL_TIMEOUT_SECONDS = 900.0

GiB = 1024 * MiB

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one save or load.

    Attributes:
        peak_bytes: Peak of resident memory, above that with the state made.
        seconds: Wall-clock time.
        requests: Requests to the store, by verb and first part of the key.
    """

    peak_bytes: int
    seconds: float
    requests: dict[str, int]


def measured(store: RecordingStore, action: Callable[[], object], *, before_bytes: int) -> Cost:
    """Return the cost of an action beyond `before_bytes` of resident memory; for a process of its own."""
    gc.collect()
    store.clear()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    began_seconds = time.monotonic()
    action()
    peak_bytes = memory_bytes("VmHWM:") - before_bytes
    return Cost(peak_bytes, time.monotonic() - began_seconds, requests(store))


def memory_bytes(field: str) -> int:
    with Path("/proc/self/status").open(encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) * KiB


def requests(store: RecordingStore) -> dict[str, int]:
    counts: dict[str, int] = {}
    for verb, key in store.calls:
        name = f"{verb} {key.partition('/')[0]}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def saves_and_loads(store: RecordingStore, state: State, blank: Callable[[], object]) -> tuple[Cost, Cost]:
    """Save a state, blank it in place, and load it again."""

    def save(what: State, where: ObjectStore) -> None:
        # Without collectives, in which torch's pickles of its plans take as much again as everything else together.
        writer = RemoteWriter(where, memory_budget_bytes=BUDGET_BYTES, shard_bytes=SHARD_BYTES_MAX)
        dcp.save(what, storage_writer=writer, no_dist=True)

    def load_into(what: State, where: ObjectStore) -> None:
        dcp.load(what, storage_reader=RemoteReader(where, memory_budget_bytes=BUDGET_BYTES), no_dist=True)

    # Imports and threads of the first use do not depend on the size.
    warm, elsewhere = {"w": torch.ones(9), "o": 1}, MemoryStore()
    save(warm, elsewhere)
    load_into(warm, elsewhere)
    # Memory that malloc keeps after the save counts as the load's.
    before_bytes = memory_bytes("VmRSS:")
    saved = measured(store, lambda: save(state, store), before_bytes=before_bytes)
    blank()
    loaded = measured(store, lambda: load_into(state, store), before_bytes=before_bytes)
    check_shards(store)
    return saved, loaded


def check_shards(store: ObjectStore) -> None:
    """Check that no shard is above the limits in bytes and entries."""
    manifest = read_manifest(store)
    data_bytes = manifest.shards.sizes - manifest.shards.data_starts
    assert data_bytes.max(initial=0) <= SHARD_BYTES_MAX
    assert np.bincount(manifest.pieces.shard).max(initial=0) <= ITEMS_PER_SHARD_MAX


def in_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    with RankPool(1, call_timeout_seconds=CALL_TIMEOUT_SECONDS) as pool:
        return pool.run(function, *args)[0]


def show(label: str, costs: Sequence[Cost]) -> None:
    """Log the costs, shown by `pytest -rP --log-level=INFO`."""
    for verb, cost in zip(("save", "load"), costs, strict=True):
        logger.info("%s: %s %.1f MiB, %.2f s, %s", label, verb, cost.peak_bytes / MiB, cost.seconds, cost.requests)


# ---- large


def count_up(rows: torch.Tensor) -> None:
    """Set each word to its place in row-major order."""
    for start in range(0, len(rows), 512):
        block = rows[start : start + 512]
        block.copy_(torch.arange(start * rows.shape[1], start * rows.shape[1] + block.numel()).view(block.shape))


def counts_up(rows: torch.Tensor) -> bool:
    return all(
        torch.equal(
            rows[start : start + 512].reshape(-1),
            torch.arange(start * rows.shape[1], min(start + 512, len(rows)) * rows.shape[1]),
        )
        for start in range(0, len(rows), 512)
    )


def through_a_folder(size_bytes: int, folder: str) -> tuple[Cost, Cost]:
    """Save two tensors, one of them transposed, to a folder, and load them."""
    rows = size_bytes // 2 // (1024 * WORD_BYTES)
    plain = torch.zeros(rows, 1024, dtype=torch.int64)
    turned = torch.zeros(1024, rows, dtype=torch.int64)
    count_up(plain)
    count_up(turned)

    def blank() -> None:
        plain.zero_()
        turned.zero_()

    store = RecordingStore(open_store(folder))
    costs = saves_and_loads(store, {"plain": plain, "turned": turned.t()}, blank)
    assert counts_up(plain)
    assert counts_up(turned)
    return costs


@NEEDS_PROC
@pytest.mark.timeout(CALL_TIMEOUT_SECONDS)
def test_large_tensors_through_a_folder(torture_seconds: float, tmp_path: Path) -> None:
    """384 MiB, or 6 GiB, half of it transposed, come back from a disk with every word equal."""
    size_bytes = 6 * GiB if torture_seconds >= LONG_SECONDS else 384 * MiB
    try:
        costs = in_fresh_process(through_a_folder, size_bytes, str(tmp_path / "saved"))
    finally:
        shutil.rmtree(tmp_path / "saved", ignore_errors=True)  # pytest would keep it
    show("folder", costs)
    for cost in costs:
        assert cost.peak_bytes < BUDGET_BYTES + SLACK_BYTES
    saved, loaded = costs
    shards, ranges = size_bytes // SHARD_BYTES_MAX, size_bytes // RANGE_BYTES_MAX
    assert saved.requests == {"get manifest.json": 1, "put shards": shards, "put manifest.json": 1}
    assert loaded.requests == {"get manifest.json": 1, "get_into shards": ranges}


# ---- small


def many_tensors(count: int, folder: str) -> tuple[Cost, Cost]:
    """Measure tensors of 40 bytes each."""
    tensors = {f"layers.{n}.weight": torch.full((10,), float(n)) for n in range(count)}

    def blank() -> None:
        for tensor in tensors.values():
            tensor.zero_()

    costs = saves_and_loads(RecordingStore(open_store(folder)), {"model": tensors}, blank)
    for number, tensor in enumerate(tensors.values()):
        assert bool((tensor == number).all()), number
    return costs


@NEEDS_PROC
@pytest.mark.timeout(CALL_TIMEOUT_SECONDS)
def test_very_many_tensors_of_40_bytes(torture_seconds: float, tmp_path: Path) -> None:
    """30,000 tensors (or 100,000, 4 MB) take only the bytes and requests of plans, headers and the manifest."""
    tensors = 100_000 if torture_seconds >= LONG_SECONDS else 30_000
    costs = in_fresh_process(many_tensors, tensors, str(tmp_path))
    show(f"{tensors} tensors", costs)
    for cost in costs:
        assert cost.peak_bytes < tensors * ENTRY_BYTES + SLACK_BYTES
    shards = -(-tensors // ITEMS_PER_SHARD_MAX)
    saved, loaded = costs
    assert saved.requests == {"get manifest.json": 1, "put shards": shards, "put manifest.json": 1}
    assert loaded.requests == {"get manifest.json": 1, "get_into shards": shards}


# ---- nothing


@pytest.mark.parametrize(
    ("state", "blank", "shown"),
    [
        ({}, {}, "shards 0 bytes 0 B"),
        ({"model": []}, {"model": []}, "0 tensors, 1 object"),
        ({"step": 3, "lr": {"last": 0.5}}, {"step": 0, "lr": {"last": 0.0}}, "lr 0 tensors, 1 object"),
        (
            {"model": {"rows": torch.zeros(0, 3), "ids": torch.zeros(0, dtype=torch.int64)}},
            {"model": {"rows": torch.ones(0, 3), "ids": torch.ones(0, dtype=torch.int64)}},
            "model 2 tensors, 0 objects, 0 B",
        ),
    ],
    ids=["nothing", "an empty list", "objects", "empty tensors"],
)
def test_states_without_an_element(
    state: State, blank: State, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A state without elements takes two requests to save and one to load; `dcp-remote show` prints its entries."""
    store = RecordingStore(open_store(tmp_path))
    save_as_ranks([state], lambda: RemoteWriter(store))
    assert requests(store) == {"get manifest.json": 1, "put manifest.json": 1}
    store.clear()
    load_as_ranks([blank], lambda: RemoteReader(store))
    assert requests(store) == {"get manifest.json": 1}
    assert equal(blank, state)
    store.clear()
    assert equal(load(store), state)
    assert requests(store) == {"get manifest.json": 1}
    assert main(["show", str(tmp_path)]) == 0
    assert shown in " ".join(capsys.readouterr().out.split())
