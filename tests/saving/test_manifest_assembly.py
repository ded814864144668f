"""Manifests from torch's metadata and the reports of ranks, and the reports that the coordinator refuses to commit.

Metadata and reports come from a save of simulated ranks; then each test changes something in them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from dcp_remote import RemoteReader, RemoteWriter, load, writer
from dcp_remote.common.arrays import Buffer, shrink_integers
from dcp_remote.errors import InvalidArgumentError, SaveFailedError
from dcp_remote.format import columns, manifest_json, segments
from dcp_remote.format.manifest import MANIFEST_KEY, Manifest, TensorKind
from dcp_remote.format.segments import decode_segment, find_segments, join, place_of, segment_keys
from dcp_remote.format.shard import ShardNames
from dcp_remote.loading.dcp_metadata import to_dcp_metadata
from dcp_remote.saving import manifest_assembly
from dcp_remote.saving.dcp_metadata import to_columns
from dcp_remote.saving.manifest_assembly import Planned as Contents
from dcp_remote.saving.manifest_assembly import assemble_manifest
from dcp_remote.saving.rank_report import JoinedNumbers, RankReport, SentReport, join_numbers
from dcp_remote.saving.shard_writer import write_shards
from dcp_remote.storage import MemoryStore
from tests.benchmark.clients.commit_cost import URL, Cost, Layout, plan
from tests.support.manifests import plain
from tests.support.segments import lower_segments
from tests.support.simulated_ranks import LocalShards, State, load_as_ranks, save_as_ranks, shard
from tests.support.strategies import AnyDtypePlanner

SAVE_ID = "5" * 32


@dataclass(frozen=True)
class Planned:
    """Arguments of `RemoteWriter.finish`: metadata and the reports of all ranks."""

    metadata: Metadata
    reports: list[RankReport]

    def manifest(self) -> Manifest:
        """Return the manifest, validated as when it is encoded."""
        return assembled(to_columns(self.metadata), self.reports)[0]


def assembled(contents: Contents, reports: Sequence[RankReport]) -> tuple[Manifest, bytes]:
    """Return manifest and document of reports that are pickled and unpickled, as between ranks."""
    sent = [pickle.loads(pickle.dumps(report.to_sent())) for report in reports]
    return assemble_manifest(
        contents, sent, url=reports[0].url, save_id=SAVE_ID, segment_names=ShardNames(0), put=MemoryStore().put
    )


def planned(
    states: list[State], planner: Callable[[], Any] = AnyDtypePlanner, store: MemoryStore | None = None
) -> Planned:
    """Save without a commit, and return the metadata that the coordinator got, and the ranks' reports."""
    finished: list[Metadata] = []
    reports: list[RankReport] = []

    class CapturingWriter(RemoteWriter):
        def finish(self, metadata: Metadata, results: Any) -> None:
            finished.append(metadata)

    def write_and_keep(*arguments: Any, **options: Any) -> RankReport:
        reports.append(write_shards(*arguments, **options))
        return reports[-1]

    store = store or MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_shards", write_and_keep)
        save_as_ranks(states, lambda: CapturingWriter(store), planner)
    return Planned(finished[0], reports)


def three_ranks() -> Planned:
    """Save a matrix in six chunks, two on each rank, a replicated tensor, a small object and one in a shard."""
    parts = shard(torch.randn(60, 10), 3, (3, 2))
    return planned(
        [{"w": part, "r": torch.ones(3), "n": 1, "text": "x" * 100_000, "m": {"b": torch.ones(2)}} for part in parts]
    )


