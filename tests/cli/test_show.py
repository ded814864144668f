"""Tests of `dcp-remote show` through its command line."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dcp_remote import CheckpointManager, RemoteWriter
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.geometry import Box
from dcp_remote.common.text import escape_unprintable, human_bytes
from dcp_remote.format.manifest import MANIFEST_KEY, TensorKind
from dcp_remote.format.manifest_json import encode
from dcp_remote.run.deletions import Deletions
from dcp_remote.storage import LocalStore
from tests.support.command_line import CommandLine
from tests.support.manifests import Layout, build
from tests.support.runs import save as run_save
from tests.support.runs import thin
from tests.support.simulated_ranks import save_as_ranks


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Save a small checkpoint from two ranks."""
    state = {"model": {"w": torch.zeros(3, 4), "s": torch.tensor(1.0)}, "optim": {"lr": 0.5, "betas": (0.9, 0.99)}}
    save_as_ranks([state, state], lambda: RemoteWriter(tmp_path / "ck"))
    return str(tmp_path / "ck")


def test_shows_facts_and_top_level_keys(cli: CommandLine, checkpoint: str) -> None:
    """Show a checkpoint without options: facts, and a line per top-level key; as JSON, one document."""
    shown = {"world size  2", "model  2 tensors, 0 objects, 52 B", "optim  0 tensors, 2 objects, 0 B"}
    assert shown <= set(cli.run("show", checkpoint).lines)
    document = cli.run("show", checkpoint, "--json").document
    assert document["world_size"] == 2
    assert f"writer      {document['writer']}" in cli.run("show", checkpoint).lines
    assert f", python {platform.python_version()}" in document["writer"]
    assert document["entries"]["model.w"] == {"dtype": "float32", "shape": [3, 4], "chunks": 1, "bytes": 48}
    assert document["entries"]["optim.lr"] == {"value": 0.5}


def test_shows_the_mesh_of_sharded_tensors(cli: CommandLine, tmp_path: Path) -> None:
    """Save tensors of two meshes, one of which has no names: each is described once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        meshes = DeviceMesh("cpu", [[0]], mesh_dim_names=("dp_shard", "tp")), DeviceMesh("cpu", [0])
        layouts = [meshes[0], meshes[1], meshes[0]]
        state = {
            str(number): DTensor.from_local(torch.ones(2), mesh, [Replicate()] * mesh.ndim)
            for number, mesh in enumerate(layouts)
        }
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, {"model": state})
    finally:
        dist.destroy_process_group()
    assert cli.run("show", tmp_path, "--json").document["writer"].endswith(", mesh dp_shard 1 × tp 1; dimension 0: 1")


def test_lists_entries_by_pattern(cli: CommandLine, checkpoint: str) -> None:
    """Show entries: tensors with dtype, shape and size, objects with their value."""
    lines = cli.run("show", checkpoint, "--key", "model.*", "--key", "optim.lr").lines
    assert {
        "model.w  float32 3×4, 48 B in 1 chunk",
        "model.s  float32 scalar, 4 B in 1 chunk",
        "optim.lr  0.5",
    } <= set(lines)
    assert not any(line.startswith("optim.betas") for line in lines)


def test_entries_at_the_top_are_one_group(cli: CommandLine, tmp_path: Path) -> None:
    """Show a flat state dict, as FSDP returns it, with a key named like the group: one line for the group."""
    flat = {"layers.0.w": torch.zeros(2), "layers.1.w": torch.zeros(2), "step": 3}
    save_as_ranks([{**flat, "(top level)": {"w": torch.zeros(1)}}], lambda: RemoteWriter(tmp_path / "ck"))
    groups = [line for line in cli.run("show", tmp_path / "ck").lines if line.startswith("(top level)")]
    assert groups == ["(top level)  2 tensors, 1 object, 16 B", "(top level)  1 tensor, 0 objects, 4 B"]


def test_a_name_in_brackets_is_no_pattern(cli: CommandLine, tmp_path: Path) -> None:
    """Show `a[0].w` beside `a0.w`: an exact name is preferred to a pattern, as in `load`."""
    save_as_ranks([{"a[0]": {"w": 1}, "a0": {"w": 2}}], lambda: RemoteWriter(tmp_path / "ck"))
    lines = cli.run("show", tmp_path / "ck", "--key", "a[0].w").lines
    assert "a[0].w  1" in lines
    assert "a0.w  2" not in lines


def test_failure_is_one_line_and_a_code(cli: CommandLine, checkpoint: str, run: str) -> None:
    """Fail in several ways: no traceback, no output; code 1 for failures, 2 for wrong command lines."""
    cli.fail("show", f"{checkpoint}-typo", says="no committed checkpoint")
    cli.fail("show", "s4://bucket/x", code=2, says="Unknown scheme")
    cli.fail("show", checkpoint, "--key", "modle.*", code=2, says="model, optim")
    cli.fail("show", checkpoint, "--endpoint-url", "http://127.0.0.1:1", code=2, says="endpoint_url")
    cli.fail("show", checkpoint, "--step", "1", says="step")
    for step in ("300", "worst"):
        cli.fail("show", run, "--step", step, says="steps='100, 200'")
    path = Path(checkpoint, MANIFEST_KEY)
    path.write_bytes(path.read_bytes()[:-10])
    cli.fail("show", checkpoint, says="damaged or truncated")


def put_manifest(folder: Path, *, name: str = "w", inline: dict[str, bytes]) -> str:
    """Put a manifest that no writer of dcp_remote writes: an empty tensor, and inline values as given."""
    manifest = build([Layout(name, TensorKind("float32"), (0,), (Box((0,), (0,)),), ((),))], inline=inline)
    (folder / MANIFEST_KEY).write_bytes(encode(manifest))
    return str(folder)


@pytest.mark.parametrize(
    "value",
    [
        b'"\xff"',
        b'{"a":1,"a":2}',
        b"1e999",
        b"123456789012345678901",
        b"[" * 500 + b"]" * 500,
    ],
    ids=["not UTF-8", "a name twice", "no float", "no 64 bits", "too deep"],
)
def test_a_damaged_value(cli: CommandLine, tmp_path: Path, value: bytes) -> None:
    """Damage one inline value: only listing it fails, with its key and without output."""
    url = put_manifest(tmp_path, inline={"good": b"1", "bad": value})
    cli.run("show", url)
    cli.run("show", url, "--key", "good")
    for more in ([], ["--json"]):
        cli.fail("show", url, "--key", "*", *more, says="key='bad'")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Save two steps; one name moves from the first to the second, and the first loses its optimizer."""
    store = LocalStore(tmp_path / "run")
    run_save(store, 100, names=("best", "first"), metrics=(("loss", 0.25),))
    run_save(store, 200, base=100, names=("best",))
    thin(Deletions(store), [100], deadline=Deadline(30))
    return str(tmp_path / "run")


