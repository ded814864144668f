"""Differences of two checkpoints by entry, from their manifests alone. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal, TypeAlias

from dcp_remote.format.json_text import from_text
from dcp_remote.format.manifest import PICKLE, RAW, TORCH, Manifest

# "kind": a tensor in one, an object in the other. "content": the bytes differ, and so does the value. "unknown": the
# manifests cannot tell, as chunks or pieces are cut differently, or since equal values may have different streams.
State: TypeAlias = Literal["equal", "only_a", "only_b", "kind", "dtype", "shape", "encoding", "content", "unknown"]

# Lengths of pieces, and their digests.
_Pieces: TypeAlias = tuple[tuple[int, ...], bytes]


def compare_manifests(a: Manifest, b: Manifest, names: Iterable[str]) -> dict[str, State]:
    """Compare the entries of these names, each of which at least one of the checkpoints has.

    Tensors of equal layout are compared by their digests, objects in the manifests by value. Properties of tensors that
    change no value, such as `requires_grad`, do not count; nor do empty dicts, which are no entries.
    """
    names_a, names_b = set(a.names()), set(b.names())

    def compare(name: str) -> State:
        if name not in names_b:
            return "only_a"
        if name not in names_a:
            return "only_b"
        if (name in a.tensors.index) != (name in b.tensors.index):
            return "kind"
        return _compare_tensors(a, b, name) if name in a.tensors.index else _compare_objects(a, b, name)

    return {name: compare(name) for name in names}


def _compare_tensors(a: Manifest, b: Manifest, name: str) -> State:
    number_a, number_b = a.tensors.index[name], b.tensors.index[name]
    kind_a, kind_b = a.tensors.kind_of(number_a), b.tensors.kind_of(number_b)
    if kind_a.dtype != kind_b.dtype:
        return "dtype"
    if a.tensors.shape_of(number_a) != b.tensors.shape_of(number_b):
        return "shape"
    if kind_a.encoding != kind_b.encoding:
        return "encoding"
    chunks_a, chunks_b = _chunks(a, number_a), _chunks(b, number_b)
    if chunks_a == chunks_b:
        return "equal"
    # Pieces of the same place and length that have other digests.
    is_other = any(
        box in chunks_b and lengths == chunks_b[box][0] and digests != chunks_b[box][1]
        for box, (lengths, digests) in chunks_a.items()
    )
    return "content" if is_other and kind_a.encoding == RAW else "unknown"


def _chunks(manifest: Manifest, number: int) -> dict[tuple[tuple[int, ...], tuple[int, ...]], _Pieces]:
    """Return the pieces of each chunk of a tensor that has any, by offsets and sizes."""
    tensors = manifest.tensors
    found = {}
    for chunk in range(*tensors.chunk_first[number : number + 2].tolist()):
        first, stop = tensors.piece_first[chunk : chunk + 2].tolist()
        if first < stop:
            found[tensors.offsets_of(chunk), tensors.sizes_of(chunk)] = _pieces(manifest, first, stop)
    return found


def _compare_objects(a: Manifest, b: Manifest, name: str) -> State:
    if name in a.inline and name in b.inline:
        return "equal" if _canonical(name, a.inline[name]) == _canonical(name, b.inline[name]) else "content"
    stored_a, stored_b = a.stored_index.get(name), b.stored_index.get(name)
    if stored_a is None or stored_b is None or stored_a.encoding != stored_b.encoding:
        return "encoding"
    lengths_a, digests_a = _pieces(a, stored_a.piece_first, stored_a.piece_first + stored_a.pieces)
    lengths_b, digests_b = _pieces(b, stored_b.piece_first, stored_b.piece_first + stored_b.pieces)
    if (lengths_a, digests_a) == (lengths_b, digests_b):
        return "equal"
    is_cut_alike = lengths_a == lengths_b or sum(lengths_a) != sum(lengths_b)
    return "content" if is_cut_alike and stored_a.encoding not in (TORCH, PICKLE) else "unknown"


def _pieces(manifest: Manifest, first: int, stop: int) -> _Pieces:
    lengths = tuple(manifest.pieces.length[first:stop].tolist())
    return lengths, b"".join(manifest.pieces.digest(piece) for piece in range(first, stop))


def _canonical(name: str, data: bytes) -> str:
    """Return the JSON of an object in an order that does not depend on that of its keys."""
    return json.dumps(from_text(name, data), sort_keys=True)