def test_pieces_are_those_of_their_chunks() -> None:
    """The piece of each chunk lies in a shard of the rank that holds the chunk, and has the chunk's length."""
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
    """Remove a tensor from the report of a rank; the shards stay."""
    tensors = report.tensors
    kept = np.array([own != name for own in tensors.names], dtype=bool)
    keep = np.repeat(kept, tensors.chunks)
    left = replace(
        tensors,
        chunks=tensors.chunks * kept,
        chunk_offsets=tensors.chunk_offsets[np.repeat(kept, tensors.chunks * tensors.dimensions)],
        chunk_pieces=tensors.chunk_pieces[keep],
    )
    return replace(
        report, tensors=left, chunk_hint=report.chunk_hint[keep], chunk_piece_first=report.chunk_piece_first[keep]
    )


def test_a_chunk_that_no_rank_wrote() -> None:
    """Each rank in turn leaves out the matrix, or its whole report: the save fails and names the entry."""
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


def test_an_object_that_no_rank_wrote() -> None:
    """An inline object, and one in a shard, that no rank wrote are named in the error."""
    good = three_ranks()
    for name, change in (("n", {"inline": {}}), ("text", {"stored": ()})):
        reports = [replace(report, **change) for report in good.reports]
        with pytest.raises(SaveFailedError) as caught:
            replace(good, reports=reports).manifest()
        assert caught.value.details["object"] == name


def test_another_dtype_than_planned() -> None:
    """A rank that wrote another dtype is named; torch does not compare dtypes."""
    good = three_ranks()
    reports = list(good.reports)
    tensors = reports[1].tensors
    kind = np.array([int(name == "w") for name in tensors.names], dtype=np.int64)
    kinds = (TensorKind("float32"), TensorKind("float64"))
    reports[1] = replace(reports[1], tensors=replace(tensors, kinds=kinds, kind=kind))
    with pytest.raises(SaveFailedError) as caught:
        replace(good, reports=reports).manifest()
    assert caught.value.details == {"tensor": "w", "rank": 1, "written": "float64", "planned": "float32"}


def test_a_tensor_and_a_chunk_that_were_not_planned() -> None:
    """The error names the tensor, or the rank that wrote the chunk."""
    good = three_ranks()
    entries = {name: meta for name, meta in good.metadata.state_dict_metadata.items() if name != "w"}
    with pytest.raises(SaveFailedError, match="is in no plan") as caught:
        replace(good, metadata=replace(good.metadata, state_dict_metadata=entries)).manifest()
    assert caught.value.details["tensor"] == "w"
    reports = list(good.reports)
    tensors = reports[2].tensors
    reports[2] = replace(reports[2], tensors=replace(tensors, chunk_offsets=tensors.chunk_offsets + 1))
    with pytest.raises(SaveFailedError, match="is in no plan") as caught:
        replace(good, reports=reports).manifest()
    assert caught.value.details["rank"] == 2


@pytest.mark.parametrize("hint", [-1, 0, 5, 6, 10**6])
def test_hints_are_not_trusted(hint: int) -> None:
    """Hints that are missing, wrong or out of range give the same manifest: chunks are found by their offsets."""
    good = three_ranks()
    expected = good.manifest()
    reports = [replace(report, chunk_hint=np.full_like(report.chunk_hint, hint)) for report in good.reports]
    found = replace(good, reports=reports).manifest()
    assert manifest_json.encode(replace(found, created="")) == manifest_json.encode(replace(expected, created=""))


def test_the_first_rank_that_wrote_a_chunk_counts() -> None:
    """If two ranks wrote a replicated tensor that was planned once, the first report counts."""
    good = three_ranks()
    by_rank = [report for report in good.reports if "r" in report.tensors.names]
    assert len(by_rank) == 1  # torch's planner leaves it on one
    twin = replace(by_rank[0], rank=7)
    twin = replace(
        twin,
        shards=replace(
            twin.shards, keys=tuple(f"shards/00/twin-{n}.safetensors" for n in range(len(twin.shards.keys)))
        ),
    )
    manifest = replace(good, reports=[*good.reports, twin]).manifest()
    assert not any("twin" in manifest.shards.keys[shard_] for shard_ in manifest.pieces.shard.tolist())
    manifest = replace(good, reports=[twin, *good.reports]).manifest()
    piece = int(manifest.tensors.piece_first[int(manifest.tensors.chunk_first[manifest.tensors.index["r"]])])
    assert "twin" in manifest.shards.keys[int(manifest.pieces.shard[piece])]


