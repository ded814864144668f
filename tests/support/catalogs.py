"""Catalogs for tests: short constructors, a hypothesis strategy, and stores that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

from dcp_remote.common import deadline
from dcp_remote.common.deadline import Deadline
from dcp_remote.format.catalog import CATALOG_KEY, Attempt, Catalog, Entry, add_entry
from dcp_remote.format.catalog_json import decode, encode
from dcp_remote.run.catalog_store import Change, swap
from dcp_remote.storage import MemoryStore, ObjectStore
from tests.support.clocks import SleepClock

RUN = "f" * 32


def identity(step: int, letter: str = "a") -> str:
    """Return a readable save_id of a step; the letter tells several saves of the step apart."""
    return f"{letter}{step:031d}"


def entry(step: int, letter: str = "a", **other: Any) -> Entry:
    """Return an entry of a step, saved by job 1 and begun at revision 0."""
    save_id = identity(step, letter)
    fields: dict[str, Any] = {
        "step": step,
        "save_id": save_id,
        "manifest": f"manifests/step-{step:012d}-{save_id}.json",
        "size_bytes": 1_000,
        "created": "2026-01-02T03:04:05Z",
        "token": 1,
        "began_revision": 0,
    }
    return Entry(**fields | other)


def catalog(*entries: Entry, **other: Any) -> Catalog:
    """Return the catalog of a run of these checkpoints, owned by job 1."""
    fields: dict[str, Any] = {"run_id": RUN, "revision": 10, "token": 1, "entries": entries}
    return Catalog(**fields | other)


def attempt(step: int, letter: str = "a", **other: Any) -> Attempt:
    """Return a save of a step that began at revision 10; arguments unknown to `Attempt` go to its entry."""
    own: dict[str, Any] = {"run_id": RUN}
    own |= {name: other.pop(name) for name in ("run_id", "before", "reused", "abandons") if name in other}
    return Attempt(entry(step, letter, **{"began_revision": 10} | other), **own)


IDENTITIES = st.text("0123456789abcdef", min_size=32, max_size=32)
NUMBERS = st.integers(min_value=0, max_value=2**53)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
METRICS = st.dictionaries(TEXTS, st.floats(allow_nan=False, allow_infinity=False), max_size=3)


@st.composite
def catalogs(draw: st.DrawFn, entries_max: int = 6) -> Catalog:
    """Draw any catalog that `catalog_json.check` accepts."""
    revision, token = draw(NUMBERS), draw(NUMBERS)
    count = draw(st.integers(min_value=0, max_value=entries_max if revision else 0))
    distinct = st.lists(TEXTS, unique=True, max_size=count)
    steps = sorted(draw(st.lists(NUMBERS, min_size=count, max_size=count, unique=True)))
    save_ids = draw(st.lists(IDENTITIES, min_size=count, max_size=count, unique=True))
    names = draw(distinct)
    entries = tuple(
        Entry(
            step=step,
            save_id=save_id,
            manifest=f"manifests/{save_id}.json",
            size_bytes=draw(NUMBERS),
            created=draw(TEXTS),
            token=draw(st.integers(min_value=0, max_value=token)),
            began_revision=draw(st.integers(min_value=0, max_value=revision - 1)),
            names=tuple(names[index::count]),
            metrics=tuple(draw(METRICS).items()),
            pinned=draw(st.booleans()),
            thinned=tuple(draw(st.lists(TEXTS, max_size=2))),
            abandoned=draw(st.booleans()),
        )
        for index, (step, save_id) in enumerate(zip(steps, save_ids, strict=True))
    )
    return Catalog(draw(IDENTITIES), revision, token, draw(st.integers(min_value=0, max_value=revision)), entries)


NONCE = "0" * 32
ONE = catalog(entry(1))
# Deadline of a swap, by the clock of the test.
SECONDS = 60.0


def store_of(run: Catalog | None = ONE) -> MemoryStore:
    """Return a store with a catalog, or an empty one."""
    store = MemoryStore()
    if run is not None:
        store.put(CATALOG_KEY, [encode(run, NONCE)])
    return store


def stored(store: MemoryStore) -> Catalog | None:
    """Return the catalog in the store, read without wrappers; None if there is none."""
    found = store.space.objects.get(CATALOG_KEY)
    return decode(found.data) if found else None


def swapped(
    store: ObjectStore,
    change: Change,
    *,
    create: bool = False,
    seconds: float = SECONDS,
    clock: SleepClock | None = None,
) -> Catalog:
    """Swap as `catalog_store.swap` does, with pauses of full length that take no time."""
    clock = clock or SleepClock()
    with full_pauses(clock.sleep):
        return swap(store, change, create=create, deadline=Deadline(seconds, clock))


@contextmanager
def full_pauses(sleep: Callable[[float], None]) -> Iterator[None]:
    """Make all pauses as long as they can be, and pass them to a function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deadline, "SYSTEM_CLOCK", deadline.Clock(sleep=sleep, uniform=lambda low, high: high))
        yield


def commit(step: int) -> Change:
    """Return the change that commits a save begun on the present catalog, by the job that owns the run."""
    return lambda run: add_entry(
        run, attempt(step, "b", run_id=run.run_id, token=run.token, began_revision=run.revision)
    )
