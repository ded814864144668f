"""torch's metadata and our manifest: one into the other and back, and what the coordinator refuses to commit.

Metadata and reports come from a save of three simulated ranks; then something in them is changed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from dcp_remote import RemoteReader, RemoteWriter, load, manifest_json
from dcp_remote.assembly import SaveInfo, to_manifest
from dcp_remote.dcp_metadata import planned_of, to_dcp_metadata
from dcp_remote.errors import InvalidArgumentError, SaveFailedError, UnsupportedFormatError
from dcp_remote.manifest import MANIFEST_KEY, Manifest
from dcp_remote.manifest_check import check
from dcp_remote.report import RankReport
from dcp_remote.storage import MemoryStore
from dcp_remote.testing.ranks import LocalShards, State, load_as_ranks, save_as_ranks, shard
from tests.manifests import decode, plain
from tests.properties import examples
from tests.strategies import AnyDtypePlanner, Case, cases
from tests.test_resharding import saved_states

INFO = SaveInfo(save_id="5" * 32, replaces=(), created="2026-01-01T00:00:00+00:00", writer={"dcp_remote": "0"})


@dataclass(frozen=True)
class Planned:
    """What `finish` is given."""

    metadata: Metadata
    reports: list[RankReport]

    def manifest(self) -> Manifest:
        """Made, and checked as when it is encoded."""
        return check(to_manifest(planned_of(self.metadata), self.reports, INFO))


def planned(
    states: list[State], planner: Callable[[], Any] = AnyDtypePlanner, store: MemoryStore | None = None
) -> Planned:
    """Save without a commit, and keep what the coordinator was given."""
    kept: list[Planned] = []

    class Keeping(RemoteWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            # Through pickle, as they come to a coordinator.
            reports = [result.storage_data for written in results for result in pickle.loads(pickle.dumps(written))]
            kept.append(Planned(metadata, reports))

    store = store or MemoryStore()
    save_as_ranks(states, lambda: Keeping(store), planner)
    return kept[0]


def three_ranks() -> Planned:
    """A matrix in six chunks, two on each rank; a replicated tensor, a small object and one that lies in a shard."""
    parts = shard(torch.randn(60, 10), 3, (3, 2))
    return planned(
        [{"w": part, "r": torch.ones(3), "n": 1, "text": "x" * 100_000, "m": {"b": torch.ones(2)}} for part in parts]
    )


@examples(60)
@given(case=cases())
def test_metadata_survives_the_manifest(case: Case) -> None:
    """Of any sharded state: into a manifest, its document, and back, equal to torch's; which is not changed by it."""
    given_ = planned(saved_states(case))
    before = pickle.dumps(given_.metadata)
    manifest = decode(manifest_json.encode(given_.manifest()))
    found = to_dcp_metadata(manifest)
    assert found.state_dict_metadata == given_.metadata.state_dict_metadata
    assert list(found.state_dict_metadata) == list(given_.metadata.state_dict_metadata)
    assert found.planner_data == given_.metadata.planner_data
    assert pickle.dumps(given_.metadata) == before


def test_pieces_are_those_of_their_chunks() -> None:
    """Each chunk's piece lies in a shard of the rank that holds the chunk, as long as the chunk is."""
    manifest = three_ranks().manifest()
    tensors = manifest.tensors
    number = tensors.index["w"]
    ranks = []
    for chunk in range(int(tensors.chunk_first[number]), int(tensors.chunk_first[number + 1])):
        piece = int(tensors.piece_first[chunk])
        assert int(tensors.piece_first[chunk + 1]) == piece + 1
        assert int(manifest.pieces.length[piece]) == 20 * 5 * 4
        ranks.append((tensors.offsets_of(chunk), manifest.shards.keys[int(manifest.pieces.shard[piece])][10:20]))
    assert sorted(ranks) == [
        ((row, column), f"rank-{(row // 20 * 2 + column // 5) % 3:05d}") for row in (0, 20, 40) for column in (0, 5)
    ]
    assert set(manifest.inline) == {"n"}
    assert [item.name for item in manifest.stored] == ["text"]
    assert set(manifest.names()) == {"w", "r", "n", "text", "m.b"}


def without(report: RankReport, name: str) -> RankReport:
    """The report of a rank that did not write a tensor, though its shards are as they were."""
    keep = np.array([report.names[n] != name for n in report.chunk_name], dtype=bool)
    kept_values = np.repeat(keep, report.chunk_dimensions)
    return replace(
        report,
        chunk_name=report.chunk_name[keep],
        chunk_hint=report.chunk_hint[keep],
        chunk_dimensions=report.chunk_dimensions[keep],
        chunk_offsets=report.chunk_offsets[kept_values],
        chunk_piece_first=report.chunk_piece_first[keep],
        chunk_pieces=report.chunk_pieces[keep],
    )