def renewed(reports: Sequence[RankReport], save: int) -> list[RankReport]:
    """Return the reports of a later save of the same state: other names of shards, digests and values."""
    random = np.random.default_rng(save)
    return [
        replace(
            report,
            shards=replace(
                report.shards,
                keys=tuple(key.replace(".safetensors", f"-{save}.safetensors") for key in report.shards.keys),
                table_digests=random.bytes(len(report.shards.table_digests)),
            ),
            pieces=replace(report.pieces, digests=random.bytes(len(report.pieces.digests))),
            inline=dict.fromkeys(report.inline, b"%d" % save),
        )
        for report in reports
    ]


def without_time(found: tuple[Manifest, bytes]) -> object:
    """Return a manifest as it is read, but for its time."""
    manifest = manifest_json.decode(found[1])
    assert manifest is not None
    assert plain(manifest) == plain(found[0])
    return plain(replace(manifest, created=""))


def test_a_later_save_of_the_same_structure() -> None:
    """Only names of shards, digests and values differ: the manifest is that of a first save, but joins nothing anew."""
    good = three_ranks()
    contents = to_columns(good.metadata)
    assembled(contents, good.reports)
    [known] = contents.checked
    for save in (2, 3):
        reports = renewed(good.reports, save)
        later = assembled(contents, reports)
        assert contents.checked == [known]
        assert without_time(later) == without_time(assembled(to_columns(good.metadata), reports))
        assert {digest_of(later[0].pieces.digests, n) for n in range(9)} <= digests_of(reports)
        assert later[0].inline == {"n": b"%d" % save}
    count = len(reports[1].shards.keys)
    reports[1] = replace(reports[1], shards=replace(reports[1].shards, keys=reports[0].shards.keys[:count]))
    with pytest.raises(SaveFailedError, match="describe one shard differently"):
        assembled(contents, reports)
    assert contents.checked == [known]


def digest_of(digests: bytes, number: int) -> bytes:
    return digests[16 * number : 16 * (number + 1)]


def digests_of(reports: Sequence[RankReport]) -> set[bytes]:
    return {digest_of(one.pieces.digests, n) for one in reports for n in range(len(one.pieces.shard))}


