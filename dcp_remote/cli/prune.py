"""`dcp-remote prune`, and the options of a retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.cli.rm import report_cleared, say_unreadable
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Catalog
from dcp_remote.run.deletions import Deletions
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.retention import Best, Decision, Retention
from dcp_remote.run.usage import Usage, clear, read_usage
from dcp_remote.storage import ObjectStore, open_store

KeepLast: TypeAlias = Annotated[int | None, argument(type=int, metavar="N", help="keep the N newest checkpoints")]
KeepEvery: TypeAlias = Annotated[
    int | None, argument(type=int, metavar="N", help="keep also those whose step is a multiple of N")
]
KeepBest: TypeAlias = Annotated[
    str | None, argument(metavar="METRIC[=N]", help="keep also the N (1) checkpoints with the best values of a metric")
]
Largest: TypeAlias = Annotated[bool, flag("the best value of the metric is the largest, as of an accuracy")]
KeepOptimizerLast: TypeAlias = Annotated[
    int | None, argument(type=int, metavar="N", help="drop the optimizer of all kept checkpoints but the N newest")
]
OptimizerKey: TypeAlias = Annotated[
    Sequence[str] | None,
    argument(
        action="append",
        metavar="KEY",
        help=f"top-level key of the optimizer; repeatable (default: {', '.join(Retention().optimizer_keys)})",
    ),
]
NamedToo: TypeAlias = Annotated[bool, flag("delete also checkpoints with a name")]


def make_retention(
    *,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: str | None,
    largest: bool,
    keep_optimizer_last: int | None,
    optimizer_key: Sequence[str] | None,
    named_too: bool,
) -> Retention | None:
    """Return the retention of these options; None if none of them says what to keep."""
    if keep_last is None and keep_optimizer_last is None and keep_every is None and keep_best is None:
        return None
    if keep_last is None and (keep_every is not None or keep_best is not None):
        raise InvalidArgumentError("--keep-every and --keep-best have no effect without --keep-last.")
    metric, equals, count = (keep_best or "").partition("=")
    if equals and not count.isdecimal():
        raise InvalidArgumentError("--keep-best must have the form METRIC or METRIC=N.", keep_best=keep_best)
    return Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=Best(metric, int(count or 1), largest) if keep_best is not None else None,
        keep_optimizer_last=keep_optimizer_last,
        optimizer_keys=tuple(optimizer_key or Retention().optimizer_keys),
        keep_named=not named_too,
    )


def preview(
    store: ObjectStore, catalog: Catalog, retention: Retention | None, deadline: Deadline
) -> tuple[Usage, Decision]:
    """Read the usage of a run, and decide what a retention would delete and thin."""
    drops = retention is not None and retention.keep_optimizer_last is not None
    dropped_keys = retention.optimizer_keys if retention is not None and drops else ()
    usage = read_usage(store, catalog, deadline, dropped_keys=dropped_keys)
    if retention is None:
        return usage, Decision((), ())
    decision = Deletions(store).decide(retention, catalog)
    if not set(usage.unreadable).issubset(decision.retire):
        return usage, Decision((), ())  # as `Deletions.apply` does
    manifests = {entry.step: entry.manifest for entry in catalog.entries}
    thin = tuple(step for step in decision.thin if manifests[step] in usage.thinned)
    return usage, Decision(decision.retire, thin)


def prune(
    out: Output,
    url: Url,
    *,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
    largest: Largest = False,
    keep_optimizer_last: KeepOptimizerLast = None,
    optimizer_key: OptimizerKey = None,
    named_too: NamedToo = False,
    yes: Annotated[bool, flag("delete; without this nothing is changed")] = False,
    storage_options: StorageOptions = None,
) -> bool:
    """Delete the checkpoints that a retention does not keep.

    Prints which checkpoints would be deleted, or lose their optimizer, and the bytes that this frees. The newest, the
    pinned, the abandoned and those with a name are kept. With --yes they are removed from the catalog, and then the
    objects that no other checkpoint uses are deleted. A training may save meanwhile. Exit code 1 if a manifest cannot
    be read: nothing is deleted then, since the other checkpoints may be needed in its place.
    """
    retention = make_retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        largest=largest,
        keep_optimizer_last=keep_optimizer_last,
        optimizer_key=optimizer_key,
        named_too=named_too,
    )
    if retention is None:
        raise InvalidArgumentError("Say what to keep: --keep-last, or --keep-optimizer-last.")
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    usage, decision = preview(store, catalog, retention, Deadline(TIMEOUT_SECONDS))
    retire = [entry for entry in catalog.entries if entry.step in decision.retire]
    thin = [entry for entry in catalog.entries if entry.step in decision.thin]
    would_free_bytes = usage.freed_bytes(catalog, decision)
    out.say(f"{store.url}: {format_count(len(retire), 'checkpoint')} of {len(catalog.entries)} to delete")
    out.say(*format_table(retire))
    if thin:
        out.say(f"{format_count(len(thin), 'checkpoint')} to lose the optimizer", *format_table(thin))
    cleared = None
    if yes:
        cleared = clear(
            store,
            usage,
            lambda deletions, deadline: deletions.apply(retention, deadline=deadline),
            timeout_seconds=TIMEOUT_SECONDS,
        )
    else:
        say_unreadable(out, usage)
        if retire or thin:
            out.say(f"Nothing was changed. To free {human_bytes(would_free_bytes)}, add --yes")
    out.give(
        {
            "url": store.url,
            "retire": [build_entry(entry) for entry in retire],
            "thin": [build_entry(entry) for entry in thin],
            "would_free_bytes": would_free_bytes,
            **report_cleared(out, store, cleared),
        }
    )
    return bool(usage.unreadable)
