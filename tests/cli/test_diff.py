"""Tests of `dcp-remote diff` through its command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.cli.arguments import split_options
from dcp_remote.common.geometry import Box
from dcp_remote.format.manifest import Manifest, TensorKind
from dcp_remote.run.differences import compare_manifests
from dcp_remote.saving import shard_writer
from dcp_remote.storage import LocalStore
from dcp_remote.testing import RecordingStore
from tests.support.command_line import CommandLine
from tests.support.manifests import Layout, build
from tests.support.schemas import require_schema
from tests.support.simulated_ranks import save_as_ranks, shard

BIG = torch.arange(300_000, dtype=torch.float32)  # more than one block, and a shard of its own


def state(**changes: Any) -> dict[str, Any]:
    """Return a state with a tensor or object of each kind; None in `changes` leaves an entry out."""
    model = {
        "frozen": BIG,
        "w": torch.ones(4, 6),
        "b": torch.zeros(3),
        "empty": torch.zeros(0, 5),
        "sparse": torch.eye(3).to_sparse(),
        "note": "n" * 200_000,  # stored in a shard
    }
    entries = {**model, "lr": 0.5, **changes}
    return {"model": {name: value for name, value in entries.items() if value is not None}, "step": 1}


def compare(cli: CommandLine, *arguments: object, code: int = 1) -> dict[str, str]:
    """Return by entry how two checkpoints differ."""
    document = cli.run("diff", *arguments, "--json", code=code).document
    require_schema("diff", document)
    assert (code == 0) == (not document["differences"])
    return {entry["name"]: entry["difference"] for entry in document["differences"]}


def save(url: Path, *states: dict[str, Any]) -> Path:
    """Save a checkpoint by itself from as many ranks as there are states."""
    save_as_ranks(list(states), lambda: RemoteWriter(url))
    return url


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save step 10 and, with other values of `w` and `lr`, step 20."""
    with CheckpointManager(tmp_path / "run", progress=False) as manager:
        manager.save(10, state(), wait=True, name="first")
        manager.save(20, state(w=torch.full((4, 6), 2.0), lr=0.25), wait=True)
    return tmp_path / "run"


def test_two_steps_of_a_run(cli: CommandLine, run: Path) -> None:
    """Compare two steps: what is shared is equal, the others are listed with both sides, and the exit code is 1."""
    differing = {"model.w": "content", "model.lr": "content"}
    assert compare(cli, run, "--step", 10, "--step", 20) == differing
    assert compare(cli, run, "--step", "first") == differing  # with the newest
    shown = cli.run("diff", run, "--step", 10, "--key", "*", code=1).lines
    assert shown[0].startswith(f"A  file://{run} step 10, saved ")
    assert "model  content: 1 tensor, 1 object, 96 B" in shown
    assert shown[-2:] == ["model.w  content: float32 4×6, 96 B in 1 chunk", "model.lr  content: 0.5 -> 0.25"]
    assert "--key" in cli.run("diff", run, "--step", 10, code=1).lines[-1]


def test_entries_are_chosen(cli: CommandLine, run: Path) -> None:
    """Compare some entries: only these count for the exit code, and those that differ are listed."""
    assert cli.run("diff", run, "--step", 10, "--key", "*.lr", code=1).lines[-1].startswith("model.lr  ")
    assert compare(cli, run, "--step", 10, "--key", "model.frozen", code=0) == {}
    cli.fail("diff", run, "--step", 10, "--key", "modle.*", code=2, says="model.*")


def test_equal_checkpoints_of_two_urls(cli: CommandLine, tmp_path: Path, run: Path) -> None:
    """Save the same state elsewhere: equal, though no object is shared; and so is a checkpoint to itself."""
    alone = save(tmp_path / "alone", state())
    assert compare(cli, run, alone, "--step", 10, "--step", "latest", code=0) == {}
    assert compare(cli, run, alone) == {"model.w": "content", "model.lr": "content"}
    assert compare(cli, run, run, code=0) == {}


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"b": None}, {"model.b": "only_a"}),
        ({"c": torch.zeros(1)}, {"model.c": "only_b"}),
        ({"w": torch.ones(6, 4)}, {"model.w": "shape"}),
        ({"empty": torch.zeros(5, 0)}, {"model.empty": "shape"}),
        ({"w": torch.ones(4, 6, dtype=torch.bfloat16)}, {"model.w": "dtype"}),
        ({"w": torch.ones(4, 6).to_sparse()}, {"model.w": "encoding"}),
        ({"w": 7}, {"model.w": "kind"}),
        ({"frozen": BIG + 1}, {"model.frozen": "content"}),
        ({"sparse": torch.eye(3).to_sparse() * 2}, {"model.sparse": "content"}),
        ({"note": "m" * 200_000}, {"model.note": "content"}),
        ({"note": "n"}, {"model.note": "content"}),
        ({"lr": 1}, {"model.lr": "content"}),
    ],
    ids=str,
)
def test_kinds_of_differences(
    cli: CommandLine, tmp_path: Path, changes: dict[str, Any], differing: dict[str, str]
) -> None:
    """Change one entry: it alone differs, in the way that it was changed."""
    a, b = save(tmp_path / "a", state()), save(tmp_path / "b", state(**changes))
    assert compare(cli, a, b) == differing


