"""`dcp-remote show`: print the content of a checkpoint, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from dcp_remote.common.text import escape_unprintable, format_count, human_bytes
from dcp_remote.errors import CorruptCheckpointError
from dcp_remote.format.entry_names import choose_names, top_level_key
from dcp_remote.format.json_text import from_text
from dcp_remote.format.manifest import Manifest, RunInfo
from dcp_remote.run.lookup import read_manifest
from dcp_remote.storage import open_store

# Characters of a value in a listing; `--json` prints all of it.
_VALUE_CHARACTERS_MAX = 60

# Mark of an entry of `Files` (FORMAT.md §5), and the beginning of such an entry in a manifest.
_FILES_MARK = "dcp_remote.Files"
_FILES_BEGIN = f'{{"$tuple":["{_FILES_MARK}",'.encode()

# Short, because a user waits at a terminal: an outage is reported within seconds.
_RETRY_SECONDS = 10.0

# Facts whose name in the JSON document is not plain enough for text. "thinned": top-level keys removed by retention.
_LABELS = {"thinned": "without"}

# Title of the entries without a top-level key, such as a step or those of a model's flat state dict.
_TOP_LEVEL = "(top level)"


def run(
    url: str,
    *,
    storage_options: Mapping[str, object],
    step: int | str | None,
    patterns: Sequence[str],
    as_json: bool,
    out: TextIO,
) -> None:
    """Print the content of a checkpoint; one GET, for a run three GETs (two if a step is given).

    Args:
        url: URL of the checkpoint, or of a run.
        storage_options: Options as for `RemoteReader`.
        step: Step or name of a checkpoint of a run; None for the newest, or for a checkpoint by itself.
        patterns: Names or globs of entries to list; if empty, only the top-level keys are summarized.
        as_json: Print a JSON document instead of text.
        out: Output stream.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint at the URL, or none of this step or name.
        CorruptCheckpointError: The manifest, or a value in it, is damaged.
        InvalidArgumentError: A pattern matches no entry.
    """
    store = open_store(url, storage_options)
    manifest = read_manifest(store, step=step, retry_seconds=_RETRY_SECONDS)
    names = list(manifest.names())
    if patterns:
        names = choose_names(names, patterns, paths=manifest.flatten)
    if as_json:
        # Encoded before the first byte is written: on an error, half a document would be worse than none.
        out.write(json.dumps(_build_document(store.url, manifest, names), indent=2) + "\n")
        return
    lines = list(_format_lines(store.url, manifest, names if patterns else None))
    out.writelines(escape_unprintable(line) + "\n" for line in lines)


def _collect_facts(url: str, manifest: Manifest) -> dict[str, object]:
    return {
        "url": url,
        **(_collect_run_facts(manifest.run) if manifest.run is not None else {}),
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


def _collect_run_facts(run: RunInfo) -> dict[str, object]:
    """Return the facts of a checkpoint in a run, without its names: only the catalog knows the current ones."""
    return {
        "step": run.step,
        **({"metrics": dict(run.metrics)} if run.metrics else {}),
        **({"thinned": list(run.thinned)} if run.thinned else {}),
    }


def _build_document(url: str, manifest: Manifest, names: Sequence[str]) -> dict[str, object]:
    return {**_collect_facts(url, manifest), "entries": {name: _build_entry(manifest, name) for name in names}}


def _build_entry(manifest: Manifest, name: str) -> dict[str, object]:
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


def _format_lines(url: str, manifest: Manifest, names: Sequence[str] | None) -> Iterator[str]:
    facts = _collect_facts(url, manifest)
    for name, value in facts.items():
        if isinstance(value, dict):
            facts[name] = ", ".join(f"{metric} {number:g}" for metric, number in value.items())
        elif isinstance(value, list):
            facts[name] = ", ".join(value)
    facts["bytes"] = f"{human_bytes(manifest.total_bytes)} ({manifest.total_bytes:,} bytes)"
    width = max(map(len, facts))
    for name, value in facts.items():
        yield f"{_LABELS.get(name, name.replace('_', ' ')):<{width}}  {value}"
    if any(True for _ in manifest.names()):
        yield ""
    if names is None:
        yield from _summarize(manifest)
        return
    for name in names:
        yield f"{name}  {_describe_entry(manifest, name)}"


def _describe_entry(manifest: Manifest, name: str) -> str:
    number = manifest.tensors.index.get(name)
    if number is not None:
        shape = "×".join(map(str, manifest.tensors.shape_of(number))) or "scalar"
        chunks = int(manifest.tensors.chunks[number])
        dtype, size = manifest.tensors.kind_of(number).dtype, human_bytes(_count_tensor_bytes(manifest, number))
        return f"{dtype} {shape}, {size} in {chunks} chunk{'s' * (chunks != 1)}"
    if name in manifest.inline:
        # Raises if damaged, since reading the manifest does not check inline values.
        value = from_text(name, manifest.inline[name])
        return _describe_files(value) or _shorten(manifest.inline[name].decode("utf-8"))
    entry = _build_entry(manifest, name)
    return f"object ({entry['encoding']}), {entry['bytes']} bytes"


def _describe_files(value: object) -> str | None:
    """Return the names and total size of the files of an entry of `Files`; None for another value.

    The size follows from the lengths of the base64 texts, which are not decoded.
    """
    match value:
        case {"$tuple": [mark, dict(contents)]} if mark == _FILES_MARK:
            texts = [content.get("$bytes") if isinstance(content, dict) else None for content in contents.values()]
            size_bytes = sum(len(text) // 4 * 3 - text.count("=") for text in texts if isinstance(text, str))
            if all(isinstance(text, str) for text in texts):
                return f"{_shorten(', '.join(contents)) or 'no files'} ({human_bytes(size_bytes)})"
    return None


def _find_files(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the entries of `Files` that are in the manifest, by name, with a description; a damaged one is left out."""
    for name, data in manifest.inline.items():
        if data.startswith(_FILES_BEGIN):
            with suppress(CorruptCheckpointError):
                text = _describe_files(from_text(name, data))
                if text is not None:
                    yield name, text


def _shorten(text: str) -> str:
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[:_VALUE_CHARACTERS_MAX]}…"


def _summarize(manifest: Manifest) -> Iterator[str]:
    files = dict(_find_files(manifest))
    groups: dict[str, list[int]] = {}
    for name in manifest.names():
        if name in files:
            continue
        top = top_level_key(manifest.flatten.get(name) if manifest.flatten else None)
        count = groups.setdefault(top, [0, 0, 0])
        number = manifest.tensors.index.get(name)
        if number is None:
            count[1] += 1
        else:
            count[0] += 1
            count[2] += _count_tensor_bytes(manifest, number)
    titles = {top: escape_unprintable(top) or _TOP_LEVEL for top in groups}
    width = max(map(len, [*titles.values(), *files]), default=0)
    for top, (tensors, objects, size_bytes) in groups.items():
        numbers = f"{format_count(tensors, 'tensor')}, {format_count(objects, 'object')}, {human_bytes(size_bytes)}"
        yield f"{titles[top]:<{width}}  {numbers}"
    for name, text in files.items():
        yield f"{name:<{width}}  {text}"
    if groups or files:
        yield ""
        yield "To list entries: dcp-remote show <url> --key 'model.*'"
