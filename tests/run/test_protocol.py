"""A few actors on one run, in every order of their requests; then the same with each rule left out.

`run_explorer.py` has the actors, the faults, and the invariants of every state. A rule that is left out must break an
invariant in some order; otherwise the rule is needless, or the explorer misses orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import pytest

from dcp_remote.format.catalog import Catalog, Entry
from tests.simulation.rules_left_out import (
    no_floor_by_retiring,
    no_floor_for_saves,
    no_floor_for_thinning,
    no_look_at_the_lending_manifest,
    no_look_at_the_pin,
    no_look_at_what_is_reused,
    no_moving_of_names,
    no_token,
)
from tests.simulation.run_explorer import (
    RUN,
    Actor,
    Explorer,
    Rules,
    World,
    fence,
    gc,
    manifest_of,
    named,
    pin,
    retire,
    roll_back,
    save,
    thin,
)
from tests.support.figures import LONG_SECONDS

pytestmark = pytest.mark.torture


def entry_of(step: int, save_id: str, shards: Sequence[str], *, names: tuple[str, ...] = ()) -> Entry:
    return Entry(step, save_id, manifest_of(0, save_id, shards), 1, "", 1, began_revision=0, names=names)


def world_of(*entries: Entry) -> World:
    catalog = Catalog(RUN, revision=1, token=1, entries=entries)
    return World(catalog, named(catalog))


ZERO = entry_of(0, "s0", ["0/old", "0/opt"], names=("best",))
TWO = entry_of(2, "s2", ["0/two"])

ONE_LIVE, TWO_LIVE = world_of(ZERO), world_of(ZERO, TWO)

# Requests of each actor, as a function of the rules that hold.
Play: TypeAlias = Callable[[Rules], Actor]

SCENES: dict[str, tuple[World, list[Play]]] = {
    "save | gc | gc": (ONE_LIVE, [partial(save, step=1, who="a"), gc, gc]),
    "two saves of one step | gc": (ONE_LIVE, [partial(save, step=1, who="a"), partial(save, step=1, who="b"), gc]),
    "a second attempt | gc": (
        ONE_LIVE,
        [partial(save, step=1, who="a"), partial(save, step=1, who="b", again=True), gc],
    ),
    "overwrite | gc | retire": (
        ONE_LIVE,
        [partial(save, step=0, who="x", overwrite=True), gc, partial(retire, step=0)],
    ),
    "overwrite that borrows from itself | gc | retire": (
        ONE_LIVE,
        [partial(save, step=0, who="x", base=0, overwrite=True), gc, partial(retire, step=0)],
    ),
    "borrow | retire | gc": (ONE_LIVE, [partial(save, step=1, who="a", base=0), partial(retire, step=0), gc]),
    "borrow | thin | gc": (ONE_LIVE, [partial(save, step=1, who="a", base=0), partial(thin, step=0, who="t"), gc]),
    "two borrowers | retire": (
        ONE_LIVE,
        [partial(save, step=1, who="a", base=0), partial(save, step=2, who="b", base=0), partial(retire, step=0)],
    ),
    "chain | retire": (
        ONE_LIVE,
        [partial(save, step=1, who="a", base=0), partial(save, step=2, who="b", base=1), partial(retire, step=0)],
    ),
    "fence | zombie save | retire": (
        ONE_LIVE,
        [fence, partial(save, step=1, who="zombie", base=0), partial(retire, step=0)],
    ),
    "save | retire of just that": (ONE_LIVE, [partial(save, step=1, who="a"), partial(retire, step=1), gc]),
    "overwrite | overwrite | retire": (
        ONE_LIVE,
        [
            partial(save, step=0, who="x", overwrite=True),
            partial(save, step=0, who="y", overwrite=True),
            partial(retire, step=0),
        ],
    ),
    "thin | thin | gc": (ONE_LIVE, [partial(thin, step=0, who="t"), partial(thin, step=0, who="u"), gc]),
    "thin | retire | gc": (ONE_LIVE, [partial(thin, step=0, who="t"), partial(retire, step=0), gc]),
    "roll back over a step | zombie save | gc": (
        TWO_LIVE,
        [partial(roll_back, to=0, steps=[2], who="r"), partial(save, step=2, who="zombie", overwrite=True), gc],
    ),
    "roll back, then over a step | zombie save": (
        TWO_LIVE,
        [partial(roll_back, to=0, steps=[1, 2], who="r"), partial(save, step=3, who="zombie")],
    ),
    "roll back over a step | pin | gc": (
        TWO_LIVE,
        [partial(roll_back, to=0, steps=[2], who="r"), partial(pin, step=2), gc],
    ),
    "roll back, then over a step | retire": (
        TWO_LIVE,
        [partial(roll_back, to=0, steps=[1, 2], who="r"), partial(retire, step=2)],
    ),
    "roll back, then over a step | pin": (
        TWO_LIVE,
        [partial(roll_back, to=0, steps=[1, 2], who="r"), partial(pin, step=2)],
    ),
    "a name moves | a name moves | retire": (
        ONE_LIVE,
        [
            partial(save, step=1, who="a", names=("best",)),
            partial(save, step=2, who="b", names=("best",)),
            partial(retire, step=0),
        ],
    ),
    "begin again | gc": (ONE_LIVE, [partial(save, step=1, who="a", attempts=2), gc]),
    "borrow and begin again | retire": (
        ONE_LIVE,
        [partial(save, step=1, who="a", base=0, attempts=2), partial(retire, step=0)],
    ),
}


def explorer(title: str, by: Rules, *, late: bool) -> Explorer:
    return Explorer([partial(play, by) for play in SCENES[title][1]], late=late)


@pytest.mark.parametrize("title", SCENES)
def test_no_order_breaks_a_run(title: str, torture_seconds: float) -> None:
    """Explore all states of a scene, with swaps that arrive late if two actors take part, or if there is time."""
    world, plays = SCENES[title]
    scene = explorer(title, Rules(), late=len(plays) == 2 or torture_seconds >= LONG_SECONDS)
    broken, states = scene.explore(world)
    assert broken is None
    assert states > 500
    assert "done" in {told.outcome for told in scene.ends()}


@pytest.mark.parametrize(
    ("title", "outcome"),
    [
        ("fence | zombie save | retire", "FencedError"),
        ("two saves of one step | gc", "CommitConflictError"),
        ("two saves of one step | gc", "BeginAgainError"),
        ("borrow | retire | gc", "BeginAgainError"),
        ("save | retire of just that", "BeginAgainError"),
        ("thin | retire | gc", "BeginAgainError"),
        ("save | gc | gc", "unknown"),
    ],
)
def test_what_refuses_does_so_in_some_order(title: str, outcome: str) -> None:
    """Find a refusal in some order of each scene, since a scene without refusals would show nothing."""
    scene = explorer(title, Rules(), late=False)
    scene.explore(SCENES[title][0])
    assert outcome in {told.outcome for told in scene.ends()}


@pytest.mark.parametrize("title", ["begin again | gc", "borrow and begin again | retire"])
def test_who_begins_again_can_commit(title: str) -> None:
    """Begin a refused save again: its second attempt, with a save_id of its own, commits in some order."""
    scene = explorer(title, Rules(), late=True)
    scene.explore(SCENES[title][0])
    assert {"a", "a'"} <= {told.save_id for told in scene.ends()}


# ---- each rule left out


LEFT_OUT: dict[str, tuple[Rules, str, str]] = {
    "the token": (Rules(committed=no_token), "fence | zombie save | retire", "a fenced job committed"),
    "the token, after a rollback": (
        Rules(committed=no_token),
        "roll back, then over a step | zombie save",
        "a fenced job committed",
    ),
    "the floor": (Rules(committed=no_floor_for_saves), "save | gc | gc", "missing"),
    "the floor, of thinning": (Rules(thinned=no_floor_for_thinning), "thin | thin | gc", "missing"),
    "raising the floor": (Rules(raised=lambda catalog, floor: None), "save | gc | gc", "missing"),
    "raising the floor, of retiring": (Rules(retired=no_floor_by_retiring), "save | retire of just that", "missing"),
    "looking again for what is reused": (
        Rules(committed=no_look_at_what_is_reused),
        "borrow | retire | gc",
        "missing",
    ),
    "looking for its manifest": (Rules(committed=no_look_at_the_lending_manifest), "borrow | thin | gc", "missing"),
    "moving a name": (Rules(committed=no_moving_of_names), "a name moves | a name moves | retire", "a name twice"),
    "looking at the pin": (
        Rules(committed=no_look_at_the_pin),
        "roll back over a step | pin | gc",
        "what is pinned went",
    ),
    "looking at the pin, of later saves": (
        Rules(committed=no_look_at_the_pin),
        "roll back, then over a step | pin",
        "what is pinned went",
    ),
    "the swap before deletion": (Rules(delete_first=True), "borrow | retire | gc", "missing"),
    "what others name": (Rules(ignore_others=True), "chain | retire", "missing"),
    "settling a lost answer": (
        Rules(take_silence_for_success=True),
        "save | retire of just that",
        "told committed, never was",
    ),
}


@pytest.mark.parametrize("rule", LEFT_OUT)
def test_a_rule_left_out_is_found(rule: str) -> None:
    """Leave out each rule: an invariant breaks in some order of requests."""
    by, title, found = LEFT_OUT[rule]
    broken, _ = explorer(title, by, late=by.take_silence_for_success).explore(SCENES[title][0])
    assert broken is not None
    assert broken.startswith(found)
