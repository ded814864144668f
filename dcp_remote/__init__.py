"""Checkpoints of PyTorch training in object storage: every rank writes its own shards, one manifest commits them.

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter

with CheckpointManager("s3://bucket/my-run") as checkpoints:            # of a training run
    step = checkpoints.restore(state) or 0
    checkpoints.save(step + 1, state)

dcp.save(state, storage_writer=RemoteWriter("s3://bucket/my-checkpoint"))  # one by itself
dcp.load(state, storage_reader=RemoteReader("s3://bucket/my-checkpoint"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcp_remote import errors

if TYPE_CHECKING:
    from dcp_remote.loading import load
    from dcp_remote.manager import CheckpointManager
    from dcp_remote.per_rank import PerRank
    from dcp_remote.random_states import RandomStates
    from dcp_remote.reader import RemoteReader
    from dcp_remote.retention import Best, Retention
    from dcp_remote.run import CheckpointInfo, latest
    from dcp_remote.writer import RemoteWriter

__all__ = [
    "Best",
    "CheckpointInfo",
    "CheckpointManager",
    "PerRank",
    "RandomStates",
    "RemoteReader",
    "RemoteWriter",
    "Retention",
    "errors",
    "latest",
    "load",
]

# Resolved when first used, so that the command line starts without torch.
_LAZY = {
    "Best": "retention",
    "CheckpointInfo": "run",
    "CheckpointManager": "manager",
    "PerRank": "per_rank",
    "RandomStates": "random_states",
    "RemoteReader": "reader",
    "RemoteWriter": "writer",
    "Retention": "retention",
    "latest": "run",
    "load": "loading",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"dcp_remote.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'dcp_remote' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
