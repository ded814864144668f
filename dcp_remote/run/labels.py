"""Names and pins of live checkpoints, changed after the save by one swap of the catalog.

The checkpoint that a step or name means is chosen in the first catalog that is read. A swap whose answer was lost is
tried again for that checkpoint alone, so that a name that moves meanwhile changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog, Entry, Owner, name_entry, pin_entry, require_owner, unname_entries
from dcp_remote.run.catalog_store import swap
from dcp_remote.run.job import check_names, require_step_or_name
from dcp_remote.run.lookup import find_entry, no_such_entry
from dcp_remote.storage.base import ObjectStore


def set_pin(store: ObjectStore, step: int | str, *, pin: bool, deadline: Deadline, owner: Owner | None = None) -> int:
    """Pin or unpin a checkpoint, and return its step; a GET and a PUT, or one GET if it is so already.

    A job that asks (`owner`; None is a person or a tool) and was fenced is refused.
    """
    return _change(store, step, lambda now, entry: pin_entry(now, entry.step, pin=pin), deadline=deadline, owner=owner)


def give_names(
    store: ObjectStore,
    step: int | str,
    names: str | Iterable[str],
    *,
    move: bool,
    deadline: Deadline,
    owner: Owner | None = None,
) -> int:
    """Give names to a live checkpoint, all or none, and return its step. Costs and errors as of `set_pin`.

    Names that other checkpoints have are refused, or taken from them if `move` is true.
    """
    given = check_names(names)
    if not given:
        raise InvalidArgumentError("No name is given.", step=step)

    def change(now: Catalog, entry: Entry) -> Catalog | None:
        check_names(given, step=entry.step)
        return name_entry(now, entry.step, given, move=move)

    return _change(store, step, change, deadline=deadline, owner=owner)


def take_names(
    store: ObjectStore,
    names: str | Iterable[str],
    *,
    deadline: Deadline,
    owner: Owner | None = None,
    save_id: str | None = None,
) -> None:
    """Take names from the checkpoints that have them, which stay. Costs and errors as of `set_pin`.

    Nothing is changed if no checkpoint has one of the names. With `save_id`, only that checkpoint loses any.
    """
    given = check_names(names)
    save_ids = {save_id} if save_id is not None else set[str]()

    def change(now: Catalog) -> Catalog | None:
        require_owner(now, owner)
        # Another process may give the name to another checkpoint before a second attempt, which must leave it there.
        if not save_ids:
            save_ids.update(find_entry(now, name, url=store.url).save_id for name in given)
        return unname_entries(now, given, save_ids=save_ids)

    swap(store, change, deadline=deadline)


def _change(
    store: ObjectStore,
    step: int | str,
    change: Callable[[Catalog, Entry], Catalog | None],
    *,
    deadline: Deadline,
    owner: Owner | None,
) -> int:
    """Change the checkpoint that a step or name means in the first catalog, by one swap; return its step."""
    require_step_or_name(step)
    first: Entry | None = None

    def find_and_change(now: Catalog) -> Catalog | None:
        nonlocal first
        require_owner(now, owner)
        if first is None:
            first = find_entry(now, step, url=store.url)
        entry = now.entry_at(first.step)
        if entry is None or entry.save_id != first.save_id:
            raise no_such_entry(now, step, url=store.url, what="The checkpoint was deleted or replaced meanwhile.")
        return change(now, entry)

    swap(store, find_and_change, deadline=deadline)
    assert first is not None, "a swap calls its change at least once"
    return first.step
