"""Events of a training as JSON lines, and a digest of its whole state; for the demo and the tests.

Nothing here is needed to save or to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcp_remote import PerRank
from dcp_remote.manager.reports import LoadReport, SaveReport
from dcp_remote.serialization.state_dict import PER_RANK_KEY


class Events:
    """Events of one rank: printed, or written as JSON lines to `<folder>/rank-<rank>.jsonl`, or both."""

    def __init__(self, folder: Path | None, *, rank: int, digest: bool) -> None:
        """Open the file. Rank 0 alone prints its events; `digest` turns the hashing of states on."""
        self._show, self._digest = rank == 0, digest
        self._reported: set[tuple[str, str]] = set()
        self._file: IO[str] | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        """Write one event at once, because the process may be killed at any time."""
        if self._show:
            line = " ".join([event, *(f"{name}={value}" for name, value in values.items())])
            print(f"{line}\n", end="", flush=True)  # in one write, since a save's thread may print as well
        self._note(event, **values)

    def digest(self, of: str, *, step: int, state: Mapping[str, Any]) -> None:
        """Write the digest of a state that is being saved, or was loaded. Called by every rank; costly."""
        if self._digest:
            self._note("digest", of=of, step=step, **logical_digest(state))

    def report(self, report: SaveReport | LoadReport | None) -> None:
        """Write the report of a save or a load, once; not printed, because the manager logs it."""
        if report is not None:
            event = "saved" if isinstance(report, SaveReport) else "loaded"
            if (event, report.save_id) not in self._reported:
                self._reported.add((event, report.save_id))
                self._note(event, **asdict(report))

    def _note(self, event: str, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()


def read_events(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank so far, without a last line that is incomplete."""
    file = folder / f"rank-{rank}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def logical_digest(state: Mapping[str, Any]) -> dict[str, str | int]:
    """Return the SHA-256 of all names, tensors and values of a state, and its bytes, for any number of ranks.

    `PerRank` values are left out. Called by every rank, or by one process that loaded the whole state. Gathers every
    tensor on every rank, one after another, which saving never needs.
    """
    digest, size_bytes = hashlib.sha256(), 0
    shared = {name: value for name, value in state.items() if name != PER_RANK_KEY and not isinstance(value, PerRank)}
    for name, value in sorted(_leaves("", shared), key=lambda leaf: leaf[0]):
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
