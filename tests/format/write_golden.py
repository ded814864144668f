"""Write the golden files: a checkpoint or run for each feature of the format, each written once and kept for ever.

    python -m tests.format.write_golden

A folder that exists is left as it is, so that only a new feature is written. Each release reads the folders of all
earlier ones; `test_golden.py` has the digest of each, and `golden_states.py` the states that they hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

from dcp_remote import CheckpointManager, Files, Opaque, PerRank, RemoteWriter, Retention
from dcp_remote.common.digests import digest
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.columns import encode_column
from dcp_remote.format.document import seal, unseal
from dcp_remote.format.manifest import Manifest, Pieces, Shards, TensorKind, Tensors
from tests.format import golden_states
from tests.support.catalogs import catalog, entry
from tests.support.simulated_ranks import save_as_ranks, shard

GOLDEN = Path(__file__).parent / "golden"

# The shards of `million` are left out: a header of 2 bytes, and zeros.
MILLION_TENSORS, MILLION_CHUNKS, MILLION_SHARDS, MILLION_HEADER_BYTES = 1_000, 1_000, 4, 10


class SmallShards(RemoteWriter):
    """Writer that cuts chunks into pieces."""

    _shard_bytes_max = 8 * 1024


def save(folder: Path, state: dict[str, Any], kind: type[RemoteWriter] = RemoteWriter, **options: Any) -> None:
    """Save a state of one rank."""
    save_as_ranks([state], lambda: kind(folder, **options))


def save_tensors(folder: Path) -> None:
    """Save tensors of all dtypes, the sizes of some of which torch's planner does not know."""
    with mock.patch("torch._utils._element_size", lambda dtype: dtype.itemsize):
        save(folder, golden_states.tensors())


def save_sharded(folder: Path) -> None:
    """Save chunks of three ranks."""
    parts = {name: shard(value, 3, golden_states.GRIDS[name]) for name, value in golden_states.sharded().items()}
    save_as_ranks(
        [{name: part[rank] for name, part in parts.items()} for rank in range(3)], lambda: RemoteWriter(folder)
    )


def save_pieces(folder: Path) -> None:
    """Save chunks of several pieces."""
    parts = {name: shard(value, 2, (1, 2)) for name, value in golden_states.pieces().items()}
    save_as_ranks(
        [{name: part[rank] for name, part in parts.items()} for rank in range(2)], lambda: SmallShards(folder)
    )


def save_replaced(folder: Path) -> None:
    """Replace a checkpoint, whose shards are orphans then."""
    save(folder, golden_states.run_state(1))
    save(folder, golden_states.run_state(2), overwrite=True)


def save_renewed(folder: Path) -> None:
    """Put a manifest again with a nonce, as gc does."""
    save(folder, golden_states.STATES["renewed", None]())
    path = folder / "manifest.json"
    path.write_bytes(manifest_json.reencode(path.read_bytes(), "5" * 32))


def edit(path: Path, change: Callable[[Any], None]) -> None:
    """Change the fields of a document, to what this release does not write."""
    document = json.loads(unseal(path.read_bytes()))
    change(document)
    path.write_bytes(seal(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()))


def save_properties(folder: Path) -> None:
    """Save tensors, and give them properties that torch's planners never give."""

    def change(document: Any) -> None:
        tensors = document["tensors"]
        (kind,) = tensors["kinds"]
        changed = {"channels_last": "memory_format", "preserve": "memory_format", "pinned": "pin_memory"}
        tensors["kinds"] = [
            kind | ({changed[name]: True if name == "pinned" else name} if name in changed else {})
            for name in tensors["names"]
        ]
        tensors["kind"] = encode_column(np.arange(len(tensors["names"])))

    save(folder, golden_states.properties())
    edit(folder / "manifest.json", change)


def save_forms(folder: Path) -> None:
    """Save objects, one of which gets the negative bits of older releases of Python."""

    def change(document: Any) -> None:
        (content,) = document["objects"]["inline"]["Enum"]["$tuple"]
        content["$Enum"]["bits"] = "-0x1"

    save(folder, golden_states.forms())
    edit(folder / "manifest.json", change)


