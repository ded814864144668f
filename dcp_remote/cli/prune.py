"""`dcp-remote prune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from dcp_remote.cli.arguments import Argument, StorageOptions, Url, argument, flag
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.cli.rm import carry_out
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.deletions import Applied, Deletions
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.retention import Best, Decision, Retention
from dcp_remote.run.usage import read_usage
from dcp_remote.storage import open_store

_OPTIMIZER_KEYS = Retention().optimizer_keys


def _number(text: str) -> Argument:
    return argument(type=int, metavar="N", help=text)


def prune(
    out: Output,
    url: Url,
    *,
    keep_last: Annotated[int | None, _number("keep the N newest checkpoints")] = None,
    keep_every: Annotated[int | None, _number("keep also those whose step is a multiple of N")] = None,
    keep_best: Annotated[
        str | None,
        argument(metavar="METRIC[=N]", help="keep also the N (1) checkpoints with the best values of a metric"),
    ] = None,
    largest: Annotated[bool, flag("the best value of the metric is the largest, as of an accuracy")] = False,
    keep_optimizer_last: Annotated[
        int | None, _number("drop the optimizer of all kept checkpoints but the N newest")
    ] = None,
    optimizer_key: Annotated[
        Sequence[str] | None,
        argument(
            action="append",
            metavar="KEY",
            help=f"top-level key of the optimizer; repeatable (default: {', '.join(_OPTIMIZER_KEYS)})",
        ),
    ] = None,
    named_too: Annotated[bool, flag("delete also checkpoints with a name")] = False,
    yes: Annotated[bool, flag("delete; without this nothing is changed")] = False,
    storage_options: StorageOptions = None,
) -> bool:
    """Delete the checkpoints that a retention does not keep.

    Prints which checkpoints would be deleted, or lose their optimizer, and the bytes that this frees. The newest, the
    pinned, the abandoned and those with a name are kept. With --yes they are removed from the catalog, and then the
    objects that no other checkpoint uses are deleted. A training may save meanwhile. Exit code 1 if a manifest cannot
    be read; if it is that of a checkpoint that stays, nothing is deleted, since others may be needed in its place.
    """
    if keep_last is None and keep_optimizer_last is None:
        raise InvalidArgumentError("Say what to keep: --keep-last (with it others, too), or --keep-optimizer-last.")
    metric, equals, count = (keep_best or "").partition("=")
    if equals and not count.isdecimal():
        raise InvalidArgumentError("--keep-best must have the form METRIC or METRIC=N.", keep_best=keep_best)
    retention = Retention(
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=Best(metric, int(count or 1), largest) if keep_best is not None else None,
        keep_optimizer_last=keep_optimizer_last,
        optimizer_keys=tuple(optimizer_key or _OPTIMIZER_KEYS),
        keep_named=not named_too,
    )
    store = open_store(url, storage_options)
    catalog = read_run_catalog(store)
    metrics = {name for entry in catalog.entries for name, _ in entry.metrics}
    if keep_best is not None and metric not in metrics:
        known = ", ".join(sorted(metrics)) or None
        raise InvalidArgumentError("No checkpoint has the metric of --keep-best.", metric=metric, known=known)
    usage = read_usage(store, catalog, Deadline(TIMEOUT_SECONDS), dropped_keys=retention.optimizer_keys)
    decision = Deletions(store).decide(retention, catalog)
    if any(entry.step not in decision.retire for entry in usage.unreadable):
        decision = Decision((), ())  # as `Deletions.apply` does
    retire = [entry for entry in catalog.entries if entry.step in decision.retire]
    thin = [entry for entry in catalog.entries if entry.step in decision.thin and entry in usage.thinned]
    out.say(f"{store.url}: {format_count(len(retire), 'checkpoint')} of {len(catalog.entries)} to delete")
    out.say(*format_table(retire))
    labelled = [e for e in catalog.entries if e not in retire and (e.pinned or (e.names and not named_too))]
    if labelled:
        steps = join_some([entry.step for entry in labelled])
        out.say(f"kept in any case, since they are pinned or have a name: step {steps}")
    if thin:
        out.say(f"{format_count(len(thin), 'checkpoint')} to lose the optimizer", *format_table(thin))

    def apply(deletions: Deletions, deadline: Deadline) -> Applied:
        return deletions.apply(retention, deadline=deadline)

    out.give(
        {
            "url": store.url,
            "retire": [build_entry(entry) for entry in retire],
            "thin": [build_entry(entry) for entry in thin],
            **carry_out(out, store, usage, decision, apply, yes=yes),
        }
    )
    return bool(usage.unreadable)
