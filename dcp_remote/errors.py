"""Everything that dcp_remote raises: one class per different handling.

    DcpRemoteError
    ├── CheckpointNotFoundError   (also FileNotFoundError)  start fresh, or choose another checkpoint
    ├── CheckpointExistsError     (also FileExistsError)    choose another name, or overwrite=True
    ├── CommitConflictError       another save won; nothing of it was overwritten
    │   └── FencedError           a newer job owns this run; stop this one
    ├── CommitUnknownError        the store never said; ask again before acting
    ├── SaveFailedError           which rank, which shard, after how many attempts, why
    │   └── SaveTimeoutError      what was not done by the deadline
    ├── CorruptCheckpointError    bytes and manifest disagree; use an older checkpoint
    ├── UnsafeObjectError         an object needs code to load; names the key and the types
    ├── UnsupportedFormatError    written by a newer version; upgrade
    ├── StorageError              the store failed, and trying again will not help
    │   ├── TransientStorageError the store failed for now: a later attempt may pass
    │   ├── ObjectNotFoundError   (also FileNotFoundError)  no such object, or no such bucket
    │   ├── ConditionFailedError  a conditional write found something else (perhaps our own earlier attempt)
    │   └── PermissionDeniedError fix the credentials or the grant
    └── InvalidArgumentError      (also ValueError)         fix the call

Messages read `what. key=value key=value`. Every class survives pickling in both directions, and so crosses ranks
inside torch's `CheckpointException`: an exception that does not would leave the other ranks waiting in a collective.
"""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound="DcpRemoteError")

Detail = str | int | float | bool | None


# Names and numbers are those of whoever wrote the checkpoint: an error is read by people, and crosses ranks.
_DETAIL_CHARACTERS_MAX = 1_000


class DcpRemoteError(Exception):
    """The base of all errors of this package.

    Args:
        what: What happened and what to do about it, in one or two sentences.
        **details: The values involved. Anything but numbers, booleans and None is kept as its string, cut where it is
            long, so that the error can always be pickled.
    """

    def __init__(self, what: str, /, **details: object) -> None:
        """See the class."""
        self.what = what
        self.details: dict[str, Detail] = {name: _plain(value) for name, value in details.items()}
        super().__init__(what)

    def __str__(self) -> str:
        """`what. key=value key=value`."""
        values = (f"{name}={value!r}" for name, value in self.details.items() if value is not None)
        return " ".join([self.what, *values])

    def __repr__(self) -> str:
        """With what `str` says: torch's `CheckpointException.failures` shows errors so."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the message and the details alone; notes and attributes that others set are not carried."""
        return _rebuild, (type(self), self.what, self.details)


def _rebuild(kind: type[_Error], what: str, details: dict[str, Detail]) -> _Error:
    return kind(what, **details)


def _plain(value: object) -> Detail:
    if value is None or type(value) in (int, float, bool):
        if type(value) is int and abs(value) >= 2**64:
            return f"<an integer of {value.bit_length()} bits>"
        return value  # type: ignore[return-value]  # the types were compared by identity, which mypy does not follow
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    except Exception:  # noqa: BLE001  # an error is told even if one of its values cannot be
        return f"<{type(value).__name__}>"
    return text if len(text) <= _DETAIL_CHARACTERS_MAX else f"{text[:_DETAIL_CHARACTERS_MAX]}…"


class CheckpointNotFoundError(DcpRemoteError, FileNotFoundError):
    """There is no committed checkpoint here: start fresh, or choose another."""


class CheckpointExistsError(DcpRemoteError, FileExistsError):
    """A committed checkpoint is here already: choose another name, or pass `overwrite=True`."""


class CommitConflictError(DcpRemoteError):
    """Another save was committed in the meantime; nothing of it was overwritten."""


class FencedError(CommitConflictError):
    """A newer job owns this run; stop this one."""


class CommitUnknownError(DcpRemoteError):
    """The store never said whether the commit was carried out: look before acting."""


class SaveFailedError(DcpRemoteError):
    """A save failed; the details name the rank, the object, the attempts and the cause."""


class SaveTimeoutError(SaveFailedError):
    """A save did not finish by its deadline; the details say what was still open."""


class CorruptCheckpointError(DcpRemoteError):
    """The bytes in the store are not those that the manifest promises: use another checkpoint."""


class UnsafeObjectError(DcpRemoteError):
    """An object can only be loaded by running code that it names; the details name key and types."""


class UnsupportedFormatError(DcpRemoteError):
    """Written by a newer version of dcp_remote: upgrade."""


class StorageError(DcpRemoteError):
    """The store failed in a way that trying again does not cure."""


class TransientStorageError(StorageError):
    """The store failed for now (timeout, reset, 5xx, throttling): the same request may pass later."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """There is no object of this name, or no such bucket."""


class ConditionFailedError(StorageError):
    """A conditional write was refused: the object is not in the state that was asked for.

    After a lost response this can be the doing of our own earlier attempt; `dcp_remote.commit` settles which.
    """


class PermissionDeniedError(StorageError):
    """No credentials, wrong credentials, or a grant that is missing."""


class InvalidArgumentError(DcpRemoteError, ValueError):
    """The call itself is wrong: a URL, an option, a template that asks for what was not saved."""
