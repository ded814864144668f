"""Reading of byte ranges of another tool's files, many at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.units import KiB
from dcp_remote.errors import CorruptCheckpointError, InvalidArgumentError, ObjectNotFoundError
from dcp_remote.format.columns import VALUE_MAX
from dcp_remote.format.manifest import DIMENSIONS_MAX
from dcp_remote.loading.downloads import RANGE_BYTES_MAX, Fetch, download
from dcp_remote.storage import ObjectStore
from dcp_remote.storage.base import ObjectInfo
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import check_key

_THREADS = 16

# Bytes between two ranges that are read with them, such as the header of a record in a zip.
_GAP_BYTES_MAX = 4 * KiB
_GAPS_BYTES_MAX = 64 * KiB


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file; `file` is its key."""

    file: str
    start: int
    length: int


class RangeReader:
    """Reader of ranges of the files of a folder; repeats a failed request for `retry_seconds`.

    `sizes` has the size of each file in bytes: of those that were listed (not in subfolders), and that were asked for.
    """

    def __init__(self, store: ObjectStore, files: Iterable[ObjectInfo], *, retry_seconds: float) -> None:
        """Store the arguments."""
        self.store, self._retry_seconds = store, retry_seconds
        self._files = {info.key: info for info in files}
        self.sizes = {file: info.size_bytes for file, info in self._files.items()}
        self._read: set[str] = set()

    def size_of(self, file: str) -> int | None:
        """Return the size of a file in bytes, None if there is none; a HEAD for one in a subfolder."""
        if file not in self.sizes:
            try:
                self._files[file] = self._retrying().head(file)
            except ObjectNotFoundError:
                return None
            self.sizes[file] = self._files[file].size_bytes
        return self.sizes[file]

    def require_unchanged(self) -> None:
        """Refuse files that were read and have another size or ETag now, or local ones another time; a HEAD each."""
        files = [self._files[file] for file in sorted(self._read)]
        with ThreadPoolExecutor(_THREADS) as pool:
            for before, now in zip(files, pool.map(lambda info: self._retrying().head(info.key), files), strict=True):
                # Listings may lack an ETag; mounts of buckets give a file another inode at times, which is in its ETag.
                marks = {before.version.etag, now.version.etag} - {None}
                if self.store.url.startswith("file:"):
                    marks = {str(before.modified_seconds), str(now.modified_seconds)}
                if before.size_bytes != now.size_bytes or len(marks) > 1:
                    raise CorruptCheckpointError(
                        "A file of the source was replaced while it was read; nothing was saved. Import once more.",
                        url=self.store.url,
                        file=now.key,
                    )

    def read(self, ranges: Sequence[FileRange]) -> list[memoryview]:
        """Return the bytes of ranges, which are held at once; one GET per 8 MiB, up to 16 at a time.

        Neighbors are read by one GET, and their bytes are kept together.
        """
        self._read.update(one.file for one in ranges)
        merged, places = _merge_neighbors(ranges)
        try:
            read = [memoryview(np.empty(one.length, dtype=np.uint8)) for one in merged]  # type: ignore[arg-type]  # a buffer
        except MemoryError as error:
            raise InvalidArgumentError(
                "A part of the source does not fit into the memory of this process.",
                url=self.store.url,
                bytes=sum(one.length for one in merged),
            ) from error
        found = [read[n][start : start + one.length] for one, (n, start) in zip(ranges, places, strict=True)]
        fetches = [
            Fetch(one.file, one.start + at, len(part), part, lambda _: b"", None)  # these files have no digests
            for one, data in zip(merged, read, strict=True)
            for at in range(0, one.length, RANGE_BYTES_MAX)
            for part in [data[at : at + RANGE_BYTES_MAX]]
        ]
        if len(fetches) == 1 and fetches[0].into is not None:  # without a thread
            self._retrying().get_into(fetches[0].key, fetches[0].start, fetches[0].into)
            return found
        # The buffers are the caller's, so the budget only bounds the requests in flight.
        for _ in download(
            self.store, fetches, memory_budget_bytes=16 * RANGE_BYTES_MAX, retry_seconds=self._retry_seconds
        ):
            pass
        return found

    def _retrying(self) -> RetryingStore:
        return RetryingStore(self.store, Deadline(self._retry_seconds))


def _merge_neighbors(ranges: Sequence[FileRange]) -> tuple[list[FileRange], list[tuple[int, int]]]:
    """Return the ranges with neighbors merged, up to 8 MiB; and for each given one, which holds it and where."""
    merged: list[FileRange] = []
    wanted_bytes = 0  # of the last one
    places = [(0, 0)] * len(ranges)
    for number, one in sorted(enumerate(ranges), key=lambda item: (item[1].file, item[1].start)):
        last = merged[-1] if merged else FileRange("", 0, 0)
        length = max(last.length, one.start + one.length - last.start)
        is_close = one.start <= last.start + last.length + _GAP_BYTES_MAX and length <= RANGE_BYTES_MAX
        # Gaps are held as well: no more of them than of what is wanted, and some headers of records.
        is_dense = length <= 2 * (wanted_bytes + one.length) + _GAPS_BYTES_MAX
        if one.length and last.length and one.file == last.file and is_close and is_dense:
            wanted_bytes += one.length
            merged[-1] = FileRange(one.file, last.start, length)
        else:
            merged.append(one)
            wanted_bytes = one.length
        places[number] = len(merged) - 1, one.start - merged[-1].start
    return merged, places


def require_range(reader: RangeReader, file: object, *, stop: int, of: str) -> str:
    """Return the key of a file; a name from another file, `of`, and the size `stop` that it needs are not trusted."""
    try:
        check_key(str(file))
    except InvalidArgumentError as error:
        raise CorruptCheckpointError(
            "A name is none of a file in this folder.", url=reader.store.url, file=file, named_by=of
        ) from error
    file = str(file)
    size_bytes = reader.size_of(file)
    if size_bytes is None:
        raise CorruptCheckpointError(
            "A file of the checkpoint is missing. Copy all of its files.", url=reader.store.url, file=file, named_by=of
        )
    if size_bytes < stop:
        raise CorruptCheckpointError(
            "A file of the checkpoint is too short. Copy it once more.",
            url=reader.store.url,
            file=file,
            size_bytes=size_bytes,
            needed_bytes=stop,
        )
    return file


def require_shape(shape: Sequence[int], dtype: torch.dtype, **details: object) -> None:
    """Refuse a tensor with more dimensions or bytes than a checkpoint can hold, before torch sees the shape.

    Sizes of 0 count as 1.
    """
    if len(shape) > DIMENSIONS_MAX or math.prod(max(size, 1) for size in shape) * dtype.itemsize > VALUE_MAX:
        raise InvalidArgumentError(
            f"A tensor has more than {DIMENSIONS_MAX} dimensions or {VALUE_MAX} bytes. Reshape it.",
            **details,
            shape=tuple(shape[: DIMENSIONS_MAX + 1]),
        )
