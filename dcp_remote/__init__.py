"""Checkpoints of PyTorch training in object storage: every rank writes its own shards, one manifest commits them.

import torch.distributed.checkpoint as dcp
from dcp_remote import RemoteReader, RemoteWriter

dcp.save(state, storage_writer=RemoteWriter("s3://bucket/my-checkpoint"))
dcp.load(state, storage_reader=RemoteReader("s3://bucket/my-checkpoint"))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcp_remote import errors

if TYPE_CHECKING:
    from dcp_remote.loading import load
    from dcp_remote.reader import RemoteReader
    from dcp_remote.writer import RemoteWriter

__all__ = ["RemoteReader", "RemoteWriter", "errors", "load"]

# Resolved when first used, so that the command line starts without torch.
_LAZY = {"RemoteReader": "reader", "RemoteWriter": "writer", "load": "loading"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"dcp_remote.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'dcp_remote' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