@pytest.mark.parametrize("pieces", [1, 2])
def test_segments_of_a_later_save(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """They are those of a first save, though kept columns are in bytes, in which sums of offsets and sizes wrap."""
    monkeypatch.setattr(segments, "SEGMENT_PIECES_MAX", 2)
    monkeypatch.setattr(segments, "SEGMENT_PIECES", pieces)
    good = planned([{"w": part, "n": 1} for part in shard(torch.randn(300, 10), 3, (3, 2))])
    contents = to_columns(good.metadata)
    tensors = contents.tensors
    offsets, sizes = shrink_integers(tensors.chunk_offsets), shrink_integers(tensors.chunk_sizes)
    assert offsets.itemsize == sizes.itemsize == 1
    kept = replace(contents, tensors=replace(tensors, chunk_offsets=offsets, chunk_sizes=sizes), checked=[])

    def found(contents: Contents, save: int) -> object:
        sent = [report.to_sent() for report in renewed(good.reports, save)]
        names = ShardNames(0, token="5" * 16)
        objects: dict[str, object] = {}
        manifest, _ = assemble_manifest(
            contents, sent, url=sent[0].url, save_id=SAVE_ID, segment_names=names, put=objects.__setitem__
        )
        assert len(objects) > 1
        return plain(replace(manifest, created="")), objects

    assert found(kept, 1) == found(contents, 1)
    [known] = kept.checked
    assert found(kept, 2) == found(to_columns(good.metadata), 2)
    assert kept.checked == [known]


@pytest.mark.parametrize("also", ["nothing", "the same shards", "shards of its own"])
def test_blocks_of_reports(monkeypatch: pytest.MonkeyPatch, also: str) -> None:
    """Segments have what a manifest in one document has, also if a further rank reports what the first one wrote."""
    empty = {"e": torch.ones(0, 3), "text": "x" * 100_000}
    good = planned([{"w": part, "r": torch.ones(3)} | empty for part in shard(torch.randn(100, 10), 5, (5, 2))])
    reports = list(good.reports)
    if also != "nothing":
        [last] = renewed(reports[:1], 2) if also == "shards of its own" else reports[:1]
        reports.append(replace(last, rank=5))
    whole = replace(assembled(to_columns(good.metadata), reports)[0], created="")
    blocks: list[int] = []

    def count(reports: Sequence[SentReport]) -> JoinedNumbers:
        blocks.append(len(reports))
        return join_numbers(reports)

    monkeypatch.setattr(manifest_assembly, "join_numbers", count)
    monkeypatch.setattr(manifest_assembly, "_BLOCK_SEGMENTS", 1)
    objects: dict[str, Sequence[Buffer]] = {}
    with lower_segments(3):
        index, _ = assemble_manifest(
            to_columns(good.metadata),
            [report.to_sent() for report in reports],
            url=reports[0].url,
            save_id=SAVE_ID,
            segment_names=ShardNames(0),
            put=objects.__setitem__,
        )
    assert blocks == [6] if also == "the same shards" else len(blocks) > 2
    assert index.segments is not None
    found = [
        decode_segment(index, number, memoryview(b"".join(objects[key]))[start : start + length])
        for number, (key, start, length) in enumerate(map(partial(place_of, index), range(len(objects))))
    ]
    joined = join(index, found, is_whole=True)
    own, shards = (
        joined.pieces.take(np.arange(joined.segment_first)),
        joined.shards.take(np.arange(len(whole.shards.keys))),
    )
    assert plain(replace(joined, segments=None, pieces=own, shards=shards, created="")) == plain(whole)


def test_segments_of_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A column has room for their boxes, and a later save, also of another process, names the segments again."""
    layout = Layout(data_parallel=4, stages=1, tensors=60)
    monkeypatch.setattr(columns, "ENTRIES_MAX", 1000)
    known: dict[bytes, str] = {}
    for last, expected in ((1, 32), (1, 0), (2, 4)):
        reports = [layout.report(rank, last if rank == 31 else 1) for rank in range(32)]
        put: dict[str, object] = {}
        with lower_segments(60, box_values=1000):
            index, body = assemble_manifest(
                plan(layout, Cost()),
                reports,
                url=URL,
                save_id=SAVE_ID,
                segment_names=ShardNames(0),
                segments_known=known,
                put=put.__setitem__,
            )
        assert len(put) == expected
        known |= segment_keys(index)
    decoded = manifest_json.decode(body)
    assert decoded is not None
    assert decoded.segments is not None
    assert len(decoded.segments.tensors) == 32
    assert len(decoded.segments.offsets) == 32 // 4 * 60 * 2
    own = {name: [(layout.offsets(13), (1, 1))] for name in layout.names(0)}
    assert len(find_segments(decoded, own)) == 4


def outcome(contents: Contents, reports: Sequence[RankReport]) -> object:
    """Return the manifest, or the text of the error."""
    try:
        return without_time(assembled(contents, reports))
    except SaveFailedError as error:
        return str(error)


def test_later_saves_of_another_structure() -> None:
    """Each of these is joined and checked anew, and gives the manifest of a first save, or is refused as in one."""
    good = three_ranks()
    two, text = good.reports[2], next(report for report in good.reports if report.stored)
    longer = replace(text.pieces, length=text.pieces.length + (text.pieces.length == int(text.pieces.length.max())))
    changes: list[list[RankReport]] = [
        [*good.reports[:2], replace(two, shards=replace(two.shards, sizes=two.shards.sizes + 8))],
        [*good.reports, replace(two, rank=3, shards=replace(two.shards, keys=("shards/00/three.safetensors",)))],
        [replace(report, chunk_hint=report.chunk_hint * 0 - 1) for report in good.reports],
        [replace(report, shards=replace(report.shards, sizes=report.shards.sizes + 8)) for report in good.reports],
        [without(report, "w") for report in good.reports],
        [replace(report, pieces=longer) if report is text else report for report in good.reports],
        [replace(report, inline={}) for report in good.reports],
    ]
    refused = 0
    for reports in changes:
        contents = to_columns(good.metadata)
        assembled(contents, good.reports)
        [known] = contents.checked
        found = outcome(contents, reports)
        assert found == outcome(to_columns(good.metadata), reports)
        is_refused = isinstance(found, str)
        assert (known in contents.checked) == is_refused
        refused += is_refused
    assert refused == 3


def test_a_shard_of_which_only_some_pieces_are_named() -> None:
    """Three ranks write the same matrix of 400 KB and text; the second writes more entries behind them in its shard.

    The manifest names the first rank's pieces of the common entries, the second's other pieces, whose digests begin in
    the middle of the block table, and none of the third's. Read whole, by rows (verified by the tables), and by `load`.
    """
    store = MemoryStore()
    generator = torch.Generator().manual_seed(5)
    x, other_x, y = (torch.randn(1000, 100, generator=generator) for _ in range(3))
    text, other_text, note = (letter * 400_000 for letter in "abc")
    first = {"m": {"x": x, "text": text}}
    second = {"m": {"x": other_x, "text": other_text, "y": y, "note": note}}
    saves = [planned([state], store=store) for state in (first, second, first)]
    reports = [replace(save.reports[0], rank=rank) for rank, save in enumerate(saves)]
    manifest = replace(saves[1], reports=reports).manifest()
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
    """Load into templates, with the objects beside them."""
    state: State = {"m": {**tensors, "text": "", "note": ""}}
    load_as_ranks([state], lambda: RemoteReader(store))
    inner: State = state["m"]
    return inner


@pytest.mark.parametrize(
    "data", [["a list"], {"w": "no tuple"}, {"w": (1.5,)}, {"w": (True,)}, {1: ("w",)}, {"w": (b"x",)}, object()]
)
def test_planner_data_that_is_no_flatten_mapping(data: object) -> None:
    """Planner data that only pickle could store, from a user's own planner, is refused; None stays None."""
    good = three_ranks()
    with pytest.raises(InvalidArgumentError, match="flatten mapping"):
        replace(good, metadata=replace(good.metadata, planner_data=data)).manifest()
    without_any = replace(good, metadata=replace(good.metadata, planner_data=None)).manifest()
    assert to_dcp_metadata(without_any).planner_data is None


def test_a_memory_format_that_has_no_word() -> None:
    """The save is refused, and the error names the tensor."""
    good = planned([{"t": torch.zeros(4, dtype=torch.int8)}])
    meta = good.metadata.state_dict_metadata["t"]
    assert isinstance(meta, TensorStorageMetadata)
    properties = TensorProperties(dtype=torch.int8, memory_format=torch.channels_last_3d)
    changed = replace(good.metadata, state_dict_metadata={"t": replace(meta, properties=properties)})
    with pytest.raises(InvalidArgumentError) as caught:
        replace(good, metadata=changed).manifest()
    assert caught.value.details["tensor"] == "t"


def test_reports_are_small() -> None:
    """A pickled report of 1,000 tensors of differing sizes: measured 70,855 bytes, 45,900 of them names and digests."""
    state: State = {f"model.layers.{n // 10}.block.{n % 10}.weight": torch.ones(300 + n % 5) for n in range(1000)}
    (report,) = planned([state]).reports
    assert len(pickle.dumps(report.to_sent())) < 75_000
