"""Checkpoints of PyTorch training in object storage: every rank writes its own shards, and one manifest commits them.

from dcp_remote import CheckpointManager, RemoteReader, RemoteWriter, training_state

state = training_state(model=model, optimizer=optimizer)
with CheckpointManager("s3://bucket/my-run") as checkpoints:               # checkpoints of a training run
    step = checkpoints.restore(state) or 0
    checkpoints.save(step + 1, state)

dcp.save(state, storage_writer=RemoteWriter("s3://bucket/my-checkpoint"))  # single checkpoint, outside a run
dcp.load(state, storage_reader=RemoteReader("s3://bucket/my-checkpoint"))
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from dcp_remote import errors as errors

if TYPE_CHECKING:
    from dcp_remote.coordination.torch_errors import plain_errors as plain_errors
    from dcp_remote.loading.load import load as load
    from dcp_remote.loading.peer_sockets import RankSockets as RankSockets
    from dcp_remote.loading.planner import RemoteLoadPlanner as RemoteLoadPlanner
    from dcp_remote.loading.run_handle import Run as Run
    from dcp_remote.loading.run_handle import open_run as open_run
    from dcp_remote.manager.manager import CheckpointManager as CheckpointManager
    from dcp_remote.manager.progress import ProgressReport as ProgressReport
    from dcp_remote.manager.random_states import RandomStates as RandomStates
    from dcp_remote.manager.reports import LoadReport as LoadReport
    from dcp_remote.manager.reports import SaveReport as SaveReport
    from dcp_remote.manager.save_policy import SavePolicy as SavePolicy
    from dcp_remote.manager.training_state import training_state as training_state
    from dcp_remote.reader import RemoteReader as RemoteReader
    from dcp_remote.run.info import CheckpointInfo as CheckpointInfo
    from dcp_remote.run.info import latest as latest
    from dcp_remote.run.retention import Best as Best
    from dcp_remote.run.retention import Retention as Retention
    from dcp_remote.run.verification import VerifyReport as VerifyReport
    from dcp_remote.serialization.files import Files as Files
    from dcp_remote.serialization.local_boxes import LocalBoxes as LocalBoxes
    from dcp_remote.serialization.module_state import ModelState as ModelState
    from dcp_remote.serialization.module_state import OptimizerState as OptimizerState
    from dcp_remote.serialization.opaque import Opaque as Opaque
    from dcp_remote.serialization.plain_values import as_plain as as_plain
    from dcp_remote.serialization.refused_values import RefusedValue as RefusedValue
    from dcp_remote.serialization.refused_values import refused_values as refused_values
    from dcp_remote.serialization.state_dict import PerRank as PerRank
    from dcp_remote.storage.url import is_remote as is_remote
    from dcp_remote.transfer.exporting import export_checkpoint as export_checkpoint
    from dcp_remote.transfer.importing import import_checkpoint as import_checkpoint
    from dcp_remote.writer import RemoteWriter as RemoteWriter

    __version__: str

# Imported when first used, so that the command line starts without torch.
_LAZY = {
    "Best": "run.retention",
    "CheckpointInfo": "run.info",
    "CheckpointManager": "manager.manager",
    "LoadReport": "manager.reports",
    "Files": "serialization.files",
    "ModelState": "serialization.module_state",
    "Opaque": "serialization.opaque",
    "OptimizerState": "serialization.module_state",
    "LocalBoxes": "serialization.local_boxes",
    "PerRank": "serialization.state_dict",
    "ProgressReport": "manager.progress",
    "RandomStates": "manager.random_states",
    "RefusedValue": "serialization.refused_values",
    "RankSockets": "loading.peer_sockets",
    "RemoteLoadPlanner": "loading.planner",
    "RemoteReader": "reader",
    "RemoteWriter": "writer",
    "Retention": "run.retention",
    "SavePolicy": "manager.save_policy",
    "Run": "loading.run_handle",
    "SaveReport": "manager.reports",
    "VerifyReport": "run.verification",
    "export_checkpoint": "transfer.exporting",
    "import_checkpoint": "transfer.importing",
    "is_remote": "storage.url",
    "as_plain": "serialization.plain_values",
    "latest": "run.info",
    "load": "loading.load",
    "open_run": "loading.run_handle",
    "refused_values": "serialization.refused_values",
    "training_state": "manager.training_state",
    "plain_errors": "coordination.torch_errors",
}
__all__ = [*_LAZY, "__version__", "errors"]  # noqa: PLE0604  # all keys of `_LAZY` are strings


# Oldest torch that pyproject.toml allows; an installation without dependencies, or a vendor's container, may have an
# older one.
_TORCH_MIN = (2, 9)


def _require_torch() -> None:
    """Refuse an older torch by its version, since an import that fails or a missing attribute would not name it."""
    from importlib import metadata

    try:
        found = sys.modules["torch"].__version__ if "torch" in sys.modules else metadata.version("torch")
    except (AttributeError, metadata.PackageNotFoundError):
        return  # the import of torch says what is wrong
    numbers = re.match(r"(\d+)\.(\d+)", str(found))
    if numbers and (int(numbers[1]), int(numbers[2])) < _TORCH_MIN:
        needed = ".".join(map(str, _TORCH_MIN))
        raise ImportError(f"dcp_remote needs torch {needed} or newer, and torch {found} is installed.", name="torch")


def __getattr__(name: str) -> object:
    if name in _LAZY:
        if not _LAZY[name].startswith(("run.", "storage.")):
            _require_torch()
        return getattr(import_module(f"dcp_remote.{_LAZY[name]}"), name)
    if name == "__version__":
        # The installation's metadata, whose one source is pyproject.toml; importing the reader of these takes a while.
        from dcp_remote.common.provenance import own_version

        return own_version()
    raise AttributeError(f"module 'dcp_remote' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
