"""Golden files: checkpoints of each feature of the format, written once, are read by this release and from the page."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from dcp_remote import CheckpointManager, Files, load, open_run
from dcp_remote.errors import CheckpointNotFoundError, UnsupportedFormatError
from dcp_remote.format import catalog_json, manifest_json
from dcp_remote.format.catalog import Catalog
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.serialization.objects import _TAG_BY_NAME
from read_without_torch import Checkpoint, UnreadableError, read_document
from tests.format.golden_forms import as_read, form
from tests.format.golden_states import STATES
from tests.format.write_golden import GOLDEN
from tests.support.columns import decode_column

# Digests of all files of each folder, with their paths. A digest never changes: the files are what old releases wrote.
DIGESTS = {
    "abandoned": "3830b756af7ca2afa9b24c636f7e52fb",
    "blocks": "a92373693aaf065d3e328a3685a390fe",
    "catalog": "713c0158d481547d01035966b51b6233",
    "compressed": "e7bb17987aa2b438086edb5009c504ca",
    "dedup": "2b8fd6a1bd8edf730bbaff99f4ccb0ce",
    "emptied": "c1d262aae7cbc41f353a8a458bcdf355",
    "encodings": "cb6ef64c973cdc88ae2f1400ba08a135",
    "forms": "d3670d360f67a9328aa3737d5b2be3c9",
    "future": "54ff24d22fac5ba9999a41cadb9d2f57",
    "header_names": "a9be4247b6dbfcd248a5b57fb291b254",
    "labels": "46b1e1ac92cbde0f6689379190f5db8a",
    "layouts": "53efed0e80f25259db9a376fdc059775",
    "marks": "e06e3532d53b5024dea63a434e1d769a",
    "million": "bfa657a466d014cc73d7940e4c93f5fc",
    "nested": "5874f8bd7601a0e65c862ae72182ed04",
    "overwritten": "06390f3bc6229c9c497befc22b03abf9",
    "per_rank": "ac63358b67a537c5cec1f4777682d6f8",
    "pieces": "cc95666a43a3f3429c1dcc05fee8fd1c",
    "properties": "adb03e5e2952c51f658824b6023f3c56",
    "rare_run": "cece2fbd827a7f745223da3c4ae24e86",
    "raw_places": "db3f04b84a716b3ee0ebda023e08ef42",
    "renewed": "ec9554c24c6f8a17e28cfb42d033101c",
    "replaced": "7f4bbfac9d06e9c9feb3186e8d97d81e",
    "replaced_twice": "ce38ff0386cc063bc624b9e0750e80ae",
    "segments": "c3f97c5683b6145d5b6b5b303c59d976",
    "sharded": "88dd64f3242813748347bfe5987ba966",
    "stream_objects": "a4bc383e25e4452c05759a3091aa8f0d",
    "streams": "b1a506d34be330b4f74146df7b9b0640",
    "tags": "ebd4eb5e26e4fe182564e45694ad4abe",
    "tensors": "421f0f06f8ce60b4a3ee3c165080990d",
    "thinned": "84c44e6ab2839d0fee44681baab4399b",
    "tombstone": "a2681ee153ed63b834be1fc93d9ef355",
}

# Tensors that are stored as streams, which a reader without torch leaves as bytes.
STREAM_MAGIC = b"PK\x03\x04"


def digest_of(folder: Path) -> str:
    found = xxhash.xxh3_128()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()} {len(data)}\n".encode() + data)
    return found.hexdigest()


def test_golden_files_are_those_that_were_written() -> None:
    assert {path.name: digest_of(path) for path in GOLDEN.iterdir()} == DIGESTS


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the keys of which a state lacks the value that another has, or of which only one has a value."""
    return [key for key in {**found, **expected} if form(found.get(key)) != form(expected.get(key, "none"))]


@pytest.mark.filterwarnings("ignore:(TypedStorage is deprecated|Sparse BS[RC]):UserWarning")  # torch's own
@pytest.mark.parametrize(("name", "step"), STATES, ids=[f"{name}-{step}" for name, step in STATES])
def test_this_release_reads(name: str, step: int | None) -> None:
    """Values, types and structure are those of the state that was saved."""
    expected = STATES[name, step]()
    found = load(GOLDEN / name, step=step, allow_pickle=name in ("streams", "encodings", "layouts"))
    assert differing(found, loaded(name, expected)) == []


def loaded(name: str, expected: dict[str, Any]) -> dict[str, Any]:
    """Return a state as `load` returns it: without parameters, with keys that are strings, and with `Files`."""
    if name in ("tensors", "layouts"):
        return {key: value.detach() for key, value in expected.items()}
    if name == "nested":
        state = expected["optim"]["state"]
        expected["optim"]["state"] = {str(key): inner for key, inner in state.items()}
    if name == "forms":  # a generator without a seed sequence is read with one
        (generator,) = expected["Generator"]
        expected["Generator"] = (np.random.Generator(np.random.MT19937(0)),)
        expected["Generator"][0].bit_generator.state = generator.bit_generator.state
    if name == "per_rank":
        expected["files"] = Files(expected["files"])
    return expected


