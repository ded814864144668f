"""FORMAT.md is enough to read a checkpoint: a reader written from that page alone returns what was saved."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import dcp_remote.format
from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.dtypes import ITEM_BYTES
from dcp_remote.format.shard import TABLE_NAME
from dcp_remote.serialization import restricted_unpickler, torch_streams
from dcp_remote.serialization.objects import EncodedObject, decode_object
from dcp_remote.serialization.restricted_unpickler import DamagedStreamError
from dcp_remote.serialization.torch_streams import load_restricted
from read_without_torch import Checkpoint, UnreadableError, column
from tests.support.simulated_ranks import save_as_ranks, shard

READER = Path(__file__).parents[2] / "examples" / "read_without_torch.py"
LINES_MAX = 510


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
    """Every tensor and object equals what was saved: in chunks, in the manifest, in a shard."""
    expected = saved(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert sorted(checkpoint.entries) == sorted(expected)
    for name, value in expected.items():
        found = checkpoint.read(name)
        if isinstance(value, np.ndarray):
            assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)
        else:
            assert found == value
    assert checkpoint.entries["optim.long"].encoding == "json"


def test_reader_written_from_the_page_alone_reads_raw_bytes_of_objects(tmp_path: Path) -> None:
    value = {"a": np.arange(70_000), "b": torch.arange(9_001.0), "c": b"xyz" * 1001}
    save_as_ranks([{"x": (value,)}], lambda: RemoteWriter(tmp_path))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.entries["x"].encoding == "json+raw"
    (found,) = checkpoint.read("x")
    np.testing.assert_array_equal(found["a"], value["a"])
    np.testing.assert_array_equal(found["b"], np.arange(9_001, dtype="<f4"))
    assert found["c"] == value["c"]


def test_reader_written_from_the_page_alone_reads_a_run(tmp_path: Path) -> None:
    """Two checkpoints are read, the later of which reuses shards of the earlier."""
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            state = {"model": {"frozen": torch.arange(100_000), "weight": torch.full((3,), float(step))}, "step": step}
            checkpoints.save(step, state, wait=True)
    for step in (1, 2):
        found = Checkpoint(tmp_path, step).read_state()
        np.testing.assert_array_equal(found["model"]["frozen"], np.arange(100_000))
        np.testing.assert_array_equal(found["model"]["weight"], np.full((3,), step, dtype=np.float32))
        assert found["step"] == step


def test_reader_written_from_the_page_alone_notices_damage(tmp_path: Path) -> None:
    """A flipped byte in the data or the block table of a shard is noticed."""
    saved(tmp_path)
    shards = Checkpoint(tmp_path).manifest["shards"]
    key, start = shards["keys"][0], column(shards["data_starts"])[0]
    data = (tmp_path / key).read_bytes()
    for position in (start - 1, start, len(data) - 1):
        (tmp_path / key).write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(UnreadableError, match="damaged"):
            Checkpoint(tmp_path).read_state()


def test_reader_is_a_program(tmp_path: Path) -> None:
    """The reader lists a folder, and behind HTTP the same; it refuses damage, and a step that is not there."""
    saved(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(READER), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    listed = run(str(tmp_path))
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "model.big: float32 [3000, 700]" in listed.stdout
    assert "note: str 'größer'" in listed.stdout
    assert listed.stdout.splitlines()[-1] == "9 entries, all digests right"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path)))
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert run(f"http://127.0.0.1:{server.server_port}/").stdout == listed.stdout
        server.shutdown()
    assert "catalog.json" in run(str(tmp_path), "--step", "3").stderr
    key = Checkpoint(tmp_path).manifest["shards"]["keys"][0]
    (tmp_path / key).write_bytes(b"x" * (tmp_path / key).stat().st_size)
    damaged = run(str(tmp_path))
    assert (damaged.returncode, "damaged" in damaged.stderr) == (1, True)


class QuietHandler(SimpleHTTPRequestHandler):
    """Files of a folder, without a log and without ranges."""

    def log_message(self, *_: object) -> None: ...


def test_reader_is_short_and_imports_neither_torch_nor_us() -> None:
    source = READER.read_text(encoding="utf-8")
    assert len(source.splitlines()) < LINES_MAX
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name if isinstance(node, ast.Import) else node.module for node in imports for alias in node.names}
    assert not {str(name).split(".")[0] for name in names} & {"torch", "dcp_remote"}


def test_names_in_streams_are_those_of_the_validator() -> None:
    """The page lists the values and callables that a stream may name, and the bytes of an item of each storage."""
    page = Path(dcp_remote.format.__file__).with_name("FORMAT.md").read_text(encoding="utf-8")
    rows = page.partition("### Streams")[2].partition("## 6.")[0].splitlines()
    names = [re.findall(r"`((?:torch|collections|builtins|_codecs)\.[\w.]+)`", row) for row in rows if row[:1] == "|"]
    dtypes = {f"torch.{name}" for name in ITEM_BYTES}
    assert {*chain.from_iterable(names)} == (restricted_unpickler.VALUES | restricted_unpickler.CALLABLE) - dtypes
    sizes = [re.search(r"(\d+) bytes?\b", row) for row in rows if row[:1] == "|"]
    found = {name: int(size[1]) for listed, size in zip(names, sizes, strict=True) if size for name in listed}
    assert found == {name: dtype.itemsize for name, dtype in restricted_unpickler.STORAGES.items()}


def test_limits_of_nesting_are_those_of_the_page() -> None:
    """101 lists around a number are read in JSON, 100 in a stream; one more is refused."""

    def lists(count: int) -> Any:
        return [lists(count - 1)] if count else 1

    assert decode_object("x", EncodedObject("json", json.dumps(lists(101)).encode())) == lists(101)
    assert load_restricted(torch_streams.save(lists(100))) == lists(100)
    with pytest.raises(CorruptCheckpointError, match="nested deeper"):
        decode_object("x", EncodedObject("json", json.dumps(lists(102)).encode()))
    with pytest.raises(DamagedStreamError, match="nested deeper"):
        load_restricted(torch_streams.save(lists(101)))


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