def test_an_object_in_the_manifest_and_in_a_shard(
    cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared by their bytes: how much room a manifest has for small objects depends on the ranks."""
    a = save(tmp_path / "a", state())
    monkeypatch.setattr(shard_writer, "INLINE_BYTES_MAX", 0)
    assert compare(cli, a, save(tmp_path / "b", state()), code=0) == {}
    assert compare(cli, a, save(tmp_path / "c", state(lr=0.25))) == {"model.lr": "content"}


def test_another_sharding_may_differ(cli: CommandLine, tmp_path: Path) -> None:
    """Save a tensor in one chunk and in two: the manifests cannot tell."""

    def cut(*boxes: Box, seed: int = 0) -> Manifest:
        pieces = tuple((box.elements * 4,) for box in boxes)
        return build([Layout("w", TensorKind("float32"), (4, 2), boxes, pieces)], seed=seed)

    whole, upper = Box((0, 0), (4, 2)), Box((0, 0), (2, 2))
    halves = cut(upper, Box((2, 0), (2, 2)))
    assert compare_manifests(cut(whole), halves, ["w"]) == {"w": "unknown"}
    assert compare_manifests(halves, cut(upper, Box((2, 0), (2, 2)), seed=1), ["w"]) == {"w": "content"}
    assert compare_manifests(halves, halves, ["w"]) == {"w": "equal"}


def amounts(cli: CommandLine, a: Path, b: Path, code: int = 1) -> dict[str, tuple[Any, ...]]:
    """Return by entry how much the values of two checkpoints differ."""
    document = cli.run("diff", a, b, "--values", "--json", code=code).document
    require_schema("diff", document)
    return {entry["name"]: tuple(entry.get("values", {}).values()) for entry in document["differences"]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
def test_how_much_values_differ(cli: CommandLine, tmp_path: Path, dtype: torch.dtype) -> None:
    """Add 2 to one of four values, in a tensor of two chunks in one checkpoint and of one in the other."""
    whole = torch.tensor([[1.0, 2.0], [2.0, 4.0]]).to(dtype)
    changed = torch.tensor([[1.0, 4.0], [2.0, 4.0]]).to(dtype)
    a = save(tmp_path / "a", *({"w": part} for part in shard(whole, 2, (2, 1))))
    b = save(tmp_path / "b", {"w": changed})
    expected = (4, 1, None, None) if dtype is torch.int64 else (4, 1, 2.0, 0.4)
    assert amounts(cli, a, b) == {"w": expected}
    same = save(tmp_path / "same", {"w": whole})
    assert compare(cli, a, same) == {"w": "unknown"}
    assert amounts(cli, a, same, code=0) == {}
    lines = cli.run("diff", a, b, "--values", code=1).lines
    assert lines[0] == f"reading from each: 1 tensor, 0 objects, {4 * dtype.itemsize} B"
    assert "; 1 of 4 values differ" in lines[-1]


def test_values_of_many_parts(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare tensors cut into parts of five elements with torch's own figures."""
    monkeypatch.setattr("dcp_remote.loading.value_differences._PART_ELEMENTS", 5)
    one = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    other = one.clone()
    other[2:5, 3] *= 1.5
    a = save(tmp_path / "a", *({"w": part, "step": 1} for part in shard(one, 2, (2, 1))))
    b = save(tmp_path / "b", *({"w": part, "step": 2} for part in shard(other.double(), 3, (1, 3))))
    found = amounts(cli, a, b)
    elements, unequal, max_abs, relative_norm = found.pop("w")
    assert (elements, unequal, found) == (63, 3, {"step": ()})
    assert max_abs == pytest.approx(float((other - one).abs().max()))
    assert relative_norm == pytest.approx(float((other - one).double().norm() / one.double().norm()))


def test_values_that_are_no_numbers(cli: CommandLine, tmp_path: Path) -> None:
    """Two NaN and two infinities are equal; a NaN beside a number differs by NaN, anything beside zeros by infinity."""
    inf, nan = math.inf, math.nan
    a = save(tmp_path / "a", {"w": torch.tensor([inf, nan, 1.0]), "n": torch.tensor([nan, 1.0]), "z": torch.zeros(2)})
    b = save(tmp_path / "b", {"w": torch.tensor([inf, nan, 2.0]), "n": torch.tensor([1.0, 1.0]), "z": torch.ones(2)})
    found = amounts(cli, a, b)
    assert found["w"][:3] == (3, 1, 1.0)
    assert found["n"] == (2, 1, "nan", "nan")
    assert found["z"] == (2, 2, 1.0, "inf")


def test_wrong_calls(cli: CommandLine, tmp_path: Path, run: Path) -> None:
    """Name one checkpoint, three steps, a step that is not there, an empty folder: each is refused with its reason."""
    cli.fail("diff", run, code=2, says="--step twice")
    cli.fail("diff", run, "--step", 10, "--step", 10, "--step", 20, code=2, says="two")
    cli.fail("diff", run, "--step", 11, says="no live checkpoint of this step")
    cli.fail("diff", run, tmp_path / "nothing", says="nothing")


def test_reads_the_manifests_alone(cli: CommandLine, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the requests: two GETs for a step, three for the newest, whatever the size."""
    recording = RecordingStore(LocalStore(run))
    monkeypatch.setattr("dcp_remote.cli.diff.open_store", lambda url, options: recording)
    cli.run("diff", run, "--step", 10, "--step", 20, code=1)
    assert [verb for verb, _ in recording.calls] == ["get"] * 4
    assert not any(key.startswith("shards/") for _, key in recording.calls)


def test_each_url_gets_its_options() -> None:
    """Two URLs of one kind have the same options, else those of the remote or second one; the first its own as well."""
    own, shared = {"profile_name": "p"}, {"anon": True}
    assert split_options("s3://a", "s3://b", own, shared) == ({**shared, **own}, shared)
    assert split_options("s3://a", "/b", own, shared) == ({**shared, **own}, {})
    assert split_options("/a", "s3://b", None, shared) == ({}, shared)
    assert split_options("gs://a", "s3://b", own, shared) == (own, shared)
    assert split_options("/a", "/b", None, shared) == ({}, shared)
