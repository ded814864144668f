"""`dcp-remote verify`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.output import Output
from dcp_remote.common.text import escape_unprintable, format_count, human_bytes, join_some, shorten
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.run import verification
from dcp_remote.run.verification import Damage, VerifyProgress
from dcp_remote.storage import open_store

# Short for the first request, because a user waits: an outage is reported within seconds. Later ones outlast it.
_LOOK_SECONDS = 10.0

_PROGRESS_SECONDS = 0.2


def verify(
    out: Output,
    url: Url,
    *,
    step: Annotated[
        Sequence[int | str] | None,
        argument(
            type=parse_step,
            action="append",
            metavar="N|NAME",
            help="checkpoint to verify, by step, name or 'latest'; repeatable (default: all that are live)",
        ),
    ] = None,
    quick: Annotated[bool, flag("compare only the lengths of shards, and read none")] = False,
    deep: Annotated[bool, flag("read every byte that a checkpoint names, instead of three blocks of each shard")] = (
        False
    ),
    after: Annotated[
        str | None, argument(metavar="PLACE", help="go on behind the place that an interrupted `verify` has printed")
    ] = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Find damage in a run or checkpoint.

    Looks for missing, cut, replaced and changed shards and manifests, and names the entries and checkpoints that are
    damaged. Costs a GET for each manifest and a HEAD for each shard; without --quick up to four GETs for each shard;
    with --deep a GET for each 4 MiB. Exit code 1 if anything is damaged.
    """
    if quick and deep:
        raise InvalidArgumentError("--quick and --deep exclude each other.")
    store = open_store(url, storage_options)
    progress = _Progress()
    try:
        report = verification.verify(
            store,
            steps=step or (),
            depth="quick" if quick else "deep" if deep else "sample",
            after=after,
            look_seconds=_LOOK_SECONDS,
            report_progress=progress.show,
        )
    except (KeyboardInterrupt, StorageError):
        progress.say_where()
        raise
    finally:
        progress.clear()
    checked = f"{format_count(report.shards, 'shard')}, {human_bytes(report.size_bytes)}"
    if report.steps:
        checked = f"{format_count(len(report.steps), 'checkpoint')}, {checked}"
    out.say(f"{report.url}: {checked}; {human_bytes(report.read_bytes)} read ({report.depth})")
    for damage in report.damage:
        out.say(*_describe(damage))
    if report.changed:
        out.say(f"deleted, replaced or thinned meanwhile, and not judged: {_name_steps(report.changed)}")
    if report.damage:
        steps = sorted({step for damage in report.damage for step in damage.steps})
        count = format_count(len({damage.key for damage in report.damage}), "object")
        out.say(f"DAMAGED: {count}" + (f", of {_name_steps(steps)}" if steps else ""))
        out.say("Use another checkpoint. One save with dedup=False sends again what checkpoints of a run share.")
    else:
        out.say("no damage was found" + (f" behind {after}" if after else ""))
    out.give({**asdict(report), "is_sound": report.is_sound})
    return not report.is_sound


def _describe(damage: Damage) -> list[str]:
    steps = f" ({_name_steps(damage.steps)})" if damage.steps else ""
    entries = [f"    {join_some([shorten(name) for name in damage.entries])}"] if damage.entries else []
    return [f"{damage.key}{steps}: {damage.reason}", *entries]


def _name_steps(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {join_some(steps)}"


class _Progress:
    """Line on a terminal, on standard error; and where to go on after an interruption."""

    def __init__(self) -> None:
        self._shards, self._shown_seconds = 0, 0.0
        self._last: VerifyProgress | None = None
        self._damaged: list[str] = []

    def show(self, progress: VerifyProgress) -> None:
        """Count a shard; rewrite the line, a few times a second."""
        self._shards, self._last = self._shards + 1, progress
        if progress.damage is not None:
            self._damaged.append(f"{progress.key}: {progress.damage.reason}")
        if sys.stderr.isatty() and time.monotonic() - self._shown_seconds > _PROGRESS_SECONDS:
            self._shown_seconds = time.monotonic()
            step = "" if progress.step is None else f"step {progress.step}, "
            text = f"{step}{format_count(self._shards, 'shard')}, {human_bytes(progress.read_bytes)} read"
            _write(f"\r\x1b[K{text}, {len(self._damaged)} damaged")

    def clear(self) -> None:
        """Remove the line."""
        if self._shown_seconds:
            _write("\r\x1b[K")

    def say_where(self) -> None:
        """Print what was found, and the place to go on from."""
        self.clear()
        for text in self._damaged:
            _write(f"damaged, or deleted meanwhile: {escape_unprintable(text)}\n")
        if self._last is not None:
            _write(f"to go on: --after {self._last.place}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
