"""`dcp-remote rm`, and the deletion of checkpoints as other commands print it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_duration, parse_step
from dcp_remote.cli.gc import describe_failures
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, human_bytes, join_some
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.deletions import require_expendable
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.info import find_age_seconds
from dcp_remote.run.lookup import find_entry
from dcp_remote.run.retention import Decision
from dcp_remote.run.usage import Cleared, Usage, clear, read_usage
from dcp_remote.storage import ObjectStore, open_store

_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)


def rm(
    out: Output,
    url: Url,
    *,
    step: Annotated[
        Sequence[int | str] | None,
        argument(
            type=parse_step,
            action="append",
            metavar="N|NAME|N-M",
            help="checkpoints to delete, by step, name, 'latest', or the steps from N to M; repeatable",
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        argument(type=parse_duration, metavar="TIME", help="delete those saved longer ago, such as 36h, 7d or 2w"),
    ] = None,
    abandoned: Annotated[bool, flag("delete those that a job left behind when it went back to an older one")] = False,
    yes: Annotated[bool, flag("delete; without this nothing is changed")] = False,
    force: Annotated[bool, flag("delete also a pinned checkpoint, or the newest")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Delete checkpoints of a run.

    Prints which checkpoints would be deleted: those that fit all of --step, --older-than and --abandoned. A pinned
    checkpoint and the newest are kept; if --step names one, nothing is deleted. With --yes they are removed from the
    catalog, and then the objects that no other checkpoint uses are deleted; what an interruption leaves is removed by
    `dcp-remote gc`.
    """
    if not step and older_than is None and not abandoned:
        raise InvalidArgumentError("Say which checkpoints to delete: --step, --older-than or --abandoned.")
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    named, found = _find_steps(catalog, step, url=store.url)
    now_seconds = time.time()
    fitting = [
        entry
        for entry in found
        if (older_than is None or (find_age_seconds(entry.created, now_seconds) or 0.0) > older_than)
        and (entry.abandoned or not abandoned)
    ]
    if not force:
        require_expendable(catalog, [entry for entry in fitting if entry in named])
    newest = catalog.latest()
    kept = [entry for entry in fitting if not force and (entry.pinned or entry == newest)]
    entries = [entry for entry in fitting if entry not in kept]
    out.say(f"{store.url}: {format_count(len(entries), 'checkpoint')} of {len(catalog.entries)}")
    out.say(*format_table(entries))
    out.say(*(f"kept: step {entry.step}, which is {'pinned' if entry.pinned else 'the newest'}" for entry in kept))
    usage = read_usage(store, catalog if entries else Catalog(catalog.run_id), Deadline(TIMEOUT_SECONDS))
    would_free_bytes = usage.freed_bytes(catalog, Decision(tuple(entry.step for entry in entries), thin=()))
    cleared = None
    if yes:
        cleared = clear(
            store,
            usage,
            lambda deletions, deadline: deletions.retire(entries, deadline=deadline, force=force),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    elif entries:
        say_unreadable(out, usage)
        out.say(f"Nothing was changed. To delete these checkpoints, which frees {human_bytes(would_free_bytes)}: --yes")
    out.give(
        {
            "url": store.url,
            "checkpoints": [build_entry(entry) for entry in entries],
            "kept": [entry.step for entry in kept],
            "would_free_bytes": would_free_bytes,
            **report_cleared(out, store, cleared),
        }
    )


def _find_steps(
    catalog: Catalog, steps: Sequence[int | str] | None, *, url: str
) -> tuple[Sequence[Entry], Sequence[Entry]]:
    """Return the checkpoints that are named one by one, and those and the ones of ranges; all if no steps are given."""
    if not steps:
        return [], catalog.entries
    named: list[Entry] = []
    ranges: list[range] = []
    for step in steps:
        bounds = _RANGE.fullmatch(step) if isinstance(step, str) and catalog.find_by_name(step) is None else None
        if bounds is None:
            named.append(find_entry(catalog, step, url=url))
        else:
            ranges.append(range(int(bounds[1]), int(bounds[2]) + 1))
    return named, [entry for entry in catalog.entries if entry in named or any(entry.step in steps for steps in ranges)]


def say_unreadable(out: Output, usage: Usage) -> None:
    """Print which manifests cannot be read, so that the bytes of their shards are not known."""
    for step, error in usage.unreadable.items():
        out.say(f"the manifest of step {step} cannot be read, so that bytes are not known: {error.message}")


def report_cleared(out: Output, store: ObjectStore, cleared: Cleared | None) -> dict[str, object]:
    """Print what was deleted, and return it as a part of the document; None if nothing was to be.

    Raises if objects could not be deleted.
    """
    if cleared is None:
        return {"deleted": [], "thinned": [], "objects_deleted": 0, "freed_bytes": 0, "left_for_gc": None}
    deleted = cleared.deleted
    objects = f"({format_count(deleted.removed, 'object')}, {human_bytes(cleared.freed_bytes)} freed)"
    out.say(f"deleted {join_some([f'step {step}' for step in cleared.retired]) or 'no checkpoint'} {objects}")
    if cleared.thinned:
        out.say(f"without optimizer: {join_some([f'step {step}' for step in cleared.thinned])}")
    if cleared.reason is not None:
        is_done = cleared.retired or cleared.thinned
        out.say(f"{'some objects are left for `dcp-remote gc`: ' if is_done else ''}{cleared.reason}")
    out.say(*describe_failures(deleted.failed))
    if deleted.failed or deleted.left or deleted.given_up:
        raise StorageError(
            "The checkpoints were removed from the catalog, but some of their objects could not be deleted. Remove "
            "those later with `dcp-remote gc --delete`.",
            url=store.url,
            failed=len(deleted.failed),
            left=deleted.left + deleted.given_up,
        )
    return {
        "deleted": list(cleared.retired),
        "thinned": list(cleared.thinned),
        "objects_deleted": deleted.removed,
        "freed_bytes": cleared.freed_bytes,
        "left_for_gc": cleared.reason,
    }