def save_marks(folder: Path) -> None:
    """Save an object that holds, in lists and dicts, entries of `Opaque` and `Files`, and one in a tuple."""

    def change(document: Any) -> None:
        opaque = {"$tuple": ["dcp_remote.Opaque", {"$tuple": ["dcp_remote.Opaque", 1]}]}
        files = {"$tuple": ["dcp_remote.Files", {"a": {"$bytes": "AA=="}}]}
        marks = [opaque, {"x": {"$OrderedDict": [["files", files]]}}, {"$tuple": [opaque]}]
        document["objects"]["inline"]["marks"] = marks

    save(folder, {"marks": 0})
    edit(folder / "manifest.json", change)


def save_replaced_twice(folder: Path) -> None:
    """Replace a checkpoint twice."""
    for step in (1, 2, 3):
        save(folder, golden_states.run_state(step), overwrite=step > 1)


def save_overwritten(folder: Path) -> None:
    """Save a step of a run again."""
    with CheckpointManager(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(1, golden_states.run_state(step), overwrite=step > 1, wait=True)


def save_rare_run(folder: Path) -> None:
    """Save a run whose manifest is compressed."""
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, golden_states.rare_run(), wait=True)


def save_future(folder: Path) -> None:
    """Save a run, and add fields of later software at every level, and a feature that is needed to write."""

    def change(document: Any) -> None:
        parts = ("run", "shards", "tensors", "chunks", "pieces", "objects")
        first = [document["checkpoints"][0]] if "checkpoints" in document else [document["tensors"]["kinds"][0]]
        for part in (document, *first, *(document[name] for name in parts if name in document)):
            part["a field of the future"] = {"x": [1]}
        if "checkpoints" in document:
            document["requires_to_write"] = ["wings"]

    save_steps(folder, 1)
    for path in (folder / "catalog.json", next((folder / "manifests").iterdir())):
        edit(path, change)


def save_tombstone(folder: Path) -> None:
    """Write the tombstone of a save that never was."""
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest_json.make_tombstone("1" * 32, ("2" * 32,)))


def save_million(folder: Path) -> None:
    """Write the manifest of a million chunks of one byte each."""
    chunks = MILLION_TENSORS * MILLION_CHUNKS
    per_shard = chunks // MILLION_SHARDS
    ones, numbers = np.ones(chunks, dtype=np.int64), np.arange(chunks)
    size = np.full(MILLION_SHARDS, MILLION_HEADER_BYTES + per_shard)
    manifest = Manifest(
        save_id="3" * 32,
        replaces=(),
        created="2026-01-02T03:04:05+00:00",
        writer={"dcp_remote": "golden"},
        world_size=MILLION_SHARDS,
        shards=Shards(
            keys=tuple(f"shards/{n:02x}/rank-{n:05d}-0123456789abcdef-0000.safetensors" for n in range(MILLION_SHARDS)),
            sizes=size,
            data_starts=size - per_shard,
            table_lengths=size * 0,
            table_digests=digest(b"") * MILLION_SHARDS,
        ),
        tensors=Tensors(
            names=tuple(f"t{n:03d}" for n in range(MILLION_TENSORS)),
            kinds=(TensorKind("uint8"),),
            kind=ones[:MILLION_TENSORS] * 0,
            dimensions=ones[:MILLION_TENSORS],
            shape=ones[:MILLION_TENSORS] * MILLION_CHUNKS,
            chunks=ones[:MILLION_TENSORS] * MILLION_CHUNKS,
            chunk_offsets=numbers % MILLION_CHUNKS,
            chunk_sizes=ones,
            chunk_pieces=ones,
        ),
        pieces=Pieces(
            shard=numbers // per_shard,
            start=MILLION_HEADER_BYTES + numbers % per_shard,
            length=ones,
            table=ones * 0,
            digests=digest(digest(b"\0")) * chunks,
        ),
    )
    folder.mkdir()
    (folder / "manifest.json").write_bytes(manifest_json.encode(manifest))


def save_nested(folder: Path) -> None:
    """Save containers of all kinds, empty ones too."""
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, golden_states.nested(), wait=True)


def save_steps(folder: Path, *steps: int, **options: Any) -> None:
    """Save steps of a run."""
    with CheckpointManager(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, golden_states.run_state(step), wait=True)


