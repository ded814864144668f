"""Saves of a run in which most of the state did not change: what is sent, and that each checkpoint is complete.

Ranks are simulated; each reuses pieces by its own last report, or by the manifest. Every checkpoint is loaded from a
store that holds only its manifest and the shards that the manifest names, and compared with bytes that were copied
before the save. The bytes that are sent are counted at the store.
"""

from __future__ import annotations

import io
import itertools
import pickle
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcp_remote import RemoteReader, load
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.digests import block_bytes
from dcp_remote.common.geometry import Box
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import SaveFailedError, SaveTimeoutError
from dcp_remote.format import manifest_json
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest, TensorKind
from dcp_remote.format.shard import SHARD_BYTES_MAX, ShardNames
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from dcp_remote.saving.dcp_metadata import to_columns
from dcp_remote.saving.dedup import LIVE_SHARE_MIN, SPAN_BYTES, Baseline
from dcp_remote.saving.manifest_assembly import assemble_manifest, find_orphaned_shards
from dcp_remote.saving.rank_report import RankReport, UploadStats
from dcp_remote.saving.shard_writer import INLINE_BYTES_MAX, write_shards
from dcp_remote.saving.uploads import Uploads
from dcp_remote.serialization.tensors import byte_view, choose_encoding
from dcp_remote.storage import MemoryStore
from dcp_remote.testing import RecordingStore
from tests.support.manifests import Layout, build, decode
from tests.support.properties import examples
from tests.support.simulated_ranks import LocalShards, State, load_as_ranks, save_as_ranks, shard
from tests.support.strategies import LAYOUTS, AnyDtypePlanner, Whole, blank, blank_like

From: TypeAlias = Literal["report", "manifest", "nothing"]

BOTH = pytest.mark.parametrize("source", ["report", "manifest"])


@dataclass(frozen=True)
class Saved:
    """Checkpoint of a run."""

    manifest: Manifest
    reports: list[RankReport]
    sent_bytes: int  # in shards

    @property
    def reused_bytes(self) -> int:
        return sum(report.figures.reused_bytes for report in self.reports)

    @property
    def put_pieces(self) -> dict[str, int]:
        """Bytes of each entry's pieces that were sent, not reused."""
        put = {key for report in self.reports for key in report.put_keys}
        lengths = {
            name: sum(int(self.manifest.pieces.length[p]) for p in pieces if self.key_of(p) in put)
            for name, pieces in self.pieces().items()
        }
        return {name: length for name, length in lengths.items() if length}

    def key_of(self, piece: int) -> str:
        return self.manifest.shards.keys[int(self.manifest.pieces.shard[piece])]

    def pieces(self) -> dict[str, range]:
        tensors = self.manifest.tensors
        places = tensors.piece_first[tensors.chunk_first].tolist()
        found = {name: range(places[n], places[n + 1]) for n, name in enumerate(tensors.names)}
        objects = {o.name: range(o.piece_first, o.piece_first + o.pieces) for o in self.manifest.stored}
        return found | objects


@dataclass
class Run:
    """Run in a memory store; its manifests are kept here."""

    store: RecordingStore = field(default_factory=lambda: RecordingStore(MemoryStore()))
    saves: list[Saved] = field(default_factory=list)
    deadline_clock: Callable[[], float] = time.monotonic

    def save(
        self,
        states: Sequence[State],
        source: From = "report",
        *,
        planner: Callable[[], SavePlanner] = AnyDtypePlanner,
        shard_bytes_max: int = SHARD_BYTES_MAX,
        allow_pickle: bool = False,
    ) -> Saved:
        """Save one state per rank, reusing pieces of the last save; then load the checkpoint."""
        expected = [bits(state) for state in states]
        bases: list[Baseline | None] = [None] * len(states)
        if self.saves and source == "manifest":
            bases = [Baseline.of_manifest(decoded(self.saves[-1].manifest))] * len(states)
        elif self.saves and source == "report":
            last = self.saves[-1]
            orphans = find_orphaned_shards(last.manifest, [report.to_sent() for report in last.reports])
            for rank, report in enumerate(last.reports[: len(states)]):
                bases[rank] = Baseline.of_report(report, left_out=orphans)
        ranks = itertools.count()
        writers: list[Writing] = []

        def writer() -> Writing:
            rank = next(ranks)
            writers.append(Writing(self, rank, bases[rank], shard_bytes_max, allow_pickle))
            return writers[-1]

        before = self.store.size_bytes("put")
        save_as_ranks(states, writer, planner)
        sent_bytes = self.store.size_bytes("put") - before
        reports = [writer.report for writer in writers if writer.report is not None]
        metadata = writers[0].metadata
        assert metadata is not None
        sent = [report.to_sent() for report in reports]
        manifest, _ = assemble_manifest(
            to_columns(metadata),
            sent,
            url=self.store.url,
            save_id=f"{len(self.saves):032x}",
            segment_names=ShardNames(0),
            put=MemoryStore().put,
        )
        self.saves.append(Saved(manifest, reports, sent_bytes))
        self.load(self.saves[-1], states, expected, allow_pickle=allow_pickle)
        return self.saves[-1]

    def load(self, saved: Saved, states: Sequence[State], expected: list[object], *, allow_pickle: bool) -> None:
        """Load with templates, and without them if one rank has everything, from a store with this checkpoint only."""
        store = self.alone(saved)
        templates = [template(state) for state in states]
        if None not in templates:
            load_as_ranks(templates, lambda: RemoteReader(store, allow_pickle=allow_pickle))
            assert [bits(state) for state in templates] == expected
        if not any(isinstance(value, LocalShards) for value in leaves(states)) and len(states) == 1:
            assert bits(load(store, allow_pickle=allow_pickle)) == expected[0]
        else:
            assert None not in templates, "loaded in one way at least"

    def alone(self, saved: Saved) -> MemoryStore:
        """Return a store with one checkpoint of the run, and only the shards that its manifest names."""
        store = MemoryStore()
        for key in saved.manifest.shards.keys:
            store.put(key, [self.store.get(key, limit_bytes=2 * SHARD_BYTES_MAX).data])
        store.put(MANIFEST_KEY, [manifest_json.encode(saved.manifest)])
        return store


