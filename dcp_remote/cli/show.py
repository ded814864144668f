"""`dcp-remote show`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from dcp_remote.cli.arguments import Step, StorageOptions, Url, argument
from dcp_remote.cli.output import Output, format_rows
from dcp_remote.common.text import format_count, human_bytes, shorten
from dcp_remote.format.entry_names import choose_names, top_level_key
from dcp_remote.format.json_text import from_text
from dcp_remote.format.manifest import Manifest
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import open_store

# Short, because a user waits at a terminal: an outage is reported within seconds.
RETRY_SECONDS = 10.0

# Facts whose name in the JSON document is not plain enough for text. "thinned": top-level keys removed by retention.
_LABELS = {"thinned": "without"}

# Title of the entries without a top-level key, such as a step or those of a model's flat state dict.
TOP_LEVEL = "(top level)"


def show(
    out: Output,
    url: Url,
    *,
    step: Step = None,
    key: Annotated[
        Sequence[str] | None,
        argument(
            action="append",
            metavar="PATTERN",
            help="list the entries that match a name or pattern, such as 'model.*'; repeatable",
        ),
    ] = None,
    storage_options: StorageOptions = None,
) -> None:
    """Print the content of a checkpoint.

    Or of the newest checkpoint of a run, from its manifest alone: one GET (of a run three, two with a step), and one
    for each segment.
    """
    store = open_store(url, storage_options)
    manifest = read_manifest(store, step=step, retry_seconds=RETRY_SECONDS)
    chosen = choose_names(list(manifest.names()), key, paths=manifest.flatten) if key else None
    if out.as_json:
        names = manifest.names() if chosen is None else chosen
        entries = {name: build_entry(manifest, name) for name in names}
        out.give({**_collect_facts(store.url, manifest), "entries": entries})
    else:
        # Made before the first line is printed, since a damaged value raises.
        out.say(*_format_facts(store.url, manifest), *_format_entries(manifest, chosen))


def _collect_facts(url: str, manifest: Manifest) -> dict[str, object]:
    facts: dict[str, object] = {"url": url}
    run = manifest.run
    if run is not None:  # without the names, of which only the catalog knows the current ones
        facts["step"] = run.step
        facts |= {"metrics": dict(run.metrics)} if run.metrics else {}
        facts |= {"thinned": list(run.thinned)} if run.thinned else {}
    return facts | {
        "save_id": manifest.save_id,
        "created": manifest.created,
        "writer": ", ".join(f"{name} {value}" for name, value in manifest.writer.items()),
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors.names),
        "chunks": len(manifest.tensors.chunk_pieces),
        "objects": len(manifest.inline) + len(manifest.stored),
        "shards": len(manifest.shards.keys),
        "bytes": manifest.total_bytes,
    }


def build_entry(manifest: Manifest, name: str) -> dict[str, object]:
    """Return an entry as it is in the JSON document. Raises if it is an inline value that is damaged."""
    tensors = manifest.tensors
    number = tensors.index.get(name)
    if number is not None:
        return {
            "dtype": tensors.kind_of(number).dtype,
            "shape": list(tensors.shape_of(number)),
            "chunks": int(tensors.chunks[number]),
            "bytes": _count_tensor_bytes(manifest, number),
        }
    if name in manifest.inline:
        return {"value": from_text(name, manifest.inline[name])}
    stored = manifest.stored_index[name]
    span = slice(stored.piece_first, stored.piece_first + stored.pieces)
    return {"encoding": stored.encoding, "bytes": int(manifest.pieces.length[span].sum())}


def _count_tensor_bytes(manifest: Manifest, number: int) -> int:
    tensors = manifest.tensors
    first, stop = (int(tensors.piece_first[tensors.chunk_first[number + i]]) for i in (0, 1))
    return int(manifest.pieces.length[first:stop].sum())


def _format_facts(url: str, manifest: Manifest) -> Iterator[str]:
    facts = _collect_facts(url, manifest)
    facts["bytes"] = f"{human_bytes(manifest.total_bytes)} ({manifest.total_bytes:,} bytes)"
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        text = str(value)
        if isinstance(value, dict):
            text = ", ".join(f"{metric} {number:g}" for metric, number in value.items())
        elif isinstance(value, list):
            text = ", ".join(value)
        rows.append((_LABELS.get(name, name.replace("_", " ")), text))
    return format_rows(rows, right=(False,))


def _format_entries(manifest: Manifest, names: Sequence[str] | None) -> Iterator[str]:
    """Yield a line for each entry of these names, or a summary of all by their top-level keys."""
    if any(True for _ in manifest.names()):
        yield ""
    if names is None:
        yield from _summarize(manifest)
    else:
        yield from (f"{name}  {describe_entry(manifest, name)}" for name in names)


def describe_entry(manifest: Manifest, name: str) -> str:
    """Return an entry as one line of text. Raises if it is an inline value that is damaged."""
    entry = build_entry(manifest, name)
    if "value" in entry:
        return shorten(manifest.inline[name].decode("utf-8"))
    if "encoding" in entry:
        return f"object ({entry['encoding']}), {entry['bytes']} bytes"
    number = manifest.tensors.index[name]
    shape = "×".join(map(str, manifest.tensors.shape_of(number))) or "scalar"
    size = human_bytes(_count_tensor_bytes(manifest, number))
    return f"{entry['dtype']} {shape}, {size} in {format_count(int(manifest.tensors.chunks[number]), 'chunk')}"


def _summarize(manifest: Manifest) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in manifest.names():
        groups.setdefault(top_level_key((manifest.flatten or {}).get(name)), []).append(name)
    rows = [(top or TOP_LEVEL, summarize_group(manifest, names)) for top, names in groups.items()]
    yield from format_rows(rows, right=(False,))
    if rows:
        yield ""
        yield "To list entries: dcp-remote show <url> --key 'model.*'"


def summarize_group(manifest: Manifest, names: Sequence[str]) -> str:
    """Return the number of tensors and objects among some entries, and the bytes of the tensors."""
    numbers = [number for name in names if (number := manifest.tensors.index.get(name)) is not None]
    size = human_bytes(sum(_count_tensor_bytes(manifest, number) for number in numbers))
    tensors, objects = format_count(len(numbers), "tensor"), format_count(len(names) - len(numbers), "object")
    return f"{tensors}, {objects}, {size}"
