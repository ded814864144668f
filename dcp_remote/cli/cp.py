"""`dcp-remote cp`."""

from __future__ import annotations

import time
from typing import Annotated

from dcp_remote.cli.arguments import SourceOptions, StorageOptions, Url, argument, parse_step, split_options
from dcp_remote.cli.ls import build_entry
from dcp_remote.cli.output import Output, show_line
from dcp_remote.common.text import format_count, human_bytes, join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.copying import CopyReport, copy_checkpoints
from dcp_remote.storage import open_store


def cp(
    out: Output,
    source: Annotated[str, argument(help="URL of the run to copy")],
    url: Url,
    *,
    step: Annotated[
        int | str | None, argument(type=parse_step, metavar="N|NAME", help="copy this checkpoint alone (default: all)")
    ] = None,
    since: Annotated[int | None, argument(type=int, metavar="N", help="copy the checkpoints from this step on")] = None,
    source_options: SourceOptions = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Copy a run, or checkpoints of it, to another URL.

    To another prefix, bucket or cloud, through this machine. All tensors and objects are verified, and each checkpoint
    is committed like a save. The same command again copies whatever the destination lacks: what an interruption left,
    what was saved since, and also what was deleted at the destination meanwhile (`rm`, `prune`). It deletes nothing
    there, but replaces a step that the source has saved anew. Checkpoints that the destination has are left out, and
    their names and pins stay as they are there. Damaged checkpoints are left out, and the exit code is 1. A job that
    resumes from the copy makes it a run of its own: no more is copied there.
    """
    if step is not None and since is not None:
        raise InvalidArgumentError("--step and --since exclude each other.", step=step, since=since)
    began_seconds = time.monotonic()
    of_source, of_copy = split_options(source, url, source_options, storage_options)
    from_store, to_store = open_store(source, of_source), open_store(url, of_copy)
    inner, outer = sorted((from_store.url, to_store.url), key=len, reverse=True)
    if inner.startswith(f"{outer}/") and of_source == of_copy:  # with other options it may be another server
        raise InvalidArgumentError(
            "One URL lies below the other, whose run would count the objects of both as its own. Copy to another URL.",
            source=from_store.url,
            destination=to_store.url,
        )
    try:
        report = copy_checkpoints(from_store, to_store, step=step, since=since, on_progress=_show_progress)
    finally:
        show_line()
    size = f"{human_bytes(report.bytes_copied)} in {format_count(report.shards, 'shard')}, verified"
    copied = f"{format_count(len(report.copied), 'checkpoint')}, {size}" if report.copied else "nothing new"
    out.say(f"copied {from_store.url} to {to_store.url}: {copied}")
    if report.bytes_there:
        out.say(f"not sent again: {human_bytes(report.bytes_there)}, of shards that several share or that were there")
    for text, steps in (
        ("left out, since the destination has them", report.present),
        ("marked as abandoned, as in the source, or since they are newer than its newest", report.abandoned),
        ("no longer marked as abandoned, as in the source", report.unmarked),
        ("left out, since they were deleted or thinned meanwhile", report.gone),
        ("NOT copied, since objects of them are damaged (the warnings say which)", report.damaged),
    ):
        if steps:
            out.say(f"{text}: {'steps' if len(steps) > 1 else 'step'} {join_some(steps)}")
    out.give(
        {
            "source": from_store.url,
            "url": to_store.url,
            "copied": [build_entry(entry) for entry in report.copied],
            "present": report.present,
            "abandoned": report.abandoned,
            "unmarked": report.unmarked,
            "gone": report.gone,
            "damaged": report.damaged,
            "shards": report.shards,
            "bytes": report.bytes_copied,
            "bytes_there": report.bytes_there,
            "seconds": round(time.monotonic() - began_seconds, 3),
        }
    )
    return bool(report.damaged)


def _show_progress(report: CopyReport) -> None:
    done = human_bytes(report.bytes_copied + report.bytes_there)
    number = len(report.copied) + len(report.gone) + len(report.damaged) + 1
    show_line(f"checkpoint {number} of {report.checkpoints}: {done} of {human_bytes(report.bytes_expected)}")
