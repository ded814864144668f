"""Conditional PUT that is settled by reading.

The answer to a conditional PUT can be lost, and a refusal can be of the caller's own write, carried out a moment
before. So after each failure the object is read again, and the caller decides from what lies there: its write was
carried out, another's was, or nothing changed and the same PUT is sent once more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from dcp_remote.common.arrays import Buffer
from dcp_remote.common.deadline import Deadline, RetryPolicy
from dcp_remote.errors import (
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.storage.base import ObjectInfo, ObjectStore, Version
from dcp_remote.storage.rereads import RereadingStore

# Shorter than those of other writes: what is put on condition changes seldom, so that a second attempt most often
# succeeds.
_PAUSES = RetryPolicy(first_delay_seconds=0.05, delay_seconds_max=5.0)

# S3 answers 409 while another conditional write of the key is under way; that clears in a moment. A store that goes on
# refusing although nothing changed does not do conditional writes.
_REFUSALS_MAX = 12


_Content = TypeVar("_Content")


def require_compare_and_swap(
    store: ObjectStore,
    refusal: str = "A run needs a store that can replace an object on condition. Save to another store.",
) -> None:
    """Refuse a store that cannot replace an object on condition; `refusal` says what needs that. No request.

    The only place where commits ask for the capability: another protocol for such stores begins here.
    """
    if not store.capabilities.compare_and_swap:
        raise InvalidArgumentError(refusal, url=store.url, reason=store.capabilities.swap_refusal)


@dataclass(frozen=True, slots=True)
class Found(Generic[_Content]):
    """Object at a key, as it was read."""

    version: Version | None  # None if there is no object
    content: _Content | None = None  # None also if the object cannot be decoded
    error: CorruptCheckpointError | UnsupportedFormatError | None = None  # why it cannot


def find_object(store: ObjectStore, key: str) -> ObjectInfo | None:
    """Return what is known of an object without its content; None if there is no such object. One HEAD."""
    with suppress(ObjectNotFoundError):
        return store.head(key)
    return None


def find(store: ObjectStore, key: str, decode: Callable[[bytes], _Content], *, limit_bytes: int) -> Found[_Content]:
    """Read an object that may be damaged; one GET, and one more if it is.

    An object larger than the limit costs a HEAD with each GET.
    What is damaged, or larger than the limit, is not taken for the absence of an object.
    """
    found: Found[_Content] = Found(None)
    for reading in (store, RereadingStore(store)):
        version = None
        try:
            content = reading.get(key, limit_bytes=limit_bytes)
            version = content.version
            return Found(version, decode(content.data))
        except ObjectNotFoundError:
            return Found(None)
        except (CorruptCheckpointError, UnsupportedFormatError) as error:
            if version is None:
                info = find_object(reading, key)
                if info is None:
                    return Found(None)
                version = info.version
            found = Found(version, error=error)
            if isinstance(error, UnsupportedFormatError):
                break
    return found


def pause(deadline: Deadline, attempt: int) -> bool:
    """Wait after the `attempt`-th failure (from 1), with full jitter; return True.

    Or return False at once, if the pause at its longest would reach the deadline.
    """
    seconds = _PAUSES.delay_seconds_limit(attempt)
    if deadline.remaining_seconds() <= seconds:
        return False
    deadline.clock.sleep(deadline.clock.uniform(0, seconds))
    return True


@dataclass(frozen=True, slots=True)
class FailedPut:
    """Failure of a conditional PUT: the error of its last attempt."""

    error: DcpRemoteError
    is_unclear: bool  # the last attempt or an earlier one may have been carried out, or may be still


def put_until_settled(
    store: ObjectStore,
    key: str,
    body: Buffer,
    seen: Found[_Content],
    *,
    look: Callable[[], Found[_Content]],
    decide: Callable[[Found[_Content], FailedPut], Buffer | None],
    unknown: Callable[[DcpRemoteError], DcpRemoteError],
    deadline: Deadline,
) -> None:
    """Put an object on the condition that it is as it was seen, until it is known what became of that.

    No other write has the same bytes as `body`. The version of `seen` is the condition. After each
    failure `look` reads the object, and `decide` is called with what is there now: it returns the content to put on
    that condition, or None if the caller's write was carried out; it raises if it was not and must not be tried again.
    `unknown` makes the error for a PUT of which it could not be found out by the deadline whether it was carried out.

    Costs one request; a GET and a PUT more for each failed attempt. After the last attempt the object is read once more
    even where there is no time for another PUT. Whatever is raised, a crash of this process included, the object is the
    old one or the new one, whole. The reads of `store` are retried; its conditional PUTs are not, since only this
    function can settle them.
    """
    content: Buffer | None = body
    attempt, refusals, is_unclear = 0, 0, False
    while content is not None:
        try:
            store.put(key, [content], condition=seen.version or "absent")
        except DcpRemoteError as error:
            failure = error
        else:
            return
        is_unclear |= isinstance(failure, TransientStorageError)
        is_refused = isinstance(failure, ConditionFailedError)
        attempt += 1
        is_last = not pause(deadline, attempt)
        try:
            now = look()
        except DcpRemoteError as error:
            # A refusal on condition can be of our own write, carried out a moment ago.
            raise (unknown(failure) if is_unclear or is_refused else failure) from error
        content = decide(now, FailedPut(failure, is_unclear))
        if content is not None:
            is_same = now.version == seen.version
            # A PUT that is still on its way cannot succeed once the object has another version.
            is_unclear &= is_same
            refusals = refusals + 1 if is_refused and is_same else 0
            if not is_unclear:
                _require_retryable(store, key, failure, refusals)
            if is_last:
                raise unknown(failure) from failure
            seen = now


def _require_retryable(store: ObjectStore, key: str, failure: DcpRemoteError, refusals: int) -> None:
    """Raise what is to be told of a PUT that was certainly not carried out, unless the next attempt may succeed."""
    if not isinstance(failure, (ConditionFailedError, TransientStorageError)):
        raise failure
    if refusals >= _REFUSALS_MAX:
        raise StorageError(
            "The store keeps refusing a conditional write although nothing changed. The store may not support such "
            "writes, or may want ETags without quotes, as Ceph 16 does (storage_options['etag_quotes'] = False).",
            url=store.url,
            key=key,
            attempts=refusals,
        ) from failure
