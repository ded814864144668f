"""How the demo and the tests watch a training: its events as JSON lines, and a digest of its whole state.

Nothing here is needed to save or to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor


class Events:
    """What happens on one rank: shown, or written as JSON lines to `<folder>/rank-<rank>.jsonl`, or both."""

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        """See the class; rank 0 is the one that shows its events."""
        self._show = rank == 0
        self._file: IO[str] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """Note one event, at once: the process may be killed at any time."""
        if self._show:
            line = " ".join([event, *(f"{name}={value}" for name, value in values.items())])
            print(f"{line}\n", end="", flush=True)  # in one piece: an upload's thread may be telling something, too
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank noted so far; a last line that is not whole yet is left out."""
    file = folder / f"rank-{rank}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logical_digest(state: Mapping[str, Any]) -> dict[str, str | int]:
    """SHA-256 over all names, tensors and values of a state; and its size. The same however many ranks hold it.

    Called by every rank. It gathers every tensor on every rank, one after another, which nobody would do who only
    wants to save.
    """
    digest, size_bytes = hashlib.sha256(), 0
    for name, value in sorted(_leaves("", state), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            whole = whole.detach().cpu().contiguous()
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().data)
            size_bytes += whole.nbytes
        else:
            digest.update(f"{name} {value!r}\n".encode())
    return {"sha256": digest.hexdigest(), "bytes": size_bytes}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Stateful):
        value = value.state_dict()
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value
