"""Exceptions of dcp_remote: one class per different handling.

    DcpRemoteError
    ├── CheckpointNotFoundError   (also FileNotFoundError)  start fresh, or choose another checkpoint
    │   └── CheckpointGoneError   deleted or replaced while it was being read; read another, which the details name
    ├── CheckpointExistsError     (also FileExistsError)    choose another name, or overwrite=True
    ├── CommitConflictError       another save was committed first, and was not overwritten
    │   └── FencedError           a newer job owns this run; stop this job
    ├── CommitUnknownError        the store did not answer the commit; look for the checkpoint before acting
    ├── SaveFailedError           the details say which rank, which shard, after how many attempts, and why
    │   └── SaveTimeoutError      the details say what was not done by the deadline
    ├── CorruptCheckpointError    bytes and manifest disagree; use an older checkpoint
    ├── UnsafeObjectError         loading an object would run code; the details name the key and the types
    ├── UnsupportedFormatError    written by a newer version; upgrade
    ├── StorageError              the store failed, and another attempt will not help
    │   ├── TransientStorageError the store failed for now; a later attempt may succeed
    │   ├── ObjectNotFoundError   (also FileNotFoundError)  no such object
    │   │   └── BucketNotFoundError   (also CheckpointNotFoundError)  create the bucket, or correct its name or server
    │   ├── ConditionFailedError  a conditional write found another object (perhaps of its own earlier attempt)
    │   └── PermissionDeniedError fix the credentials or the permissions
    └── InvalidArgumentError      (also ValueError)         fix the call
        └── StateMismatchError    the checkpoint does not fit the state; the message lists all of it, and the options

Messages have the form `what. Options: advice; advice. key=value key=value`. Every class can be pickled and unpickled,
and so reaches other ranks inside torch's `CheckpointException`; an exception that cannot would leave them waiting in a
collective operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self, TypeVar

_Error = TypeVar("_Error", bound="DcpRemoteError")

Detail = str | int | float | bool | None

# Details may come from an untrusted checkpoint; a longer one would be hard to read and costly to send to other ranks.
_DETAIL_CHARACTERS_MAX = 1_000


class DcpRemoteError(Exception):
    """Base of all errors of this package.

    Attributes:
        what: Message without advice and details.
        advice: Texts on what the caller can pass, by the argument's name; other callers have other words for it.
        details: Values involved, by name.
    """

    def __init__(self, what: str, /, **details: object) -> None:
        """Keep the message, and the details in a form that can be pickled.

        Args:
            what: Message that says what happened and what to do about it, in one or two sentences.
            **details: Values involved. Numbers, booleans and None are kept; anything else is kept as its string, cut
                to 1,000 characters.
        """
        self.what = what
        self.advice: dict[str, str] = {}
        self.details: dict[str, Detail] = {name: _plain(value) for name, value in details.items()}
        super().__init__(what)

    @property
    def message(self) -> str:
        """Message with the advice and without the details."""
        if not self.advice:
            return self.what
        separator = "\n" if "\n" in self.what else " "
        return f"{self.what}{separator}Options: {'; '.join(dict.fromkeys(self.advice.values()))}."

    def advise(self, **advice: str) -> Self:
        """Set the advice: texts of the form `argument=value does this`, by the argument's name. Returns this error."""
        self.advice = advice
        return self

    def reword(self, words: Mapping[str, str]) -> None:
        """Replace the advice by the words of another caller, who cannot pass an argument for which there are none."""
        self.advice = {name: words[name] for name in self.advice if name in words}

    def with_details(self, **details: object) -> Self:
        """Return an error of the same class, message and advice, with more details."""
        return type(self)(self.what, **{**self.details, **details}).advise(**self.advice)

    def __str__(self) -> str:
        """Return `what. Options: advice; advice. key=value key=value`, without details that are None."""
        values = (f"{name}={value!r}" for name, value in self.details.items() if value is not None)
        return " ".join([self.message, *values])

    def __repr__(self) -> str:
        """Return the class and `str(self)`: torch's `CheckpointException` shows errors by their repr."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle message, advice and details only, not notes or other attributes."""
        return _rebuild, (type(self), self.what, self.advice, self.details)


def _rebuild(kind: type[_Error], what: str, advice: dict[str, str], details: dict[str, Detail]) -> _Error:
    return kind(what, **details).advise(**advice)


def _plain(value: object) -> Detail:
    if value is None or type(value) in (int, float, bool):
        if type(value) is int and abs(value) >= 2**64:
            return f"<an integer of {value.bit_length()} bits>"
        return value  # type: ignore[return-value]  # the types were compared by identity, which mypy does not follow
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else str(value)
    except Exception:  # noqa: BLE001  # the `__str__` of a value may raise anything
        return f"<{type(value).__name__}>"
    return text if len(text) <= _DETAIL_CHARACTERS_MAX else f"{text[:_DETAIL_CHARACTERS_MAX]}…"


class CheckpointNotFoundError(DcpRemoteError, FileNotFoundError):
    """No committed checkpoint exists here: start fresh, or choose another checkpoint."""


class CheckpointGoneError(CheckpointNotFoundError):
    """The checkpoint was deleted, replaced or thinned while it was being read: read the one that the details name.

    Details of a checkpoint of a run: `next`, the oldest live step above this one, and `newest`, the newest live step;
    None if there is none. A thinned checkpoint is still there, without its optimizer, and can be read again.
    """


class CheckpointExistsError(DcpRemoteError, FileExistsError):
    """A committed checkpoint exists here already: choose another name, or pass `overwrite=True`."""


class CommitConflictError(DcpRemoteError):
    """Another save was committed first; its checkpoint was not overwritten."""


class FencedError(CommitConflictError):
    """A newer job owns this run; stop this job."""


class CommitUnknownError(DcpRemoteError):
    """The store did not answer whether the commit was carried out: look for the checkpoint before acting."""


class SaveFailedError(DcpRemoteError):
    """A save failed; the details name the rank, the object, the attempts and the cause."""


class SaveTimeoutError(SaveFailedError):
    """A save did not finish by its deadline; the details say what was still open."""


class CorruptCheckpointError(DcpRemoteError):
    """The bytes in the store disagree with the manifest: use another checkpoint."""


class UnsafeObjectError(DcpRemoteError):
    """Loading an object would run code that it names; the details name the key and the types."""


class UnsupportedFormatError(DcpRemoteError):
    """A newer version of dcp_remote wrote this: upgrade."""


class StorageError(DcpRemoteError):
    """The store failed, and another attempt will not help."""


class TransientStorageError(StorageError):
    """The store failed for now (timeout, reset, 5xx, throttling): the same request may succeed later."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object has this key."""


class BucketNotFoundError(ObjectNotFoundError, CheckpointNotFoundError):
    """The bucket or container does not exist, for reading or saving: create it, or correct its name or its server."""


class ConditionFailedError(StorageError):
    """A conditional write was refused: the object is not in the required state.

    The cause may be an earlier attempt of the same write whose response was lost; `dcp_remote.run.commit` settles this.
    """


class PermissionDeniedError(StorageError):
    """The credentials are missing or wrong, or lack a permission."""


class InvalidArgumentError(DcpRemoteError, ValueError):
    """The call itself is wrong: a bad URL or option, or a template that asks for entries that were not saved."""


class StateMismatchError(InvalidArgumentError):
    """The checkpoint does not fit the state; no tensor was read, unless the message says so.

    The message lists missing and unexpected names, shapes, dtypes and kinds, and the options that allow them; the
    details count them.
    """
