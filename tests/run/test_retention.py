"""Decisions of retention: tables of examples, and properties of every policy with every set of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_remote import Run
from dcp_remote.errors import InvalidArgumentError
from dcp_remote.format.catalog import Entry
from dcp_remote.run.retention import Best, Decision, Retention, decide
from dcp_remote.storage import MemoryStore
from tests.support.catalogs import entry

LOSS = "loss"


def entries(*steps: int) -> list[Entry]:
    return [entry(step) for step in steps]


def with_losses(**losses: float | None) -> list[Entry]:
    """Return checkpoints by `s3=0.5`, step 3 with that loss; None is a checkpoint without one."""
    return [entry(int(name[1:]), metrics=() if loss is None else ((LOSS, loss),)) for name, loss in losses.items()]


SIX = entries(20, 0, 30, 15, 10, 25)
FIVE = entries(1, 2, 3, 4, 5)
LOSSES = with_losses(s1=3.0, s2=1.0, s3=2.0, s4=math.nan, s5=None, s6=None)
EQUALS = with_losses(s1=0.0, s2=-0.0, s3=0.0, s4=None)
INFINITE = with_losses(s1=math.inf, s2=-math.inf, s3=0.0, s4=None)


def five(steps: tuple[int, ...], **marks: Any) -> list[Entry]:
    """Return five checkpoints, some of them with these marks."""
    return [replace(one, **marks) if one.step in steps else one for one in FIVE]


@pytest.mark.parametrize(
    ("retention", "live", "retire", "thin"),
    [
        (Retention(keep_last=1, keep_optimizer_last=1), [], [], []),
        # In any order; step 0 is a multiple of every number.
        (Retention(), SIX, [], []),
        (Retention(keep_last=1), SIX, [0, 10, 15, 20, 25], []),
        (Retention(keep_last=4), SIX, [0, 10], []),
        (Retention(keep_last=6), SIX, [], []),
        (Retention(keep_last=100), SIX, [], []),
        (Retention(keep_last=1, keep_every=10), SIX, [15, 25], []),
        (Retention(keep_last=2, keep_every=7), SIX, [10, 15, 20], []),
        (Retention(keep_optimizer_last=1), SIX, [], [0, 10, 15, 20, 25]),
        (Retention(keep_optimizer_last=6), SIX, [], []),
        (Retention(keep_last=3, keep_optimizer_last=1), SIX, [0, 10, 15], [20, 25]),
        # What goes does not count for the optimizers.
        (Retention(keep_last=1, keep_every=10, keep_optimizer_last=2), entries(10, 19, 20, 29), [19], [10]),
        # A missing value and NaN are never the best, in either direction.
        (Retention(keep_last=1, keep_best=Best(LOSS)), LOSSES, [1, 3, 4, 5], []),
        (Retention(keep_last=1, keep_best=Best(LOSS, 2)), LOSSES, [1, 4, 5], []),
        (Retention(keep_last=1, keep_best=Best(LOSS, 100)), LOSSES, [4, 5], []),
        (Retention(keep_last=1, keep_best=Best(LOSS, largest=True)), LOSSES, [2, 3, 4, 5], []),
        (Retention(keep_last=1, keep_best=Best("accuracy", 100)), LOSSES, [1, 2, 3, 4, 5], []),
        # Of equals, 0 and -0 among them, the newer is better: a constant metric does not keep the oldest.
        (Retention(keep_last=1, keep_best=Best(LOSS, 2)), EQUALS, [1], []),
        (Retention(keep_last=1, keep_best=Best(LOSS, 2, largest=True)), EQUALS, [1], []),
        (Retention(keep_last=1, keep_best=Best(LOSS)), INFINITE, [1, 3], []),
        (Retention(keep_last=1, keep_best=Best(LOSS, largest=True)), INFINITE, [2, 3], []),
        # Pinned and named ones count among the newest, and are kept whole.
        (Retention(keep_last=3, keep_optimizer_last=1), five((1, 4), pinned=True), [2], [3]),
        (Retention(keep_last=3, keep_optimizer_last=1), five((1,), names=("best",)), [2], [3, 4]),
        (Retention(keep_last=3, keep_named=False, keep_optimizer_last=1), five((1,), names=("x",)), [1, 2], [3, 4]),
        # Abandoned ones count for nothing; those after the newest that counts are not judged.
        (Retention(keep_last=1), five((4, 5), abandoned=True), [1, 2], []),
        (Retention(keep_optimizer_last=1), five((4, 5), abandoned=True), [], [1, 2]),
    ],
)
def test_what_goes(retention: Retention, live: list[Entry], retire: list[int], thin: list[int]) -> None:
    assert decide(retention, live) == Decision(tuple(retire), tuple(thin))


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "1"])
@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_optimizer_last"])
def test_counts_that_keep_nothing(name: str, count: Any) -> None:
    """Pass counts below one or of another type: refused, and the error names the field."""
    with pytest.raises(InvalidArgumentError, match=name):
        Retention(**{"keep_last": 1, name: count})
    with pytest.raises(InvalidArgumentError, match="keep_best"):
        Best(LOSS, count)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        # Without `keep_last`, which keeps all, other rules beside that add nothing.
        ({"keep_last": None, "keep_every": 10}, "keep_last"),
        ({"keep_last": None, "keep_best": Best(LOSS)}, "keep_last"),
        # Refused when the policy is made, and not after each save in the background.
        ({"keep_best": LOSS}, "keep_best"),
        ({"keep_best": (LOSS, 2)}, "keep_best"),
        ({"optimizer_keys": "optim"}, "optimizer_keys"),
        ({"optimizer_keys": (1,)}, "optimizer_keys"),
    ],
    ids=str,
)
def test_parts_that_are_refused(part: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        Retention(**{"keep_last": 1} | part)


@pytest.mark.parametrize("largest", ["min", "max", 0, 1, None])
def test_an_order_that_is_no_bool(largest: Any) -> None:
    """Pass "min" as `largest`, which would count as true and delete the best: refused."""
    with pytest.raises(InvalidArgumentError, match="largest must be True or False"):
        Best(LOSS, 1, largest)


@pytest.mark.parametrize("wrong", [Best(LOSS), 3, ""], ids=str)
def test_metrics_that_are_no_names(wrong: Any) -> None:
    """Pass a `Best` where the name of a metric belongs, a number, or nothing: refused."""
    with pytest.raises(InvalidArgumentError, match="name"):
        Best(wrong)
    if wrong:
        with pytest.raises(InvalidArgumentError, match="metric must be a text"):
            Run(MemoryStore()).best(wrong)


METRICS = st.dictionaries(
    st.sampled_from([LOSS, "accuracy"]),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0]) | st.floats(),
).map(lambda metrics: tuple(metrics.items()))
LIVE = st.lists(
    st.builds(
        entry,
        step=st.integers(min_value=0, max_value=60),
        pinned=st.booleans(),
        abandoned=st.booleans(),
        thinned=st.sampled_from([(), ("optim",), ("other",)]),
        metrics=METRICS,
        names=st.sampled_from([(), ("best",), ("best", "last")]),
    ),
    unique_by=lambda one: one.step,
    max_size=12,
)
COUNTS = st.integers(min_value=1, max_value=6)
BESTS = st.builds(Best, metric=st.sampled_from([LOSS, "accuracy"]), count=COUNTS, largest=st.booleans())
RETENTIONS = st.builds(
    Retention,
    keep_last=COUNTS,
    keep_every=st.none() | COUNTS,
    keep_best=st.none() | BESTS,
    keep_optimizer_last=st.none() | COUNTS,
    keep_named=st.booleans(),
) | st.builds(Retention, keep_optimizer_last=st.none() | COUNTS)


def carried_out(decision: Decision, live: Sequence[Entry]) -> list[Entry]:
    return [
        replace(one, thinned=("optim",) if one.step in decision.thin else one.thinned)
        for one in live
        if one.step not in decision.retire
    ]


@given(RETENTIONS, LIVE)
def test_what_is_never_touched(retention: Retention, live: list[Entry]) -> None:
    """Keep the newest that counts, and all that are pinned, named or abandoned; thin none that is thinned."""
    decision = decide(retention, live)
    counted = {one.step for one in live if not one.abandoned}
    touched = {*decision.retire, *decision.thin}
    assert touched <= counted - {one.step for one in live if one.pinned or (one.names and retention.keep_named)}
    assert not counted or max(counted) not in touched
    assert not set(decision.retire) & set(decision.thin)
    assert not set(decision.thin) & {one.step for one in live if "optim" in one.thinned}
    assert list(decision.retire) == sorted(set(decision.retire))
    assert list(decision.thin) == sorted(set(decision.thin))


@given(RETENTIONS, LIVE)
def test_deciding_again_changes_nothing(retention: Retention, live: list[Entry]) -> None:
    """Decide again after a decision was carried out: nothing more; after a part of it was, just the rest."""
    decision = decide(retention, live)
    assert decide(retention, carried_out(decision, live)) == Decision((), ())
    first = Decision(decision.retire[:1], decision.thin[:1])
    assert decide(retention, carried_out(first, live)) == Decision(decision.retire[1:], decision.thin[1:])


@given(RETENTIONS, LIVE, st.randoms(use_true_random=False))
def test_order_and_abandoned_are_no_matter(retention: Retention, live: list[Entry], random: Any) -> None:
    """Shuffle the checkpoints and leave out the abandoned: the same decision."""
    shuffled = [one for one in live if not one.abandoned]
    random.shuffle(shuffled)
    assert decide(retention, shuffled) == decide(retention, live)


@given(RETENTIONS, LIVE)
def test_each_part_keeps_what_it_says(retention: Retention, live: list[Entry]) -> None:
    """Compare with an oracle written from the documentation: a checkpoint stays if a rule keeps it."""
    counted = sorted((one for one in live if not one.abandoned), key=lambda one: -one.step)
    newest = {one.step for one in counted[: retention.keep_last]}
    every = {one.step for one in counted if retention.keep_every and one.step % retention.keep_every == 0}
    best: set[int] = set()
    if retention.keep_best is not None:
        sign = -1 if retention.keep_best.largest else 1
        metric = retention.keep_best.metric
        valued = [(sign * value, -one.step) for one in counted for name, value in one.metrics if name == metric]
        best = {
            -step for value, step in sorted(pair for pair in valued if pair[0] == pair[0])[: retention.keep_best.count]
        }
    kept = newest | every | best | {one.step for one in counted if one.pinned or (one.names and retention.keep_named)}
    assert set(decide(retention, live).retire) == {one.step for one in counted} - kept


def test_a_checkpoint_known_to_hold_no_optimizer_is_not_thinned() -> None:
    live = entries(1, 2, 3)
    assert decide(Retention(keep_optimizer_last=1), live, bare={live[0].manifest}) == Decision((), (2,))


def test_keys_of_the_optimizer_in_a_list() -> None:
    """Pass a list of keys: stored as a tuple, which can be hashed."""
    assert Retention(optimizer_keys=["a", "b"]) == Retention(optimizer_keys=("a", "b"))  # type: ignore[arg-type]