def save_labels(folder: Path) -> None:
    """Save with names, metrics and notes, pin a step, replace one, and retire one."""
    with CheckpointManager(folder, retention=Retention(keep_last=2)) as checkpoints:
        for step in (1, 2, 3, 4):
            notes: dict[str, Any] = {"metrics": {"loss": 1 / step, "accuracy": 1}, "user": {"note": ["ä", None, 0.5]}}
            checkpoints.save(step, golden_states.run_state(step), name=["best", "émile"], wait=True, **notes)
            if step == 2:
                checkpoints.run.pin(step)
        checkpoints.run.name(3, "third")
        checkpoints.save(4, golden_states.run_state(4), name=["best", "émile"], overwrite=True, wait=True)


def save_abandoned(folder: Path) -> None:
    """Go back to step 1, which abandons step 2, and go on to step 3."""
    save_steps(folder, 1, 2)
    with CheckpointManager(folder, resumed_from=1) as checkpoints:
        checkpoints.save(3, golden_states.run_state(30), wait=True)


def save_emptied(folder: Path) -> None:
    """Save a step and delete it: a run without checkpoints."""
    save_steps(folder, 1)
    with CheckpointManager(folder) as checkpoints:
        checkpoints.run.delete(1, force=True)


def save_large_catalog(folder: Path) -> None:
    """Write the catalog of 2,000 checkpoints, which are not there."""
    entries = [entry(step, metrics=(("loss", 1 / (step + 1)),), abandoned=step % 7 == 0) for step in range(2_000)]
    folder.mkdir()
    (folder / "catalog.json").write_bytes(catalog_json.encode(catalog(*entries, floor=5), "4" * 32))


def save_rank(rank: int, folder: Path, rendezvous: str) -> None:
    """Save values of one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    shared = golden_states.per_rank()
    state = {
        "model": shared["model"],
        "hparams": Opaque(shared["hparams"]),
        "files": Files(shared["files"]),
        "loader": PerRank(golden_states.rank_value(rank)),
    }
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, state, wait=True)
    dist.destroy_process_group()


def save_per_rank(folder: Path) -> None:
    """Save values of two ranks, an `Opaque` and `Files`."""
    with tempfile.TemporaryDirectory() as temporary:
        torch.multiprocessing.spawn(save_rank, (folder, f"{temporary}/rendezvous"), nprocs=2)


CASES: dict[str, Callable[[Path], None]] = {
    "tensors": save_tensors,
    "streams": lambda folder: save(folder, golden_states.streams(), allow_pickle=True),
    "sharded": save_sharded,
    "pieces": save_pieces,
    "tags": lambda folder: save(folder, golden_states.STATES["tags", None]()),
    "encodings": lambda folder: save(folder, golden_states.encoded(), allow_pickle=True),
    "replaced": save_replaced,
    "renewed": save_renewed,
    "tombstone": save_tombstone,
    "compressed": lambda folder: save(folder, golden_states.many()),
    "million": save_million,
    "nested": save_nested,
    "dedup": lambda folder: save_steps(folder, 1, 2),
    "thinned": lambda folder: save_steps(folder, 1, 2, retention=Retention(keep_optimizer_last=1)),
    "labels": save_labels,
    "abandoned": save_abandoned,
    "emptied": save_emptied,
    "catalog": save_large_catalog,
    "per_rank": save_per_rank,
    "properties": save_properties,
    "layouts": lambda folder: save(folder, golden_states.layouts(), allow_pickle=True),
    "stream_objects": lambda folder: save(folder, golden_states.stream_objects()),
    "blocks": lambda folder: save(folder, golden_states.blocks()),
    "header_names": lambda folder: save(folder, golden_states.header_names(), SmallShards),
    "raw_places": lambda folder: save(folder, golden_states.raw_places(), SmallShards),
    "forms": save_forms,
    "marks": save_marks,
    "rare_run": save_rare_run,
    "replaced_twice": save_replaced_twice,
    "overwritten": save_overwritten,
    "future": save_future,
}


def main() -> None:
    """Write the folders that are missing."""
    GOLDEN.mkdir(exist_ok=True)
    for name, write in CASES.items():
        if not (GOLDEN / name).exists():
            write(GOLDEN / name)
            sys.stdout.write(f"{name}: written. Add its digest to test_golden.py.\n")


if __name__ == "__main__":
    main()
