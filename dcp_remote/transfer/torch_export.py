"""TorchExport: a checkpoint as a folder of torch's distributed checkpoint."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from dcp_remote.common.digests import digest
from dcp_remote.common.geometry import Box
from dcp_remote.coordination.torch_errors import plain_errors
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError
from dcp_remote.serialization.files import Files
from dcp_remote.serialization.tensors import byte_view
from dcp_remote.transfer.checkpoint import SavedCheckpoint, size_of
from dcp_remote.transfer.piece_planner import PiecePlanner
from dcp_remote.transfer.source import open_source
from dcp_remote.transfer.tensor_source import cut_pieces
from dcp_remote.transfer.torch_source import TORCH_METADATA_FILE, TorchSource

logger = logging.getLogger(__name__)


class TorchExport:
    """Export of all entries. `bytes_max` bytes of tensors are read at once; larger tensors become several chunks."""

    last_file = TORCH_METADATA_FILE  # without which torch finds no checkpoint

    def __init__(self, saved: SavedCheckpoint, *, dtype: torch.dtype | None, bytes_max: int) -> None:
        """Choose the dtypes; no request is sent."""
        self._saved, self._bytes_max = saved, bytes_max
        if saved.manifest.run is not None and saved.manifest.run.thinned:
            logger.warning(
                "not in the export, since retention has deleted it: %s", ", ".join(saved.manifest.run.thinned)
            )
        self._dtypes: dict[str, torch.dtype] = {}
        for name in saved.manifest.tensors.names:
            if not saved.is_plain(name):
                raise InvalidArgumentError(
                    "torch's writer cannot save a tensor that is sparse, quantized or of an own class. Load it by "
                    "dcp_remote.load.",
                    tensor=name,
                )
            own = saved.dtype(name)
            self._dtypes[name] = own if dtype is None or not own.is_floating_point else dtype
        self.total_bytes = sum(size_of(Box((), saved.shape(name)), own) for name, own in self._dtypes.items())

    def write(self, folder: Path, add: Callable[[int], None]) -> None:
        """Write the files into a folder, and read them back; `add` is told the bytes of both."""
        planner = _RunPlanner(self._saved, self._dtypes, add, bytes_max=self._bytes_max)
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
        written = open_source(folder, allow_pickle=True, piece_bytes_max=2 * self._bytes_max)
        assert isinstance(written, TorchSource)
        for name, span in written.object_ranges.items():
            self._require_equal(folder, name, written.reader.read([span])[0], planner.object_digests[name])
        for name in self._dtypes:
            for box in written.pieces(name):
                (tensor,) = written.read([(name, box)])
                self._require_equal(folder, name, byte_view(tensor.contiguous()), planner.digests[name, box][1])
                add(size_of(box, tensor.dtype))

    def _require_equal(self, folder: Path, name: str, data: memoryview, expected: bytes) -> None:
        if digest(data) != expected:
            raise CorruptCheckpointError(
                "Bytes read back differ from those that were written. Check the disk.", folder=str(folder), entry=name
            )

    def _make_state(self) -> dict[str, Any]:
        """Return the state, with tensors on the meta device."""
        names = list(self._saved.manifest.names())
        values = self._saved.objects([name for name in names if name not in self._dtypes])
        state: dict[str, Any] = {}
        for name in names:
            if name in self._dtypes:
                value: Any = torch.empty(self._saved.shape(name), dtype=self._dtypes[name], device="meta")
            else:
                value = values[name]
            # torch asks only the values at the top for their state.
            set_element(state, self._saved.path(name), value.state_dict() if isinstance(value, Files) else value)
        return state


class _RunPlanner(PiecePlanner):
    """Planner that reads a checkpoint, with the given dtypes by name; `add` is told the bytes that were read."""

    def __init__(
        self,
        saved: SavedCheckpoint,
        dtypes: dict[str, torch.dtype],
        add: Callable[[int], None],
        *,
        bytes_max: int,
    ) -> None:
        super().__init__(bytes_max=bytes_max)
        self._saved, self._dtypes, self._add = saved, dtypes, add
        self.object_digests: dict[str, bytes] = {}

    def cut(self, name: str) -> Mapping[Box, int]:
        shape, dtype = self._saved.shape(name), self._dtypes[name]
        boxes = cut_pieces(Box((0,) * len(shape), shape), dtype, piece_bytes_max=max(16, self._bytes_max))
        return {box: size_of(box, dtype) for box in boxes}

    def read(self, pieces: Sequence[tuple[str, Box]]) -> Sequence[torch.Tensor]:
        return self._saved.read([(name, box, self._dtypes[name]) for name, box in pieces])

    def note_read(self, tensor: torch.Tensor) -> None:
        self._add(tensor.nbytes)

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = super().resolve_data(write_item)
        if isinstance(value, io.BytesIO):
            self.object_digests[write_item.index.fqn] = digest(value.getbuffer())
        return value
