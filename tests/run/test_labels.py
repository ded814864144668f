"""Names and pins after the save: which names are allowed, moves, lost answers, and other processes in between."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from dcp_remote.common.deadline import Deadline
from dcp_remote.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FencedError,
    InvalidArgumentError,
)
from dcp_remote.format.catalog import NEWEST_WORDS, Catalog, Owner, name_entry, take_fence
from dcp_remote.loading.run_handle import Run
from dcp_remote.run.job import CheckpointLabels
from dcp_remote.run.labels import give_names, set_pin, take_names
from dcp_remote.run.lookup import find_entry, read_manifest
from dcp_remote.storage import MemoryStore, ObjectStore
from dcp_remote.testing import FaultyStore, RecordingStore, nth
from dcp_remote.testing.wrappers import Lost
from tests.support.catalogs import stored, swapped
from tests.support.runs import MeanwhileStore, a_run, assert_sound, copied, live, save

STEPS = (1, 2, 3)


pytestmark = pytest.mark.usefixtures("short_pauses")


def deadline() -> Deadline:
    return Deadline(30.0)


def names(store: MemoryStore) -> dict[int, tuple[str, ...]]:
    return {entry.step: entry.names for entry in live(store)}


def give(store: ObjectStore, step: int | str, *given: str, move: bool = False) -> int:
    return give_names(store, step, given, move=move, deadline=deadline())


def revision(store: MemoryStore) -> int:
    catalog = stored(store)
    assert catalog is not None
    return catalog.revision


# ---- which names


@pytest.mark.parametrize("name", ["checkpoint-500", "epoch=3-step=500.ckpt", "global_step500", "-5", "1.5", "ä b"])
def test_names_with_digits(name: str) -> None:
    """Give names as frameworks do, at the save and later: they select their checkpoint wherever a step does."""
    assert CheckpointLabels.of(7, name=name).names == (name,)
    store = a_run(*STEPS)
    assert give(store, 2, name) == 2
    assert set_pin(store, name, pin=True, deadline=deadline()) == 2
    assert [entry.pinned for entry in live(store)] == [False, True, False]


def test_digits_alone_are_the_step_itself() -> None:
    """Name a checkpoint by digits: allowed if they are its step, refused if they are another one."""
    for name in ("500", "000500"):
        assert CheckpointLabels.of(500, name=name).names == (name,)
    with pytest.raises(InvalidArgumentError, match=r"taken for another step.* name='500' step=400"):
        CheckpointLabels.of(400, name=["best", "500"])
    store = a_run(*STEPS)
    give(store, 2, "002")
    with pytest.raises(InvalidArgumentError, match="taken for another step"):
        give(store, 3, "002", move=True)
    assert names(store) == {1: (), 2: ("002",), 3: ()}


@pytest.mark.parametrize("word", NEWEST_WORDS)
def test_words_for_the_newest(word: str) -> None:
    """Ask for "latest" and "last": each is the newest checkpoint, and none may be given as a name."""
    store = a_run(*STEPS)
    assert give(store, word, "best") == 3
    assert set_pin(store, word, pin=True, deadline=deadline()) == 3
    run = Run(store)
    assert run.exists(word)
    assert not Run(MemoryStore()).exists(word)
    assert read_manifest(store, step=word).save_id == live(store)[-1].save_id
    for refused in (
        lambda: CheckpointLabels.of(7, name=["best", word]),
        lambda: give(store, 2, word),
        lambda: take_names(store, word, deadline=deadline()),
    ):
        with pytest.raises(InvalidArgumentError, match="means the newest checkpoint"):
            refused()
    with pytest.raises(CheckpointNotFoundError, match="No checkpoint is live"):
        find_entry(Catalog("5" * 32), word, url="memory://run")


def test_best_without_the_name() -> None:
    """Ask for "best" where no checkpoint has the name: the error says how to find the best by a metric."""
    store = a_run()
    save(store, 1, metrics=(("loss", 0.5),))
    with pytest.raises(CheckpointNotFoundError, match=r"no live checkpoint of this name\. `best\('loss'\)` finds"):
        read_manifest(store, step="best")


@pytest.mark.parametrize("step", [1.0, True, None, -1, b"best"])
def test_what_is_no_step(step: object) -> None:
    """Pass what is neither a step nor a name: refused before a request is sent."""
    store = RecordingStore(a_run(1))
    with pytest.raises(InvalidArgumentError, match="step must be an integer"):
        set_pin(store, step, pin=True, deadline=deadline())  # type: ignore[arg-type]  # the mistake that is tested
    assert store.calls == []


@pytest.mark.parametrize("given", [3, None, [], [3], ["a", "a"], "", "a\nb", "x" * 201, ["a", b"b"]])
def test_what_is_no_name(given: object) -> None:
    """Pass what is no name, or one name twice: refused before a request is sent."""
    store = RecordingStore(a_run(1))
    with pytest.raises(InvalidArgumentError):
        give_names(store, 1, given, move=False, deadline=deadline())  # type: ignore[arg-type]  # the mistake that is tested
    assert store.calls == []


# ---- giving, moving, taking


def test_several_names_a_step() -> None:
    """Give two names, then one of them and a third: one swap each, and none if nothing is new."""
    store = a_run(*STEPS)
    before = revision(store)
    give(store, 2, "best", "stable")
    give(store, "best", "stable", "third")
    assert names(store)[2] == ("best", "stable", "third")
    assert revision(store) == before + 2
    recording = RecordingStore(store)
    give(recording, 2, "third", "best")
    assert recording.calls == [("get", "catalog.json")]


def test_a_name_moves_only_if_told_to() -> None:
    """Give names that others have: refused with the holders, and nothing changed; with `move`, all move at once."""
    store = a_run(*STEPS)
    give(store, 1, "best", "first")
    give(store, 2, "stable")
    before = stored(store)
    with pytest.raises(CheckpointExistsError, match=r"move=True.* names='best \(step 1\), stable \(step 2\)'"):
        give(store, 3, "new", "best", "stable")
    assert stored(store) == before
    give(store, 3, "new", "best", "stable", move=True)
    assert names(store) == {1: ("first",), 2: (), 3: ("new", "best", "stable")}
    assert revision(store) == (before.revision if before is not None else 0) + 1
    assert_sound(store)


def test_names_are_taken() -> None:
    """Take names from two checkpoints at once; a name that none has is refused, and nothing changed."""
    store = a_run(*STEPS)
    give(store, 1, "best", "first")
    give(store, 2, "stable")
    take_names(store, ["best", "stable"], deadline=deadline())
    assert names(store) == {1: ("first",), 2: (), 3: ()}
    with pytest.raises(CheckpointNotFoundError, match=r"no live checkpoint of this name.* near='first'"):
        take_names(store, ["first", "frist"], deadline=deadline())
    assert names(store)[1] == ("first",)


def test_a_name_that_has_moved_is_not_taken_from_another_checkpoint() -> None:
    """Take a name from a checkpoint that has lost it to another one: nothing changes."""
    store = a_run(*STEPS)
    give(store, 1, "best")
    save_id = live(store)[0].save_id
    give(store, 2, "best", move=True)
    take_names(store, "best", deadline=deadline(), save_id=save_id)
    assert names(store) == {1: (), 2: ("best",), 3: ()}


def test_what_is_not_there() -> None:
    """Name and pin steps and names that are not live, and a run that has not begun."""
    store = a_run(*STEPS)
    calls: list[Callable[[], object]] = [
        lambda: give(store, 9, "best"),
        lambda: give(store, "nobody", "best"),
        lambda: set_pin(store, 9, pin=True, deadline=deadline()),
    ]
    for call in calls:
        with pytest.raises(CheckpointNotFoundError, match="steps='1, 2, 3'"):
            call()
    with pytest.raises(CheckpointNotFoundError, match="no run here"):
        give(MemoryStore(), 1, "best")


# ---- failures, and other processes


def _move(store: ObjectStore) -> None:
    give(store, 3, "best", move=True)


def _take(store: ObjectStore) -> None:
    take_names(store, "best", deadline=deadline())


def _pin(store: ObjectStore) -> None:
    set_pin(store, "best", pin=True, deadline=deadline())


@pytest.mark.parametrize("lost", ["request", "response"])
@pytest.mark.parametrize("act", [_move, _take, _pin], ids=["move", "take", "pin"])
def test_lost_requests_and_answers(act: Callable[[ObjectStore], object], lost: Lost) -> None:
    """Lose each request in turn, or its answer: the change is made, once."""
    wanted = a_run(*STEPS)
    give(wanted, 1, "best")
    before = copied(wanted)
    act(wanted)
    for number in itertools.count(1):
        store = copied(before)
        faulty = FaultyStore(store, [nth(number, lost)])
        act(faulty)
        assert live(store) == live(wanted)
        assert_sound(store)
        if not faulty.hits:
            break
    assert number == 3


@pytest.mark.parametrize("act", [_take, _pin], ids=["take", "pin"])
def test_what_was_meant_first_stays_meant(act: Callable[[ObjectStore], object]) -> None:
    """Move the name while the swap is tried again: the checkpoint that had it at first is changed, and no other."""
    store = a_run(*STEPS)
    give(store, 1, "best")
    # The swap is refused because the catalog has changed; the second attempt finds the name elsewhere.
    busy = MeanwhileStore(store, 2, lambda: swapped(store, lambda now: name_entry(now, 2, ["best"], move=True)))
    act(busy)
    assert busy.acted
    assert names(store)[2] == ("best",)
    assert [entry.pinned for entry in live(store)] == [act is _pin, False, False]


@pytest.mark.parametrize("is_meanwhile", [False, True])
def test_a_fenced_job_changes_nothing(*, is_meanwhile: bool) -> None:
    """Take the fence before or while an earlier job pins, names or deletes: `FencedError`, and nothing is changed."""
    calls: list[Callable[[Run], None]] = [
        lambda run: run.pin(1),
        lambda run: run.unpin(3),
        lambda run: run.name(1, "best", move=True),
        lambda run: run.unname("best"),
        lambda run: run.delete(1),
        lambda run: run.delete("latest", force=True),
    ]
    for call in calls:
        store = a_run(*STEPS)
        give(store, 2, "best")
        set_pin(store, 3, pin=True, deadline=deadline())
        before = stored(store)
        assert before is not None
        fence = partial(swapped, store, take_fence)
        asked: ObjectStore = store
        if is_meanwhile:
            asked = MeanwhileStore(store, 2, fence)  # before its PUT, or between its first GET and the swap's
        else:
            fence()
        with pytest.raises(FencedError, match="nothing was changed"):
            call(Run(asked, owner=partial(Owner, before.run_id, before.token)))
        after = stored(store)
        assert after is not None
        assert after.entries == before.entries
        assert_sound(store)
        call(Run(store, owner=partial(Owner, after.run_id, after.token)))
        assert live(store) != before.entries


def test_a_checkpoint_that_goes_meanwhile() -> None:
    """Overwrite the step while it is being named: an error, and the new checkpoint gets no name."""
    store = a_run(*STEPS)
    busy = MeanwhileStore(store, 2, lambda: save(store, 2, letter="b", overwrite=True))
    with pytest.raises(CheckpointNotFoundError, match="deleted or replaced meanwhile"):
        give(busy, 2, "best")
    assert names(store)[2] == ()