@pytest.mark.parametrize(
    ("more", "step"), [([], 200), (["--step", "100"], 100), (["--step", "best"], 200), (["--step", "first"], 100)]
)
def test_a_run_is_its_newest_checkpoint(cli: CommandLine, run: str, more: list[str], step: int) -> None:
    """Show a run by default, by step and by name: step, metrics and removed keys are printed."""
    lines = cli.run("show", run, *more).lines
    assert f"step        {step}" in lines
    assert ("metrics     loss 0.25" in lines) == ("without     optim" in lines) == (step == 100)
    assert any(line.startswith("optim ") for line in lines) == (step == 200)
    document = cli.run("show", run, *more, "--json").document
    assert document["step"] == step
    assert document.get("thinned") == (["optim"] if step == 100 else None)


def test_printable_text() -> None:
    """Escape every character that exists: printable ones stay, others become Python's escapes."""
    assert escape_unprintable("Größe 3×4, 日本語 🙂 \\n") == "Größe 3×4, 日本語 🙂 \\n"
    assert escape_unprintable("\x1b[0m\n\ud800\u202e") == r"\x1b[0m\n\ud800\u202e"
    everything = escape_unprintable("".join(map(chr, range(sys.maxunicode + 1))))
    assert everything.isprintable()
    assert everything.encode()


def test_a_terminal_that_knows_only_ascii(checkpoint: str) -> None:
    """Run in its own process with ASCII output: other characters are escaped."""
    command = [sys.executable, "-c", "import sys; from dcp_remote.cli import main; sys.exit(main(sys.argv[1:]))"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    shown = subprocess.run(
        [*command, "show", checkpoint, "--key", "model.w"], env=environment, capture_output=True, check=True
    )
    assert rb"model.w  float32 3\xd74" in shown.stdout


def test_starts_without_torch_and_survives_a_closed_pipe(checkpoint: str) -> None:
    """Run in its own process, and close its output after a line, as `| head -1` does."""
    script = (
        "import sys; from dcp_remote.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", script, "show", checkpoint, "--key", "*"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model.w" in whole.stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as cut:
        assert cut.stdout is not None
        assert cut.stderr is not None
        cut.stdout.close()
        assert cut.stderr.read() == b""
    assert cut.returncode == 141


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1024.0 PiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    """Format sizes in powers of 1024 with one decimal."""
    assert human_bytes(size_bytes) == text
