"""SavedCheckpoint: a checkpoint of dcp_remote of which parts of tensors are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

from dcp_remote.common.geometry import Box
from dcp_remote.common.text import format_count, join_some
from dcp_remote.common.units import MiB
from dcp_remote.format.manifest import RAW
from dcp_remote.loading.engine import Target, read_targets
from dcp_remote.loading.read_plan import Want
from dcp_remote.loading.targets import BytesTarget, make_box_targets, make_object_target
from dcp_remote.run.lookup import read_manifest
from dcp_remote.serialization.state_dict import unwrap_per_rank
from dcp_remote.serialization.tensors import dtype_name, empty_tensor, parse_dtype
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.location import Location
from dcp_remote.transfer.tensor_source import cut_pieces

logger = logging.getLogger(__name__)

# Time for which the first requests are repeated, in seconds: a user who waits hears soon of a server that is down.
LOOK_SECONDS = 30.0

# dtypes in which large values become infinite.
_NARROW = (torch.float16, torch.bfloat16, torch.float32)


class SavedCheckpoint:
    """Checkpoint of a run, or by itself; every byte that is read is verified.

    Floating-point tensors are converted to `dtype`, if it is given. Requests in flight hold `buffer_bytes_max`, and a
    piece has half of that at most. The first requests are repeated for `look_seconds`, one later request for
    `retry_seconds`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | ObjectStore,
        *,
        step: int | str | None,
        dtype: torch.dtype | None = None,
        storage_options: Mapping[str, object] | None,
        allow_pickle: bool,
        buffer_bytes_max: int,
        look_seconds: float,
        retry_seconds: float,
    ) -> None:
        """Read the manifest; one GET, of a run up to three."""
        self.store = Location.of(url, storage_options).store
        self.manifest = read_manifest(self.store, step=step, retry_seconds=look_seconds)
        self.piece_bytes_max = max(16, buffer_bytes_max // 2)
        self._allow_pickle, self._buffer_bytes_max, self._retry_seconds = allow_pickle, buffer_bytes_max, retry_seconds
        self._dtype = dtype
        self._overflowed: dict[str, None] = {}  # tensors with infinite values after a conversion

    @property
    def step(self) -> int | None:
        """Step of training; None outside a run."""
        return self.manifest.run.step if self.manifest.run is not None else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.manifest.tensors.shape_of(self.manifest.tensors.index[name])

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, converted."""
        own = self._stored_dtype(name)
        return own if self._dtype is None or not own.is_floating_point else self._dtype

    def is_plain(self, name: str) -> bool:
        """Return whether an entry is a tensor that is stored as its elements."""
        number = self.manifest.tensors.index.get(name)
        return number is not None and self.manifest.tensors.kind_of(number).encoding == RAW

    def pieces(self, name: str) -> dict[Box, int]:
        """Return the boxes of a tensor that are read at once, each contiguous and in order, and the bytes of each."""
        shape, dtype = self.shape(name), self.dtype(name)
        boxes = cut_pieces(Box((0,) * len(shape), shape), dtype, piece_bytes_max=self.piece_bytes_max)
        return {box: box.elements * dtype.itemsize for box in boxes}

    def read(self, parts: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """Return the values of boxes of plain tensors, converted.

        Costs one GET per range of 8 MiB, and one per shard of which a piece is read in part.
        """
        tensors = [empty_tensor(self.dtype(name), box.sizes) for name, box in parts]
        index = self.manifest.tensors.index
        targets = (
            make_box_targets(self.manifest, index[name], box, into)
            for (name, box), into in zip(parts, tensors, strict=True)
        )
        self._read([*chain(*targets)])
        for (name, _), into in zip(parts, tensors, strict=True):
            is_converted = into.dtype in _NARROW and into.dtype != self._stored_dtype(name)
            if is_converted and any(part.isinf().any() for part in into.reshape(-1).split(MiB)):
                self._overflowed[name] = None
        return tensors

    def log_overflows(self) -> None:
        """Log which tensors have infinite values after a conversion."""
        if self._overflowed:
            logger.warning(
                "the conversion left infinite values in %s: %s",
                format_count(len(self._overflowed), "tensor"),
                join_some([f"{name} ({dtype_name(self.dtype(name))})" for name in self._overflowed]),
            )

    def objects(self, names: Sequence[str]) -> dict[str, Any]:
        """Return objects by name; one GET per range of 8 MiB of those that are not in the manifest."""
        values: dict[str, Any] = {}
        deliver = values.__setitem__
        self._read(
            [
                make_object_target(self.manifest, name, partial(deliver, name), allow_pickle=self._allow_pickle)
                for name in names
            ]
        )
        return {name: unwrap_per_rank(self.path(name), values[name]) for name in names}

    def check(self, names: Iterable[str]) -> None:
        """Read entries whole, and compare their bytes with the digests that the save made; nothing is decoded.

        Costs one GET per range of 8 MiB, and holds one entry at a time on top of the requests in flight.
        """
        tensors = self.manifest.tensors
        targets: list[Target] = []
        for name in names:
            wants = []
            if (stored := self.manifest.stored_index.get(name)) is not None:
                wants = [Want(stored.piece_first, stored.piece_first + stored.pieces, None)]
            elif (number := tensors.index.get(name)) is not None:
                bounds = tensors.piece_first[tensors.chunk_first[number] : tensors.chunk_first[number + 1] + 1]
                wants = [Want(start, stop, None) for start, stop in pairwise(bounds.tolist())]
            targets += [BytesTarget(self.manifest, name, want, lambda _: None) for want in wants]
        self._read(targets)

    def path(self, name: str) -> tuple[str | int, ...]:
        """Return the place of an entry in the state."""
        return (self.manifest.flatten or {}).get(name, (name,))

    def _stored_dtype(self, name: str) -> torch.dtype:
        return parse_dtype(self.manifest.tensors.kind_of(self.manifest.tensors.index[name]).dtype)

    def _read(self, targets: Sequence[Target]) -> None:
        read_targets(
            self.store,
            self.manifest,
            targets,
            memory_budget_bytes=self._buffer_bytes_max,
            retry_seconds=self._retry_seconds,
        )
