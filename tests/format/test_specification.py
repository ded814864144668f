"""FORMAT.md is enough to read a checkpoint: a reader written from that page alone returns what was saved."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.format.shard import TABLE_NAME
from tests.support import format_reader
from tests.support.simulated_ranks import save_as_ranks, shard

LINES_MAX = 100


def saved(folder: Path) -> dict[str, object]:
    """Save as three ranks: chunks, blocks, scalars, empties, objects small and large. Return the whole values."""
    generator = torch.Generator().manual_seed(7)
    whole = {
        "model.big": torch.randn(3000, 700, generator=generator),
        "model.grid": torch.randn(7, 5, 3, generator=generator),
        "model.empty": torch.zeros(0, 4),
        "optim.step": torch.tensor(3, dtype=torch.int64),
        "optim.mask": torch.tensor([True, False, True]),
        "optim.z": torch.randn(4, dtype=torch.complex64, generator=generator),
    }
    big = shard(whole["model.big"], 3, (3, 1))
    small = shard(whole["model.grid"], 3, (2, 3, 1))
    rest = {name: value for name, value in whole.items() if name not in ("model.big", "model.grid")}
    objects = {"optim.lr": 0.125, "optim.long": list(range(10_000)), "note": "größer"}
    states = [{"model.big": big[rank], "model.grid": small[rank], **rest, **objects} for rank in range(3)]
    save_as_ranks(states, lambda: RemoteWriter(folder))
    return {**{name: value.numpy() for name, value in whole.items()}, **objects}


def test_reader_written_from_the_page_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    """Every tensor and object equals what was saved, in the order in which torch listed them."""
    expected = saved(tmp_path)
    found = format_reader.read(tmp_path)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype
            np.testing.assert_array_equal(found[name], value)
        else:
            # A list of 10,000 is not flattened: it is one object, too large for the manifest.
            assert found[name] == value


def test_reader_written_from_the_page_alone_reads_a_run(tmp_path: Path) -> None:
    """Two checkpoints are read, the later of which reuses shards of the earlier."""
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            state = {"model": {"frozen": torch.arange(100_000), "weight": torch.full((3,), float(step))}, "step": step}
            checkpoints.save(step, state, wait=True)
    for step in (1, 2):
        found = format_reader.read(tmp_path, step)
        np.testing.assert_array_equal(found["model.frozen"], np.arange(100_000))
        np.testing.assert_array_equal(found["model.weight"], np.full((3,), step, dtype=np.float32))
        assert found["step"] == step
    keys = [set(format_reader.read_manifest(tmp_path, step)["shards"]["keys"]) for step in (1, 2)]
    assert keys[0] & keys[1]


def test_reader_written_from_the_page_alone_reads_raw_bytes_of_objects(tmp_path: Path) -> None:
    """Tensors and arrays inside objects of two ranks are found among the raw bytes, at their places."""
    values = [{"a": np.arange(70_000) + rank, "b": torch.arange(9_001.0), "c": b"xyz" * 1001} for rank in range(2)]
    save_as_ranks([{f"x{rank}": (values[rank],)} for rank in range(2)], lambda: RemoteWriter(tmp_path))
    for rank, value in enumerate(values):
        tree, raw = format_reader.read(tmp_path)[f"x{rank}"]
        found = tree["$tuple"][0]
        places = [found["a"]["$numpy.ndarray"]["data"], found["b"]["$torch.Tensor"]["data"], found["c"]["$bytes"]]
        a, b, c = (raw[start : start + length] for start, length in places)
        np.testing.assert_array_equal(np.frombuffer(a, found["a"]["$numpy.ndarray"]["dtype"]), value["a"])
        np.testing.assert_array_equal(np.frombuffer(b, "<f4"), np.arange(9_001, dtype="<f4"))
        assert c == value["c"]
        assert sum(length for _, length in places) == len(raw)


def test_reader_written_from_the_page_alone_notices_damage(tmp_path: Path) -> None:
    """A flipped byte in the data or the block table of a shard is noticed."""
    saved(tmp_path)
    manifest = format_reader.read_manifest(tmp_path)
    key = manifest["shards"]["keys"][0]
    start = format_reader.column(manifest["shards"]["data_starts"])[0]
    data = (tmp_path / key).read_bytes()
    for position in (start - 1, start, len(data) - 1):
        (tmp_path / key).write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(AssertionError):
            format_reader.read(tmp_path)


def test_reader_is_short_and_imports_neither_torch_nor_us() -> None:
    """The source of the reader is short, and imports neither torch nor dcp_remote."""
    source = Path(format_reader.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < LINES_MAX
    modules = {
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert not any(name.split(".")[0] in ("torch", "dcp_remote") for name in modules)


def test_safetensors_opens_every_shard(tmp_path: Path) -> None:
    """The safetensors library lists and reads every tensor of every shard; whole tensors keep their names."""
    expected = saved(tmp_path)
    found: dict[str, torch.Tensor] = {}
    for path in sorted(tmp_path.glob("shards/*/*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # the file is no mapping, and has no iterator
    assert TABLE_NAME in found
    for name in ("optim.step", "optim.mask", "optim.z"):
        np.testing.assert_array_equal(found[name].numpy(), expected[name])
    rows = torch.cat([found[f"model.big@{offset},0"] for offset in (0, 1000, 2000)])
    np.testing.assert_array_equal(rows.numpy(), expected["model.big"])