@pytest.mark.filterwarnings("ignore:Sparse BS[RC]:UserWarning")
@pytest.mark.parametrize(("name", "step"), STATES, ids=[f"{name}-{step}" for name, step in STATES])
def test_a_reader_without_torch_reads(name: str, step: int | None) -> None:
    """The reference reader returns the same values, as far as they need no torch; streams are left as bytes."""
    expected = loaded(name, STATES[name, step]())
    checkpoint = Checkpoint(GOLDEN / name, step)
    found = checkpoint.read_state()
    for key in [key for key, entry in checkpoint.entries.items() if entry.encoding in ("torch", "pickle")]:
        assert found.pop(key).startswith(STREAM_MAGIC)
        del expected[key]
    if name == "encodings":
        assert {entry.encoding for entry in checkpoint.entries.values()} == {"json", "json+raw", "torch", "pickle"}
    if name == "forms":
        (bits,), expected["Enum"] = found.pop("Enum"), ()
        assert (bits, found.setdefault("Enum", ())) == ("tests.format.golden_states.Access.-0x1", ())
    assert differing(found, as_read(expected)) == []


def test_every_dtype_and_tag_is_in_the_files() -> None:
    """A new one needs a golden folder."""
    entries = [
        entry for name in ("tensors", "streams", "layouts") for entry in Checkpoint(GOLDEN / name).entries.values()
    ]
    assert {entry.dtype for entry in entries} == set(ITEM_BYTES)
    tags = (GOLDEN / "tags" / "manifest.json").read_text() + "".join(
        path.read_bytes().decode(errors="ignore") for path in (GOLDEN / "tags").rglob("*.safetensors")
    )
    assert not [tag for tag in _TAG_BY_NAME if f'"{tag}":' not in tags]


def test_a_run_of_later_software_is_not_changed(tmp_path: Path) -> None:
    """A feature that is needed to write is named; reading goes on, as the states above show."""
    shutil.copytree(GOLDEN / "future", tmp_path / "future")
    with pytest.raises(UnsupportedFormatError, match="wings"), CheckpointManager(tmp_path / "future") as checkpoints:
        checkpoints.run.pin(1)


def catalog_of(name: str) -> Catalog:
    return catalog_json.decode((GOLDEN / name / "catalog.json").read_bytes())


def test_catalogs() -> None:
    """Labels of checkpoints are read; retired, thinned and abandoned ones are marked so."""
    first, second, third = catalog_of("labels").entries
    assert [entry.step for entry in (first, second, third)] == [2, 3, 4]
    assert (first.pinned, second.names, third.names) == (True, ("third",), ("best", "émile"))
    assert dict(third.metrics) == {}
    assert dict(second.metrics) == {"loss": 1 / 3, "accuracy": 1.0}
    assert [entry.thinned for entry in catalog_of("thinned").entries] == [("optim",), ()]
    assert [entry.abandoned for entry in catalog_of("abandoned").entries] == [False, True, False]
    assert catalog_of("emptied").entries == ()
    assert open_run(GOLDEN / "labels").user(3) == {"note": ["ä", None, 0.5]}
    large = catalog_of("catalog")
    assert (len(large.entries), large.floor) == (2_000, 5)
    assert large.entries[7].abandoned
    document = read_document(
        lambda key, *_: (GOLDEN / "catalog" / key).read_bytes(), "catalog.json", "dcp_remote catalog"
    )
    assert [entry["step"] for entry in document["checkpoints"]] == list(range(2_000))


def test_tombstone() -> None:
    """There is no checkpoint, for this release and from the page."""
    with pytest.raises(CheckpointNotFoundError):
        load(GOLDEN / "tombstone")
    head = manifest_json.decode_head((GOLDEN / "tombstone" / "manifest.json").read_bytes())
    assert (head.kind, head.save_id, head.replaces) == ("tombstone", "1" * 32, ("2" * 32,))
    with pytest.raises(UnreadableError, match="no checkpoint"):
        Checkpoint(GOLDEN / "tombstone")


def test_a_million_chunks(tmp_path: Path) -> None:
    """The manifest is small, and one tensor of a thousand chunks is read; the shards are zeros that the test writes."""
    shutil.copy(GOLDEN / "million" / "manifest.json", tmp_path)
    assert (tmp_path / "manifest.json").stat().st_size < 300_000
    manifest = manifest_json.decode((tmp_path / "manifest.json").read_bytes())
    assert manifest is not None
    assert len(manifest.tensors.chunk_pieces) == 1_000_000
    for key, size in zip(manifest.shards.keys, manifest.shards.sizes.tolist(), strict=True):
        (tmp_path / key).parent.mkdir(parents=True)
        (tmp_path / key).write_bytes(bytes(size))
    assert torch.equal(load(tmp_path, keys="t567")["t567"], torch.zeros(1_000, dtype=torch.uint8))
    checkpoint = Checkpoint(tmp_path)
    assert sum(len(entry.chunks) for entry in checkpoint.entries.values()) == 1_000_000
    np.testing.assert_array_equal(checkpoint.read("t999"), np.zeros(1_000, dtype=np.uint8))
    assert decode_column(checkpoint.manifest["chunks"]["sizes"], name="sizes").sum() == 1_000_000
