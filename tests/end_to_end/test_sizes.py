"""Memory and requests of a save and a load beyond the state, for states from nothing to 6 GiB.

Memory is measured as the peak of the resident memory of a fresh process, which is reset through Linux's /proc before
each save and load.
"""

from __future__ import annotations

import gc
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_remote import RemoteReader, RemoteWriter, load
from dcp_remote.cli import main
from dcp_remote.common.arrays import Buffer
from dcp_remote.common.units import KiB, MiB
from dcp_remote.format.shard import ITEMS_PER_SHARD_MAX, SHARD_BYTES_MAX
from dcp_remote.loading.downloads import DOWNLOADS_IN_FLIGHT, RANGE_BYTES_MAX, Fetch, _Buffers, download
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.base import Condition, Version
from dcp_remote.storage.memory import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.figures import LONG_SECONDS
from tests.support.rank_pool import RankPool
from tests.support.simulated_ranks import LocalShards, assembled, load_as_ranks, save_as_ranks
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
        dcp.save(what, storage_writer=RemoteWriter(where, memory_budget_bytes=BUDGET_BYTES), no_dist=True)

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


class CountingStore(MemoryStore):
    """Store of shards of any size whose words count upwards: only the first word and their number are kept.

    Every word is compared when it is put, and counted again when it is read. So 6 GiB cost no memory and no disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fronts: dict[str, tuple[bytes, int, int]] = {}  # header and block table, first word, number of words

    def put(self, key: str, buffers: Sequence[Buffer], *, condition: Condition = "any") -> Version:
        if not key.startswith("shards/"):
            return super().put(key, buffers, condition=condition)
        front, *data = buffers
        first = next_word = int(np.frombuffer(data[0], dtype=np.int64, count=1)[0])
        for words in (block for buffer in data for block in blocks_of(np.frombuffer(buffer, dtype=np.int64))):
            assert np.array_equal(words, np.arange(next_word, next_word + len(words)))
            next_word += len(words)
        self._fronts[key] = bytes(front), first, next_word - first
        return super().put(key, [b"counted"], condition=condition)

    def get_into(self, key: str, start: int, buffer: memoryview) -> None:
        if not key.startswith("shards/"):
            super().get_into(key, start, buffer)
            return
        front, first, _ = self._fronts[key]
        in_front = front[start : start + len(buffer)]
        buffer[: len(in_front)] = in_front
        position = first + (start + len(in_front) - len(front)) // WORD_BYTES
        for words in blocks_of(np.frombuffer(buffer[len(in_front) :], dtype=np.int64)):
            words[:] = np.arange(position, position + len(words))
            position += len(words)


def blocks_of(words: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a few words at a time, so that comparing and counting take little memory."""
    for start in range(0, len(words), 32 * KiB):
        yield words[start : start + 32 * KiB]


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


def large_tensors(size_bytes: int) -> list[tuple[Cost, Cost]]:
    """Measure a contiguous tensor, and one in the same memory that is not."""
    columns = 1024
    rows = size_bytes // (columns * WORD_BYTES)
    memory = torch.zeros(rows, columns + 8, dtype=torch.int64)
    costs = []
    for tensor in (memory.view(-1)[: rows * columns].view(rows, columns), memory[:, :columns]):
        count_up(tensor)
        store = RecordingStore(CountingStore())
        costs.append(saves_and_loads(store, {"model": {"w": tensor}}, tensor.zero_))
        assert counts_up(tensor)
    return costs


