"""Manifests without some keys: the other entries are unchanged, in any manifest."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.format.manifest import Manifest
from dcp_remote.format.manifest_json import encode
from dcp_remote.format.manifest_validation import check
from dcp_remote.run.thinning import drop_keys
from tests.support.manifests import assert_sound, decode, manifests, plain
from tests.support.runs import FROZEN, TRAINED, a_run, manifest_at


def described(manifest: Manifest) -> dict[str, object]:
    """Return the description of each entry by name, with shards by key."""
    tensors, pieces, shards = manifest.tensors, manifest.pieces, manifest.shards

    def laid(first: int, count: int) -> list[object]:
        return [
            (
                shards.keys[shard],
                *(int(column[shard]) for column in (shards.sizes, shards.data_starts, shards.table_lengths)),
                shards.table_digest(shard),
                *(int(column[piece]) for column in (pieces.start, pieces.length, pieces.table)),
                pieces.digest(piece),
            )
            for piece in range(first, first + count)
            for shard in [int(pieces.shard[piece])]
        ]

    entries: dict[str, object] = dict(manifest.inline.items())
    entries |= {one.name: (one.encoding, laid(one.piece_first, one.pieces)) for one in manifest.stored}
    for number, name in enumerate(tensors.names):
        first, stop = (int(tensors.chunk_first[number + i]) for i in (0, 1))
        entries[name] = (
            tensors.kind_of(number),
            tensors.shape_of(number),
            [
                (
                    tensors.offsets_of(chunk),
                    tensors.sizes_of(chunk),
                    laid(int(tensors.piece_first[chunk]), int(tensors.chunk_pieces[chunk])),
                )
                for chunk in range(first, stop)
            ],
        )
    return entries


@given(manifests(), st.data())
def test_what_is_left_is_as_it_was(manifest: Manifest, data: st.DataObject) -> None:
    """Drop any keys of any manifest: each entry that stays has the same description, in the same order."""
    names = list(manifest.names())
    if names:  # without a mapping, names count as keys
        assert list(drop_keys(manifest, {names[0]}).names()) == names[1:]
    tops = [data.draw(st.sampled_from(["model", "optim", "ema"])) for _ in names]
    deep = {name: (top, f"{number}") for number, (name, top) in enumerate(zip(names, tops, strict=True))}
    manifest = check(replace(manifest, flatten=deep))
    keys = data.draw(st.sets(st.sampled_from(["model", "optim", "ema", "other"])))
    thin = drop_keys(manifest, keys)
    assert_sound(thin)
    kept = [name for name, top in zip(names, tops, strict=True) if top not in keys]
    assert list(thin.names()) == kept
    before = described(manifest)
    assert described(thin) == {name: before[name] for name in kept}
    assert thin.flatten == {name: deep[name] for name in kept}
    if thin is not manifest:
        assert set(thin.shards.keys) == {thin.shards.keys[number] for number in thin.pieces.shard.tolist()}
    assert plain(decode(encode(thin))) == plain(check(thin))
    if manifest.run is not None:
        assert thin.run == replace(manifest.run, thinned=tuple(sorted(keys & set(tops))))
    assert (thin is manifest) == (kept == names)


def test_an_optimizer() -> None:
    """Drop an optimizer: its shard is not named, and flattened values without an entry, as an empty dict, go too."""
    whole = manifest_at(a_run(1), 1)
    assert whole.flatten is not None
    whole = replace(whole, flatten={**whole.flatten, "optim.state": ("optim", "state")})
    thin = drop_keys(whole, ("optim", "optimizer"))
    assert thin.run is not None
    assert thin.run.thinned == ("optim",)
    assert thin.shards.keys == (whole.shards.keys[FROZEN], whole.shards.keys[TRAINED])
    assert thin.flatten is not None
    assert set(thin.flatten) == {"model.frozen", "model.trained", "step"}
    assert thin.save_id == whole.save_id
    again = drop_keys(replace(thin, flatten=dict(thin.flatten)), ("model", "step"))
    assert again.run is not None
    assert again.run.thinned == ("model", "optim", "step")
    assert again.shards.keys == ()
