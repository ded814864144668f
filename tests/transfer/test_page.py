"""The code blocks of docs/import-export.md, run as they stand, but for the URL of the run."""

from __future__ import annotations

import re
import shlex
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from dcp_remote import export_checkpoint, latest
from dcp_remote.cli import main
from dcp_remote.testing.servers import S3Server

PAGE = Path(__file__).parent.parent.parent / "docs" / "import-export.md"


@pytest.fixture
def url(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a run; its server and credentials are in the environment, as for users."""
    bucket = f"page-{uuid.uuid4().hex[:12]}"
    s3_server.create_bucket(bucket)
    for name, value in (
        ("AWS_ENDPOINT_URL", s3_server.endpoint_url),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return f"s3://{bucket}/run"


def blocks(language: str, url: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("s3://bucket/run", url) for block in found]


def test_the_functions(url: str, tmp_path: Path) -> None:
    first, _, second = blocks("python", url)
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "torch-checkpoint", no_dist=True)
    exec(first, {})
    assert torch.equal(load_file(tmp_path / "weights" / "model.safetensors")["w"], torch.ones(3))
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}, "last.pt")
    exec(second.replace(url, f"{url}2"), {})
    info = latest(f"{url}2")
    assert info is not None
    assert info.step == 5


def test_a_training_that_begins_with_weights(url: str, tmp_path: Path) -> None:
    """Twice, as a job that starts again: the second goes on from its own checkpoint, with the optimizer and files."""
    base = url.replace("/run", "/base")
    block = blocks("python", url)[1].replace("s3://bucket/base", base)
    (tmp_path / "weights").mkdir()
    save_file({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, tmp_path / "weights" / "model.safetensors")
    (tmp_path / "weights" / "config.json").write_text("{}")
    (line,) = re.findall(r"`dcp-remote (import weights .*)`", PAGE.read_text())
    assert main(shlex.split(line.replace("s3://bucket/base", base))) == 0
    for step in (1, 2):
        found: dict[str, Any] = {}
        exec(block, found)
        assert torch.equal(found["model"].weight, torch.ones(2, 4))
        assert found["step"] == step - 1
    export_checkpoint(url, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_the_commands(url: str, tmp_path: Path) -> None:
    (block,) = blocks("bash", url)
    dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "torch-checkpoint", no_dist=True)
    for line in block.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "dcp-remote"
        assert main(arguments) == 0
    assert load_file(tmp_path / "weights" / "model.safetensors")["w"].dtype == torch.bfloat16
