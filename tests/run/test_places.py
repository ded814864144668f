"""Tests of finding runs below a URL, and of similar names beside one."""

from __future__ import annotations

import bisect
import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import CheckpointNotFoundError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import manifest_key
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run import places
from dcp_remote.run.info import list_places
from dcp_remote.run.lookup import not_found, read_manifest
from dcp_remote.run.places import find_near_runs, find_places
from dcp_remote.storage import LocalStore, MemoryStore, ObjectInfo, ObjectStore, Version
from dcp_remote.testing import FaultyStore, RecordingStore, matching
from tests.support.faults import denied, verb_is
from tests.support.runs import fence, save

MANIFEST = manifest_key(revision=1, step=5)
SHARD = "shards/0a/1-step-000000000005-rank-00000-0123456789abcdef-0000.safetensors"


class PagedStore(MemoryStore):
    """Store that counts the pages of its listings, of a thousand keys each."""

    pages = 0

    def fill(self, keys: list[str]) -> None:
        self.put("0", [b"x"])
        self.space.objects.update(dict.fromkeys(keys, self.space.objects["0"]))
        self._sorted = sorted(self.space.objects)

    def list(self, prefix: str = "", *, after: str = "") -> Iterator[ObjectInfo]:
        assert not prefix
        first = bisect.bisect_right(self._sorted, after)
        for number in itertools.count(first):
            if (number - first) % 1_000 == 0:
                self.pages += 1
            if number == len(self._sorted):
                return
            yield ObjectInfo(self._sorted[number], 1, Version("e"), 0.0)


def filled(*keys: str) -> MemoryStore:
    store = MemoryStore()
    for key in keys:
        store.put(key, [b"x"])
    return store


def found(store: ObjectStore, *, is_recursive: bool = True) -> list[tuple[str, str]]:
    return [(place.path, place.kind) for place in find_places(store, is_recursive=is_recursive)]


@pytest.mark.parametrize("shards", [2, 1_100])
def test_200_runs_cost_a_page_each_at_most(shards: int) -> None:
    """List 200 runs, of few or many objects: a page serves many small runs, and a large one has one page read."""
    store = PagedStore()
    names = [f"run-{number:03}" for number in range(200)]
    store.fill([f"{name}/shards/{number:04}" for name in names for number in range(shards)])
    for name in names:
        fence(store.child(name))
    store.fill([])
    recording = RecordingStore(store)
    infos = list_places(recording, is_recursive=False, timeout_seconds=60)
    assert [info.place.path for info in infos] == names
    assert recording.count("get") == 200
    assert store.pages == 1 + 200 * (2 + 1) // 1_000 if shards == 2 else 200 <= store.pages <= 201
    assert recording.count() == recording.count("get") + recording.count("list")


def test_kinds_of_places() -> None:
    """Lay a run, one whose catalog is lost, a checkpoint by itself, and other files into folders with similar names."""
    store = filled(
        "file", "data/x/y/z", "a/alpha/1", f"a/{CATALOG_KEY}", f"a/{MANIFEST}", "a/shards/00/x", f"a-1/{CATALOG_KEY}",
        f"a0/{MANIFEST}", f"a0/{SHARD}", "b/extra/1",
        f"b/{MANIFEST_KEY}", "b/shards/00/x", f"b/shards/{CATALOG_KEY}",
        f"orphans/{SHARD}", f"team/one/{CATALOG_KEY}", f"team/two/deep/{MANIFEST}", CATALOG_KEY, MANIFEST,
    )  # fmt: skip
    below = [("a-1", "run"), ("a", "run"), ("a0", "lost run"), ("b", "checkpoint")]
    assert found(store, is_recursive=False) == below
    assert found(store) == [*below, ("team/one", "run"), ("team/two/deep", "lost run")]


FOLDERS = st.lists(st.sampled_from(["a", "a0", "a-", "catalog", "manifests", "z"]), min_size=1, max_size=3).map(
    "/".join
)
NAMES = st.sampled_from([CATALOG_KEY, MANIFEST_KEY, MANIFEST, "shards/00/x", "x", "0"])


@given(st.lists(st.tuples(FOLDERS, NAMES), max_size=12), st.booleans(), st.integers(1, 3))
def test_pages_do_not_change_what_is_found(parts: list[tuple[str, str]], is_recursive: bool, page: int) -> None:
    """Compare with a walk over all keys, for pages of any size."""
    store = filled(*(f"{folder}/{name}" for folder, name in parts))
    seen: list[str] = []
    expected: list[tuple[str, str]] = []
    for key in sorted(store.space.objects):
        place = places._find_place(key)
        if place is None or (not is_recursive and "/" in place.path):
            continue
        if not any(f"{place.path}/".startswith(f"{path}/") for path in seen):
            seen.append(place.path)
            expected.append((place.path, place.kind))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "_KEYS_PER_PAGE", page)
        assert found(store, is_recursive=is_recursive) == expected


# ---- a mistyped name


def test_a_mistyped_run_is_told_its_neighbours(tmp_path: Path) -> None:
    """Leave out a letter of the name of a run: the error names those that are similar."""
    for store in (MemoryStore(), LocalStore(tmp_path)):
        for name in ("team/llama-7b", "team/llama-13b", "team/qwen"):
            save(store.child(name), 1)
        with pytest.raises(CheckpointNotFoundError, match="similar names lie beside it") as caught:
            read_manifest(store.child("team/lama-7b"))
        assert caught.value.details["near"] == "llama-7b, llama-13b"
        with pytest.raises(CheckpointNotFoundError, match="Check the URL") as caught:
            read_manifest(store.child("team/zzz"))
        assert caught.value.details["near"] is None


def test_names_that_begin_alike_are_found_behind_large_runs() -> None:
    """Lay twenty runs of many objects before the one that was meant: the look begins at the first half of the name."""
    store = PagedStore()
    for name in (*(f"a{number}" for number in range(20)), "training-1"):
        fence(store.child(name))
    store.fill([f"a{number}/shards/{shard}" for number in range(20) for shard in range(1_001)])
    recording = RecordingStore(store)
    assert find_near_runs(recording.child("trainign-1")) == ["training-1"]
    assert recording.calls == [("list", "trainign-1/../")]
    assert find_near_runs(recording.child("z-1")) == []
    assert recording.count() == 1 + 1 + 5


def test_without_a_grant_to_list_the_error_stays() -> None:
    """Refuse LIST: the error names no neighbours, and each look sends one request."""
    refused = [matching(verb_is("list"), "request", persistent=True, error=denied)]
    store = MemoryStore()
    save(store.child("run-1"), 1)
    recording = RecordingStore(FaultyStore(store, refused))
    error = not_found(recording.child("run-2"))
    assert "near" not in str(error)
    assert "Check the URL." in str(error)
    assert recording.calls == [("list", f"run-2/{prefix}") for prefix in ("manifests/", "", "../")]


def test_a_bucket_has_no_neighbours() -> None:
    """Ask for the whole store, and for a store of another kind, which does not know its parent."""
    assert find_near_runs(MemoryStore(secrets.token_hex(4))) == []
    assert "Check the URL." in str(not_found(MemoryStore()))


def test_a_look_ends_after_its_pages() -> None:
    """Lay twenty thousand files before a run: five pages of them are read."""
    store = PagedStore()
    fence(store.child("train"))
    store.fill([f"t{number:06}" for number in range(20_000)])
    assert list(find_places(store, is_recursive=False, pages_max=5)) == []
    assert store.pages == 5
