"""`dcp-remote show`: what a checkpoint holds, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from dcp_remote.checkpoint import read_manifest
from dcp_remote.manifest import Manifest, RunInfo
from dcp_remote.names import chosen_names, top_level_key
from dcp_remote.object_text import from_text
from dcp_remote.storage import open_store
from dcp_remote.terminal import counted, human_bytes, printable

# A terminal is not a disk: whoever wants more asks for it by pattern.
_VALUE_CHARACTERS_MAX = 60

# Somebody looks at a terminal: an outage is told in seconds, not retried for minutes.
_RETRY_SECONDS = 10.0

# Entries that lie at the top of the state dict themselves, as a step or a model's flat state dict does.
_TOP_LEVEL = "(top level)"


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    step: str | None,
    patterns: Sequence[str],
    as_json: bool,
    out: TextIO,
) -> None:
    """Print what a checkpoint holds; one GET, of a run three (two if a step is given).

    Args:
        url: Of the checkpoint, or of a run.
        storage_options: As for `RemoteReader`.
        step: Of a run: the step, or the name, of a checkpoint. None is its newest, or a checkpoint by itself.
        patterns: Names or globs of entries to list; none lists the top-level keys.
        as_json: A JSON document instead of text.
        out: Where to.

    Raises:
        CheckpointNotFoundError: No checkpoint is committed here, or none of this step or name.
        CorruptCheckpointError: The manifest, or a value in it, is damaged.
        InvalidArgumentError: No entry fits a pattern.
    """
    store = open_store(url, storage_options)
    # A name of digits alone can be given by a program, which has `read_manifest`.
    chosen = int(step) if step is not None and step.isdecimal() else step
    manifest = read_manifest(store, step=chosen, retry_seconds=_RETRY_SECONDS)
    names = list(manifest.names())
    if patterns:
        names = chosen_names(names, patterns, paths=manifest.flatten)
    if as_json:
        # All of it before the first byte: half a document would be worse than the error alone.
        out.write(json.dumps(_document(store.url, manifest, names), indent=2) + "\n")
        return
    lines = list(_lines(store.url, manifest, names if patterns else None))
    out.writelines(printable(line) + "\n" for line in lines)


def _facts(url: str, manifest: Manifest) -> dict[str, object]:
    return {
        "url": url,
        **(_run_facts(manifest.run) if manifest.run is not None else {}),
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


def _run_facts(run: RunInfo) -> dict[str, object]:
    """Without its names: which it has now, the catalog says."""
    return {
        "step": run.step,
        **({"metrics": dict(run.metrics)} if run.metrics else {}),
        **({"thinned": list(run.thinned)} if run.thinned else {}),
    }


def _document(url: str, manifest: Manifest, names: Sequence[str]) -> dict[str, object]:
    return {**_facts(url, manifest), "entries": {name: _entry(manifest, name) for name in names}}


def _entry(manifest: Manifest, name: str) -> dict[str, object]:
    tensors = manifest.tensors
    number = tensors.index.get(name)
    if number is not None:
        return {
            "dtype": tensors.kind_of(number).dtype,
            "shape": list(tensors.shape_of(number)),
            "chunks": int(tensors.chunks[number]),
            "bytes": _tensor_bytes(manifest, number),
        }
    if name in manifest.inline:
        return {"value": from_text(name, manifest.inline[name])}
    stored = manifest.stored_index[name]
    span = slice(stored.piece_first, stored.piece_first + stored.pieces)
    return {"encoding": stored.encoding, "bytes": int(manifest.pieces.length[span].sum())}


def _tensor_bytes(manifest: Manifest, number: int) -> int:
    tensors = manifest.tensors
    first, stop = (int(tensors.piece_first[tensors.chunk_first[number + i]]) for i in (0, 1))
    return int(manifest.pieces.length[first:stop].sum())


def _lines(url: str, manifest: Manifest, names: Sequence[str] | None) -> Iterator[str]:
    facts = _facts(url, manifest)
    for name, value in facts.items():
        if isinstance(value, dict):
            facts[name] = ", ".join(f"{one} {number:g}" for one, number in value.items())
        elif isinstance(value, list):
            facts[name] = ", ".join(value)
    facts["bytes"] = f"{human_bytes(manifest.total_bytes)} ({manifest.total_bytes:,} bytes)"
    width = max(map(len, facts))
    for name, value in facts.items():
        yield f"{name.replace('_', ' '):<{width}}  {value}"
    if any(True for _ in manifest.names()):
        yield ""
    if names is None:
        yield from _summary(manifest)
        return
    for name in names:
        yield f"{name}  {_line(manifest, name)}"


def _line(manifest: Manifest, name: str) -> str:
    number = manifest.tensors.index.get(name)
    if number is not None:
        shape = "×".join(map(str, manifest.tensors.shape_of(number))) or "scalar"
        chunks = int(manifest.tensors.chunks[number])
        dtype, size = manifest.tensors.kind_of(number).dtype, human_bytes(_tensor_bytes(manifest, number))
        return f"{dtype} {shape}, {size} in {chunks} chunk{'s' * (chunks != 1)}"
    if name in manifest.inline:
        from_text(name, manifest.inline[name])  # raises if damaged: who read the manifest left values unread
        text = manifest.inline[name].decode("utf-8")
        return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}…"
    entry = _entry(manifest, name)
    return f"object ({entry['encoding']}), {entry['bytes']} bytes"


def _summary(manifest: Manifest) -> Iterator[str]:
    groups: dict[str, list[int]] = {}
    for name in manifest.names():
        top = top_level_key(manifest.flatten.get(name) if manifest.flatten else None)
        count = groups.setdefault(top, [0, 0, 0])
        number = manifest.tensors.index.get(name)
        if number is None:
            count[1] += 1
        else:
            count[0] += 1
            count[2] += _tensor_bytes(manifest, number)
    titles = {top: printable(top) or _TOP_LEVEL for top in groups}
    width = max(map(len, titles.values()), default=0)
    for top, (tensors, objects, size_bytes) in groups.items():
        numbers = f"{counted(tensors, 'tensor')}, {counted(objects, 'object')}, {human_bytes(size_bytes)}"
        yield f"{titles[top]:<{width}}  {numbers}"
    if groups:
        yield ""
        yield "To list entries: dcp-remote show <url> --key 'model.*'"
