"""Contents by key: buckets, objects and uploads, in dictionaries; their bytes are extents of the file.

What was put is there at once and whole, and conditions hold at the very moment of a put: there is one lock. An object
that is replaced or deleted while somebody reads it stays whole for that reader.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from dcp_remote.common.units import MiB
from tests.benchmark.server.request import Conditions, S3Error, no_such_key
from tests.benchmark.server.space import Extent, Space, Span

# S3's own, of all parts but the last.
_PART_BYTES_MIN = 5 * MiB


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that came in one body."""

    extent: Extent
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Object:
    """Content of a key: one piece if it was put whole, one per part otherwise."""

    pieces: tuple[Piece, ...]
    etag: str
    modified_seconds: float
    checksums: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        """Return the length of all pieces, in bytes."""
        return sum(piece.size_bytes for piece in self.pieces)

    def spans(self, start: int, size_bytes: int) -> Iterator[Span]:
        """Return the places of so many of its bytes, from `start` on."""
        for piece in self.pieces:
            if size_bytes <= 0:
                return
            if start < piece.size_bytes:
                count = min(size_bytes, piece.size_bytes - start)
                yield Span(piece.extent, piece.extent.start + start, count)
                size_bytes -= count
                start = 0
            else:
                start -= piece.size_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Part that was put under a number of an upload."""

    piece: Piece
    etag: str


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that comes in parts, by their numbers."""

    bucket: str
    key: str
    parts: dict[int, Part] = field(default_factory=dict)


