"""`dcp-remote rm` and `dcp-remote prune`: which checkpoints go, what that frees, and their deletion."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, TypeAlias

from dcp_remote.cli.arguments import DIGITS_MAX, Argument, StorageOptions, Url, argument, flag, parse_step
from dcp_remote.cli.gc import describe_failures
from dcp_remote.cli.ls import build_entry, format_table, read_run_catalog
from dcp_remote.cli.output import Output
from dcp_remote.common.deadline import Deadline
from dcp_remote.common.text import format_count, human_bytes, join_some, shorten
from dcp_remote.errors import InvalidArgumentError, StorageError
from dcp_remote.format.catalog import Catalog, Entry
from dcp_remote.run.deletions import Applied, Deletions, describe_unreadable, require_expendable
from dcp_remote.run.gc import TIMEOUT_SECONDS
from dcp_remote.run.info import find_age_seconds
from dcp_remote.run.lookup import find_entry
from dcp_remote.run.retention import Best, Decision, Retention
from dcp_remote.run.usage import Usage, clear, read_usage
from dcp_remote.storage import ObjectStore, open_store
from dcp_remote.storage.deletion_queue import Deleted

_DAY_SECONDS = 86_400.0

_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)

_OPTIMIZER_KEYS = Retention().optimizer_keys

_Yes: TypeAlias = Annotated[bool, flag("delete; without this nothing is changed")]


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
    yes: _Yes = False,
    force: Annotated[bool, flag("delete also a pinned checkpoint, the newest, or what has a name")] = False,
    storage_options: StorageOptions = None,
) -> None:
    """Delete checkpoints of a run.

    Prints which checkpoints would be deleted: those that fit all of --step, --older-than and --abandoned. A pinned
    checkpoint and the newest are kept; if --step N or NAME means one, nothing is deleted. A checkpoint with a name is
    kept unless --step N or NAME means it. With --yes the others are removed from the catalog, and then the objects that
    no other checkpoint uses are deleted; what an interruption leaves is removed by `dcp-remote gc`.
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
    if not force:
        require_expendable(catalog, [entry for entry in chosen if entry in named])
    kept = {} if force else {entry: why for entry in chosen if (why := _why_kept(entry, newest, named))}
    entries = [entry for entry in chosen if entry not in kept]
    out.say(f"{store.url}: {format_count(len(entries), 'checkpoint')} of {len(catalog.entries)}")
    out.say(*format_table(entries))
    out.say(*(f"kept: step {entry.step}, which is {why}" for entry, why in kept.items()))
    left = [entry for entry in catalog.entries if entry not in entries]
    if left and all(entry.abandoned for entry in left):
        out.say("what stays is abandoned: no job begins by itself until one is restored by step, or all are deleted")
    usage = read_usage(store, catalog, Deadline(TIMEOUT_SECONDS))
    decision = Decision(tuple(entry.step for entry in entries), thin=())

    def retire(deletions: Deletions, deadline: Deadline) -> Applied:
        return deletions.retire(decision.retire, deadline=deadline, force=force, catalog=catalog)

    listed = {"checkpoints": [build_entry(entry) for entry in entries], "kept": [entry.step for entry in kept]}
    _carry_out(out, store, usage, decision, retire, listed=listed, yes=yes)


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
    yes: _Yes = False,
    storage_options: StorageOptions = None,
) -> bool:
    """Delete the checkpoints that a retention does not keep.

    Prints which checkpoints would be deleted, or lose their optimizer, and the bytes that this frees. The newest, the
    pinned, the abandoned and those with a name are kept. With --yes they are removed from the catalog, and then the
    objects that no other checkpoint uses are deleted. A training may save meanwhile: only what was printed goes, and of
    that what the retention still does not keep. Exit code 1 if a manifest cannot be read; if it is that of a checkpoint
    that stays, nothing is deleted, since others may be needed in its place.
    """
    if keep_last is None and keep_optimizer_last is None:
        raise InvalidArgumentError("Say what to keep: --keep-last (with it others, too), or --keep-optimizer-last.")
    metric, equals, count = (keep_best or "").partition("=")
    if equals and not (count.isdecimal() and len(count) <= DIGITS_MAX):
        given = shorten(f"{metric}={count}")
        raise InvalidArgumentError("--keep-best must have the form METRIC or METRIC=N.", keep_best=given)
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
    damaged = next((entry for entry in usage.unreadable if entry.step not in decision.retire), None)
    if damaged is not None:
        decision = Decision((), ())  # as `Deletions.apply` does
    retire = [entry for entry in catalog.entries if entry.step in decision.retire]
    thin = [entry for entry in catalog.entries if entry.step in decision.thin and entry in usage.thinned]
    decision = Decision(decision.retire, tuple(entry.step for entry in thin))  # the others have no optimizer
    out.say(f"{store.url}: {format_count(len(retire), 'checkpoint')} of {len(catalog.entries)} to delete")
    out.say(*format_table(retire))
    labelled = [e for e in catalog.entries if e not in retire and (e.pinned or (e.names and not named_too))]
    if labelled:
        steps = join_some([entry.step for entry in labelled])
        out.say(f"kept in any case, since they are pinned or have a name: step {steps}")
    if thin:
        out.say(f"{format_count(len(thin), 'checkpoint')} to lose the optimizer", *format_table(thin))

    def apply(deletions: Deletions, deadline: Deadline) -> Applied:
        if damaged is not None:
            return Applied(reason=describe_unreadable(damaged, usage.unreadable[damaged]))
        return deletions.apply(retention, deadline=deadline, planned=(catalog, decision))

    listed = {"retire": [build_entry(entry) for entry in retire], "thin": [build_entry(entry) for entry in thin]}
    _carry_out(out, store, usage, decision, apply, listed=listed, yes=yes)
    return bool(usage.unreadable)


