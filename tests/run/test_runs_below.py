"""Tests of finding runs below a URL, and of similar names beside one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import CheckpointNotFoundError, TransientStorageError
from dcp_remote.format.catalog import CATALOG_KEY
from dcp_remote.format.keys import manifest_key
from dcp_remote.format.manifest import MANIFEST_KEY
from dcp_remote.run import lookup, runs_below
from dcp_remote.run.lookup import find_near_runs, not_found, read_manifest
from dcp_remote.run.runs_below import find_runs, list_runs
from dcp_remote.storage import LocalStore, MemoryStore
from dcp_remote.testing import Fault, FaultyStore, RecordingStore
from tests.support.faults import denied, verb_is
from tests.support.runs import fence, save

MANIFEST = manifest_key(revision=1, step=5)


def filled(*keys: str) -> MemoryStore:
    store = MemoryStore()
    for key in keys:
        store.put(key, [b"x"])
    return store


@pytest.mark.parametrize(("shards", "pages"), [(2, 1), (1_100, 201)])
def test_200_runs_cost_a_page_each_at_most(shards: int, pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """List 200 runs, of few or many objects: a page serves many small runs, and a large one has one page read."""
    store = MemoryStore()
    names = [f"run-{number:03}" for number in range(200)]
    for name in names:
        fence(store.child(name))
        for number in range(min(shards, 11)):
            store.put(f"{name}/shards/{number:04}", [b"x"])
    if shards > 1_000:
        monkeypatch.setattr(runs_below, "_KEYS_PER_PAGE", 10)  # a hundredth, with a hundredth of the shards
    recording = RecordingStore(store)
    assert [run.path for run in list_runs(recording, timeout_seconds=60)] == names
    assert (recording.count("get"), recording.count("list"), recording.count()) == (200, pages, 200 + pages)


def test_what_is_a_run() -> None:
    """Lay a run, one whose catalog is lost, a checkpoint by itself, and other files into folders with similar names."""
    store = filled(
        "file", "data/x/y/z", "a/alpha/1", f"a/{CATALOG_KEY}", f"a/{MANIFEST}", "a/shards/00/x", f"a-1/{CATALOG_KEY}",
        f"a0/{MANIFEST}", f"b/{MANIFEST_KEY}", "b/shards/00/x", f"team/two/deep/{MANIFEST}", CATALOG_KEY, MANIFEST,
    )  # fmt: skip
    assert list(find_runs(store)) == ["a-1", "a", "a0", "team/two/deep"]


FOLDERS = st.lists(st.sampled_from(["a", "a0", "a-", "catalog", "z"]), min_size=1, max_size=3).map("/".join)
NAMES = st.sampled_from([CATALOG_KEY, MANIFEST_KEY, MANIFEST, "shards/00/x", "x", "0"])


@given(st.lists(st.tuples(FOLDERS, NAMES), max_size=12), st.integers(1, 3))
def test_pages_do_not_change_what_is_found(parts: list[tuple[str, str]], page: int) -> None:
    """Compare with a walk over all keys, for pages of any size."""
    store = filled(*(f"{folder}/{name}" for folder, name in parts))
    expected: list[str] = []
    for key in sorted(store.space.objects):
        path = runs_below._find_run(key)
        if path and not any(f"{path}/".startswith(f"{above}/") for above in expected):
            expected.append(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_below, "_KEYS_PER_PAGE", page)
        assert list(find_runs(store)) == expected


def test_an_outage_is_no_problem_of_a_run() -> None:
    """Let the store fail after the listing: the error is raised, and not told of each run."""
    store = MemoryStore()
    save(store.child("run-1"), 1)
    failing = [Fault(verb_is("get"), "request", persistent=True)]
    with pytest.raises(TransientStorageError):
        list_runs(FaultyStore(store, failing), timeout_seconds=0.2)


# ---- a mistyped name


def test_a_mistyped_run_is_told_its_neighbours(tmp_path: Path) -> None:
    """Leave out a letter of the name of a run: the error names those that are similar."""
    store = LocalStore(tmp_path)
    for name in ("team/llama-7b", "team/llama-13b", "team/qwen"):
        save(store.child(name), 1)
    for name, near in (("team/lama-7b", "llama-7b, llama-13b"), ("team/zzz", None)):
        with pytest.raises(CheckpointNotFoundError, match="Check the URL") as caught:
            read_manifest(store.child(name))
        assert caught.value.details["near"] == near


def test_one_page_behind_the_first_half_of_the_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay runs of more than a page before the one that was meant; of those themselves only the first is seen."""
    monkeypatch.setattr(lookup, "_NEAR_KEYS", 3)
    store = LocalStore(tmp_path)
    for name in ("a0", "a1", "training-1"):
        save(store.child(name), 1)
    recording = RecordingStore(store)
    assert find_near_runs(recording.child("trainign-1")) == ["training-1"]
    assert recording.calls == [("list", "trainign-1/../")]
    assert find_near_runs(recording.child("a00")) == ["a0"]
    assert find_near_runs(recording.child("a-1")) == []


def test_names_are_compared_as_they_are_in_keys(tmp_path: Path) -> None:
    """Mistype a name with spaces, which the URL of a folder encodes."""
    store = LocalStore(tmp_path)
    save(store.child("my run b ü"), 1)
    assert find_near_runs(store.child("my run a ü")) == ["my run b ü"]


def test_a_step_in_the_url_is_told_the_run_above(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    save(store, 20)
    for step in ("20", "0", "000300"):
        assert find_near_runs(store.child(step)) == [store.url]
    assert find_near_runs(store.child("2x")) == []


def test_without_a_grant_to_list_the_error_stays(tmp_path: Path) -> None:
    """Refuse LIST: the error names no neighbours, and each look sends one request."""
    refused = [Fault(verb_is("list"), "request", persistent=True, error=denied)]
    store = LocalStore(tmp_path)
    save(store.child("run-1"), 1)
    recording = RecordingStore(FaultyStore(store, refused))
    error = not_found(recording.child("run-2"))
    assert "near" not in str(error)
    assert "Check the URL." in str(error)
    assert recording.calls == [("list", f"run-2/{prefix}") for prefix in ("manifests/", "", "../")]


def test_a_store_without_a_folder_above_has_no_neighbours() -> None:
    assert find_near_runs(LocalStore("/")) == find_near_runs(MemoryStore()) == []
