"""Wait for a newer checkpoint of a run, by reading its catalog again and again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from dcp_remote.common.deadline import Clock, Deadline
from dcp_remote.errors import TransientStorageError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.catalog_store import read_catalog
from dcp_remote.run.info import CheckpointInfo, require_run_url
from dcp_remote.run.job import require_step
from dcp_remote.run.lookup import describe_surroundings, require_not_lost, require_reachable
from dcp_remote.storage.base import ObjectStore
from dcp_remote.storage.location import require_timeout
from dcp_remote.storage.request_context import limit_requests

_Found = TypeVar("_Found")

logger = logging.getLogger(__name__)

# Long enough that a hundred evaluators cost a bucket little, and short beside the time between two checkpoints.
POLL_SECONDS = 30.0

# A request that takes longer is given up, and sent again at the next poll.
_REQUEST_SECONDS = 60.0


def wait_for_newer(
    store: ObjectStore,
    step: int | None,
    *,
    timeout_seconds: float,
    poll_seconds: float = POLL_SECONDS,
    clock: Clock | None = None,
) -> CheckpointInfo | None:
    """Wait until the newest checkpoint of a run is above a step; see `Run.wait_for_newer`.

    None waits for any checkpoint. `clock` is an argument for tests.
    """
    if step is not None:
        require_step(step)

    def choose(catalog: Catalog | None) -> Entry | None:
        newest = catalog.latest() if catalog is not None else None
        return newest if newest is not None and (step is None or newest.step > step) else None

    found = _wait(
        store, choose, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds, raises_at_end=False, clock=clock
    )
    return CheckpointInfo.of(found) if found is not None else None


def watch_run(
    store: ObjectStore,
    *,
    after: int | None = None,
    timeout_seconds: float = math.inf,
    poll_seconds: float = POLL_SECONDS,
    clock: Clock | None = None,
) -> Iterator[Entry]:
    """Yield each checkpoint that is committed from now on, until none has come for `timeout_seconds`.

    With `after`, also those that are there with a higher step. The lowest step of a look comes first, then the run is
    looked at again; a checkpoint that is deleted between two looks is missed. After a rollback, new checkpoints of
    lower steps are yielded as well. An outage is waited out, and said once.

    Costs a GET of the catalog per look: at once, after each pause, and after each checkpoint that was taken.
    """
    known: set[str] | None = None  # save_ids of the catalog at the last look

    def choose(catalog: Catalog | None) -> list[Entry]:
        nonlocal known
        entries = catalog.entries if catalog is not None else ()
        live = [entry for entry in entries if not entry.abandoned]
        if known is None:
            new = [entry for entry in live if after is not None and entry.step > after]
        else:
            new = [entry for entry in live if entry.save_id not in known]
        # A lost catalog that is rebuilt has the checkpoints that were known.
        if catalog is not None or known is None:
            known = {entry.save_id for entry in entries}.difference(entry.save_id for entry in new[1:])
        return new[:1]

    while found := _wait(
        store, choose, timeout_seconds=timeout_seconds, poll_seconds=poll_seconds, raises_at_end=True, clock=clock
    ):
        yield from found


def require_times(timeout_seconds: float, poll_seconds: float) -> None:
    """Refuse times of a wait that are not numbers above zero; only the timeout may be infinite."""
    if timeout_seconds != math.inf:
        require_timeout(timeout_seconds)
    require_timeout(poll_seconds, name="poll_seconds")


def _wait(
    store: ObjectStore,
    choose: Callable[[Catalog | None], _Found | None],
    *,
    timeout_seconds: float,
    poll_seconds: float,
    raises_at_end: bool,
    clock: Clock | None,
) -> _Found | None:
    """Look at the catalog until `choose` finds something in it, and return that; None if there is nothing in time."""
    require_times(timeout_seconds, poll_seconds)
    deadline = Deadline(timeout_seconds, clock)
    has_looked_around = is_outage_told = False
    while True:
        # Taken before the look, so that the last one begins at the deadline, not a pause before it.
        is_last = deadline.expired()
        try:
            with limit_requests(Deadline(_REQUEST_SECONDS).remaining_seconds):
                catalog = read_catalog(store)
            if catalog is None and not has_looked_around:
                _look_around(store)
                has_looked_around = True
        except TransientStorageError as error:
            if not is_outage_told:
                text = "%s: the store does not answer; still waiting for a newer checkpoint: %s"
                logger.warning(text, store.url, error)
            is_outage_told = True
            if is_last and raises_at_end:
                raise  # nothing is known of the run
        else:
            if is_outage_told:
                logger.warning("%s: the store answers again", store.url)
            is_outage_told = False
            if found := choose(catalog):
                return found
        if is_last:
            return None
        deadline.clock.sleep(min(poll_seconds, deadline.remaining_seconds()))


def _look_around(store: ObjectStore) -> None:
    """Refuse a URL at which no run will begin, and say what else lies there; called where there is no catalog."""
    with limit_requests(Deadline(_REQUEST_SECONDS).remaining_seconds):
        require_reachable(store)
        require_run_url(store)
        require_not_lost(store)
    found = describe_surroundings(store)
    logger.warning("%s: there is no run here yet; waiting for one%s", store.url, f". {found}" if found else "")