@NEEDS_PROC
@pytest.mark.timeout(CALL_TIMEOUT_SECONDS)
def test_one_large_tensor(torture_seconds: float) -> None:
    """A tensor of 1 GiB, or 6, is sent without a copy if contiguous, otherwise copied within the budget.

    One request per shard and per range, none above its limit; every word is compared on both ways.
    """
    size_bytes = 6 * GiB if torture_seconds >= LONG_SECONDS else 1 * GiB
    for kind, costs in zip(("contiguous", "strided"), in_fresh_process(large_tensors, size_bytes), strict=True):
        saved, loaded = costs
        show(kind, costs)
        assert saved.peak_bytes < (SLACK_BYTES if kind == "contiguous" else BUDGET_BYTES + SLACK_BYTES)
        assert loaded.peak_bytes < BUDGET_BYTES + SLACK_BYTES
        assert saved.requests == {
            "get manifest.json": 1,
            "put shards": size_bytes // SHARD_BYTES_MAX,
            "put manifest.json": 1,
        }
        assert loaded.requests == {"get manifest.json": 1, "get_into shards": size_bytes // (8 * MiB)}


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


def test_memory_of_ranges_is_used_again() -> None:
    """A hundred ranges of 1 MiB reuse the memory of the pending ones.

    malloc would keep memory for each of the threads: 6 GiB, read with a budget of 64 MiB, then took 129.
    """
    store = MemoryStore()
    store.put("shard", [bytes(100 * MiB)])
    fetches = [Fetch("shard", n * MiB, MiB, None, lambda _: b"", n) for n in range(100)]
    # The objects themselves are kept, so that no address is used twice.
    budget_bytes = DOWNLOADS_IN_FLIGHT * RANGE_BYTES_MAX
    memories = [fetched.data.obj for fetched in download(store, fetches, memory_budget_bytes=budget_bytes)]
    assert len(memories) == 100
    assert len({id(memory) for memory in memories}) <= DOWNLOADS_IN_FLIGHT


def test_memory_that_is_kept_is_within_the_budget() -> None:
    """Kept memory is within the budget: eight short ranges fit at a time, but only two long buffers are kept."""
    buffers = _Buffers(16 * MiB)
    first = [buffers.take(MiB) for _ in range(8)]
    for view in first:
        buffers.give_back(view)
    second = [buffers.take(MiB) for _ in range(8)]
    kept = {id(view.obj) for view in first} & {id(view.obj) for view in second}
    assert len(kept) == 2


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


def many_objects(count: int, folder: str) -> tuple[Cost, Cost]:
    """Measure numbers and short texts, half of each."""
    expected = {f"layers.{n}": n if n % 2 else f"text {n}" for n in range(count)}
    state = {"model": dict(expected)}

    def blank() -> None:
        state["model"].update(dict.fromkeys(expected, 0))

    costs = saves_and_loads(RecordingStore(open_store(folder)), state, blank)
    assert state["model"] == expected
    return costs


@NEEDS_PROC
@pytest.mark.timeout(CALL_TIMEOUT_SECONDS)
def test_very_many_objects(torture_seconds: float, tmp_path: Path) -> None:
    """10,000 objects (or 100,000) stand in the manifest, and take no request of their own."""
    objects = 100_000 if torture_seconds >= LONG_SECONDS else 10_000
    costs = in_fresh_process(many_objects, objects, str(tmp_path))
    show(f"{objects} objects", costs)
    for cost in costs:
        assert cost.peak_bytes < objects * ENTRY_BYTES
    assert [cost.requests for cost in costs] == [
        {"get manifest.json": 1, "put manifest.json": 1},
        {"get manifest.json": 1},
    ]


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


def parts(sizes: Sequence[int]) -> list[LocalShards]:
    """Return the rows of a tensor, so many per rank; as with a DTensor, an empty part begins where the tensor ends."""
    whole = torch.arange(sum(sizes) * 4.0).reshape(-1, 4)
    return [
        LocalShards(whole.shape, whole.dtype, [((start if start < stop else len(whole), 0), whole[start:stop])])
        for start, stop in pairwise(np.cumsum([0, *sizes]).tolist())
    ]


@pytest.mark.parametrize(
    "states",
    [
        [{"same": torch.ones(3)}, {}, {"same": torch.ones(3)}],
        [{"rows": part} for part in parts([5, 0, 2])],
        [{"rows": part} for part in parts([0, 7, 0])],
        [{}, {}, {"step": 3}],
    ],
    ids=["no entry", "an empty part", "empty parts at both ends", "an object alone"],
)
def test_a_rank_with_nothing(states: Sequence[State]) -> None:
    """A rank without bytes, among three, puts no shard; the checkpoint loads on one rank and on three."""
    store = RecordingStore(MemoryStore())
    save_as_ranks(states, lambda: RemoteWriter(store))
    ranks_with_bytes = {key.partition("/rank-")[2][:5] for verb, key in store.calls if verb == "put" and "/" in key}
    assert len(ranks_with_bytes) == store.count("put") - 1
    assert len(ranks_with_bytes) < len(states)
    expected = {key: value for state in states for key, value in state.items()}
    found = load(store)
    assert found.keys() == expected.keys()
    if "rows" in found:
        assert torch.equal(found["rows"], torch.arange(28.0).reshape(7, 4))
        blank = parts([2, 0, 5])
        for part in blank:
            for _, chunk in part.chunks:
                chunk.zero_()
        load_as_ranks([{"rows": part} for part in blank], lambda: RemoteReader(store))
        assert torch.equal(assembled([{"rows": part} for part in blank], "rows"), torch.arange(28.0).reshape(7, 4))
    else:
        assert equal(found, expected)
        blanks: list[State] = [dict.fromkeys(state, 0) for state in states]
        for blank_state in blanks:
            if "same" in blank_state:
                blank_state["same"] = torch.zeros(3)
        load_as_ranks(blanks, lambda: RemoteReader(store))
        assert equal(blanks, list(states))
