"""Differences of two checkpoints by entry, from their manifests alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from dcp_remote.common.digests import block_bytes, block_digests, piece_digest
from dcp_remote.format.manifest import JSON, Manifest

# "kind": a tensor in one, an object in the other. "content": the stored bytes differ. "unknown": they are cut
# differently, as by another sharding, so that the manifests cannot tell.
State: TypeAlias = Literal["equal", "only_a", "only_b", "kind", "dtype", "shape", "encoding", "content", "unknown"]


def compare_manifests(a: Manifest, b: Manifest, names: Iterable[str]) -> dict[str, State]:
    """Compare the entries of these names, each of which at least one of the checkpoints has.

    Those in shards are compared by the digests of their pieces. Properties of tensors that change no value, such as
    `requires_grad`, do not count; nor do empty dicts, which are no entries, and whether a number is a key or an index.
    """
    names_a, names_b = set(a.names()), set(b.names())

    def compare(name: str) -> State:
        if name not in names_b:
            return "only_a"
        if name not in names_a:
            return "only_b"
        facts_a, facts_b = _collect_facts(a, name), _collect_facts(b, name)
        for state, fact in facts_a.items():
            if fact != facts_b[state]:
                return state
        pieces_a, pieces_b = _list_pieces(a, name), _list_pieces(b, name)
        if pieces_a == pieces_b:
            return "equal"
        is_cut_alike = pieces_a.keys() == pieces_b.keys()
        return "content" if is_cut_alike or _sum_lengths(pieces_a) != _sum_lengths(pieces_b) else "unknown"

    return {name: compare(name) for name in names}


def _collect_facts(manifest: Manifest, name: str) -> dict[State, object]:
    """Return what the manifest says of an entry, by the difference that it makes, in the order of their weight."""
    number, stored = manifest.tensors.index.get(name), manifest.stored_index.get(name)
    if number is None:
        return {"kind": "object", "encoding": stored.encoding if stored is not None else JSON}
    kind = manifest.tensors.kind_of(number)
    return {
        "kind": "tensor",
        "dtype": kind.dtype,
        "shape": manifest.tensors.shape_of(number),
        "encoding": kind.encoding,
    }


def _list_pieces(manifest: Manifest, name: str) -> dict[tuple[tuple[int, ...], int, int], bytes]:
    """Return the digests of the pieces of an entry by the box of their chunk, number in the chunk, and length."""
    tensors, pieces = manifest.tensors, manifest.pieces
    number, stored = tensors.index.get(name), manifest.stored_index.get(name)
    if (text := manifest.inline.get(name)) is not None:  # as the piece that a shard would have
        blocks = block_digests(text, size_bytes=block_bytes(len(text)))
        return {((), 0, len(text)): piece_digest(blocks)}
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    if stored is not None:
        spans[()] = (stored.piece_first, stored.piece_first + stored.pieces)
    if number is not None:
        for chunk in range(*tensors.chunk_first[number : number + 2].tolist()):
            first, stop = tensors.piece_first[chunk : chunk + 2].tolist()
            spans[tensors.offsets_of(chunk) + tensors.sizes_of(chunk)] = (first, stop)
    return {
        (box, piece - first, int(pieces.length[piece])): pieces.digest(piece)
        for box, (first, stop) in spans.items()
        for piece in range(first, stop)
    }


def _sum_lengths(pieces: Iterable[tuple[object, int, int]]) -> int:
    return sum(length for _, _, length in pieces)
