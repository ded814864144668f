"""`dcp-remote rm`, and the deletion of checkpoints as other commands print it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.gc import describe_failures
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, human_bytes, join_some
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.deletions import Applied, Deletions, require_expendable
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.info import find_age_seconds
from dcp_remote.run.lookup import find_entry
from dcp_remote.run.retention import Decision
from dcp_remote.run.usage import Cleared, Usage, clear, read_usage
from dcp_remote.storage import ObjectStore, open_store

_DAY_SECONDS = 86_400.0

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
        argument(type=float, metavar="DAYS", help="delete those that were saved more than so many days ago"),
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
    if older_than is not None and not older_than >= 0:  # also NaN
        raise InvalidArgumentError("--older-than must be at least 0.", older_than=older_than)
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    named, ranges = _find_steps(catalog, step or (), url=store.url)
    newest, now_seconds = catalog.latest(), time.time()

    def is_chosen(entry: Entry) -> bool:
        if step and entry not in named and not any(entry.step in steps for steps in ranges):
            return False
        age_seconds = find_age_seconds(entry.created, now_seconds) or 0.0
        return (older_than is None or age_seconds > older_than * _DAY_SECONDS) and (entry.abandoned or not abandoned)

    chosen = [entry for entry in catalog.entries if is_chosen(entry)]
    kept = [] if force else [entry for entry in chosen if entry.pinned or entry == newest]
    require_expendable(catalog, [entry for entry in kept if entry in named])
    entries = [entry for entry in chosen if entry not in kept]
    out.say(f"{store.url}: {format_count(len(entries), 'checkpoint')} of {len(catalog.entries)}")
    out.say(*format_table(entries))
    out.say(*(f"kept: step {entry.step}, which is {'pinned' if entry.pinned else 'the newest'}" for entry in kept))
    usage = read_usage(store, catalog, Deadline(TIMEOUT_SECONDS))
    decision = Decision(tuple(entry.step for entry in entries), thin=())

    def retire(deletions: Deletions, deadline: Deadline) -> Applied:
        return deletions.retire(decision.retire, deadline=deadline, force=force, catalog=catalog)

    out.give(
        {
            "url": store.url,
            "checkpoints": [build_entry(entry) for entry in entries],
            "kept": [entry.step for entry in kept],
            **carry_out(out, store, usage, decision, retire, yes=yes),
        }
    )


def _find_steps(catalog: Catalog, steps: Sequence[int | str], *, url: str) -> tuple[list[Entry], list[range]]:
    """Return the checkpoints that are named one by one, and the ranges; a name that looks like a range is a name."""
    named: list[Entry] = []
    ranges: list[range] = []
    for step in steps:
        bounds = _RANGE.fullmatch(step) if isinstance(step, str) and catalog.find_by_name(step) is None else None
        if bounds is None:
            named.append(find_entry(catalog, step, url=url))
        elif int(bounds[1]) > int(bounds[2]):
            raise InvalidArgumentError("--step N-M goes from the smaller step to the larger one.", step=step)
        else:
            ranges.append(range(int(bounds[1]), int(bounds[2]) + 1))
    return named, ranges


def say_unreadable(out: Output, usage: Usage) -> None:
    """Print which manifests cannot be read, so that the bytes of their shards are not known."""
    for entry, error in usage.unreadable.items():
        out.say(f"the manifest of step {entry.step} cannot be read, so that bytes are not known: {error.message}")


def carry_out(
    out: Output,
    store: ObjectStore,
    usage: Usage,
    decision: Decision,
    apply: Callable[[Deletions, Deadline], Applied],
    *,
    yes: bool,
) -> dict[str, object]:
    """Print what a decision would free, or with `yes` carry it out by `apply`, and print what was done.

    Returns a part of the document. Raises if objects could not be deleted.
    """
    would_free_bytes = usage.freed_bytes(decision)
    cleared = clear(store, usage, apply, timeout_seconds=TIMEOUT_SECONDS) if yes else Cleared()
    deleted = cleared.deleted
    if yes:
        steps = join_some([f"step {step}" for step in cleared.retired]) or "no checkpoint"
        freed = human_bytes(cleared.freed_bytes)
        out.say(f"deleted {steps} ({format_count(deleted.removed, 'object')}, {freed} freed)")
    else:
        say_unreadable(out, usage)
        if decision.retire or decision.thin:
            out.say(f"Nothing was changed. To free {human_bytes(would_free_bytes)}, add --yes")
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
        "would_free_bytes": would_free_bytes,
        "deleted": cleared.retired,
        "thinned": cleared.thinned,
        "objects_deleted": deleted.removed,
        "freed_bytes": cleared.freed_bytes,
        "left_for_gc": cleared.reason,
    }
