"""`dcp-remote show`, as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_remote import RemoteWriter
from dcp_remote.cli import main
from dcp_remote.cli.show import human_bytes
from dcp_remote.testing.ranks import save_as_ranks


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A small one, saved by two ranks."""
    state = {"model": {"w": torch.zeros(3, 4), "s": torch.tensor(1.0)}, "optim": {"lr": 0.5, "betas": (0.9, 0.99)}}
    save_as_ranks([state, state], lambda: RemoteWriter(tmp_path / "ck"))
    return str(tmp_path / "ck")


def test_shows_facts_and_top_level_keys(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What somebody wants to know first."""
    assert main(["show", checkpoint]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "world size  2" in lines
    assert "model  2 tensors, 0 objects, 52 B" in lines
    assert "optim  0 tensors, 2 objects, 0 B" in lines


def test_lists_entries_by_pattern(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors with dtype, shape, size; objects with their value."""
    assert main(["show", checkpoint, "--key", "model.*", "--key", "optim.lr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model.w  float32 3×4, 48 B in 1 chunk" in lines
    assert "model.s  float32 scalar, 4 B in 1 chunk" in lines
    assert "optim.lr  0.5" in lines
    assert not any(line.startswith("optim.betas") for line in lines)


def test_json_is_a_document(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts."""
    assert main(["show", checkpoint, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 2
    assert document["entries"]["model.w"] == {"dtype": "float32", "shape": [3, 4], "chunks": 1, "bytes": 48}
    assert document["entries"]["optim.lr"] == {"value": 0.5}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{checkpoint}-typo"], 1, "no committed checkpoint"),
        (["s4://bucket/x"], 2, "Unknown scheme"),
        (["{checkpoint}", "--key", "modle.*"], 2, "model, optim"),
        (["{checkpoint}", "--option", "nonsense"], 2, "NAME=VALUE"),
        (["{checkpoint}", "--endpoint-url", "http://127.0.0.1:1"], 2, "endpoint_url"),
    ],
)
def test_failure_is_one_line_and_a_code(
    checkpoint: str, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    """No traceback, nothing on standard output; 1 if it failed, 2 if the command line is wrong."""
    assert main(["show", *(argument.format(checkpoint=checkpoint) for argument in arguments)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_damaged_manifest_is_told(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Truncated."""
    path = Path(checkpoint, "manifest.json")
    path.write_bytes(path.read_bytes()[:-10])
    assert main(["show", checkpoint]) == 1
    assert "damaged or truncated" in capsys.readouterr().err


def test_starts_without_torch_and_survives_a_closed_pipe(checkpoint: str) -> None:
    """In a process of its own, with the output cut off after a line, as `| head -1` does."""
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
    assert cut.returncode == 1


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 2**40, "5.0 TiB"), (2**60, "1024.0 PiB")],
)
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    """Powers of 1024, one decimal."""
    assert human_bytes(size_bytes) == text