def test_a_chunk_that_nobody_wrote() -> None:
    """Each rank in turn forgets the matrix, or does not report at all: named with offsets and sizes."""
    good = three_ranks()
    for rank in range(3):
        reports = list(good.reports)
        reports[rank] = without(reports[rank], "w")
        for short in (reports, [r for r in good.reports if r.rank != rank]):
            with pytest.raises(SaveFailedError) as caught:
                replace(good, reports=short).manifest()
            error = caught.value
            assert error.details.get("tensor", error.details.get("object")) in ("w", "r", "n", "text", "m.b")
            assert "nothing was committed" in str(error)


def test_an_object_that_nobody_wrote() -> None:
    """Small, and in a shard."""
    good = three_ranks()
    for name, change in (("n", {"inline": {}}), ("text", {"stored": ()})):
        reports = [replace(report, **change) for report in good.reports]
        with pytest.raises(SaveFailedError) as caught:
            replace(good, reports=reports).manifest()
        assert caught.value.details["object"] == name


def test_another_dtype_than_planned() -> None:
    """On one rank only; torch does not compare them."""
    good = three_ranks()
    reports = list(good.reports)
    dtypes = tuple(
        "float64" if name == "w" else dtype for name, dtype in zip(reports[1].names, reports[1].dtypes, strict=True)
    )
    reports[1] = replace(reports[1], dtypes=dtypes)
    with pytest.raises(SaveFailedError) as caught:
        replace(good, reports=reports).manifest()
    assert caught.value.details == {"tensor": "w", "rank": 1, "written": "float64", "planned": "float32"}


def test_a_tensor_and_a_chunk_that_nobody_planned() -> None:
    """Both named, with the rank."""
    good = three_ranks()
    entries = {name: meta for name, meta in good.metadata.state_dict_metadata.items() if name != "w"}
    with pytest.raises(SaveFailedError, match="nobody planned") as caught:
        replace(good, metadata=replace(good.metadata, state_dict_metadata=entries)).manifest()
    assert caught.value.details["tensor"] == "w"
    reports = list(good.reports)
    reports[2] = replace(reports[2], chunk_offsets=reports[2].chunk_offsets + 1)
    with pytest.raises(SaveFailedError, match="nobody planned") as caught:
        replace(good, reports=reports).manifest()
    assert caught.value.details["rank"] == 2


@pytest.mark.parametrize("hint", [-1, 0, 5, 6, 10**6])
def test_hints_are_not_trusted(hint: int) -> None:
    """Missing, of another chunk, outside: the manifest is the same one, by the offsets."""
    good = three_ranks()
    expected = good.manifest()
    reports = [replace(report, chunk_hint=np.full_like(report.chunk_hint, hint)) for report in good.reports]
    found = replace(good, reports=reports).manifest()
    assert manifest_json.encode(found) == manifest_json.encode(expected)


def test_the_first_rank_that_wrote_a_chunk_counts() -> None:
    """A planner that leaves a small replicated tensor and an object on all ranks, planned once: those of rank 0."""
    good = three_ranks()
    by_rank = [report for report in good.reports if "r" in report.names]
    assert len(by_rank) == 1  # torch's planner leaves it on one
    twin = replace(by_rank[0], rank=7)
    twin = replace(
        twin,
        shards=replace(
            twin.shards, keys=tuple(f"shards/00/twin-{n}.safetensors" for n in range(len(twin.shards.keys)))
        ),
    )
    manifest = to_manifest(planned_of(good.metadata), [*good.reports, twin], INFO)
    assert not any("twin" in manifest.shards.keys[shard_] for shard_ in manifest.pieces.shard.tolist())
    manifest = to_manifest(planned_of(good.metadata), [twin, *good.reports], INFO)
    piece = int(manifest.tensors.piece_first[int(manifest.tensors.chunk_first[manifest.tensors.index["r"]])])
    assert "twin" in manifest.shards.keys[int(manifest.pieces.shard[piece])]


def test_a_shard_of_which_only_some_pieces_are_named() -> None:
    """Three ranks write one matrix of 400 KB and one text; the second alone writes more behind them in its shard.

    The first rank's count. The digests of what the second is needed for begin in the middle of its block table, and
    nothing is needed of the third. Read whole, by rows (which go by the tables), and without a template.
    """
    store = MemoryStore()
    generator = torch.Generator().manual_seed(5)
    x, other_x, y = (torch.randn(1000, 100, generator=generator) for _ in range(3))
    text, other_text, note = (letter * 400_000 for letter in "abc")
    first = {"m": {"x": x, "text": text}}
    second = {"m": {"x": other_x, "text": other_text, "y": y, "note": note}}
    saves = [planned([state], store=store) for state in (first, second, first)]
    reports = [replace(save.reports[0], rank=rank) for rank, save in enumerate(saves)]
    manifest = check(to_manifest(planned_of(saves[1].metadata), reports, INFO))
    assert manifest.shards.keys == (*reports[0].shards.keys, *reports[1].shards.keys)
    assert len(manifest.shards.keys) == 2
    assert manifest.pieces.shard.tolist() == [0, 1, 0, 1]
    assert sorted(manifest.pieces.table.tolist())[:2] == [0, 7]
    assert int(manifest.shards.table_lengths[1]) == 4 * 7 * 16
    store.put(MANIFEST_KEY, [manifest_json.encode(manifest)])
    for found in (load(store)["m"], loaded(store, {"x": torch.zeros(1000, 100), "y": torch.zeros(1000, 100)})):
        assert torch.equal(found["x"], x)
        assert torch.equal(found["y"], y)
        assert (found["text"], found["note"]) == (text, note)
    rows = {name: LocalShards((1000, 100), torch.float32, [((600, 0), torch.zeros(20, 100))]) for name in ("x", "y")}
    found = loaded(store, rows)
    for name, whole in (("x", x), ("y", y)):
        ((_, part),) = found[name].chunks
        assert torch.equal(part, whole[600:620])