def _why_kept(entry: Entry, newest: Entry | None, named: Collection[Entry]) -> str:
    """Return why a checkpoint is kept without --force; "" if it is not."""
    if entry.pinned:
        return "pinned"
    if entry == newest:
        return "the newest"
    return "" if entry in named or not entry.names else f'named "{shorten(entry.names[0])}"'


def _find_steps(catalog: Catalog, steps: Sequence[int | str], *, url: str) -> tuple[list[Entry], list[range]]:
    """Return the checkpoints that are named one by one, and the ranges; a name that looks like a range is a name."""
    named: list[Entry] = []
    ranges: list[range] = []
    for step in steps:
        bounds = _RANGE.fullmatch(step) if isinstance(step, str) and catalog.find_by_name(step) is None else None
        if bounds is None:
            named.append(find_entry(catalog, step, url=url))
        elif max(map(len, bounds.groups())) > DIGITS_MAX:
            raise InvalidArgumentError(f"--step N-M has at most {DIGITS_MAX} digits a step.", step=shorten(bounds[0]))
        elif int(bounds[1]) > int(bounds[2]):
            raise InvalidArgumentError("--step N-M goes from the smaller step to the larger one.", step=step)
        else:
            ranges.append(range(int(bounds[1]), int(bounds[2]) + 1))
    return named, ranges


def say_unreadable(out: Output, usage: Usage) -> None:
    """Print which manifests cannot be read, so that the bytes of their shards are not known."""
    for entry, error in usage.unreadable.items():
        out.say(describe_unreadable(entry, error.message, "bytes are not known"))


def _carry_out(
    out: Output,
    store: ObjectStore,
    usage: Usage,
    decision: Decision,
    apply: Callable[[Deletions, Deadline], Applied],
    *,
    listed: Mapping[str, object],
    yes: bool,
) -> None:
    """Print what a decision would free, or with `yes` carry it out by `apply`, and print what was done.

    `listed` is the beginning of the document. Raises if objects could not be deleted.
    """
    would_free_bytes = usage.freed_bytes(decision)
    applied, deleted, freed_bytes = Applied(), Deleted(), 0
    if yes:
        applied, deleted, freed_bytes = clear(store, usage, apply, timeout_seconds=TIMEOUT_SECONDS)
        steps = join_some([f"step {step}" for step in applied.retired]) or "no checkpoint"
        freed = human_bytes(freed_bytes)
        out.say(f"deleted {steps} ({format_count(deleted.removed, 'object')}, {freed} freed)")
    else:
        say_unreadable(out, usage)
        if decision.retire or decision.thin:
            known = f"free {human_bytes(would_free_bytes)}" if would_free_bytes is not None else "delete"
            out.say(f"Nothing was changed. To {known}, add --yes")
    if applied.thinned:
        out.say(f"without optimizer: {join_some([f'step {step}' for step in applied.thinned])}")
    if applied.reason is not None:
        is_done = applied.retired or applied.thinned
        out.say(f"{'some objects are left for `dcp-remote gc`: ' if is_done else ''}{applied.reason}")
    out.say(*describe_failures(deleted.failed))
    if deleted.failed or deleted.left or deleted.given_up:
        raise StorageError(
            "The checkpoints were removed from the catalog, but some of their objects could not be deleted. Remove "
            "those later with `dcp-remote gc --yes`.",
            url=store.url,
            failed=len(deleted.failed),
            left=deleted.left + deleted.given_up,
        )
    out.give(
        {
            "url": store.url,
            **listed,
            "would_free_bytes": would_free_bytes,
            "deleted": applied.retired,
            "thinned": applied.thinned,
            "objects_deleted": deleted.removed,
            "freed_bytes": freed_bytes,
            "left_for_gc": applied.reason,
        }
    )
