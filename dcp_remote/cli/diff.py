"""`dcp-remote diff`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from dcp_remote.cli.arguments import SourceOptions, StorageOptions, Url, argument, flag, parse_step, split_options
from dcp_remote.cli.output import Output
from dcp_remote.cli.show import RETRY_SECONDS, TOP_LEVEL, build_entry, describe_entry, summarize_group
from dcp_remote.common.text import human_bytes
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import NEWEST_WORDS
from dcp_remote.format.entry_names import choose_names, top_level_key
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.differences import State, compare_manifests
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import open_store

if TYPE_CHECKING:
    from dcp_remote.loading.value_differences import ValueDifference


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
    values: Annotated[bool, flag("read the tensors that differ, or may, and print how much their values do")] = False,
    source_options: SourceOptions = None,
    storage_options: StorageOptions = None,
) -> bool:
    """Compare two checkpoints, from their manifests alone.

    `diff URL URL`, or `diff RUN --step 10 --step 20`; with one step, that one and the newest. Reads no tensors, unless
    with --values: those that were saved with the same sharding are compared by their digests; the others may differ.
    Exits with 1 if the checkpoints differ, or may differ.
    """
    steps = list(step or ())
    if steps[2:] or (other is None and not steps):
        raise InvalidArgumentError("Name two checkpoints: two URLs, or --step twice for two of one run.")
    if other is None:
        other, steps = url, [*steps, NEWEST_WORDS[0]][:2]
    options_a, options_b = split_options(url, other, source_options, storage_options)
    store_a, store_b = open_store(url, options_a), open_store(other, options_b)
    step_a, step_b = (steps[0], steps[-1]) if steps else (None, None)
    a = read_manifest(store_a, step=step_a, retry_seconds=RETRY_SECONDS)
    b = read_manifest(store_b, step=step_b, retry_seconds=RETRY_SECONDS)
    names = list(dict.fromkeys([*a.names(), *b.names()]))
    if key:
        names = choose_names(names, key, paths={**(b.flatten or {}), **(a.flatten or {})})
    states = compare_manifests(a, b, names)
    amounts: dict[str, ValueDifference] = {}
    if values:
        # Imported here, since it imports torch.
        from dcp_remote.loading.value_differences import choose_comparable, compare_values

        chosen = choose_comparable(a, b, states)
        out.say(f"reading from each: {summarize_group(a, chosen)}", "")
        amounts = dict(compare_values((store_a, a), (store_b, b), chosen, retry_seconds=RETRY_SECONDS))
        states |= {
            name: "content" if amounts[name].unequal else "equal" for name in chosen if states[name] == "unknown"
        }
    differing = {name: state for name, state in states.items() if state != "equal"}
    # Made before the comparison is printed, since a damaged value raises.
    listed = [
        f"{name}  {state}: {_describe_sides(a, b, name, state)}{_describe_amount(amounts.get(name))}"
        for name, state in differing.items()
        if key or values
    ]
    out.say(f"A  {_describe_side(store_a.url, a)}", f"B  {_describe_side(store_b.url, b)}", "")
    out.say(*_summarize(a, b, states))
    if listed:
        out.say("", *listed)
    elif differing:
        out.say("", "To list what differs: --key 'model.*', or --key '*'")
    if out.as_json:
        out.give(
            {
                "a": _build_side(store_a.url, a),
                "b": _build_side(store_b.url, b),
                "equal": len(states) - len(differing),
                "differences": [
                    {
                        "name": name,
                        "difference": state,
                        "a": None if state == "only_b" else build_entry(a, name),
                        "b": None if state == "only_a" else build_entry(b, name),
                    }
                    | ({"values": _build_amount(amounts[name])} if name in amounts else {})
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


def _summarize(a: Manifest, b: Manifest, states: Mapping[str, State]) -> Iterator[str]:
    """Yield a line for the entries of each top-level key that are in the same state."""
    groups: dict[tuple[str, State], list[str]] = {}
    for name, state in states.items():
        paths = (a if state == "only_a" else b).flatten or {}
        groups.setdefault((top_level_key(paths.get(name)), state), []).append(name)
    for (top, state), names in groups.items():
        yield f"{top or TOP_LEVEL}  {state}: {summarize_group(a if state == 'only_a' else b, names)}"


def _describe_sides(a: Manifest, b: Manifest, name: str, state: State) -> str:
    sides = [describe_entry(a, name)] if state != "only_b" else []
    sides += [describe_entry(b, name)] if state != "only_a" else []
    return " -> ".join(dict.fromkeys(sides))


def _describe_amount(amount: ValueDifference | None) -> str:
    if amount is None:
        return ""
    text = f"; {amount.unequal:,} of {amount.elements:,} values differ"
    if amount.max_abs is not None:
        text += f", max abs {amount.max_abs:.3g}, relative norm {amount.relative_norm:.3g}"
    return text


def _build_amount(amount: ValueDifference) -> dict[str, object]:
    # JSON has neither NaN nor infinity.
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in asdict(amount).items()
    }
