"""Where a reader or writer was told to go: from what users pass to a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch.distributed as dist

from dcp_remote.crossing import portable
from dcp_remote.errors import DcpRemoteError, InvalidArgumentError
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.url import parse_url


@dataclass(frozen=True, slots=True)
class Location:
    """A store, and how to open another like it.

    Attributes:
        store: Opened at the checkpoint.
        options: Of the URL that it was opened by; None if the store itself was given.
        checkpoint_id: URL or path as it was given; the URL of a store that was given itself.
        process: That was told of it, whichever has unpickled it since.
    """

    store: ObjectStore
    options: Mapping[str, object] | None = field(repr=False)  # some are secrets
    checkpoint_id: str | os.PathLike[str]
    process: int = field(default_factory=os.getpid, repr=False)

    @classmethod
    def of(cls, url: str | os.PathLike[str] | ObjectStore, options: Mapping[str, object] | None) -> Self:
        """Of a URL, or of a store.

        Raises:
            InvalidArgumentError: The URL or an option is wrong, or there are options beside a store.
        """
        if not isinstance(url, ObjectStore):
            return cls(open_store(url, options), dict(options or {}), url)
        if options:
            raise InvalidArgumentError("storage_options go with a URL; this store has its own.", url=url.url)
        return cls(url, None, url.url)

    def moved_to(self, checkpoint_id: str | os.PathLike[str]) -> Self:
        """Another URL, with the same options.

        Raises:
            InvalidArgumentError: A plain path, where this one is a URL: torch would make it a local folder; or the
                store was given as such, so that nothing is known of how to open another like it.
        """
        parsed = parse_url(checkpoint_id)
        if parsed.canonical == self.store.url:
            return replace(self, checkpoint_id=checkpoint_id)
        if self.options is None:
            raise InvalidArgumentError(
                "checkpoint_id is not the URL of the store that this reader or writer was given. Give it the other "
                "store.",
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


class Whereabouts:
    """Where a reader or writer was last told to go, by whichever thread; what it was told last may not be openable.

    Args:
        location: Where it is.
        refusal: Why it is not where it was told to go; None if it is.
    """

    def __init__(self, location: Location, refusal: BaseException | None = None) -> None:
        """See the class."""
        self.now = location, refusal  # one assignment, which no thread sees half of


class Here(threading.local):
    """What the save or load of this thread is about; of a reader or writer that several threads may use at a time.

    torch runs a save or a load in one thread, and `async_save` several of them in several: they must never finish one
    another's. A thread that is new, as `async_save` makes one for each save, begins where the writer was last told to
    go; so does whoever unpickles it.

    Args:
        last: Shared by the threads.
    """

    def __init__(self, last: Whereabouts) -> None:
        """See the class; called anew in each thread that comes by."""
        self._last = last
        self.location, self._refusal = last.now

    def move_to(self, checkpoint_id: str | os.PathLike[str] | None) -> None:
        """Go on to another checkpoint, or stay if it is None. Never raises: `raise_refusal` does.

        torch calls `reset` before its collectives, where a rank that raises leaves all others waiting for it.
        """
        if checkpoint_id is None:
            return
        try:
            self.location, self._refusal = self.location.moved_to(checkpoint_id), None
        except Exception as error:  # noqa: BLE001  # kept, to be raised
            self._refusal = portable(error)
        self._last.now = self.location, self._refusal

    def raise_refusal(self) -> None:
        """Raise what `move_to` held back, until it is told something better; called where torch tells the other ranks.

        Not only once: whoever tries again without a `checkpoint_id` would replace the checkpoint before.
        """
        if self._refusal is not None:
            raise self._refusal

    def __reduce__(self) -> tuple[object, ...]:
        """The configuration, with credentials that were given by hand: nothing of what is under way."""
        return type(self), (Whereabouts(self.location, self._refusal),)


def is_location(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether it can be parsed."""
    try:
        parse_url(checkpoint_id)
    except DcpRemoteError:
        return False
    return True


def require_shared(location: Location) -> None:
    """Refuse a store that those who should see it cannot see.

    Raises:
        InvalidArgumentError: The store is of one process alone, and there are several ranks; or this is not the process
            that was told of it, but a child of it (as with `AsyncCheckpointerType.PROCESS`), whose memory dies with it.
    """
    if location.store.capabilities.shared:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise InvalidArgumentError(
            "This store is seen by one process alone, and the job has several.",
            url=location.store.url,
            world_size=dist.get_world_size(),
        )
    if location.process != os.getpid():
        raise InvalidArgumentError(
            "This store is seen by one process alone, and this is another than the one that it was opened in.",
            url=location.store.url,
        )


def require_budget(memory_budget_bytes: int) -> None:
    """Refuse what is no number of bytes.

    Raises:
        InvalidArgumentError: Not an integer above zero.
    """
    if type(memory_budget_bytes) is not int or memory_budget_bytes <= 0:
        raise InvalidArgumentError(
            "memory_budget_bytes must be an integer above zero.", memory_budget_bytes=memory_budget_bytes
        )


def require_timeout(timeout_seconds: object, *, name: str = "timeout_seconds") -> None:
    """Refuse what nobody can wait for.

    Raises:
        InvalidArgumentError: Not above zero, or longer than a thread can wait (292 years).
    """
    if not isinstance(timeout_seconds, int | float) or not 0 < timeout_seconds <= threading.TIMEOUT_MAX:
        raise InvalidArgumentError(f"{name} must be a number above zero, and finite.", **{name: timeout_seconds})