def loaded(store: MemoryStore, tensors: State) -> State:
    """Read into these, and the objects with them."""
    state: State = {"m": {**tensors, "text": "", "note": ""}}
    load_as_ranks([state], lambda: RemoteReader(store))
    inner: State = state["m"]
    return inner


@pytest.mark.parametrize(
    "data", [["a list"], {"w": "no tuple"}, {"w": (1.5,)}, {"w": (True,)}, {1: ("w",)}, {"w": (b"x",)}, object()]
)
def test_planner_data_that_is_no_flatten_mapping(data: object) -> None:
    """Of a planner of the user's own: refused, as only pickle could keep it; none at all is kept as none."""
    good = three_ranks()
    with pytest.raises(InvalidArgumentError, match="flatten mapping"):
        replace(good, metadata=replace(good.metadata, planner_data=data)).manifest()
    without_any = replace(good, metadata=replace(good.metadata, planner_data=None)).manifest()
    assert to_dcp_metadata(without_any).planner_data is None


@pytest.mark.parametrize(
    "properties",
    [
        TensorProperties(dtype=torch.int8, requires_grad=True),
        TensorProperties(dtype=torch.int8, memory_format=torch.channels_last),
        TensorProperties(dtype=torch.int8, memory_format=torch.preserve_format, pin_memory=True),
        TensorProperties(dtype=torch.int8, layout=torch.sparse_coo),
    ],
)
def test_properties_survive(properties: TensorProperties) -> None:
    """Those that torch knows, by name."""
    good = planned([{"t": torch.zeros(4, dtype=torch.int8)}])
    meta = good.metadata.state_dict_metadata["t"]
    assert isinstance(meta, TensorStorageMetadata)
    changed = replace(good.metadata, state_dict_metadata={"t": replace(meta, properties=properties)})
    manifest = decode(manifest_json.encode(replace(good, metadata=changed).manifest()))
    assert to_dcp_metadata(manifest).state_dict_metadata == changed.state_dict_metadata


@pytest.mark.parametrize("change", [{"layout": "no_layout"}, {"layout": "float32"}, {"memory_format": "round"}])
def test_properties_that_torch_does_not_know(change: dict[str, Any]) -> None:
    """A newer torch may; a name of torch's that is no layout is none."""
    manifest = three_ranks().manifest()
    kinds = tuple(replace(kind, **change) for kind in manifest.tensors.kinds)
    with pytest.raises(UnsupportedFormatError):
        to_dcp_metadata(replace(manifest, tensors=replace(manifest.tensors, kinds=kinds)))


def test_a_memory_format_that_has_no_word() -> None:
    """It is not taken for another one; the tensor is named."""
    good = planned([{"t": torch.zeros(4, dtype=torch.int8)}])
    meta = good.metadata.state_dict_metadata["t"]
    assert isinstance(meta, TensorStorageMetadata)
    properties = TensorProperties(dtype=torch.int8, memory_format=torch.channels_last_3d)
    changed = replace(good.metadata, state_dict_metadata={"t": replace(meta, properties=properties)})
    with pytest.raises(InvalidArgumentError) as caught:
        replace(good, metadata=changed).manifest()
    assert caught.value.details["tensor"] == "t"


def test_reports_are_small() -> None:
    """Pickled, for 1,000 tensors of differing sizes: 70,855 bytes when measured, 45,900 of them names and digests."""
    state: State = {f"model.layers.{n // 10}.block.{n % 10}.weight": torch.ones(300 + n % 5) for n in range(1000)}
    (report,) = planned([state]).reports
    data = pickle.dumps(report)
    assert len(data) < 85_000
    assert plain(pickle.loads(data)) == plain(report)


def test_a_state_of_nothing() -> None:
    """No tensors, no objects, on two ranks."""
    manifest = planned([{}, {}]).manifest()
    assert to_dcp_metadata(manifest).state_dict_metadata == {}
    assert manifest.world_size == 2
    assert manifest.shards.keys == ()
