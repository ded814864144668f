"""`dcp-remote verify`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Self

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.ls import require_answer
from dcp_remote.cli.output import Output, show_line
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes, join_some, shorten
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
    with _Progress() as progress:
        report = verification.verify(store, step=step, depth=depth, after=after, report_progress=progress.show)
    checkpoints = f"{format_count(len(report.steps), 'checkpoint')}, " if report.steps else ""
    shards, size = format_count(report.shards, "shard"), human_bytes(report.read_bytes)
    out.say(f"{store.url}: {checkpoints}{shards}; {size} read ({depth})")
    for damage in report.damage:
        steps = f" (of step {join_some(damage.steps)})" if damage.steps else ""
        out.say(f"{damage.key}{steps}: {damage.reason}")
        if damage.entries:
            out.say(f"    {join_some([shorten(name) for name in damage.entries])}")
    if report.changed:
        out.say(f"deleted, replaced or thinned meanwhile, and not judged: step {join_some(report.changed)}")
    if report.damage:
        out.say(f"DAMAGED: {format_count(len(report.damage), 'object')}")
        hit = {step for damage in report.damage for step in damage.steps}
        whole = [step for step in report.steps if step not in hit and step not in report.changed]
        if report.steps:
            out.say(f"no damage was found in step {join_some(whole)}" if whole else "every checkpoint is damaged")
        out.say("A later save may share a damaged shard: save once with CheckpointManager(…, dedup=False).")
    else:
        where = f" behind {after}" if after else ""
        out.say(f"no damage was found{where}" + ("" if deep else f" ({depth}); --deep reads every byte"))
    out.give({"url": store.url, "depth": depth, **asdict(report)})
    return bool(report.damage)


class _Progress:
    """Line on a terminal, on standard error; and where to go on after an interruption."""

    def __init__(self) -> None:
        self._shards, self._place = 0, ""
        self._damaged: list[str] = []

    def __enter__(self) -> Self:
        return self

    def show(self, place: str, damage: Damage | None, read_bytes: int) -> None:
        """Count a shard; rewrite the line."""
        self._shards, self._place = self._shards + 1, place
        if damage is not None:
            self._damaged.append(f"{damage.key}: {damage.reason}")
        shards = format_count(self._shards, "shard")
        show_line(f"{shards}, {human_bytes(read_bytes)} read, {len(self._damaged)} damaged")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Remove the line; print the damage that an interrupted call has found, and the place to go on from."""
        show_line()
        if kind is not None and self._place:
            for text in self._damaged:
                print(f"damaged, or deleted meanwhile: {escape_unprintable(text)}", file=sys.stderr)
            print(f"to go on: --after {self._place}", file=sys.stderr)
