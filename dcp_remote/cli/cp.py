"""`dcp-remote cp`."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, parse_step
from dcp_remote.cli.ls import build_entry
from dcp_remote.cli.output import Output
from dcp_remote.cli.two_urls import FirstOptions, open_two
from dcp_remote.common.text import format_count, human_bytes, join_some
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.run.copying import CopyReport, copy_checkpoints

# Time between two lines of progress on a terminal, which take each other's place.
_PROGRESS_SECONDS = 0.5


def cp(
    out: Output,
    source: Annotated[str, argument(help="URL of the run, or of the checkpoint by itself, to copy")],
    url: Url,
    *,
    step: Annotated[
        int | str | None,
        argument(type=parse_step, metavar="N|NAME", help="copy this checkpoint of a run alone (default: all)"),
    ] = None,
    since: Annotated[
        int | None, argument(type=int, metavar="N", help="copy the checkpoints of a run from this step on")
    ] = None,
    first_options: FirstOptions = None,
    storage_options: StorageOptions = None,
) -> None:
    """Copy a run, or a checkpoint, to another URL.

    To another prefix, bucket or cloud, through this machine; a checkpoint by itself to one by itself. All tensors and
    objects are verified, and each checkpoint is committed like a save. Checkpoints that the destination has are left
    out, so that the same command goes on after an interruption, or brings what was saved since. A job that resumes from
    the copy makes it a run of its own: no more is copied there.
    """
    if step is not None and since is not None:
        raise InvalidArgumentError("--step and --since exclude each other.", step=step, since=since)
    began_seconds = time.monotonic()
    from_store, to_store = open_two(source, url, first_options, storage_options)
    progress = _Progress()
    try:
        report = copy_checkpoints(from_store, to_store, step=step, since=since, on_progress=progress.show)
    finally:
        progress.clear()
    copied = report.checkpoints - len(report.gone)
    size = f"{human_bytes(report.bytes_copied)} in {format_count(report.shards, 'shard')}, verified"
    out.say(f"copied {from_store.url} to {to_store.url}: {format_count(copied, 'checkpoint')}, {size}")
    if not report.checkpoints:
        out.say("nothing to copy: the destination has it, or there is nothing")
    if report.bytes_shared or report.bytes_found:
        shared, found = human_bytes(report.bytes_shared), human_bytes(report.bytes_found)
        out.say(f"not copied again: {shared} shared with other checkpoints, {found} put by an interrupted copy")
    for text, steps in (
        ("left out, since the destination has them", report.present),
        ("replaced, since the source has saved them anew (`dcp-remote gc` removes the old ones)", report.replaced),
        ("marked as abandoned, since the source has gone back", report.abandoned),
        ("left out, since they were deleted or thinned meanwhile", report.gone),
    ):
        if steps:
            out.say(f"{text}: {'steps' if len(steps) > 1 else 'step'} {join_some(steps)}")
    out.give(
        {
            "source": from_store.url,
            "url": to_store.url,
            "checkpoints": copied,
            "copied": [build_entry(entry) for entry in report.copied],
            "present": report.present,
            "replaced": report.replaced,
            "abandoned": report.abandoned,
            "gone": report.gone,
            "shards": report.shards,
            "bytes": report.bytes_copied,
            "bytes_shared": report.bytes_shared,
            "bytes_found": report.bytes_found,
            "seconds": round(time.monotonic() - began_seconds, 3),
        }
    )


class _Progress:
    """Line on a terminal, drawn anew; nothing where standard error is no terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._due_seconds = 0.0

    def show(self, report: CopyReport) -> None:
        now_seconds = time.monotonic()
        if self._is_terminal and now_seconds >= self._due_seconds:
            self._due_seconds = now_seconds + _PROGRESS_SECONDS
            done = human_bytes(report.bytes_copied + report.bytes_shared + report.bytes_found)
            number = len(report.copied) + len(report.gone) + 1
            text = f"checkpoint {number} of {report.checkpoints}: {done} of {human_bytes(report.bytes_expected)}"
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._is_terminal and self._due_seconds:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
