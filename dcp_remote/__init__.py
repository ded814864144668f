"""Checkpoints of PyTorch training in object storage: every rank writes its own shards, and one manifest commits them.

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter

with CheckpointManager("s3://bucket/my-run") as checkpoints:               # checkpoints of a training run
    step = checkpoints.restore(state) or 0
    checkpoints.save(step + 1, state)

dcp.save(state, storage_writer=RemoteWriter("s3://bucket/my-checkpoint"))  # single checkpoint, outside a run
dcp.load(state, storage_reader=RemoteReader("s3://bucket/my-checkpoint"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcp_remote import errors

if TYPE_CHECKING:
    from dcp_remote.loading.load import load
    from dcp_remote.loading.planner import RemoteLoadPlanner
    from dcp_remote.manager.manager import CheckpointManager
    from dcp_remote.manager.random_states import RandomStates
    from dcp_remote.reader import RemoteReader
    from dcp_remote.run.retention import Best, Retention
    from dcp_remote.run.run import CheckpointInfo, latest
    from dcp_remote.serialization.state_dict import PerRank
    from dcp_remote.writer import RemoteWriter

__all__ = [
    "Best",
    "CheckpointInfo",
    "CheckpointManager",
    "PerRank",
    "RandomStates",
    "RemoteLoadPlanner",
    "RemoteReader",
    "RemoteWriter",
    "Retention",
    "errors",
    "latest",
    "load",
]

# Imported when first used, so that the command line starts without torch.
_LAZY = {
    "Best": "run.retention",
    "CheckpointInfo": "run.run",
    "CheckpointManager": "manager.manager",
    "PerRank": "serialization.state_dict",
    "RandomStates": "manager.random_states",
    "RemoteLoadPlanner": "loading.planner",
    "RemoteReader": "reader",
    "RemoteWriter": "writer",
    "Retention": "run.retention",
    "latest": "run.run",
    "load": "loading.load",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"dcp_remote.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'dcp_remote' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