class Writing(StorageWriter):
    """Writer that handles one rank's plan as a manager does."""

    def __init__(self, run: Run, rank: int, base: Baseline | None, shard_bytes_max: int, allow_pickle: bool) -> None:
        super().__init__()
        self._run, self._store, self._rank, self._base = run, run.store, rank, base
        self._shard_bytes_max, self._allow_pickle = shard_bytes_max, allow_pickle
        self.report: RankReport | None = None
        self.metadata: Metadata | None = None

    def reset(self, checkpoint_id: object = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with Uploads[Any](
            self._store, rank=self._rank, deadline=Deadline(600, self._run.deadline_clock), memory_budget_bytes=64 * MiB
        ) as uploads:
            self.report = write_shards(
                plan,
                planner,
                uploads,
                allow_pickle=self._allow_pickle,
                shard_bytes=self._shard_bytes_max if self._shard_bytes_max < SHARD_BYTES_MAX else None,
                base=self._base,
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: object) -> None:
        self.metadata = metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        return checkpoint_id is not None


def decoded(manifest: Manifest) -> Manifest:
    """Return a manifest as a reader decodes it."""
    return decode(manifest_json.encode(manifest))


def bits(value: object) -> object:
    """Return an independent value that contains every bit of the tensors in `value`."""
    if isinstance(value, LocalShards):
        return ("shards", [(offsets, bits(chunk)) for offsets, chunk in value.chunks])
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return ("sparse", bits(value.coalesce().indices()), bits(value.coalesce().values()), tuple(value.shape))
        whole = value.detach().resolve_conj().resolve_neg().contiguous().clone()
        # A dimension of size 1 may have any stride, with which torch refuses a view of bytes.
        flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(inner) for inner in value]
    return pickle.dumps(value)


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def template(value: Any) -> Any:
    """Return a template of a state, with other bytes; None if the state holds values that only `load` reads."""
    if isinstance(value, LocalShards):
        return blank_like(value, "contiguous")
    if isinstance(value, torch.Tensor):
        return blank(value.dtype, value.shape, layout="contiguous") if value.layout == torch.strided else None
    if isinstance(value, dict):
        inner = {key: template(element) for key, element in value.items()}
        return None if None in list(inner.values()) else inner
    return 0


