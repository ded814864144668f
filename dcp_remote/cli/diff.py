"""`dcp-remote diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from dcp_remote.cli.arguments import StorageOptions, Url, argument, parse_step
from dcp_remote.cli.output import Output
from dcp_remote.cli.show import TOP_LEVEL, build_entry, count_bytes, describe_entry
from dcp_remote.cli.two_urls import FirstOptions, open_two
from dcp_remote.common.text import escape_unprintable, human_bytes
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import NEWEST_WORDS
from dcp_remote.format.entry_names import choose_names, top_level_key
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.differences import State, compare_manifests
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import open_store

# Short, because a user waits at a terminal: an outage is reported within seconds.
_RETRY_SECONDS = 10.0

_STEPS_MAX = 2

# Columns of the summary, with the states that each counts, and their titles.
_COLUMNS: Mapping[str, Sequence[State]] = {
    "equal": ("equal",),
    "differ": ("kind", "dtype", "shape", "encoding", "content"),
    "may_differ": ("unknown",),
    "only_a": ("only_a",),
    "only_b": ("only_b",),
}
_WORDS = {"may_differ": "may differ", "unknown": "may differ", "only_a": "only in A", "only_b": "only in B"}


def diff(
    out: Output,
    url: Url,
    other: Annotated[
        str | None, argument(nargs="?", help="URL of the second checkpoint or run (default: the same run)")
    ] = None,
    *,
    step: Annotated[
        Sequence[int | str] | None,
        argument(
            type=parse_step,
            action="append",
            metavar="N|NAME",
            help="checkpoint of a run (default: the newest): given twice, of the first and of the second; given once, "
            "of both URLs",
        ),
    ] = None,
    key: Annotated[
        Sequence[str] | None,
        argument(
            action="append",
            metavar="PATTERN",
            help="compare the entries that match a name or pattern, such as 'model.*', and list those that differ; "
            "repeatable",
        ),
    ] = None,
    as_list: Annotated[bool, argument("--all", action="store_true", help="list all entries that differ")] = False,
    first_options: FirstOptions = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Compare two checkpoints, from their manifests alone.

    `diff URL URL`, or `diff RUN --step 10 --step 20`; with one step, that one and the newest. Reads no tensors: those
    that were saved with the same sharding are compared by their digests; the others may differ. Exits with 1 if the
    checkpoints differ, or may differ.
    """
    steps = list(step or ())
    if len(steps) > _STEPS_MAX or (other is None and not steps):
        raise InvalidArgumentError("Name two checkpoints: two URLs, or --step twice for two of one run.")
    if other is None:
        store_a = store_b = open_store(url, storage_options)
        steps = [*steps, NEWEST_WORDS[0]][:_STEPS_MAX]
    else:
        store_a, store_b = open_two(url, other, first_options, storage_options)
    step_a, step_b = (steps[0], steps[-1]) if steps else (None, None)
    a = read_manifest(store_a, step=step_a, retry_seconds=_RETRY_SECONDS)
    b = read_manifest(store_b, step=step_b, retry_seconds=_RETRY_SECONDS)
    paths = {**(b.flatten or {}), **(a.flatten or {})}
    names = list(dict.fromkeys([*a.names(), *b.names()]))
    if key:
        names = choose_names(names, key, paths=paths)
    states = compare_manifests(a, b, names)
    differing = {name: state for name, state in states.items() if state != "equal"}
    out.say(f"A  {_describe_side(store_a.url, a)}", f"B  {_describe_side(store_b.url, b)}", "")
    summary = _summarize(a, b, states)
    out.say(*_format_summary(summary))
    if differing and (as_list or key):
        out.say("", *(_describe_difference(a, b, name, state) for name, state in differing.items()))
    elif differing:
        out.say("", "To list what differs: --all, or --key 'model.*'")
    out.give(
        {
            "a": _build_side(store_a.url, a),
            "b": _build_side(store_b.url, b),
            "equal": not differing,
            "summary": summary,
            "differences": [
                {
                    "name": name,
                    "difference": state,
                    "a": None if state == "only_b" else build_entry(a, name),
                    "b": None if state == "only_a" else build_entry(b, name),
                }
                for name, state in differing.items()
            ],
        }
    )
    return bool(differing)


def _build_side(url: str, manifest: Manifest) -> dict[str, object]:
    return {"url": url, "step": manifest.run.step if manifest.run is not None else None, "save_id": manifest.save_id}


def _describe_side(url: str, manifest: Manifest) -> str:
    step = f" step {manifest.run.step}" if manifest.run is not None else ""
    return f"{url}{step}, saved {manifest.created}, {human_bytes(manifest.total_bytes)}"


def _summarize(a: Manifest, b: Manifest, states: Mapping[str, State]) -> dict[str, dict[str, int]]:
    """Return by top-level key how many entries are in each state, and the bytes of those that are not equal."""
    groups: dict[str, dict[str, int]] = {}
    for name, state in states.items():
        manifest = a if state == "only_a" else b
        top = top_level_key(manifest.flatten.get(name) if manifest.flatten else None)
        counts = groups.setdefault(top, {**dict.fromkeys(_COLUMNS, 0), "bytes": 0})
        for column, counted in _COLUMNS.items():
            counts[column] += state in counted
        counts["bytes"] += count_bytes(manifest, name) if state != "equal" else 0
    return groups


def _format_summary(summary: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the aligned lines of a table, header first."""
    width = max(map(len, [TOP_LEVEL, *map(escape_unprintable, summary)]))
    titles = [_WORDS.get(column, column) for column in _COLUMNS]
    yield "  ".join([" " * width, *titles, "bytes that differ"])
    for top, counts in summary.items():
        cells = [f"{counts[column]:>{len(title)}}" for column, title in zip(_COLUMNS, titles, strict=True)]
        title = escape_unprintable(top) or TOP_LEVEL
        yield "  ".join([f"{title:<{width}}", *cells, f"{human_bytes(counts['bytes']):>17}"])


def _describe_difference(a: Manifest, b: Manifest, name: str, state: State) -> str:
    sides = [] if state == "only_b" else [describe_entry(a, name)]
    sides += [] if state == "only_a" else [describe_entry(b, name)]
    return f"{name}  {_WORDS.get(state, f'other {state}')}: {' -> '.join(dict.fromkeys(sides))}"
