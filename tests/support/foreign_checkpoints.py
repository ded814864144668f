"""Checkpoints of other tools, whole and changed, and their import into a run."""

from __future__ import annotations

import json
import pickle
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dcp_remote import CheckpointManager, errors, import_checkpoint, latest, load

QUIET: dict[str, Any] = {"progress": False}

INDEX = "model.safetensors.index.json"


def save_run(run: Path, *states: dict[str, Any], **settings: Any) -> Path:
    """Save states of one rank as steps 1, 2 and so on; return the run."""
    with CheckpointManager(run, **settings, **QUIET) as manager:
        for step, state in enumerate(states, 1):
            manager.save(step, state, wait=True)
    return run


def imported(source: object, folder: Path, **options: Any) -> dict[str, Any]:
    """Import into a new run below a folder, and return its state."""
    run = folder / f"run-{uuid.uuid4().hex}"
    import_checkpoint(source, run, step=1, **QUIET, **options)  # type: ignore[arg-type]  # a path or URL
    return load(run)


def refused(kind: type[errors.DcpRemoteError], match: str, source: object, folder: Path, **options: Any) -> None:
    """Import, and see that the run has nothing."""
    with pytest.raises(kind, match=match):
        import_checkpoint(source, folder / "run", **{"step": 1, **QUIET, **options})  # type: ignore[arg-type]  # mistakes
    assert not (folder / "run").exists() or latest(folder / "run") is None


def hugging_face(folder: Path, tensors: dict[str, torch.Tensor], parts: int = 2) -> Path:
    """Make files of weights, each with every n-th tensor, an index and a configuration."""
    folder.mkdir()
    names = list(tensors)
    files = {f"model-{part + 1:05}-of-{parts:05}.safetensors": names[part::parts] for part in range(parts)}
    for file, own in files.items():
        save_file({name: tensors[name] for name in own}, folder / file, metadata={"format": "pt"})
    write_index(folder, {name: file for file, own in files.items() for name in own})
    (folder / "config.json").write_text('{"model_type": "small"}')
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def by_torch(folder: Path, change: Callable[[Any], object] = lambda _: None) -> Path:
    """Save by torch, and change the metadata."""
    dcp.save({"w": torch.arange(12.0).view(3, 4), "o": [1, {"x": 2}]}, checkpoint_id=folder, no_dist=True)
    change_metadata(folder, change)
    return folder


def change_metadata(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the metadata of a checkpoint of torch."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    """Change the records of a file of `torch.save`."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(name, data))


def damage(path: Path, mark: bytes, offset: int = 0) -> None:
    """Change a bit of a file, so many bytes behind the first place of a mark."""
    data = bytearray(path.read_bytes())
    data[data.index(mark) + offset] ^= 1
    path.write_bytes(data)
