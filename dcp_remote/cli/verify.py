"""`dcp-remote verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.ls import require_answer
from dcp_remote.cli.output import Output, complain, show_line
from dcp_remote.common.text import format_count, human_bytes, join_some, shorten
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run import verification
from dcp_remote.run.shard_check import Damage, Depth
from dcp_remote.storage import open_store


def verify(
    out: Output,
    url: Url,
    *,
    step: Annotated[
        int | str | None,
        argument(type=parse_step, metavar="N|NAME", help="checkpoint of a run, by step or name (default: all)"),
    ] = None,
    quick: Annotated[bool, flag("compare only the lengths of shards, and read none")] = False,
    deep: Annotated[bool, flag("read every byte that a checkpoint names")] = False,
    after: Annotated[str, argument(metavar="PLACE", help="go on from where an interrupted `verify` has stopped")] = "",
    storage_options: StorageOptions = None,
) -> bool:
    """Find damage in a run or checkpoint.

    Looks for missing, cut, replaced and changed shards and manifests, and names the entries and checkpoints that are
    damaged. Reads three blocks of each shard. Exit code 1 if anything is damaged.
    """
    if quick and deep:
        raise InvalidArgumentError("--quick and --deep exclude each other.")
    store = open_store(url, storage_options)
    require_answer(store)
    depth: Depth = "quick" if quick else "deep" if deep else "sample"
    with _show_progress() as show:
        report = verification.verify(store, step=step, depth=depth, after=after, report_progress=show)
    out.say(f"{store.url}: verified{f' behind {after}' if after else ''} ({depth})")
    for damage in report.damage:
        steps = f" (of step {join_some(damage.steps)})" if damage.steps else ""
        out.say(f"{damage.key}{steps}: {damage.reason}")
        if damage.entries:
            out.say(f"    {join_some([shorten(name) for name in damage.entries])}")
    if report.changed:
        out.say(f"deleted, replaced or thinned meanwhile, and not judged: step {join_some(report.changed)}")
    if report.damage:
        hit = {step for damage in report.damage for step in damage.steps}
        whole = [step for step in report.steps if step not in hit and step not in report.changed]
        if report.steps:
            none = f"every {'other ' if report.changed else ''}checkpoint is damaged"
            out.say(f"no damage was found in step {join_some(whole)}" if whole else none)
        out.say(
            "Until the damaged checkpoints are deleted (`dcp-remote rm`), a later save may share their shards: save "
            "once with CheckpointManager(…, dedup=False)."
        )
    else:
        out.say("no damage was found" + ("" if depth == "deep" else f" ({depth}); --deep reads every byte"))
    total = [format_count(len(report.steps), "checkpoint")] if report.steps else []
    total += [format_count(report.shards, "shard"), f"{human_bytes(report.read_bytes)} read"]
    out.say(f"total: {', '.join(total)}, {format_count(len(report.damage), 'object')} damaged")
    out.give({"url": store.url, "depth": depth, **asdict(report)})
    return bool(report.damage)


@contextmanager
def _show_progress() -> Iterator[Callable[[str, Damage | None, int], None]]:
    """Draw a line on a terminal; after an interruption print the damage that was found, and the place to go on from."""
    shards, last_place = 0, ""
    damaged: list[str] = []

    def show(place: str, damage: Damage | None, read_bytes: int) -> None:
        nonlocal shards, last_place
        shards, last_place = shards + 1, place
        if damage is not None:
            damaged.append(f"{damage.key}: {damage.reason}")
        show_line(f"{format_count(shards, 'shard')}, {human_bytes(read_bytes)} read, {len(damaged)} damaged")

    try:
        yield show
    except BaseException:
        show_line()
        if last_place:
            for text in damaged:
                complain(f"damaged, or deleted meanwhile: {text}")
            complain(f"to go on: --after {last_place}")
        raise
    show_line()
