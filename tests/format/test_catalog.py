"""Rules for changing a catalog: each rule by example, then properties of every catalog and every order of changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    DcpRemoteError,
    FencedError,
    InvalidArgumentError,
)
from dcp_remote.format.catalog import (
    Attempt,
    BeginAgainError,
    Catalog,
    Entry,
    add_entry,
    label_entry,
    name_entry,
    pin_entry,
    raise_floor,
    raise_revision,
    retire_entries,
    take_fence,
    thin_entry,
)
from dcp_remote.format.catalog_json import check
from tests.support.catalogs import attempt, catalog, catalogs, entry, identity

THREE = catalog(entry(1), entry(2), entry(3))


def steps(of: Catalog | None) -> list[int]:
    assert of is not None
    return [one.step for one in of.entries]


def commit(into: Catalog, step: int, letter: str = "b", **other: Any) -> Catalog:
    after = add_entry(into, attempt(step, letter, **other))
    assert after is not None
    return after


# ---- looking


def test_finding() -> None:
    """Lookups by step, name and save_id find abandoned checkpoints, too; `latest` skips them."""
    run = catalog(entry(1, names=("best",)), entry(2), entry(3, abandoned=True, names=("last", "lost")))
    assert run.entry_at(3) == run.entries[2]
    assert run.entry_at(4) is None
    assert run.latest() == run.entries[1]
    assert run.find_by_name("best") == run.entries[0]
    assert run.find_by_name("lost") == run.entries[2]
    assert run.find_by_name("") is None
    assert run.holds(identity(3))
    assert not run.holds(identity(3, "b"))
    for empty in (catalog(), catalog(entry(3, abandoned=True))):
        assert empty.latest() is None


# ---- committing


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_commit(step: int) -> None:
    """A commit adds one checkpoint in the order of steps, and changes nothing else but the revision."""
    run = catalog(entry(1), entry(3))
    after = commit(run, step)
    assert after == replace(
        run,
        revision=11,
        entries=tuple(sorted([*run.entries, after.entries[steps(after).index(step)]], key=lambda one: one.step)),
    )
    assert after.entry_at(step) == entry(step, "b", began_revision=10)


def test_a_commit_that_is_there_already() -> None:
    """Return None also after the run was fenced, the floor rose, or the checkpoint was abandoned."""
    ours = attempt(2, "b")
    after = add_entry(catalog(entry(1)), ours)
    assert after is not None
    later = replace(take_fence(after), floor=12, entries=(entry(1), replace(ours.entry, abandoned=True, names=("x",))))
    assert add_entry(after, ours) is None
    assert add_entry(later, ours) is None


REFUSALS: dict[str, tuple[Catalog, Attempt, type[DcpRemoteError]]] = {
    "a newer job": (take_fence(THREE), attempt(4), FencedError),
    "a job from nowhere": (THREE, attempt(4, token=2), FencedError),
    "another run": (THREE, attempt(4, run_id="e" * 32), FencedError),
    "below the floor": (replace(THREE, floor=10), attempt(4, began_revision=9), BeginAgainError),
    "the step is taken": (THREE, attempt(3, "b"), CommitConflictError),
    "the step is taken by a third": (
        catalog(entry(3, "c")),
        attempt(3, "b", before=identity(3)),
        CommitConflictError,
    ),
    "what was to be replaced is gone": (THREE, attempt(4, before=identity(4)), CommitConflictError),
    "newer than what it abandons, but of its own job": (THREE, attempt(3, "b", abandons=1), CommitConflictError),
    "what it abandons is pinned": (
        take_fence(catalog(entry(1), entry(2, pinned=True))),
        attempt(2, "b", token=2, abandons=1),
        CommitConflictError,
    ),
    "what is abandoned was pinned": (
        catalog(entry(1), entry(2, abandoned=True, pinned=True)),
        attempt(2, "b"),
        CommitConflictError,
    ),
    "what it abandons has a name": (
        take_fence(catalog(entry(1), entry(2, names=("best",)))),
        attempt(2, "b", token=2, abandons=1),
        CommitConflictError,
    ),
    "what is abandoned has another name, too": (
        catalog(entry(1), entry(2, abandoned=True, names=("best", "last"))),
        attempt(2, "b", names=("last", "newest")),
        CommitConflictError,
    ),
    "older than what it abandons": (
        replace(THREE, token=2),
        attempt(1, "b", token=2, abandons=1),
        CommitConflictError,
    ),
    "the reused checkpoint is gone": (THREE, attempt(4, reused=(identity(9), entry(9).manifest)), BeginAgainError),
    "the reused checkpoint was thinned": (
        THREE,
        attempt(4, reused=(identity(3), "manifests/x.json")),
        BeginAgainError,
    ),
    "the reused checkpoint was replaced": (
        catalog(entry(3, "c")),
        attempt(4, reused=(identity(3), entry(3).manifest)),
        BeginAgainError,
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_refused_commits(why: str) -> None:
    """Each refusal has exactly this class, with a message that says what to do, and can be pickled."""
    into, refused, error = REFUSALS[why]
    with pytest.raises(error) as caught:
        add_entry(into, refused)
    assert type(caught.value) is error
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (error, str(caught.value))


def test_fence_is_checked_first() -> None:
    """A fenced job is not told to begin again, which would fail again."""
    with pytest.raises(FencedError):
        add_entry(replace(take_fence(THREE), floor=11), attempt(3, "b", began_revision=0, reused=("", "")))


def test_the_floor_itself_may_commit() -> None:
    assert steps(commit(replace(THREE, floor=10), 4, began_revision=10)) == [1, 2, 3, 4]


def test_overwriting_what_was_seen() -> None:
    """The new checkpoint replaces the old one, without its pin, names and metrics."""
    run = catalog(entry(1), entry(2, pinned=True, names=("best",), metrics=(("loss", 1.0),)))
    after = commit(run, 2, before=identity(2))
    assert after.entries == (entry(1), entry(2, "b", began_revision=10))


def test_reusing_shards() -> None:
    """Shards of a live checkpoint may be reused, also of an abandoned one, and of one that this commit replaces."""
    run = catalog(entry(1), entry(2, abandoned=True))
    assert steps(commit(run, 3, reused=(identity(1), entry(1).manifest))) == [1, 2, 3]
    assert steps(commit(run, 3, reused=(identity(2), entry(2).manifest))) == [1, 2, 3]
    assert steps(commit(run, 1, before=identity(1), reused=(identity(1), entry(1).manifest))) == [1, 2]


def test_names_move() -> None:
    """Names move to the newer checkpoint; other names and checkpoints stay as they are."""
    run = catalog(entry(1, names=("best", "first")), entry(2, names=("last",)), entry(3))
    after = commit(run, 4, names=("last", "best"))
    assert [one.names for one in after.entries] == [("first",), (), (), ("last", "best")]
    assert [replace(one, names=()) for one in after.entries[:3]] == [replace(one, names=()) for one in run.entries]


# ---- rolling back


def test_rolling_back() -> None:
    """The first commit of a job abandons newer checkpoints than the one restored, so that `latest` skips them."""
    after = commit(take_fence(THREE), 5, token=2, abandons=1)
    assert [(one.step, one.abandoned) for one in after.entries] == [(1, False), (2, True), (3, True), (5, False)]
    assert after.latest() == after.entry_at(5)
    assert replace(after.entries[1], abandoned=False) == THREE.entries[1]


@pytest.mark.parametrize("before", [None, identity(2)])
def test_replacing_an_abandoned_checkpoint(before: str | None) -> None:
    """The commit that abandons a checkpoint may replace it, and so may a later one, whether the save saw it or not."""
    after = commit(take_fence(THREE), 2, token=2, abandons=1, before=before)
    found = [(one.save_id, one.abandoned) for one in after.entries]
    assert found == [(identity(1), False), (identity(2, "b"), False), (identity(3), True)]
    run = catalog(entry(1), entry(2, abandoned=True))
    assert commit(run, 2, before=before).entries == (entry(1), entry(2, "b", began_revision=10))


HELD = catalog(entry(1), entry(2, abandoned=True, pinned=True, names=("best",)))
NAMED = catalog(entry(1), entry(2, abandoned=True, names=("best",)))


@pytest.mark.parametrize(
    ("run", "how"),
    [(HELD, {"before": identity(2)}), (NAMED, {"names": ("best",)}), (NAMED, {"names": ("last", "best")})],
)
def test_pinned_or_named_checkpoint_is_replaced_explicitly(run: Catalog, how: dict[str, Any]) -> None:
    """A save with `before` replaces it; so does a save with all its names, if it is not pinned."""
    after = commit(run, 2, **how)
    assert [one.save_id for one in after.entries] == [identity(1), identity(2, "b")]
    assert after.entries[1].names == how.get("names", ())


def test_starting_over() -> None:
    """A job that restored nothing abandons step 0, too."""
    run = take_fence(catalog(entry(0), entry(1)))
    assert [one.abandoned for one in commit(run, 2, token=2, abandons=-1).entries] == [True, True, False]
    assert [one.abandoned for one in commit(run, 2, token=2, abandons=0).entries] == [False, True, False]


def test_abandoning_again() -> None:
    """A job whose first commit had no answer sends `abandons` again; the checkpoint of that commit is not abandoned."""
    first = commit(take_fence(THREE), 5, token=2, abandons=1)
    second = commit(first, 6, "c", token=2, abandons=1)
    assert [one.step for one in second.entries if one.abandoned] == [2, 3]


# ---- the other changes


def test_fence_and_fresh_revision() -> None:
    """Nothing else changes."""
    assert take_fence(THREE) == replace(THREE, revision=11, token=2)
    assert raise_revision(THREE) == replace(THREE, revision=11)


def test_retiring() -> None:
    """Live checkpoints with these save_ids are removed; None if there are none."""
    after = retire_entries(THREE, [identity(1), identity(3), identity(9)])
    assert after == replace(THREE, revision=11, floor=1, entries=(entry(2),))
    assert retire_entries(after, [identity(1), identity(3)]) is None
    assert retire_entries(THREE, []) is None


def test_retiring_raises_the_floor() -> None:
    """The floor rises above the newest removed checkpoint and never falls, so that no removed save commits again."""
    ours = attempt(4, "b")
    after = add_entry(replace(THREE, floor=4), ours)
    assert after is not None
    gone = retire_entries(after, [ours.entry.save_id])
    assert gone == replace(THREE, revision=12, floor=11)
    with pytest.raises(BeginAgainError):
        add_entry(gone, ours)
    assert retire_entries(after, [identity(1)]) == replace(after, revision=12, floor=4, entries=after.entries[1:])


def thin(run: Catalog, step: int, *, keys: tuple[str, ...] = ("optim",), **other: Any) -> Catalog | None:
    seen = other.pop("seen", entry(step).manifest)
    made: dict[str, Any] = {"manifest": "manifests/thin.json", "began_revision": 10, "size_bytes": 10} | other
    return thin_entry(run, replace(entry(step), thinned=keys, **made), seen=seen)


def test_thinning() -> None:
    """The entry has the new manifest, and the keys removed so far, sorted."""
    run = catalog(entry(1, pinned=True, names=("best",)), entry(2, thinned=("schedule",)))
    after = thin(run, 2, keys=("optim", "ema"))
    assert after == catalog(
        entry(1, pinned=True, names=("best",)),
        entry(2, manifest="manifests/thin.json", size_bytes=10, thinned=("ema", "optim", "schedule")),
        revision=11,
    )


@pytest.mark.parametrize("seen", [{"seen": "manifests/other.json"}, {"step": 9}])
def test_thinning_a_changed_or_removed_checkpoint(seen: dict[str, Any]) -> None:
    """Return None if another process thinned the checkpoint, or the checkpoint is gone."""
    after = thin(THREE, 2)
    assert after is not None
    assert thin(after, 2) is None
    assert thin(THREE, **{"step": 2} | seen) is None


def test_thinning_below_the_floor() -> None:
    """The new manifest was an orphan when orphans were removed, so thinning must begin again."""
    assert thin(replace(THREE, floor=10), 2, began_revision=10) is not None
    with pytest.raises(BeginAgainError):
        thin(replace(THREE, floor=10), 2, began_revision=9)


def test_pinning() -> None:
    """Pinning a pinned checkpoint changes nothing; a step that is not live cannot be pinned."""
    after = pin_entry(THREE, 2, pin=True)
    assert after == catalog(entry(1), entry(2, pinned=True), entry(3), revision=11)
    assert pin_entry(after, 2, pin=True) is None
    assert pin_entry(after, 2, pin=False) == replace(THREE, revision=12)
    assert pin_entry(THREE, 2, pin=False) is None
    for change in (partial(pin_entry, pin=True), partial(name_entry, names=["best"], move=True)):
        with pytest.raises(CheckpointNotFoundError, match="step=9"):
            change(THREE, 9)


def test_labels_of_a_repeated_save() -> None:
    """Names move to the checkpoint, metrics get new values; the same again changes nothing; others are refused."""
    run = catalog(
        entry(1, names=("best", "first")), entry(2, names=("last",), metrics=(("a", 1.0), ("b", 2.0))), token=4
    )
    assert label_entry(run, identity(2), token=4) is None
    assert label_entry(run, identity(2), token=4, names=("last",), metrics=(("b", 2.0),)) is None
    after = label_entry(run, identity(2), token=4, names=("best", "last"), metrics=(("b", 3.0), ("c", 4.0)))
    metrics = (("a", 1.0), ("b", 3.0), ("c", 4.0))
    entries = (entry(1, names=("first",)), entry(2, names=("last", "best"), metrics=metrics))
    assert after == replace(run, revision=run.revision + 1, entries=entries)
    assert label_entry(after, identity(2), token=4, names=("best", "last"), metrics=metrics) is None
    with pytest.raises(FencedError):
        label_entry(run, identity(2), token=3, names=("last",))
    with pytest.raises(CommitConflictError, match="removed or replaced"):
        label_entry(run, identity(9), token=4, names=("last",))


def test_the_floor() -> None:
    """The floor rises at most to the next revision, and never falls."""
    assert raise_floor(THREE, 11) == replace(THREE, revision=11, floor=11)
    assert raise_floor(replace(THREE, floor=5), 5) is None
    assert raise_floor(replace(THREE, floor=5), 4) is None
    with pytest.raises(InvalidArgumentError, match="floor=12"):
        raise_floor(THREE, 12)
    # A save that begins after that can commit.
    assert steps(commit(replace(THREE, revision=11, floor=11), 4, began_revision=11)) == [1, 2, 3, 4]


# ---- in any order

Change = Callable[[Catalog], Catalog | None]

STEPS = st.integers(min_value=0, max_value=5)
NAMES = st.lists(st.sampled_from(["best", "last"]), unique=True).map(tuple)


@st.composite
def changes(draw: st.DrawFn, number: int) -> Change:
    """Draw one change, made from the current catalog or an earlier one."""
    step, old = draw(STEPS), draw(st.booleans())

    def save(run: Catalog) -> Catalog | None:
        token = run.token - (old and run.token > 0)
        there = run.entry_at(step)
        new = entry(step, f"{number:02x}"[-1], token=token, began_revision=max(0, run.revision - old), names=names)
        new = replace(new, save_id=f"{number:032x}", manifest=f"manifests/{number}.json")
        before = there.save_id if there is not None and overwrite else None
        reused = (there.save_id, there.manifest) if there is not None and borrow else None
        return add_entry(run, Attempt(new, run.run_id, before, reused, abandons))

    names, overwrite, borrow = draw(NAMES), draw(st.booleans()), draw(st.booleans())
    abandons = draw(st.none() | st.integers(min_value=-1, max_value=5))
    floor = draw(st.integers(min_value=0, max_value=20))
    chosen: list[Change] = [
        save,
        save,
        save,
        take_fence,
        raise_revision,
        lambda run: retire_entries(run, [one.save_id for one in run.entries if one.step == step]),
        lambda run: thin_entry(
            run,
            replace(
                run.entry_at(step) or entry(step),
                manifest=f"manifests/{number}.json",
                began_revision=run.revision,
                thinned=("optim",),
                size_bytes=1,
            ),
            seen=next((one.manifest for one in run.entries if one.step == step), ""),
        ),
        partial(pin_entry, step=step, pin=old),
        lambda run: label_entry(
            run,
            next((one.save_id for one in run.entries if one.step == step), ""),
            token=run.token - old,
            names=names,
            metrics=(("loss", float(number)),),
        ),
        partial(raise_floor, floor=floor),
    ]
    return draw(st.sampled_from(chosen))


HISTORIES = st.integers(min_value=0, max_value=25).flatmap(lambda count: st.tuples(*map(changes, range(count))))


@given(HISTORIES)
def test_any_history(history: tuple[Change, ...]) -> None:
    """A change that is not refused gives a valid catalog of the next revision, or None; token and floor never fall.

    A removed save_id never becomes live again, even if its save tries to commit at every later moment.
    """
    run, attempts = Catalog("f" * 32), list[Attempt]()
    for change in history:
        try:
            after = change(run)
        except DcpRemoteError:
            continue
        if after is None:
            continue
        assert check(after) is after
        assert after.revision == run.revision + 1
        assert after.floor >= run.floor
        assert after.token >= run.token
        assert after.run_id == run.run_id
        run = after
        known = {one.entry.save_id for one in attempts}
        attempts += [Attempt(one, run.run_id) for one in run.entries if one.save_id not in known]
        for one in attempts:
            if not run.holds(one.entry.save_id):
                with pytest.raises(CommitConflictError):
                    add_entry(run, one)


@given(catalogs(), st.data())
def test_retiring_leaves_the_rest(run: Catalog, data: st.DataObject) -> None:
    """For any catalog and any subset of its checkpoints, exactly that subset is removed."""
    gone: set[Entry] = set(data.draw(st.lists(st.sampled_from(run.entries)))) if run.entries else set()
    after = retire_entries(run, [one.save_id for one in gone])
    if not gone:
        assert after is None
        return
    assert after is not None
    assert after.entries == tuple(one for one in run.entries if one not in gone)
    assert after.floor <= after.revision
