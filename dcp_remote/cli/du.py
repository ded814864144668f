"""`dcp-remote du`."""

from __future__ import annotations

import math
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument
from dcp_remote.cli.deletions import say_unreadable
from dcp_remote.cli.ls import read_run_catalog
from dcp_remote.cli.output import Output, format_rows
from dcp_remote.cli.show import TOP_LEVEL
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, human_bytes
from dcp_remote.common.units import GiB
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.usage import read_usage
from dcp_remote.storage import open_store
from dcp_remote.storage.retrying import RetryingStore


def du(
    out: Output,
    url: Url,
    *,
    price: Annotated[
        float | None,
        argument(type=float, metavar="DOLLARS", help="price of a GB (2^30 bytes) stored for a month, such as 0.023"),
    ] = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Print what a run stores, by checkpoint and by top-level key of the state, and its orphans.

    For each checkpoint, the bytes that no other one uses, which its deletion alone would free, stand apart from those
    that it shares. A shared shard counts once in the totals. What a retention would free is told by `prune` without
    --yes. Costs two GETs of the catalog, one of each manifest, and a LIST of the run, of a request per thousand
    objects. Exit code 1 if a manifest cannot be read.
    """
    if price is not None and not 0 <= price < math.inf:
        raise InvalidArgumentError("--price must be at least 0, and finite.", price=price)
    store = open_store(url, storage_options)
    read_run_catalog(store)  # for its error messages, within seconds
    deadline = Deadline(TIMEOUT_SECONDS)
    # The listing comes before the catalog is read, so that it has no object of a save that commits in between.
    listed = {info.key: info.size_bytes for info in RetryingStore(store, deadline).list()}
    catalog = read_run_catalog(store)
    usage = read_usage(store, catalog, deadline)
    stored_bytes, orphan_bytes = sum(listed.values()), usage.orphan_bytes(listed)
    dollars = None if price is None else price * stored_bytes / GiB
    own_bytes = {entry: usage.own_bytes(entry) for entry in catalog.entries}
    shared_bytes = {entry: None if own is None else entry.size_bytes - own for entry, own in own_bytes.items()}
    keys = usage.sum_by_top()

    out.say(f"{store.url}: {format_count(len(catalog.entries), 'checkpoint')}")
    say_unreadable(out, usage)
    if catalog.entries:
        steps = [
            (str(entry.step), *map(human_bytes, (entry.size_bytes, own_bytes[entry], shared_bytes[entry])))
            for entry in catalog.entries
        ]
        out.say("", *format_rows([("step", "size", "used by no other", "shared"), *steps], right=(True,) * 4))
        tops = [(top or TOP_LEVEL, human_bytes(stored), human_bytes(own)) for top, (stored, own) in keys.items()]
        out.say("", *format_rows([("key", "stored", "used by one step"), *tops], right=(False, True, True)), "")
    out.say(f"stored in total: {human_bytes(stored_bytes)} in {format_count(len(listed), 'object')}")
    out.say(f"of which orphans: {human_bytes(orphan_bytes)} (`dcp-remote gc` tells which are old)")
    if dollars is not None:
        out.say(f"cost: {dollars:,.2f} dollars a month")
    out.give(
        {
            "url": store.url,
            "steps": [
                {"step": entry.step, "bytes": entry.size_bytes, "own_bytes": own} for entry, own in own_bytes.items()
            ],
            "keys": [{"key": top, "bytes": stored, "own_bytes": own} for top, (stored, own) in keys.items()],
            "stored_bytes": stored_bytes,
            "stored_objects": len(listed),
            "orphan_bytes": orphan_bytes,
            "dollars_per_month": None if dollars is None else round(dollars, 4),
            "unreadable": sorted(entry.step for entry in usage.unreadable),
        }
    )
    return bool(usage.unreadable)
