"""Storage of bodies: one preallocated file in shared memory, given out by extents.

`recv_into` puts a body there and `sendfile` takes it out, both without the interpreter's lock, a call for a whole body.
Nothing here knows of objects or requests; all is lost with the process.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dcp_remote.errors import InvalidArgumentError

# Extents begin at pages: what is given back to the kernel one by one must not share any.
_PAGE_BYTES = mmap.PAGESIZE

_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap has no name for it


class NoRoomError(Exception):
    """No extent of that size is free."""


@dataclass(eq=False, slots=True)
class Extent:
    """A part of the file."""

    start: int  # first byte, at a page
    stop: int  # end, at a page
    holders: int = 1  # objects, parts, and requests that receive or send it
    sent: int = 0  # connections that sent it and may have some of it on the way


@dataclass(frozen=True, slots=True)
class Span:
    """Some bytes of an extent."""

    extent: Extent
    start: int
    size_bytes: int


class Space:
    """The file that bodies lie in, and which parts of it are free.

    What `sendfile` put into a socket is the file's own pages, and stays so until the client has read it. So an extent
    is not given out anew before each connection that sent it has asked for something else, or is closed. Where room
    runs out before, the kernel is told to put fresh pages there; those on the way are not touched by that.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        # Rounded up, so that the last page is whole.
        self.size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        if self.size_bytes <= 0:
            raise InvalidArgumentError("The server needs room for bodies.", size_bytes=size_bytes)
        try:
            # Without a name from the beginning: however this process ends, the kernel frees it.
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # held as long as the process
            status = os.fstatvfs(self.file.fileno())
            if status.f_bavail * status.f_frsize < self.size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.file.fileno(), 0, self.size_bytes)
        except OSError as error:
            raise InvalidArgumentError(
                "There is no room for the server's bodies: ask for less, or name another folder.",
                folder=folder,
                size_bytes=self.size_bytes,
                cause=error,
            ) from error
        self.mapping = mmap.mmap(self.file.fileno(), self.size_bytes)
        with suppress(OSError):  # an older kernel: the first bodies then pay for mapping their pages
            self.mapping.madvise(_MADV_POPULATE_WRITE)
        self.view = memoryview(self.mapping)
        self._lock = threading.Lock()
        self._free = [(0, self.size_bytes)]
        self._on_the_way: set[Extent] = set()

    def take(self, size_bytes: int) -> Extent:
        """Find room; the lowest, whose pages are warm."""
        rounded = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        with self._lock:
            found = self._first_fit(rounded)
            if found is None:
                self._renew()
                found = self._first_fit(rounded)
            if found is None:
                free = sum(stop - start for start, stop in self._free)
                raise NoRoomError(
                    f"The server was started with too little room. size={size_bytes} free={free} of={self.size_bytes}"
                )
            return found

    def _first_fit(self, size_bytes: int) -> Extent | None:
        if not size_bytes:
            return Extent(0, 0)
        for number, (start, stop) in enumerate(self._free):
            if stop - start >= size_bytes:
                self._free[number : number + 1] = [(start + size_bytes, stop)] if stop - start > size_bytes else []
                return Extent(start, start + size_bytes)
        return None

    def _renew(self) -> None:
        for extent in self._on_the_way:
            self.mapping.madvise(mmap.MADV_REMOVE, extent.start, extent.stop - extent.start)
            self._put_back(extent)
        self._on_the_way.clear()

    def hold(self, extent: Extent) -> None:
        """One holder more."""
        with self._lock:
            assert extent.holders > 0
            extent.holders += 1

    def drop(self, extent: Extent) -> None:
        """One holder less; without any it is free, once nothing of it is on the way."""
        with self._lock:
            assert extent.holders > 0
            extent.holders -= 1
            if not extent.holders:
                if extent.sent:
                    self._on_the_way.add(extent)
                else:
                    self._put_back(extent)

    def sending(self, extent: Extent) -> None:
        """One connection more may have some of it on the way."""
        with self._lock:
            assert extent.holders > 0
            extent.sent += 1

    def arrived(self, extent: Extent) -> None:
        """One connection less."""
        with self._lock:
            extent.sent -= 1
            if not extent.sent and extent in self._on_the_way:
                self._on_the_way.remove(extent)
                self._put_back(extent)

    def _put_back(self, extent: Extent) -> None:
        start, stop = extent.start, extent.stop
        if start == stop:
            return
        at = bisect.bisect(self._free, (start, stop))
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, stop))
