"""Reading and swapping the catalog of a run: what was meant to become of it, until it is so, or cannot be.

A swap whose answer is lost is settled by reading: the change is asked again on what lies there now, and says itself
whether anything is left to do.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from dcp_remote import catalog_json
from dcp_remote.catalog import CATALOG_KEY, Catalog
from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitUnknownError,
    ConditionFailedError,
    CorruptCheckpointError,
    DcpRemoteError,
    InvalidArgumentError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
    UnsupportedFormatError,
)
from dcp_remote.storage.base import ObjectStore, Version
from dcp_remote.storage.conditional_writes import require_conditional_writes
from dcp_remote.storage.rereads import get_decoded
from dcp_remote.storage.retrying import Deadline, RetryingStore, jitter

# The pause before a swap that was lost is tried again, doubled each time, with full jitter: a catalog changes seldom.
_FIRST_PAUSE_SECONDS = 0.05
_PAUSE_SECONDS_MAX = 5.0

# A store that goes on refusing although nothing changed does not compare and swap.
_REFUSALS_MAX = 12

# What the catalog is to become of what it is; None if it is so already. A refusal is raised, and nothing is written.
Change = Callable[[Catalog], Catalog | None]


@dataclass(frozen=True, slots=True)
class Seen:
    """The catalog as it was read.

    Attributes:
        catalog: What it says.
        version: Of the object.
    """

    catalog: Catalog
    version: Version


class _Known:
    """The last catalog that this process read or wrote, and its bytes.

    A job that is alone reads just that again, two or three times a save; decoding it is most of what a save costs.
    """

    def __init__(self) -> None:
        self._last: tuple[bytes, Catalog] | None = None  # replaced whole: threads share it

    def decoded(self, data: bytes) -> Catalog:
        last = self._last
        if last is not None and last[0] == data:
            return last[1]
        catalog = catalog_json.decode(data)
        self.remember(data, catalog)
        return catalog

    def remember(self, data: bytes, catalog: Catalog) -> None:
        self._last = (data, catalog)


_KNOWN = _Known()


def read_catalog(store: ObjectStore) -> Seen | None:
    """Read and check the catalog; one GET, and one more if the answer is damaged. None if there is none.

    Raises:
        CorruptCheckpointError: It is damaged; `dcp-remote recover` rebuilds it.
        UnsupportedFormatError: A newer version wrote it.
    """
    try:
        content, catalog = get_decoded(store, CATALOG_KEY, _KNOWN.decoded, limit_bytes=catalog_json.STORED_BYTES_MAX)
    except ObjectNotFoundError:
        return None
    except CorruptCheckpointError as error:
        what = f"The catalog of this run cannot be read: {error.what} `dcp-remote recover` makes it again."
        raise CorruptCheckpointError(what, **{"url": store.url, **error.details}) from error
    except UnsupportedFormatError as error:
        raise UnsupportedFormatError(error.what, **{"url": store.url, **error.details}) from error
    return Seen(catalog, content.version)


def swap(
    store: ObjectStore,
    change: Change,
    *,
    deadline: Deadline,
    create: bool = False,
    sleep: Callable[[float], None] = time.sleep,
    uniform: Callable[[float, float], float] = jitter,
) -> Catalog:
    """Replace the catalog by what `change` makes of it, and return what lies there then. Never overwrites unseen.

    Two requests, and two more for each swap that was lost to somebody else's or whose answer was; the first time on a
    server that is none of the clouds' own, those of `require_conditional_writes`. Whatever is raised, a
    crash of this process included, the catalog is the old one or the new one, whole.

    Args:
        store: Opened at the run.
        change: Asked on what was just read, again after each swap that did not clearly succeed: it must know its own
            work when it sees it.
        deadline: Until when to go on.
        create: Begin the run if there is no catalog: `change` is asked on an empty one, which is written if it is to
            stay so.
        sleep: For tests.
        uniform: For tests.

    Raises:
        CheckpointNotFoundError: There is no catalog, and it is not to be created.
        CommitUnknownError: By the deadline it could not be found out whether the change was made.
        InvalidArgumentError: The store cannot compare and swap.
        StorageError: The store refused, or ignores the condition of a write; nothing was written.
        DcpRemoteError: Whatever `change` refuses with: it was asked on what lies there now.
    """
    if not store.capabilities.compare_and_swap:
        raise InvalidArgumentError(
            "A run needs a store that can replace an object on condition.",
            url=store.url,
            reason=store.capabilities.swap_refusal,
        )
    reading = RetryingStore(store, deadline, sleep=sleep, random=lambda: uniform(0, 1))
    run_id = uuid.uuid4().hex
    pause, refusals, unclear, last = _FIRST_PAUSE_SECONDS, 0, False, False
    before: Seen | None = None
    failure: DcpRemoteError | None = None
    while True:
        try:
            seen = read_catalog(reading)
        except DcpRemoteError as error:
            if failure is None:
                raise
            # A refusal on condition can be of our own write, carried out a moment ago.
            may_be_written = unclear or isinstance(failure, ConditionFailedError)
            raise (_unknown(store, failure) if may_be_written else failure) from error
        if seen is None and not create:
            raise CheckpointNotFoundError("There is no run here: it has no catalog.json.", url=store.url)
        # Before `change` is asked: it may look at the time, and what it says is to be written at once.
        require_conditional_writes(store, deadline, swaps=True, sleep=sleep)
        now = Catalog(run_id) if seen is None else seen.catalog
        wanted = change(now)
        if wanted is None and seen is not None:
            return now
        # Past what a swap was conditional on, it is not on its way any more.
        unclear = unclear and seen == before
        refusals = refusals + 1 if isinstance(failure, ConditionFailedError) and seen == before else 0
        if failure is not None:
            _give_up_or_go_on(store, failure, refusals=refusals, unclear=unclear, last=last)
        before, wanted = seen, now if wanted is None else wanted
        body = catalog_json.encode(wanted, uuid.uuid4().hex, known=now)
        try:
            reading.put(CATALOG_KEY, [body], condition="absent" if seen is None else seen.version)
        except DcpRemoteError as error:
            failure = error
        else:
            _KNOWN.remember(body, wanted)
            return wanted
        unclear |= isinstance(failure, TransientStorageError)
        # Whether it was carried out after all is worth a last look.
        last = deadline.remaining_seconds() <= pause
        if not last:
            sleep(uniform(0, pause))
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)


def _give_up_or_go_on(store: ObjectStore, failure: DcpRemoteError, *, refusals: int, unclear: bool, last: bool) -> None:
    """Raise what is to be told of a swap that failed and did nothing so far, unless it is to be tried again."""
    may_pass = isinstance(failure, (ConditionFailedError, TransientStorageError))
    if not may_pass and not unclear:
        raise failure
    if refusals >= _REFUSALS_MAX and not unclear:
        raise StorageError(
            "The store keeps refusing to replace the catalog although nothing changed: it may not support that.",
            url=store.url,
            attempts=refusals,
        ) from failure
    if last:
        raise _unknown(store, failure) from failure


def _unknown(store: ObjectStore, cause: DcpRemoteError) -> CommitUnknownError:
    return CommitUnknownError(
        "The store never said whether the catalog was replaced. Look before you act again.", url=store.url, cause=cause
    )
