"""`dcp-remote du`."""

from __future__ import annotations

import math
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument
from dcp_remote.cli.ls import format_rows, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.cli.prune import (
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepOptimizerLast,
    Largest,
    NamedToo,
    OptimizerKey,
    make_retention,
    preview,
)
from dcp_remote.cli.rm import say_unreadable
from dcp_remote.cli.show import TOP_LEVEL
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes
from dcp_remote.common.units import GiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.usage import list_sizes, sum_orphans
from dcp_remote.storage import open_store


def du(
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
    price: Annotated[
        float | None,
        argument(type=float, metavar="DOLLARS", help="price of a GB (2^30 bytes) stored for a month, such as 0.023"),
    ] = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Print what a run stores, and what a retention would free.

    Counts a shard that several checkpoints share once: by checkpoint, and by top-level key of the state. The options of
    `prune` tell what it would free; nothing is changed. Costs a GET of each manifest, and a LIST of the run, of a
    request per thousand objects. Exit code 1 if a manifest cannot be read.
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
    if price is not None and not 0 <= price < math.inf:
        raise InvalidArgumentError("--price must be at least 0, and finite.", price=price)
    store = open_store(url, storage_options)
    read_run_catalog(store)  # for its error messages, within seconds
    deadline = Deadline(TIMEOUT_SECONDS)
    # The listing comes before the catalog is read, so that it has no object of a save that commits in between.
    listed = list_sizes(store, deadline)
    catalog = read_run_catalog(store)
    usage, decision = preview(store, catalog, retention, deadline)
    stored_bytes = None if listed is None else sum(listed.values())
    orphan_bytes = None if listed is None else sum_orphans(listed, catalog, usage)
    would_free_bytes = None if retention is None else usage.freed_bytes(catalog, decision)
    dollars = None if price is None else price * (usage.size_bytes if stored_bytes is None else stored_bytes) / GiB
    steps: list[dict[str, object]] = [
        {"step": entry.step, "bytes": entry.size_bytes, "own_bytes": usage.own_bytes(entry)}
        for entry in catalog.entries
    ]
    keys = usage.sum_by_top()

    count = format_count(len(catalog.entries), "checkpoint")
    out.say(f"{store.url}: {count}, {human_bytes(usage.size_bytes)} of shards, each counted once")
    say_unreadable(out, usage)
    if steps:
        rows = [[str(row["step"]), _format(row["bytes"]), _format(row["own_bytes"])] for row in steps]
        out.say("", *format_rows([["step", "size", "used by no other"], *rows], right=(True, True, True)))
        parts = [
            [escape_unprintable(top) or TOP_LEVEL, _format(all_), _format(own)] for top, (all_, own) in keys.items()
        ]
        out.say("", *format_rows([["key", "stored", "used by one step"], *parts], right=(False, True, True)), "")
    if listed is None:
        out.say("stored in total: not known, since the store refuses to list its objects")
    else:
        out.say(f"stored in total: {_format(stored_bytes)} in {format_count(len(listed), 'object')}")
        out.say(f"of which orphans: {_format(orphan_bytes)} (`dcp-remote gc` tells which are old)")
    if retention is not None:
        retired, thinned = (format_count(len(steps), "checkpoint") for steps in (decision.retire, decision.thin))
        loss = f" and the optimizer of {thinned}" if decision.thin else ""
        out.say(f"this retention would delete {retired}{loss}, which frees {_format(would_free_bytes)}")
    if dollars is not None:
        out.say(f"cost: {dollars:,.2f} dollars a month")
    out.give(
        {
            "url": store.url,
            "bytes": usage.size_bytes,
            "steps": steps,
            "keys": [{"key": top, "bytes": all_, "own_bytes": own} for top, (all_, own) in keys.items()],
            "stored_bytes": stored_bytes,
            "stored_objects": None if listed is None else len(listed),
            "orphan_bytes": orphan_bytes,
            "retire": list(decision.retire),
            "thin": list(decision.thin),
            "would_free_bytes": would_free_bytes,
            "dollars_per_month": None if dollars is None else round(dollars, 4),
            "unreadable": sorted(usage.unreadable),
        }
    )
    return bool(usage.unreadable)


def _format(size_bytes: object) -> str:
    return human_bytes(size_bytes) if isinstance(size_bytes, int) else "?"
