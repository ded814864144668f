"""Checks before a training writes to a store: what each found, and its cure. `dcp-remote doctor` prints them."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import human_bytes
from dcp_remote.common.units import KiB, MiB
from dcp_remote.errors import (
    BucketNotFoundError,
    ConditionFailedError,
    DcpRemoteError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import Condition, ObjectStore
from dcp_remote.storage.conditional_writes import PROBES_PREFIX, make_ignored_error
from dcp_remote.storage.local import HIDDEN_FOLDER
from dcp_remote.storage.retrying import RetryingStore
from dcp_remote.storage.url import ParsedUrl

logger = logging.getLogger(__name__)

# Time for which one request is repeated: a user waits. An object of 8 MiB gets more, for a slow network.
_REQUEST_SECONDS = 8.0
_LARGE_SECONDS = 20.0
_DELETE_SECONDS = 5.0

_BODY_BYTES = KiB
_LARGE_BYTES = 8 * MiB
_LATENCY_REQUESTS = 5

# Files that a process of a training may open at least: a load in which ranks read for each other needs up to 192
# (loading/peers.py), a save fewer, and the training its own.
_OPEN_FILES_MIN = 512

# Free space of the folder in which call stacks and small files of frameworks are kept.
_TEMPORARY_BYTES_MIN = 64 * MiB

# Shared memory of Docker and Kubernetes is 64 MiB, unless set; workers of a DataLoader and NCCL need more.
_SHARED_MEMORY_BYTES_MIN = 128 * MiB
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # asked for its size alone

# Checks whose facts are measured values, which differ between ranks.
MEASURED = ("open files", "temporary folder", "shared memory", "speed")

# Permission by verb and scheme; that of Azure is a role.
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

_DEFAULT_CURE = "Correct the URL, the options or the credentials, or ask those who run the store."

# "skip": not checked, for the reason that the fact gives.
State: TypeAlias = Literal["ok", "warn", "fail", "skip"]


class Finding(NamedTuple):
    """Result of one check: what was found, and what to do, which is empty unless the state is "warn" or "fail"."""

    state: State
    fact: str
    cure: str = ""


class Check(NamedTuple):
    """Check that makes one finding.

    Attributes:
        name: Name in the report.
        examine: Function that makes the finding, or raises.
        failure: State of the finding if it raises.
        is_needed: True if later checks make no sense once this one has failed.
    """

    name: str
    examine: Callable[[], Finding]
    failure: State = "fail"
    is_needed: bool = False


def run_checks(checks: Iterable[Check]) -> Iterator[tuple[str, Finding]]:
    """Make one check after another; yield its name and finding.

    A check that fails does not end the others, unless it is needed, or the store does not answer: these are skipped.

    Raises:
        InvalidArgumentError: The URL or an option is wrong.
    """
    blocked_by = ""
    for check in checks:
        if blocked_by:
            yield check.name, Finding("skip", f"not checked, since {blocked_by} failed")
            continue
        is_needed = check.is_needed
        try:
            finding = check.examine()
        except (StorageError, OSError) as error:
            finding = _explain(error, check.failure)
            is_needed |= isinstance(error, TransientStorageError | BucketNotFoundError)
        if finding.state == "fail" and is_needed:
            blocked_by = check.name
        yield check.name, finding


def _explain(error: StorageError | OSError, state: State) -> Finding:
    """Return the finding for an error, whose second sentence most often says what to do."""
    what, details = (error.what, error.details) if isinstance(error, DcpRemoteError) else (str(error), {})
    fact, _, advice = what.rstrip(".").partition(". ")
    if reason := details.get("code") or details.get("cause"):
        fact += f" ({reason})"
    return Finding(state, fact, f"{advice}." if advice else _DEFAULT_CURE)


def check_machine() -> Sequence[Check]:
    """Return the checks of this machine: limits that a training reaches in its first save, or in the middle."""
    temporary, cure = Path(tempfile.gettempdir()), "Free some space there, or set TMPDIR to another folder."
    shared_cure = "Start the container with more: `docker run --shm-size=8g`, in a pod an emptyDir of medium Memory."
    return (
        Check("open files", _check_open_files),
        Check("temporary folder", partial(_check_space, temporary, _TEMPORARY_BYTES_MIN, cure), failure="warn"),
        Check(
            "shared memory",
            partial(_check_space, _SHARED_MEMORY, _SHARED_MEMORY_BYTES_MIN, shared_cure),
            failure="warn",
        ),
    )


def _check_open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_unlimited = limit == resource.RLIM_INFINITY
    fact = "no limit" if is_unlimited else f"a process may open {limit} files"
    if is_unlimited or limit >= _OPEN_FILES_MIN:
        return Finding("ok", fact)
    return Finding("warn", fact, f"Raise the limit before the training: `ulimit -n 4096`, at least {_OPEN_FILES_MIN}.")


def _check_space(folder: Path, least_bytes: int, cure: str) -> Finding:
    if not folder.is_dir():
        return Finding("skip", f"this system has no {folder}")
    free_bytes = shutil.disk_usage(folder).free
    fact = f"{human_bytes(free_bytes)} free in {folder}"
    return Finding("ok", fact) if free_bytes >= least_bytes else Finding("warn", fact, cure)


class StoreChecks:
    """Checks that write, read, list and delete objects below a fresh prefix, each permission by itself.

    Costs about 20 requests, and 8 MiB in each direction. `clean` deletes what the checks have left.
    """

    def __init__(self, store: ObjectStore, parsed: ParsedUrl) -> None:
        """Choose the prefix; nothing is sent."""
        self._place = store.child(f"{PROBES_PREFIX}doctor-{secrets.token_hex(8)}")
        self._scheme = parsed.scheme
        self._keys: list[str] = []  # of objects that may exist
        self._body = os.urandom(_BODY_BYTES)
        self._permitted: set[str] = set()  # verbs
        self._is_put_refused = False  # so that no object exists
        root = Path(parsed.path) if parsed.scheme == "file" else None
        folders = [root / HIDDEN_FOLDER, root, *root.parents] if root is not None else []
        self._new_folders = [folder for folder in folders if not os.access(folder, os.F_OK)]

    @property
    def url(self) -> str:
        """URL below which all objects of the checks are."""
        return self._place.url

    def checks(self) -> Sequence[Check]:
        """Return the checks, in their order."""
        return (
            Check("put", partial(self._check_permission, "put", self._put_object)),
            Check("get", partial(self._check_permission, "get", self._get_object)),
            Check("list", partial(self._check_permission, "list", self._list_objects)),
            Check("conditional writes", self._check_conditions),
            Check("speed", self._check_speed),
            Check("delete", partial(self._check_permission, "delete", self._delete_objects), failure="warn"),
        )

    def clean(self) -> None:
        """Delete the objects that are left, and folders that were not there; a warning tells of other objects."""
        if (failed := self._delete()) and not self._is_put_refused:
            logger.warning(
                "Objects of the checks may be left. Delete everything below this URL. url=%s objects=%d cause=%s",
                self.url,
                len(failed),
                next(iter(failed.values())),
            )
        for folder in self._new_folders:
            with suppress(OSError):  # a training has begun to save there
                folder.rmdir()

    def _retry(self, seconds: float | None = None) -> ObjectStore:
        return RetryingStore(self._place, Deadline(_REQUEST_SECONDS if seconds is None else seconds))

    def _delete(self) -> Mapping[str, StorageError]:
        """Delete all objects that may exist; return the errors of those that are left."""
        failed = self._retry(_DELETE_SECONDS).delete(self._keys) if self._keys else {}
        self._keys = list(failed)
        return failed

    # ---- permissions

    def _check_permission(self, verb: str, request: Callable[[], Finding]) -> Finding:
        try:
            finding = request()
        except PermissionDeniedError as error:
            if "code" in error.details:
                # Imported here, so that a local folder needs no cloud client.
                from dcp_remote.storage.cloud.errors import ADVICE

                if fault := ADVICE.get(str(error.details["code"])):  # of the credentials, which no grant cures
                    raise PermissionDeniedError(fault, **error.details) from error
            permission = _PERMISSIONS[verb].get(self._scheme) or _ROLES.get(self._scheme, "it")
            what = f"{error.what.partition('. ')[0].rstrip('.')}. Grant {permission}: {_PURPOSES[verb]}."
            raise PermissionDeniedError(what, **error.details) from error
        self._permitted.add(verb)
        return finding

    def _put_object(self) -> Finding:
        self._keys.append("object")  # before the request, which may be carried out although it fails
        try:
            self._retry().put("object", [self._body])
        except PermissionDeniedError:
            self._is_put_refused = True
            raise
        return Finding("ok", "an object was written")

    def _get_object(self) -> Finding:
        try:
            body = self._retry().get("object", limit_bytes=_BODY_BYTES).data
        except ObjectNotFoundError:
            if "put" in self._permitted:
                raise
            return Finding("ok", "permitted; there is no object, since none could be written")
        if body != self._body:
            cure = "Check that the endpoint is that of the store."
            return Finding("fail", "the answer is not what was written", cure)
        return Finding("ok", "the object was read, with the bytes that were written")

    def _list_objects(self) -> Finding:
        keys = [info.key for info in self._retry().list()]
        if "put" in self._permitted and "object" not in keys:
            return Finding("fail", "the listing lacks the object that was written", "Use a store that lists at once.")
        return Finding("ok", "the prefix was listed")

    def _delete_objects(self) -> Finding:
        for error in self._delete().values():
            raise error
        if "put" not in self._permitted:
            return Finding("ok", "permitted; there was no object, since none could be written")
        return Finding("ok", "the objects of these checks were deleted")

    # ---- behaviour

    def _check_conditions(self) -> Finding:
        """Write on conditions that hold and on others; a server that is known to be correct is checked as well."""
        if not self._place.capabilities.compare_and_swap:
            refusal = self._place.capabilities.swap_refusal
            return Finding("fail", refusal or "this store has no conditional writes", "Save runs to another store.")
        if "put" not in self._permitted:
            return Finding("skip", "not checked, since no object could be written")
        self._keys.append("swapped")
        try:
            version = self._retry().put("swapped", [b"first"], condition="absent")
        except ConditionFailedError:  # of a first attempt whose answer was lost: no other process has this key
            version = self._retry().head("swapped").version
        if self._replaces("absent"):
            raise make_ignored_error("If-None-Match", self.url)
        if not self._replaces(version) and self._retry().head("swapped").version == version:
            cure = "Update the server; for Ceph before version 17 pass storage_options['etag_quotes'] = False."
            return Finding("fail", "a write is refused although its condition (If-Match) holds", cure)
        if self._replaces(version):
            raise make_ignored_error("If-Match", self.url)
        if "get" in self._permitted and self._retry().get("swapped", limit_bytes=_BODY_BYTES).data != b"second":
            return Finding("fail", "a read after a write shows the object before it", "Save to a consistent store.")
        return Finding("ok", "of two writers the second is refused")

    def _replaces(self, condition: Condition) -> bool:
        try:
            self._retry().put("swapped", [b"second"], condition=condition)
        except ConditionFailedError:
            return False
        return True

    def _check_speed(self) -> Finding:
        if not {"put", "get"} <= self._permitted:
            return Finding("skip", "not checked, since no object could be written and read")
        small = [self._measure(lambda: self._retry().head("object")) for _ in range(_LATENCY_REQUESTS)]
        store, body, buffer = self._retry(_LARGE_SECONDS), os.urandom(_LARGE_BYTES), bytearray(_LARGE_BYTES)
        self._keys.append("large")
        up_seconds = self._measure(lambda: store.put("large", [body]))
        down_seconds = self._measure(lambda: store.get_into("large", 0, memoryview(buffer)))
        up, down = (_LARGE_BYTES / MiB / seconds for seconds in (up_seconds, down_seconds))
        latency = f"{1000 * statistics.median(small):.1f} ms for a small request"
        return Finding("ok", f"{latency}; {up:.3g} MiB/s up, {down:.3g} MiB/s down; `dcp-remote bench` measures more")

    def _measure(self, request: Callable[[], object]) -> float:
        began = time.monotonic()
        request()
        return time.monotonic() - began
