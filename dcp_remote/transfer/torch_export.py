"""TorchExport: a checkpoint as a folder of torch's distributed checkpoint."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from dcp_remote.common.digests import digest
from dcp_remote.coordination.torch_errors import plain_errors
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.serialization.files import Files
from dcp_remote.serialization.tensors import byte_view
from dcp_remote.transfer.checkpoint import SavedCheckpoint
from dcp_remote.transfer.piece_planner import PiecePlanner
from dcp_remote.transfer.source import open_source
from dcp_remote.transfer.torch_source import TORCH_METADATA_FILE, TorchSource

logger = logging.getLogger(__name__)


class TorchExport:
    """Export of all entries; tensors larger than a piece become several chunks."""

    last_file = TORCH_METADATA_FILE  # without which torch finds no checkpoint

    def __init__(self, saved: SavedCheckpoint) -> None:
        """Check that torch can save all tensors; no request is sent."""
        self._saved, self._tensors = saved, saved.manifest.tensors.names
        if saved.manifest.run is not None and saved.manifest.run.thinned:
            logger.warning(
                "not in the export, since retention has deleted it: %s", ", ".join(saved.manifest.run.thinned)
            )
        for name in self._tensors:
            if not saved.is_plain(name):
                raise InvalidArgumentError(
                    "torch's writer cannot save a tensor that is sparse, quantized or of an own class. Load it by "
                    "dcp_remote.load.",
                    tensor=name,
                )
        self.total_bytes = sum(sum(saved.pieces(name).values()) for name in self._tensors)

    def write(self, folder: Path, add: Callable[[int], None]) -> None:
        """Write the files into a folder, and read them back; `add` is told the bytes of both."""
        planner = _RunPlanner(self._saved, add)
        state = self._make_state()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: this is one process
            try:
                with plain_errors():
                    dcp.save(state, storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True)
            except CheckpointException as failed:
                error: BaseException | None = failed.failures[0][0]
                # At the end of a file that could not be written, torch raises another error.
                while error is not None and not isinstance(error, OSError):
                    error = error.__context__
                raise (error or failed.failures[0][0]) from None
        written = open_source(folder, allow_pickle=True, piece_bytes_max=2 * self._saved.piece_bytes_max)
        assert isinstance(written, TorchSource)
        for name, span in written.object_ranges.items():
            self._require_equal(folder, name, written.reader.read([span])[0], planner.object_digests[name])
        for name in self._tensors:
            for box in written.pieces(name):
                (tensor,) = written.read([(name, box)])
                self._require_equal(folder, name, byte_view(tensor.contiguous()), planner.digests[name, box])
                add(tensor.nbytes)

    def _require_equal(self, folder: Path, name: str, data: memoryview, expected: bytes) -> None:
        if digest(data) != expected:
            raise CorruptCheckpointError(
                "Bytes read back differ from those that were written. Check the disk.", folder=str(folder), entry=name
            )

    def _make_state(self) -> dict[str, Any]:
        """Return the state, with tensors on the meta device."""
        names = list(self._saved.manifest.names())
        index = self._saved.manifest.tensors.index
        values = self._saved.objects([name for name in names if name not in index])
        state: dict[str, Any] = {}
        for name in names:
            if name in index:
                value: Any = torch.empty(self._saved.shape(name), dtype=self._saved.dtype(name), device="meta")
            else:
                value = values[name]
            # torch asks only the values at the top for their state.
            set_element(state, self._saved.path(name), value.state_dict() if isinstance(value, Files) else value)
        return state


class _RunPlanner(PiecePlanner):
    """Planner that reads a checkpoint; `add` is told the bytes that were read."""

    def __init__(self, saved: SavedCheckpoint, add: Callable[[int], None]) -> None:
        super().__init__(saved, bytes_max=saved.piece_bytes_max)
        self._add = add
        self.object_digests: dict[str, bytes] = {}

    def note_read(self, tensor: torch.Tensor) -> None:
        self._add(tensor.nbytes)

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        if isinstance(value, io.BytesIO):
            self.object_digests[write_item.index.fqn] = digest(value.getbuffer())
        return value