class Objects:
    """Contents of the server: dictionaries under one lock, which is never held while bytes move."""

    def __init__(self, space: Space, *, buckets: Iterable[str]) -> None:
        self._space = space
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, Object]] = {name: {} for name in buckets}
        self._uploads: dict[str, Upload] = {}
        self._numbers = itertools.count(1)
        # So that no ETag of an earlier server is one of this one's.
        self._nonce = os.urandom(8).hex()
        self._modified_seconds = 0.0

    def new_etag(self) -> str:
        """Not seen before. With the suffix of multipart uploads: nobody takes it for an MD5, and checks the content."""
        return f"{self._nonce}{next(self._numbers):016x}-1"

    def now_seconds(self) -> float:
        """The store's clock, which does not go back."""
        with self._lock:
            return self._now()

    def _now(self) -> float:
        self._modified_seconds = max(self._modified_seconds, time.time())
        return self._modified_seconds

    def create_bucket(self, bucket: str) -> None:
        """Make an empty bucket; one that exists stays as it is."""
        with self._lock:
            self._buckets.setdefault(bucket, {})

    def require_bucket(self, bucket: str) -> None:
        """Refuse with 404 where there is none."""
        with self._lock:
            self._bucket(bucket)

    def _bucket(self, bucket: str) -> dict[str, Object]:
        if bucket not in self._buckets:
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchBucket", "The specified bucket does not exist")
        return self._buckets[bucket]

    def clear(self) -> None:
        """Forget all objects and uploads; buckets stay."""
        with self._lock:
            gone = [piece for bucket in self._buckets.values() for there in bucket.values() for piece in there.pieces]
            gone += [part.piece for upload in self._uploads.values() for part in upload.parts.values()]
            for bucket in self._buckets.values():
                bucket.clear()
            self._uploads.clear()
        self.release(gone)

    def release(self, pieces: Iterable[Piece]) -> None:
        """Let go of pieces that `get` held, or that no key names any more."""
        for piece in pieces:
            self._space.drop(piece.extent)

    def put(self, bucket: str, key: str, new: Object, conditions: Conditions) -> Object:
        """Put an object, if the conditions hold at this moment; its pieces are the store's from then on."""
        with self._lock:
            objects = self._bucket(bucket)
            there = objects.get(key)
            conditions.require_for_put(key, there.etag if there is not None else None)
            new = objects[key] = replace(new, modified_seconds=self._now())
        if there is not None:
            self.release(there.pieces)
        return new

    def get(self, bucket: str, key: str) -> Object:
        """Find an object, and hold its pieces: who asked releases them."""
        with self._lock:
            there = self._bucket(bucket).get(key)
            if there is None:
                raise no_such_key(key)
            for piece in there.pieces:
                self._space.hold(piece.extent)
        return there

    def delete(self, bucket: str, keys: Iterable[str]) -> None:
        """Delete objects; those that are not there are none."""
        with self._lock:
            objects = self._bucket(bucket)
            gone = [there for there in (objects.pop(key, None) for key in keys) if there is not None]
        for there in gone:
            self.release(there.pieces)

    def listed(
        self, bucket: str, *, prefix: str, delimiter: str, after: str
    ) -> tuple[list[tuple[str, Object]], list[str]]:
        """Return keys and their objects, and common prefixes, sorted; only keys behind `after`."""
        found: list[tuple[str, Object]] = []
        prefixes: dict[str, None] = {}
        with self._lock:
            for key, there in sorted(self._bucket(bucket).items()):  # by code points, which is the order of their UTF-8
                if not key.startswith(prefix) or key <= after:
                    continue
                cut = key.find(delimiter, len(prefix)) if delimiter else -1
                if cut < 0:
                    found.append((key, there))
                else:
                    prefixes[key[: cut + len(delimiter)]] = None
        return found, list(prefixes)

    def create_upload(self, upload: Upload) -> str:
        """Begin one, and give it an id."""
        upload_id = f"{self._nonce}{next(self._numbers):016x}"
        with self._lock:
            self._bucket(upload.bucket)
            self._uploads[upload_id] = upload
        return upload_id

    def _upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        upload = self._uploads.get(upload_id)
        if upload is None or (upload.bucket, upload.key) != (bucket, key):
            raise S3Error(HTTPStatus.NOT_FOUND, "NoSuchUpload", "There is no such upload.")
        return upload

    def require_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Refuse with 404 where there is none."""
        with self._lock:
            self._upload(bucket, key, upload_id)

    def put_part(self, bucket: str, key: str, upload_id: str, number: int, part: Part) -> None:
        """Put a part, in place of one of this number; its piece is the store's from then on."""
        with self._lock:
            parts = self._upload(bucket, key, upload_id).parts
            there = parts.get(number)
            parts[number] = part
        if there is not None:
            self.release([there.piece])

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        """Forget an upload and its parts."""
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            del self._uploads[upload_id]
        self.release(part.piece for part in upload.parts.values())

    def complete(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        wanted: Sequence[tuple[int, str]],
        conditions: Conditions,
    ) -> Object:
        """Make an object of the parts that are named; nothing is copied, and the other parts are let go."""
        with self._lock:
            upload = self._upload(bucket, key, upload_id)
            objects = self._bucket(bucket)
            parts = _wanted_parts(upload, wanted)
            there = objects.get(key)
            conditions.require_for_put(key, there.etag if there is not None else None)
            del self._uploads[upload_id]
            pieces = tuple(part.piece for part in parts)
            new = objects[key] = Object(pieces, self.new_etag(), self._now(), {})
        used = {id(part) for part in parts}
        self.release(part.piece for part in upload.parts.values() if id(part) not in used)
        if there is not None:
            self.release(there.pieces)
        return new


def _wanted_parts(upload: Upload, wanted: Sequence[tuple[int, str]]) -> list[Part]:
    numbers = [number for number, _ in wanted]
    if not numbers or numbers != sorted(set(numbers)):
        raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidPartOrder", "Parts are named once each, ascending.")
    if any(number not in upload.parts or upload.parts[number].etag != etag for number, etag in wanted):
        raise S3Error(HTTPStatus.BAD_REQUEST, "InvalidPart", "There is no such part, or it has another ETag.")
    parts = [upload.parts[number] for number in numbers]
    if any(part.piece.size_bytes < _PART_BYTES_MIN for part in parts[:-1]):
        raise S3Error(HTTPStatus.BAD_REQUEST, "EntityTooSmall", "A part that is not the last has at least 5 MiB.")
    return parts
