"""Checks of a store by requests below a fresh prefix, each permission by itself; and of a local folder."""

from __future__ import annotations

import logging
import os
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.findings import Check, Finding, SkippedError, explain_error
from dcp_remote.common.machine import check_space
from dcp_remote.common.units import GiB, KiB, MiB
from dcp_remote.errors import ConditionFailedError, ObjectNotFoundError, PermissionDeniedError, StorageError
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.conditional_writes import PROBES_PREFIX, probe_conditional_writes
from dcp_remote.storage.local import HIDDEN_FOLDER
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import Scheme

logger = logging.getLogger(__name__)

# Time for which one request is repeated: a user waits. An object of 8 MiB gets more, for a slow network.
_REQUEST_SECONDS = 8.0
_LARGE_SECONDS = 20.0
_DELETE_SECONDS = 5.0

_BODY_BYTES = KiB
_LARGE_BYTES = 8 * MiB
_LATENCY_REQUESTS = 5

# Less than a checkpoint of a small model with its optimizer.
_FREE_BYTES_MIN = 10 * GiB

# Permission by verb and scheme; that of Azure is a role. HEAD has that of GET.
_PERMISSIONS = {
    "put": {"s3": "s3:PutObject", "gs": "storage.objects.create"},
    "get": {"s3": "s3:GetObject", "gs": "storage.objects.get"},
    "list": {"s3": "s3:ListBucket", "gs": "storage.objects.list"},
    "delete": {"s3": "s3:DeleteObject", "gs": "storage.objects.delete"},
}
_ROLES = {"az": "the role Storage Blob Data Contributor", "file": "this user write access to the folder"}
_PURPOSES = {
    "put": "saves need it",
    "get": "restores need it, and saves to read the catalog",
    "list": "gc and recover need it, and without it a store may deny that an object is absent",
    "delete": "retention, rm and gc need it, and nothing else",
}