def noise(*shape: int, number: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random floats, equal for equal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def flip(tensor: torch.Tensor, byte: int, bit: int = 0) -> None:
    """Flip one bit of a contiguous tensor in place."""
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


# ---- how much is sent


def frozen_state(world_size: int) -> list[State]:
    """Return states that are 99.5 % frozen: replicated and sharded tensors of all sizes, beside trained adapters."""
    parts = [shard(noise(600, 256, number=n), world_size, (2 * world_size, 1)) for n in range(4)]
    layers = {f"layers.{n}.norm": noise(256, number=n) for n in range(80)}
    tower = {f"blocks.{n}.weight": noise(256, 256, number=n, dtype=torch.bfloat16) for n in range(10)}
    adapters = {f"layers.{n}.lora": noise(4, 64, number=n) for n in range(18)}
    moments = {name: torch.zeros(4, 16) for name in adapters}
    return [
        {
            "model": {**layers, **adapters, **{f"w{n}": part[rank] for n, part in enumerate(parts)}},
            "vision": tower,
            "ema": {"w": noise(256, 512, number=9)},
            "optim": {"state": moments, "step": 1},
            "names": "x" * (2 * INLINE_BYTES_MAX),
        }
        for rank in range(world_size)
    ]


def train(states: Sequence[State], step: int) -> None:
    for state in states:
        for name, tensor in state["model"].items():
            if "lora" in name:
                tensor.copy_(noise(4, 64, number=1000 * step + int(name.split(".")[1])))
                state["optim"]["state"][name] = tensor[:, :16] * 0.1
        state["optim"]["step"] = step


@pytest.mark.torture
@BOTH
@pytest.mark.parametrize("world_size", [1, 3])
def test_frozen(world_size: int, source: From) -> None:
    """With 99.5 % frozen, each of three later saves sends at least 95 % less, manifest included."""
    states = frozen_state(world_size)
    run = Run()
    first = run.save(states, planner=DefaultSavePlanner)
    share = sum(t.nbytes for n, t in states[0]["model"].items() if "lora" in n) * 1.25 / first.manifest.total_bytes
    assert 0.003 < share < 0.006
    for step in range(2, 5):
        train(states, step)
        later = run.save(states, source, planner=DefaultSavePlanner)
        assert later.sent_bytes + len(manifest_json.encode(later.manifest)) < 0.05 * first.sent_bytes
        assert later.reused_bytes > 0.99 * first.manifest.pieces.length.sum()
        assert set(later.put_pieces) == {n for n in later.pieces() if "lora" in n}
        assert sum(len(report.put_keys) for report in later.reports) <= 2 * world_size, "what is sent is packed anew"
    unchanged = run.save(states, source, planner=DefaultSavePlanner)
    assert unchanged.sent_bytes == 0
    assert set(unchanged.manifest.shards.keys) == set(later.manifest.shards.keys)


# ---- what counts as a change

# A tensor in four pieces of four blocks each.
PIECE_BYTES = 256 * KiB
BLOCK_BYTES = block_bytes(PIECE_BYTES)


@BOTH
@pytest.mark.parametrize(
    "byte",
    [0, BLOCK_BYTES - 1, BLOCK_BYTES, PIECE_BYTES - 1, PIECE_BYTES, 4 * PIECE_BYTES - 1],
)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_one_flipped_bit(byte: int, source: From, layout: str) -> None:
    """A bit flipped in the first block of a piece, the last, or between: only the piece with the bit is sent."""
    whole = noise(512, 512)
    state = {"w": whole if layout == "contiguous" else whole.t().contiguous().t(), "small": noise(3), "scalar": noise()}
    run = Run()
    first = run.save([state], shard_bytes_max=PIECE_BYTES)
    assert first.manifest.pieces.length.tolist()[:4] == [PIECE_BYTES] * 4
    flip(whole, byte, bit=6)
    state["w"] = whole if layout == "contiguous" else whole.t().contiguous().t()
    second = run.save([state], source, shard_bytes_max=PIECE_BYTES)
    assert second.put_pieces == {"w": PIECE_BYTES}
    changed = second.pieces()["w"][byte // PIECE_BYTES]
    assert second.key_of(changed) == second.reports[0].put_keys[0]
    assert second.reused_bytes == 3 * PIECE_BYTES + 16


def float_of(word: int) -> torch.Tensor:
    return torch.tensor([word], dtype=torch.int32).view(torch.float32)


@BOTH
def test_bits_count_and_not_values(source: From) -> None:
    """A NaN equals a NaN of the same bits; 0.0 and -0.0 differ."""
    run = Run()
    state = {"nan": float_of(0x7FC00001).expand(8), "zero": torch.zeros(4), "other": float_of(0x7FC00001)}
    run.save([state])
    state["zero"], state["other"] = -torch.zeros(4), float_of(0x7FC00002)
    assert run.save([state], source).put_pieces == {"zero": 16, "other": 4}


@BOTH
def test_equal_bytes_of_another_tensor_are_not_its_own(source: From) -> None:
    """With another dtype, shape, name or offset, a tensor is sent although its bytes are already stored."""
    w = noise(64, 8)
    run = Run()
    run.save(
        [
            {
                "dtype": w,
                "shape": w,
                "dimensions": w,
                "name": w,
                "same": w,
                "rows": LocalShards((128, 8), w.dtype, [((0, 0), w), ((64, 0), w)]),
            }
        ]
    )
    second = run.save(
        [
            {
                "dtype": w.view(torch.int32),
                "shape": w.view(8, 64),
                "dimensions": w.view(-1),
                "renamed": w,
                "same": w,
                "rows": LocalShards((192, 8), w.dtype, [((0, 0), w), ((64, 0), w), ((128, 0), w)]),
            }
        ],
        source,
    )
    assert second.put_pieces == dict.fromkeys(("dtype", "shape", "dimensions", "renamed", "rows"), w.nbytes)
    back = run.save([{"dtype": w, "same": w}], source)
    assert back.put_pieces == {"dtype": w.nbytes}


def test_a_tensor_that_moved_to_another_rank() -> None:
    """A tensor that moved to another rank is reused by the manifest, which has all chunks, not by a rank's report."""
    whole = noise(64, 8)
    first, second = shard(whole, 2, (2, 1))
    cases: list[tuple[From, dict[str, int]]] = [("manifest", {}), ("report", {"w": whole.nbytes})]
    for source, sent in cases:
        run = Run()
        run.save([{"w": first}, {"w": second}])
        assert run.save([{"w": second}, {"w": first}], source).put_pieces == sent
        assert run.save([{"w": second}, {"w": first}], source).put_pieces == {}


@BOTH
def test_other_order_and_other_budget(source: From) -> None:
    """The order of the plan and the size of a shard change; unchanged pieces are reused as they were cut.

    A changed piece keeps its bounds if it fits into a shard, and is cut otherwise.
    """
    state = {name: noise(512, 512, number=n) for n, name in enumerate("abcdef")}
    run = Run()
    first = run.save([state], shard_bytes_max=300 * KiB)
    assert len(first.manifest.pieces.shard) == 4 * 6
    turned = dict(reversed(state.items()))
    assert run.save([turned], source, shard_bytes_max=MiB).put_pieces == {}
    flip(state["b"], 5)
    second = run.save([turned], source, shard_bytes_max=100 * KiB)
    assert second.put_pieces == {"b": 300 * KiB}
    lengths = [second.manifest.pieces.length[p] for p in second.pieces()["b"]]
    assert sorted(lengths) == [100 * KiB] * 3 + [124 * KiB] + [300 * KiB] * 2
    state["c"].zero_()
    third = run.save([state], source, shard_bytes_max=2 * MiB)
    assert third.put_pieces == {"c": MiB}
    assert len(third.pieces()["c"]) == 1, "a tensor that changed everywhere is cut anew"


@BOTH
def test_pieces_that_fill_a_shard_keep_their_bounds(source: From) -> None:
    """Tensors of 3 MiB are cut to fill shards of 4 MiB; what changes of a cut tensor is sent in its bounds, thrice."""
    tensors = {name: noise(768, 1024, number=n) for n, name in enumerate("abc")}
    run = Run()
    lengths = run.save([{"m": tensors}], shard_bytes_max=4 * MiB).manifest.pieces.length.tolist()
    assert lengths == [3 * MiB, 1 * MiB, 2 * MiB, 2 * MiB, 1 * MiB]
    for step in range(3):
        flip(tensors["a"], step)
        flip(tensors["b"], 2 * MiB + step)
        flip(tensors["c"], step)
        saved = run.save([{"m": tensors}], source, shard_bytes_max=4 * MiB)
        assert saved.put_pieces == {"m.a": 3 * MiB, "m.b": 2 * MiB, "m.c": 2 * MiB}
        assert sorted(saved.manifest.pieces.length.tolist()) == sorted(lengths)


@pytest.mark.torture
@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", [(7, 150, 100), (150, 7, 100), (1, 1, 105_000), (105_000, 1, 1)])
def test_pieces_that_are_no_boxes(sizes: tuple[int, ...], layout: str, source: From) -> None:
    """Pieces are cut across rows and planes, in any memory layout; each piece in turn changes."""
    tensor = blank(torch.int32, sizes, layout=layout)
    values = torch.arange(105_000, dtype=torch.int32).view(sizes)
    tensor.copy_(values)
    run = Run()
    first = run.save([{"w": tensor}], shard_bytes_max=100_000)
    lengths = first.manifest.pieces.length.tolist()
    assert len(lengths) > 4
    place = 0
    for length in lengths:
        values.view(-1)[place // 4 + length // 8] += 1_000_000
        place += length
        tensor.copy_(values)
        saved = run.save([{"w": tensor}], source, shard_bytes_max=100_000)
        assert saved.put_pieces == {"w": length}


class OfTheUser:
    """Object of a user that needs code to load."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> tuple[object, ...]:
        return OfTheUser, (self.text,)


@BOTH
def test_objects(source: From) -> None:
    """Objects as JSON, torch's stream and pickle; small ones stay in the manifest, and a renamed one is sent."""
    text = "x" * (2 * INLINE_BYTES_MAX)
    shared = [1, 2, 3]
    streamed = {"a": shared, "b": shared}  # on two paths: no JSON
    run = Run()

    def state(text: str, streamed: object, small: int, name: str = "text") -> State:
        return {
            name: text,
            "streamed": (streamed,),
            "small": small,
            "pickled": OfTheUser(text),
            "m": {"w": torch.ones(3)},
        }

    first = run.save([state(text, streamed, 1)], allow_pickle=True)
    assert {o.name: o.encoding for o in first.manifest.stored} == {
        "text": "json",
        "streamed": "torch",
        "pickled": "pickle",
    }
    assert run.save([state(text, streamed, 2)], source, allow_pickle=True).put_pieces == {}
    changed = run.save([state(text, {"a": [4], "b": [4]}, 2)], source, allow_pickle=True)
    assert changed.put_pieces == {}, "it is JSON now, and in the manifest"
    assert set(run.save([state(text + "y", streamed, 2)], source, allow_pickle=True).put_pieces) == {
        "text",
        "streamed",
        "pickled",
    }
    assert set(run.save([state(text + "y", streamed, 2, name="note")], source, allow_pickle=True).put_pieces) == {
        "note"
    }


@BOTH
def test_a_large_object_in_pieces(source: From) -> None:
    """After a change of one character in a text of one MiB, one piece is sent."""
    text = "x" * MiB
    run = Run()
    run.save([{"text": text}], shard_bytes_max=200 * KiB)
    second = run.save([{"text": text[:500_000] + "y" + text[500_001:]}], source, shard_bytes_max=200 * KiB)
    assert 150 * KiB < second.put_pieces["text"] <= 200 * KiB
    third = run.save([{"text": "z" + text}], source, shard_bytes_max=200 * KiB)
    assert third.put_pieces["text"] > MiB, "a text of another length is cut anew"


@BOTH
def test_tensors_that_are_streams(source: From) -> None:
    """A sparse tensor is stored as torch's stream; it becomes a plain tensor of the same name, and sparse again."""
    sparse = torch.eye(200).to_sparse()
    other = (2 * torch.eye(200)).to_sparse()
    run = Run()
    run.save([{"s": sparse, "m": {"w": torch.ones(3)}}])
    assert run.save([{"s": sparse.clone(), "m": {"w": torch.ones(3)}}], source).put_pieces == {}
    assert set(run.save([{"s": other, "m": {"w": torch.ones(3)}}], source).put_pieces) == {"s"}
    assert run.save([{"s": other.to_dense(), "m": {"w": torch.ones(3)}}], source).put_pieces == {"s": 160_000}
    assert set(run.save([{"s": other, "m": {"w": torch.ones(3)}}], source).put_pieces) == {"s"}


@BOTH
def test_a_stream_and_elements_of_equal_bytes(source: From) -> None:
    """A plain tensor whose bytes are the stream of the sparse tensor that it replaces is sent, and the reverse."""
    size = 0
    for _ in range(10):
        sparse = torch.eye(1, size + 1, dtype=torch.uint8)[0][:size].to_sparse()
        encoding, stream = choose_encoding("s", sparse, allow_pickle=False)
        if len(stream) == size:
            break
        size = len(stream)
    assert (encoding, len(stream)) == ("torch", size)
    run = Run()
    run.save([{"s": sparse}])
    plain = torch.tensor(list(stream), dtype=torch.uint8)
    assert run.save([{"s": plain}], source).put_pieces == {"s": size}
    assert run.save([{"s": sparse}], source).put_pieces == {"s": size}


# ---- what it costs


def one_tensor(size_bytes: int, *, shard_bytes_max: int = SHARD_BYTES_MAX) -> tuple[Run, torch.Tensor]:
    run, tensor = Run(), noise(size_bytes // 4)
    run.save([{"w": tensor}], shard_bytes_max=shard_bytes_max)
    return run, tensor


def reads(base: Baseline, tensor: torch.Tensor) -> tuple[list[tuple[int, int]], list[bool]]:
    """Return the byte ranges that a comparison reads, and for each piece whether it did not change."""
    known = base.chunk("w", dtype="float32", offsets=(0,), sizes=(len(tensor),))
    assert known is not None
    data = byte_view(tensor)
    seen: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> memoryview:
        seen.append((start, stop))
        return data[start:stop]

    parts = list(base.compare(known.pieces, length_bytes=tensor.nbytes, read=read))
    return seen, [part.first_block is not None for part in parts]


def test_a_change_is_seen_in_the_first_block() -> None:
    """With its own report, a rank reads one block of a changed piece; with a manifest, the whole piece.

    An unchanged piece is read once, a span at a time; also in the third save, after it was reused.
    """
    run, tensor = one_tensor(8 * MiB, shard_bytes_max=4 * MiB)
    run.save([{"w": tensor}])
    own = Baseline.of_report(run.saves[-1].reports[0])
    manifest = Baseline.of_manifest(run.saves[-1].manifest)
    for base in (own, manifest):
        seen, same = reads(base, tensor)
        assert same == [True, True]
        assert [start for start, _ in seen[1:]] == [stop for _, stop in seen[:-1]]
        assert seen[-1][1] == 8 * MiB
        assert max(stop - start for start, stop in seen) <= SPAN_BYTES
    tensor.neg_()
    block = block_bytes(4 * MiB)
    assert reads(own, tensor) == ([(0, block), (4 * MiB, 4 * MiB + block)], [False, False])
    seen, same = reads(manifest, tensor)
    assert (seen[-1][1], same) == (8 * MiB, [False, False])


class Copying(DefaultSavePlanner):
    """Planner that returns copies, and counts how many it made, and how many were alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = self.made = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            data = data.clone()
            self.made += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(data, self._gone)
        return data

    def _gone(self) -> None:
        self.alive -= 1


@BOTH
def test_copies_of_a_planner_live_one_at_a_time(source: From) -> None:
    """At most two copies are alive while comparing; a tensor that is reused whole is resolved once."""
    state = {"m": {str(n): noise(1000, number=n) for n in range(50)}, "o": {"w": noise(1000, number=50)}}
    run, planners = Run(), []

    def planner() -> SavePlanner:
        planners.append(Copying())
        return planners[-1]

    run.save([state], planner=planner)
    run.save([state], source, planner=planner)
    state["o"]["w"].neg_()
    run.save([state], source, planner=planner)
    assert [planner.made for planner in planners] == [51, 51, 52]
    assert planners[0].most == 51, "they fit into the budget"
    assert planners[1].most <= 2
    assert planners[2].most <= 2


class Counting(DefaultSavePlanner):
    """Planner that counts how often it resolves a tensor."""

    resolved = 0

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self.resolved += 1
        return super().resolve_data(write_item)


@BOTH
def test_tensors_of_the_state_are_resolved_once(source: From) -> None:
    """Compare tensors and send them, as all but one have changed: each is resolved for both, and no copy is kept."""
    state = {"m": {str(n): noise(1000, number=n) for n in range(9)}, "o": {"w": noise(1000, number=9)}}
    run, planner = Run(), Counting()
    run.save([state])
    for value in state["m"].values():
        value.neg_()
    assert run.save([state], source, planner=lambda: planner).reused_bytes == state["o"]["w"].nbytes
    assert planner.resolved == 10


@BOTH
def test_what_is_named_is_not_much_more_than_the_state(source: From) -> None:
    """The shards that a checkpoint names hold little more than its state, of which ever more stops changing.

    If every unchanged piece were reused, each of twelve shards would be kept for a small share of its bytes.
    """
    names = [f"t{n}" for n in range(12)]
    state = {"m": {name: noise(1000, number=n) for n, name in enumerate(names)}}
    run = Run()
    run.save([state])
    state_bytes = 12 * 4000
    for step in range(12):
        for name in names[step:]:
            state["m"][name].add_(1)
        saved = run.save([state], source)
        assert saved.manifest.total_bytes < state_bytes / LIVE_SHARE_MIN
    assert run.save([state], source).sent_bytes == 0
    for tensor in state["m"].values():
        tensor.add_(1)
    assert len(run.save([state], source).manifest.shards.keys) == 1


def test_a_shard_that_other_ranks_reuse_too() -> None:
    """A shard of one rank is reused by six ranks, a sixth each, in this and in later saves.

    A rank that counted only its own pieces would take most of the shard for changed, and send its sixth again.
    """
    state = {str(n): noise(1000, number=n) for n in range(24)}
    run = Run()
    run.save([state], planner=DefaultSavePlanner)
    first = run.save([state] * 6, "manifest", planner=DefaultSavePlanner)
    assert first.sent_bytes == 0
    assert max(len(report.shards.keys) for report in first.reports) == 1
    for _ in range(2):
        assert run.save([state] * 6, "report", planner=DefaultSavePlanner).sent_bytes == 0


def test_a_base_makes_no_objects_per_chunk() -> None:
    """A manifest of 20,000 chunks costs fewer than 100 bytes per chunk."""
    boxes = tuple(Box((n, 0), (1, 2)) for n in range(20_000))
    manifest = decoded(build([Layout("w", TensorKind("float32"), (20_000, 2), boxes, ((8,),) * len(boxes))]))
    tracemalloc.start()
    try:
        base = Baseline.of_manifest(manifest)
        known = base.chunk("w", dtype="float32", offsets=(7, 0), sizes=(1, 2))
        assert tracemalloc.get_traced_memory()[1] < 100 * 20_000
    finally:
        tracemalloc.stop()
    assert known is not None
    assert known.pieces == range(7, 8)
    assert base.chunk("w", dtype="float32", offsets=(7, 0), sizes=(1, 2), hint=3) == known
    assert base.chunk("w", dtype="float32", offsets=(7, 1), sizes=(1, 1), hint=7) is None


@BOTH
def test_a_part_of_a_reused_piece(source: From) -> None:
    """Some rows of a reused piece are read with the block table of the old shard."""
    state = {name: noise(600, 500, number=n) for n, name in enumerate("abcd")}
    run = Run()
    run.save([state])
    state["b"].neg_()
    for _ in range(2):
        saved = run.save([state], source)
    assert len(saved.manifest.shards.keys) == 2
    rows = {name: LocalShards((600, 500), torch.float32, [((300, 0), torch.zeros(40, 500))]) for name in state}
    load_as_ranks([rows], lambda: RemoteReader(run.alone(saved)))
    for name, value in rows.items():
        assert torch.equal(value.chunks[0][1], state[name][300:340])


# ---- what must not be reused


def test_what_another_rank_wrote_as_well() -> None:
    """A tensor that a planner writes on all ranks may be reused from the first rank's copy alone.

    The manifest names the first rank's shard; the second rank's is an orphan, which gc may delete.
    """

    class Everything(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return all_plans, super().create_global_plan(all_plans)[1]

    state = {"w": noise(1000)}
    run = Run()
    first = run.save([state, state], planner=Everything)
    orphans = find_orphaned_shards(first.manifest, [report.to_sent() for report in first.reports])
    assert orphans == {first.reports[1].put_keys[0]}
    assert orphans.isdisjoint(first.manifest.shards.keys)
    (of_first, of_second) = (Baseline.of_report(report, left_out=orphans) for report in first.reports)
    assert reads(of_first, state["w"])[1] == [True]
    assert reads(of_second, state["w"]) == ([], [False])
    second = run.save([state, state], "report", planner=Everything)
    assert [report.shards.keys[report.put :] for report in second.reports] == [first.reports[0].put_keys, ()]
    assert second.manifest.shards.keys == first.manifest.shards.keys
    third = run.save([state, state], "manifest", planner=Everything)
    assert third.sent_bytes == 0
    assert [report.shards.keys[report.put :] for report in third.reports] == [first.manifest.shards.keys] * 2


def test_ranks_that_reuse_one_shard() -> None:
    """The manifest names the shard once; reports that describe it differently are refused."""
    parts = shard(noise(60, 8), 3, (3, 1))
    run = Run()
    run.save([{"w": LocalShards((60, 8), torch.float32, [chunk for part in parts for chunk in part.chunks])}])
    second = run.save([{"w": part} for part in parts], "manifest")
    assert second.sent_bytes == 0
    assert second.manifest.shards.keys == run.saves[0].manifest.shards.keys
    shards = second.reports[1].shards
    changes: list[dict[str, Any]] = [
        {"sizes": shards.sizes + 1},
        {"data_starts": shards.data_starts - 16},
        {"table_lengths": shards.table_lengths + 16},
        {"table_digests": bytes(16)},
    ]
    for change in changes:
        reports = [*second.reports]
        reports[1] = replace(reports[1], shards=replace(shards, **change))
        with pytest.raises(SaveFailedError) as caught:
            reassembled(second.manifest, reports)
        assert caught.value.details == {"shard": shards.keys[0]}


def test_nobody_names_a_piece_for_two_chunks() -> None:
    """A faulty report that names a piece for two chunks is refused."""
    run = Run()
    run.save([{"a": noise(100), "b": noise(100)}])
    saved = run.save([{"a": noise(100), "b": noise(100)}])
    (report,) = saved.reports
    report = replace(report, chunk_piece_first=np.zeros_like(report.chunk_piece_first))
    with pytest.raises(SaveFailedError, match="overlap"):
        reassembled(saved.manifest, [report])


def reassembled(manifest: Manifest, reports: Sequence[RankReport]) -> Manifest:
    """Return the manifest of the same contents and other reports."""
    sent = [report.to_sent() for report in reports]
    contents = to_columns(to_dcp_metadata(manifest))
    names, put = ShardNames(0), MemoryStore().put
    return assemble_manifest(contents, sent, url=sent[0].url, save_id="5" * 32, segment_names=names, put=put)[0]


# ---- what is reported


def test_the_report_tells_what_was_put_and_what_was_reused() -> None:
    """The figures and the keys, of which the coordinator is sent the latter."""
    state = {"m": {"w": noise(1000), "x": noise(1000)}, "o": {"y": noise(500)}}
    run = Run()
    first = run.save([state]).reports[0]
    sizes = first.shards.sizes.tolist()
    assert first.put_keys == first.shards.keys
    assert first.put == len(first.shards.keys)
    assert first.figures == UploadStats(
        put_bytes=sum(sizes),
        slowest_shard=first.figures.slowest_shard,
        slowest_seconds=first.figures.slowest_seconds,
    )
    assert first.figures.slowest_shard in first.put_keys
    assert first.figures.slowest_seconds > 0
    state["o"]["y"].zero_()
    second = run.save([state]).reports[0]
    assert second.shards.keys[second.put :] == first.put_keys[:1]
    assert second.figures.reused_bytes == 8000
    assert len(second.put_keys) == 1
    assert run.store.count("put") == 3
    assert second.figures.put_bytes == int(second.shards.sizes[0])
    third = run.save([state]).reports[0]
    assert (third.figures.put_bytes, third.figures.retries, third.figures.slowest_shard) == (0, 0, "")
    assert run.store.count("put") == 3
    sent = pickle.loads(pickle.dumps(second.to_sent()))
    assert sent == second.to_sent()
    assert (sent.put_keys, sent.keys) == (second.put_keys, second.shards.keys)


def test_comparing_ends_with_the_save() -> None:
    """The deadline is checked after each piece, although nothing is put."""
    run, tensor = one_tensor(4 * MiB, shard_bytes_max=MiB)
    now_seconds = [0.0]

    class Late(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
            now_seconds[0] = 700.0
            return super().resolve_data(write_item)

    run.deadline_clock = lambda: now_seconds[0]
    with pytest.raises(SaveTimeoutError):
        run.save([{"w": tensor}], planner=Late)
    assert run.store.count("put") == 4


# ---- anything


@dataclass(frozen=True)
class Change:
    """Change of an entry between two saves."""

    what: Literal["nothing", "bit", "all", "dtype", "shape", "layout", "moved", "gone"]
    at: int


CHANGES = st.builds(
    Change,
    st.sampled_from(["nothing", "nothing", "nothing", "bit", "all", "dtype", "shape", "layout", "moved", "gone"]),
    st.integers(0, 2**20),
)


@dataclass
class Entry:
    """Tensor of the state: its bytes, how they are viewed, and which ranks hold them."""

    data: np.ndarray
    dtype: torch.dtype
    rows: int
    layout: str
    owner: int

    def apply(self, change: Change) -> None:
        if change.what == "bit" and len(self.data):
            self.data[change.at % len(self.data)] ^= 1 << change.at % 8
        elif change.what == "all":
            self.data ^= 0xFF
        elif change.what == "dtype":
            self.dtype = [torch.float32, torch.int32, torch.bfloat16, torch.complex64][change.at % 4]
        elif change.what == "shape":
            self.rows = [1, 2, 4, 8][change.at % 4]
        elif change.what == "layout":
            self.layout = LAYOUTS[change.at % len(LAYOUTS)]
        elif change.what == "moved":
            self.owner = change.at

    def tensor(self) -> torch.Tensor:
        item_bytes = self.dtype.itemsize
        elements = self.data.copy().view(f"V{item_bytes}").reshape(self.rows, -1 if len(self.data) else 0)
        return Whole(self.dtype, elements).tensor(layout=self.layout)


History: TypeAlias = tuple[int, list[Entry], list[tuple[list[Change], From, int]]]
SOURCES: list[From] = ["report", "report", "manifest", "nothing"]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw ranks, entries, and five saves, each with its changes, its baseline, and the size of its shards."""
    ranks = draw(st.integers(1, 3))
    entries = []
    for _ in range(draw(st.integers(1, 5))):
        size = draw(st.sampled_from([0, 64, 6_400, 64 * 1024, 64 * 1024 + 64, 300_032]))
        data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, size, dtype=np.uint8)
        layout = draw(st.sampled_from(LAYOUTS))
        entries.append(Entry(data, torch.int32, draw(st.sampled_from([1, 2, 8])), layout, draw(st.integers(-2, 2))))
    saves = []
    for _ in range(5):
        changes = [draw(CHANGES) for _ in entries]
        source: From = draw(st.sampled_from(SOURCES))
        saves.append((changes, source, draw(st.sampled_from([1_000, 70_000, 200_000, SHARD_BYTES_MAX]))))
    return ranks, entries, saves


@examples(40)
@given(history=histories())
def test_any_history(history: History) -> None:
    """Five saves of a state in which anything changes, with any baseline and shard size: each loads equal."""
    ranks, entries, saves = history
    run = Run()
    for changes, source, shard_bytes_max in saves:
        states: list[State] = [{} for _ in range(ranks)]
        for number, (entry, change) in enumerate(zip(entries, changes, strict=True)):
            entry.apply(change)
            if change.what == "gone":
                continue
            tensor, top, name = entry.tensor(), f"group{number % 2}", f"t{number}"
            for rank, state in enumerate(states):
                group = state.setdefault(top, {})
                if entry.owner < 0:
                    group[name] = tensor
                else:
                    mine = [row for row in range(entry.rows) if (row + entry.owner) % ranks == rank]
                    rows = [((row, 0), tensor[row : row + 1]) for row in mine]
                    group[name] = LocalShards(tensor.shape, tensor.dtype, rows)
        saved = run.save(states, source, shard_bytes_max=shard_bytes_max)
        put = sum(saved.put_pieces.values())
        assert put + saved.reused_bytes == saved.manifest.pieces.length.sum()
