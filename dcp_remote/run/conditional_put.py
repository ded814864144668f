"""Conditional PUT that is settled by reading.

The answer to a conditional PUT can be lost, and a refusal can be of the caller's own write, carried out a moment
before. So after each failure the object is read again, and the caller decides from what lies there: its write was
carried out, another's was, or nothing changed and the same PUT is sent once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dcp_remote.common.deadline import Deadline, jitter
from dcp_remote.errors import (
    CommitUnknownError,
    ConditionFailedError,
    DcpRemoteError,
    StorageError,
    TransientStorageError,
)
from dcp_remote.storage.base import ObjectStore, Version

_FIRST_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 10.0

# S3 answers 409 while another conditional write of the key is under way; that clears in a moment. A store that goes on
# refusing although nothing changed does not do conditional writes.
_REFUSALS_MAX = 12


class _Versioned(Protocol):
    """Object as it was read."""

    @property
    def version(self) -> Version | None:
        """Version of the object; None if there was none."""


_Seen = TypeVar("_Seen", bound=_Versioned | None)


class Backoff:
    """Pauses between attempts: doubled each time, with full jitter.

    Args:
        deadline: Deadline of all attempts.
        first_seconds: Longest first pause, in seconds.
        seconds_max: Longest pause, in seconds.
        sleep: Waits so many seconds; an argument for tests.
        uniform: Draws a number between two; an argument for tests.
    """

    def __init__(
        self,
        deadline: Deadline,
        *,
        first_seconds: float | None = None,
        seconds_max: float = _PAUSE_SECONDS_MAX,
        sleep: Callable[[float], None] = time.sleep,
        uniform: Callable[[float, float], float] = jitter,
    ) -> None:
        """Store the settings; nothing is waited for."""
        self._deadline, self._seconds_max = deadline, seconds_max
        self._seconds = _FIRST_PAUSE_SECONDS if first_seconds is None else first_seconds
        self._sleep, self._uniform = sleep, uniform

    def is_exhausted(self) -> bool:
        """Return whether the next pause, at its longest, would reach the deadline."""
        return self._deadline.remaining_seconds() <= self._seconds

    def pause(self) -> None:
        """Wait, and double the next pause."""
        self._sleep(self._uniform(0, self._seconds))
        self._seconds = min(2 * self._seconds, self._seconds_max)


@dataclass(frozen=True, slots=True)
class FailedPut:
    """Failure of a conditional PUT.

    Attributes:
        error: Error of the last attempt.
        is_unclear: The last attempt or an earlier one may have been carried out, or may be still.
    """

    error: DcpRemoteError
    is_unclear: bool


def put_until_settled(
    store: ObjectStore,
    key: str,
    body: bytes,
    seen: _Seen,
    *,
    look: Callable[[], _Seen],
    decide: Callable[[_Seen, FailedPut], bytes | None],
    unknown: Callable[[DcpRemoteError], CommitUnknownError],
    backoff: Backoff,
) -> bytes | None:
    """Put an object on the condition that it is as it was seen, until it is known what became of that.

    Costs one request; a GET and a PUT more for each failed attempt. After the last attempt the object is read once more
    even where there is no time for another PUT. Whatever is raised, a crash of this process included, the object is the
    old one or the new one, whole.

    Args:
        store: Store whose reads are retried; a conditional PUT is not retried there, since only this function can
            settle it.
        key: Key of the object.
        body: New content; no other write has the same bytes.
        seen: Object as it was read; its version (None: absent) is the condition.
        look: Reads the object.
        decide: Called with the object as it is now, after each failure. Returns the content to put on that condition,
            or None if the caller's write was carried out; raises if it was not and must not be tried again.
        unknown: Makes the error for a PUT that may have been carried out.
        backoff: Pauses between attempts, and their deadline.

    Returns:
        The content whose PUT succeeded; None if `decide` found it carried out.

    Raises:
        CommitUnknownError: By the deadline it could not be found out whether the object was written.
        StorageError: The store refused; nothing was written.
        DcpRemoteError: Error raised by `decide`.
    """
    content: bytes | None = body
    refusals, is_unclear = 0, False
    while content is not None:
        try:
            store.put(key, [content], condition=_version(seen) or "absent")
        except DcpRemoteError as error:
            failure = error
        else:
            return content
        is_unclear |= isinstance(failure, TransientStorageError)
        is_refused = isinstance(failure, ConditionFailedError)
        is_last = backoff.is_exhausted()
        if not is_last:
            backoff.pause()
        try:
            now = look()
        except DcpRemoteError as error:
            # A refusal on condition can be of our own write, carried out a moment ago.
            raise (unknown(failure) if is_unclear or is_refused else failure) from error
        content = decide(now, FailedPut(failure, is_unclear))
        if content is not None:
            is_same = _version(now) == _version(seen)
            # A PUT that is still on its way cannot succeed once the object has another version.
            is_unclear &= is_same
            refusals = refusals + 1 if is_refused and is_same else 0
            if not is_unclear:
                _require_retryable(store, key, failure, refusals)
            if is_last:
                raise unknown(failure) from failure
            seen = now
    return None


def _version(seen: _Versioned | None) -> Version | None:
    return None if seen is None else seen.version


def _require_retryable(store: ObjectStore, key: str, failure: DcpRemoteError, refusals: int) -> None:
    """Raise what is to be told of a PUT that was certainly not carried out, unless the next attempt may succeed."""
    if not isinstance(failure, (ConditionFailedError, TransientStorageError)):
        raise failure
    if refusals >= _REFUSALS_MAX:
        raise StorageError(
            "The store keeps refusing a conditional write although nothing changed. The store may not support such "
            "writes, or may want ETags without quotes, as Ceph 16 does (storage_options={'etag_quotes': False}).",
            url=store.url,
            key=key,
            attempts=refusals,
        ) from failure