class StoreChecks:
    """Checks that write, read, list and delete objects below a fresh prefix.

    Costs about 25 requests, and 8 MiB in each direction. `clean` deletes what the checks have left.
    """

    def __init__(self, store: ObjectStore, scheme: Scheme) -> None:
        """Choose the prefix; nothing is sent."""
        self._place = store.child(f"{PROBES_PREFIX}doctor-{secrets.token_hex(8)}")
        self._scheme = scheme
        self._keys: list[str] = []
        self._body = b""  # of the object that was put; empty if it could not be put

    def checks(self) -> Sequence[Check]:
        """Return the checks, in their order."""
        return (
            Check("put", self._check_put, grant=self._grant("put")),
            Check("get", self._check_get, grant=self._grant("get")),
            Check("head", self._check_head, grant=self._grant("get")),
            Check("list", self._check_list, grant=self._grant("list")),
            Check("conditional writes", self._check_conditions),
            Check("latency", self._check_latency),
            Check("throughput", self._check_throughput),
            Check("delete", self._check_delete),
        )

    def clean(self) -> None:
        """Delete all objects that are left; a warning tells of those that could not be deleted."""
        if failed := self._delete():
            logger.warning(
                "Objects of the checks may be left. Delete everything below this URL. url=%s objects=%d cause=%s",
                self._place.url,
                len(failed),
                next(iter(failed.values())),
            )

    def _grant(self, verb: str) -> str:
        permission = _PERMISSIONS[verb].get(self._scheme) or _ROLES.get(self._scheme, "it")
        return f"Grant {permission}: {_PURPOSES[verb]}."

    def _retry(self, seconds: float | None = None) -> ObjectStore:
        return RetryingStore(self._place, Deadline(_REQUEST_SECONDS if seconds is None else seconds))

    def _put(self, key: str, body: bytes, seconds: float | None = None) -> None:
        if key not in self._keys:
            self._keys.append(key)  # before the request, which may be carried out although it fails
        self._retry(seconds).put(key, [body])

    def _delete(self) -> Mapping[str, StorageError]:
        """Delete all objects that were put; return the errors of those that are left, and forget these too."""
        keys, failed = self._keys, dict[str, StorageError]()
        try:
            failed.update(self._retry(_DELETE_SECONDS).delete(keys) if keys else {})
        except StorageError as error:
            failed = dict.fromkeys(keys, error)
        self._keys = []
        return failed

    def _check_put(self) -> Finding:
        body = os.urandom(_BODY_BYTES)
        self._put("object", body)
        self._body = body
        return Finding("ok", "an object was written")

    def _check_get(self) -> Finding:
        def get() -> bool:
            return self._retry().get("object", limit_bytes=_BODY_BYTES).data == self._body

        return self._read(get, "the object was read, with the bytes that were written")

    def _check_head(self) -> Finding:
        def head() -> bool:
            return self._retry().head("object").size_bytes == len(self._body)

        return self._read(head, "the object was found, with its size")

    def _read(self, read: Callable[[], bool], fact: str) -> Finding:
        """Return the finding for a read of the object; without the object, its absence shows that it may be read."""
        try:
            is_same = read()
        except ObjectNotFoundError:
            if self._body:
                raise
            return Finding("ok", "permitted; there is no object, since none could be written")
        if is_same:
            return Finding("ok", fact)
        return Finding("fail", "the answer is not what was written", "Check that the endpoint is that of the store.")

    def _check_list(self) -> Finding:
        keys = [info.key for info in self._retry().list()]
        if self._body and "object" not in keys:
            return Finding("fail", "the listing lacks the object that was written", "Use a store that lists at once.")
        return Finding("ok", "the prefix was listed")

    def _check_conditions(self) -> Finding:
        refusal = self._place.capabilities.swap_refusal
        if not self._place.capabilities.compare_and_swap:
            what, _, advice = refusal.partition("; ")
            cure = f"{advice[:1].upper()}{advice[1:]}." if advice else "Save runs to another store."
            return Finding("fail", what or "this store replaces no object on a condition", cure)
        self._require_put()
        probe_conditional_writes(self._place, Deadline(_REQUEST_SECONDS), swaps=True)
        self._keys.append("swapped")
        version = self._place.put("swapped", [b"first"], condition="absent")
        try:
            self._place.put("swapped", [b"second"], condition=version)
        except ConditionFailedError:
            cure = "Update the server; for Ceph before version 17 pass storage_options['etag_quotes'] = False."
            return Finding("fail", "a write is refused although its condition (If-Match) holds", cure)
        with suppress(PermissionDeniedError):  # of which the check of GET tells
            if self._retry().get("swapped", limit_bytes=_BODY_BYTES).data != b"second":
                return Finding("fail", "a read after a write shows the object before it", "Save to a consistent store.")
        return Finding("ok", "of two writers the second is refused, and a read shows the first")

    def _check_latency(self) -> Finding:
        seconds = []
        for _ in range(_LATENCY_REQUESTS):
            began = time.monotonic()
            with suppress(ObjectNotFoundError, PermissionDeniedError):
                self._retry().head("absent")
            seconds.append(time.monotonic() - began)
        return Finding("ok", f"{1000 * statistics.median(seconds):.1f} ms, the median of {len(seconds)} small requests")

    def _require_put(self) -> None:
        if not self._body:
            raise SkippedError("not checked, since no object could be written")

    def _check_throughput(self) -> Finding:
        self._require_put()
        body, buffer = os.urandom(_LARGE_BYTES), bytearray(_LARGE_BYTES)
        began = time.monotonic()
        self._put("large", body, _LARGE_SECONDS)
        put_seconds = time.monotonic() - began
        began = time.monotonic()
        try:
            self._retry(_LARGE_SECONDS).get_into("large", 0, memoryview(buffer))
        except PermissionDeniedError:
            raise SkippedError("not checked, since no object can be read") from None
        rates = [_LARGE_BYTES / MiB / seconds for seconds in (put_seconds, time.monotonic() - began)]
        rate = f"{rates[0]:.3g} MiB/s up, {rates[1]:.3g} MiB/s down"
        return Finding("ok", f"{rate}, one request at a time; `dcp-remote bench` measures more")

    def _check_delete(self) -> Finding:
        failed = self._delete()
        if failed:
            finding = explain_error(next(iter(failed.values())), grant=self._grant("delete"), state="warn")
            return replace(finding, fact=f"{finding.fact}; {len(failed)} objects stay below {self._place.url}")
        return Finding("ok", "the objects of these checks were deleted")


class FolderChecks:
    """Checks of the folder of a local store; `clean` removes the folders that the store created."""

    def __init__(self, path: str) -> None:
        """Look which folders exist."""
        self._root = Path(path)
        folders = [self._root / HIDDEN_FOLDER, self._root, *self._root.parents]
        self._missing = [folder for folder in folders if not folder.exists()]
        self._nearest = next(folder for folder in folders[1:] if folder.exists())

    def checks(self) -> Sequence[Check]:
        """Return the checks, in their order; none writes."""
        return (Check("file system", self._check_file_system), Check("free space", self._check_space))

    def clean(self) -> None:
        """Remove the empty folders that were not there before."""
        for folder in self._missing:
            with suppress(OSError):  # a training has begun to save there
                folder.rmdir()

    def _check_file_system(self) -> Finding:
        within = [self._nearest, *(path for path in self._nearest.iterdir() if self._nearest == self._root)]
        devices = {path.stat().st_dev for path in within if path.is_dir() and not path.is_symlink()}
        if len(devices) > 1:
            cure = "Save to a folder without mounted folders in it: a file cannot be renamed into another file system."
            return Finding("fail", f"{self._root} extends over {len(devices)} file systems", cure)
        return Finding("ok", f"{self._root} is one file system")

    def _check_space(self) -> Finding:
        cure = "Free space there, before a checkpoint is larger than it."
        return check_space(self._nearest, _FREE_BYTES_MIN, cure)
