"""Locations of readers and writers: from the URL or store that a user passes, to an open store."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from dcp_remote.common.picklable_errors import make_picklable
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.limits import note_processes
from dcp_remote.storage.url import parse_url


@dataclass(frozen=True, slots=True)
class Location:
    """Store of a checkpoint or run, and the options to open another one like it."""

    store: ObjectStore
    options: Mapping[str, object] | None = field(repr=False)  # None if the user passed a store; some are secrets
    checkpoint_id: str | os.PathLike[str]  # as the user passed it; the URL of the store if the user passed a store
    process: int = field(default_factory=os.getpid, repr=False)  # that created this location; pickling keeps it

    @classmethod
    def of(cls, url: str | os.PathLike[str] | ObjectStore, options: Mapping[str, object] | None) -> Self:
        """Make the location of a URL, or of a store."""
        if not isinstance(url, ObjectStore):
            return cls(open_store(url, options), dict(options or {}), url)
        if options:
            raise InvalidArgumentError(
                "storage_options are for URLs: pass them when the store is created.", url=url.url
            )
        return cls(url, None, url.url)

    def moved_to(self, checkpoint_id: str | os.PathLike[str]) -> Self:
        """Return the location of another URL, with the same options.

        Refused are a plain path where this location is a URL, since torch would make a local folder of it, and any
        other URL where this location was made of a store, since no options are known.
        """
        parsed = parse_url(checkpoint_id)
        if parsed.canonical == self.store.url:
            return replace(self, checkpoint_id=checkpoint_id)
        if self.options is None:
            raise InvalidArgumentError(
                "checkpoint_id is not the URL of the store that this reader or writer was created with. Create a new "
                "reader or writer with the other store.",
                checkpoint_id=parsed.canonical,
                url=self.store.url,
            )
        plain = isinstance(checkpoint_id, Path) or "://" not in os.fspath(checkpoint_id)
        if plain and not self.store.url.startswith("file:"):
            raise InvalidArgumentError(
                "checkpoint_id is a plain path, but this reader or writer is for a URL. Pass the whole URL.",
                checkpoint_id=os.fspath(checkpoint_id),
                url=self.store.url,
            )
        return replace(self, store=open_store(checkpoint_id, self.options), checkpoint_id=checkpoint_id)


class ThreadLocation(threading.local):
    """Location of the save or load of each thread, for a reader or writer that several threads use at once.

    torch runs a save or load in one thread, but `async_save` may run several saves in several threads, which must not
    change one another's location. A new thread (`async_save` makes one for each save) and an unpickled copy begin at
    the last location that any thread set.
    """

    def __init__(self, last: list[tuple[Location, BaseException | None]]) -> None:
        """Begin at the last location; Python calls this once in each thread that uses the object.

        `last` is shared by all threads, and has one element: the last location, and the error of that `move_to`.
        """
        self._last = last
        self.location, self._refusal = last[0]

    def move_to(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Move to another checkpoint, or stay if it is None. Never raises: `raise_refusal` raises its error.

        torch calls `reset` before its collectives, where a rank that raises would leave all others waiting.
        """
        if checkpoint_id is None:
            return
        try:
            self.location, self._refusal = self.location.moved_to(checkpoint_id), None
        except Exception as error:  # noqa: BLE001  # raised by `raise_refusal`
            self._refusal = make_picklable(error)
        self._last[0] = self.location, self._refusal

    def raise_refusal(self) -> None:
        """Raise the error of the last `move_to`, if it failed; called where torch reports errors to the other ranks.

        Raised by each save or load until `move_to` succeeds: a retry without a `checkpoint_id` would otherwise replace
        the checkpoint before.
        """
        if self._refusal is not None:
            raise self._refusal

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the location, including explicit credentials, but no state of a save or load."""
        return type(self), ([(self.location, self._refusal)],)


class Located:
    """Base of a reader and a writer of torch's protocol, which the threads that use them move by `reset`."""

    _thread: ThreadLocation

    def __repr__(self) -> str:
        """Return the class and the URL, never an option: some are secrets."""
        return f"{type(self).__name__}({self._store.url!r})"

    @property
    def _store(self) -> ObjectStore:
        return self._thread.location.store

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """URL or path of the checkpoint, as it was given; torch's logger reads it."""
        return self._thread.location.checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a reader or writer can be made for this URL or path."""
        try:
            parse_url(checkpoint_id)
        except DcpRemoteError:
            return False
        return True


def join_job(location: Location, world_size: int) -> None:
    """Note how many processes the job has, and refuse a store that not all of them can see.

    A child of the process that opened the store (as with `AsyncCheckpointerType.PROCESS`) is refused too, since the
    objects would be lost with it.
    """
    note_processes(world_size)
    if location.store.capabilities.shared:
        return
    if world_size > 1:
        raise InvalidArgumentError(
            "This store is visible to one process only, and the job has several ranks. Use a folder or a bucket.",
            url=location.store.url,
            world_size=world_size,
        )
    if location.process != os.getpid():
        raise InvalidArgumentError(
            "This store is visible only to the process that opened it, and this is another one. Use a folder or a "
            "bucket.",
            url=location.store.url,
        )


def require_budget(memory_budget_bytes: int) -> None:
    """Refuse a memory budget that is not an integer above zero."""
    if type(memory_budget_bytes) is not int or memory_budget_bytes <= 0:
        raise InvalidArgumentError(
            "memory_budget_bytes must be an integer above zero, in bytes, such as 256 * 2**20.",
            memory_budget_bytes=memory_budget_bytes,
            type=type(memory_budget_bytes).__name__,
        )


def require_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    """Refuse a value that is none of the texts to choose from."""
    if value not in choices:
        listed = " or ".join(f'"{choice}"' for choice in choices)
        raise InvalidArgumentError(f"{name} must be {listed}.{hint}", **{name: value})


def require_timeout(timeout_seconds: object, *, name: str = "timeout_seconds") -> None:
    """Refuse a timeout that is not a number above zero, or longer than a thread can wait (292 years)."""
    if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds <= threading.TIMEOUT_MAX:
        raise InvalidArgumentError(
            f"{name} must be a number above zero, in seconds, and finite.",
            **{name: timeout_seconds, "type": type(timeout_seconds).__name__},
        )
