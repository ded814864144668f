"""Warnings that name what an import or an export leaves out, or cannot hold."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dcp_remote import Files, Retention, export_checkpoint, import_checkpoint, open_run
from tests.support.foreign_checkpoints import QUIET, save_run


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Collect the warnings of imports and exports."""
    caplog.set_level(logging.WARNING, "dcp_remote.transfer")
    return caplog


def test_objects_beside_the_weights(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    """Named under any key; the small files are written."""
    state = {"model": {"w": torch.ones(2), "epoch": 3}, "files": Files({"config.json": b"{}"})}
    run = save_run(tmp_path / "run", state)
    for number, key in enumerate(("model", "")):
        warned.clear()
        export_checkpoint(run, tmp_path / str(number), key=key, **QUIET)
        assert [record.getMessage() for record in warned.records] == [
            "left out of the export, since safetensors hold no objects: 1 entries, such as model.epoch"
        ]
        assert (tmp_path / str(number) / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_states_of_an_optimizer_that_have_numbers(tmp_path: Path, warned: pytest.LogCaptureFixture, kind: str) -> None:
    """Imported, with a warning: an optimizer's own state_dict() fits no restore; by torch's names there is none."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    named = get_optimizer_state_dict(model, optimizer)
    for number, optim in enumerate((optimizer.state_dict(), named)):
        state = {"model": model.state_dict(), "trainer": {"optimizer": optim}}
        source = tmp_path / f"{number}.pt"
        if kind == "file":
            torch.save(state, source)
        else:
            dcp.save(state, checkpoint_id=source, no_dist=True)
        import_checkpoint(source, tmp_path / f"run-{number}", step=1, **QUIET)
        assert [record.getMessage().partition(" have numbers")[0] for record in warned.records] == [
            f"file://{tmp_path / '0.pt' if kind == 'folder' else tmp_path}: the states of trainer.optimizer"
        ]


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_values_beyond_the_range_of_a_dtype(tmp_path: Path, kind: Any, warned: pytest.LogCaptureFixture) -> None:
    model = {"large": torch.tensor([1.0, -7e4, torch.nan]), "small": torch.tensor([6e4]), "none": torch.ones(0)}
    run = save_run(tmp_path / "run", {"model": model})
    export_checkpoint(run, tmp_path / "bf16", kind=kind, dtype="bfloat16", **QUIET)
    assert not warned.records
    export_checkpoint(run, tmp_path / "fp16", kind=kind, dtype="float16", **QUIET)
    (record,) = warned.records
    assert record.getMessage() == "the conversion left infinite values in 1 tensor: model.large (float16)"


def test_an_optimizer_that_retention_has_deleted(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    state = {"model": {"w": torch.ones(2)}, "optim": {"m": torch.ones(2)}}
    run = save_run(tmp_path / "run", state, state, state, retention=Retention(keep_last=3, keep_optimizer_last=1))
    assert next(info for info in open_run(run).checkpoints() if info.step == 1).thinned
    export_checkpoint(run, tmp_path / "out", step=1, kind="torch", **QUIET)
    (record,) = warned.records
    assert record.getMessage() == "not in the export, since retention has deleted it: optim"


def test_other_files_of_a_source(tmp_path: Path, warned: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.ones(2)}, source / "model.safetensors")
    for name in ("config.json", "optimizer.bin", "logo.png"):
        (source / name).write_bytes(b"{}")
    import_checkpoint(source, tmp_path / "run", step=1, **QUIET)
    (record,) = warned.records
    assert record.getMessage() == "left out of the import: 2 files, such as logo.png, optimizer.bin"
    export_checkpoint(tmp_path / "run", tmp_path / "out", **QUIET)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], torch.ones(2))
